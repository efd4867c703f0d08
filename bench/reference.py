"""Is a result right? The float64 reference, what counts as close enough, and the verdict in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from minikernel.problem import BACKWARD, TOPK

from .spaces import Space

#: Above this many elements, MAX_ROWS rows are checked, the first and the last among them.
MAX_ELEMENTS = 1 << 24
MAX_ROWS = 64


@dataclass(frozen=True)
class Tolerance:
    """``|y - reference| <= relative * |reference| + absolute``, the reference rounded to the result's dtype.

    ``smallest`` is the smallest normal number of the dtype: relative errors are reported from there up.
    """

    relative: float
    absolute: float
    smallest: float


# Half types: one unit in the last place, which is at most 2**-10 (2**-7) of the value, or one subnormal step.
TOLERANCES = {
    ("softmax", "float16"): Tolerance(2**-10, 2**-24, 2**-14),
    ("softmax", "bfloat16"): Tolerance(2**-7, 2**-126, 2**-126),
    ("softmax", "float32"): Tolerance(1e-5, 2**-126, 2**-126),
    ("softmax", "float64"): Tolerance(1e-12, 2**-1022, 2**-1022),
    # A logarithm near 0 is a difference of larger numbers: its error is theirs.
    ("log_softmax", "float16"): Tolerance(2**-10, 2e-6, 2**-14),
    ("log_softmax", "bfloat16"): Tolerance(2**-7, 2e-6, 2**-126),
    ("log_softmax", "float32"): Tolerance(1e-5, 2e-6, 2**-126),
    ("log_softmax", "float64"): Tolerance(1e-12, 1e-14, 2**-1022),
}


@dataclass(frozen=True)
class Verdict:
    """What a check found.

    Attributes:
        max_rel_error: Over reference values that are normal numbers in the dtype; None if there are none.
        max_abs_error: Over all finite reference values.
        fault: How the result is wrong; None if it is right.
    """

    max_rel_error: float | None
    max_abs_error: float
    fault: str | None = None


def is_gradient(op: str) -> bool:
    return op in BACKWARD.values()


class Reference:
    """The float64 answers for one input, made once and compared with every implementation's.

    For gradients ``x`` is y, any values that is, and there is a ``dy`` too.
    """

    def __init__(self, x: Any, dim: int, dtype: str, space: Space, dy: Any = None) -> None:
        self._space, self._dim, self._dtype = space, dim, dtype
        self._shape = tuple(x.shape)
        leading = np.delete(self._shape, dim % x.ndim)
        rows = math.prod(map(int, leading))
        chosen = np.arange(rows)
        if rows * self._shape[dim] > MAX_ELEMENTS and rows > MAX_ROWS:
            inner = np.random.default_rng(rows).choice(rows - 2, MAX_ROWS - 2, replace=False) + 1
            chosen = np.sort(np.concatenate([[0, rows - 1], inner]))
        self._all = len(chosen) == rows
        # A lone axis leaves none to index by, and is always checked whole.
        indices = () if self._all else np.unravel_index(chosen, tuple(leading))
        self._rows = tuple(space.xp.asarray(axis) for axis in indices)
        self._x = space.wide(self._take(x))
        self._dy = None if dy is None else space.wide(self._take(dy))
        self._answers: dict[str, Any] = {}
        # For gradients, the size of what may cancel in the answer.
        self._sizes: dict[str, Any] = {}

    def _take(self, x: Any) -> Any:
        rows = self._space.xp.moveaxis(x, self._dim, -1)
        if self._all:
            return rows.reshape(-1, rows.shape[-1])
        return rows[self._rows]

    def _gradient(self, op: str) -> tuple[Any, Any]:
        """The exact gradient, and the size of what may cancel in it."""
        xp, y, dy = self._space.xp, self._x, self._dy
        if op == BACKWARD["softmax"]:
            terms = dy * y
            exact = y * (dy - xp.sum(terms, axis=-1, keepdims=True))
            return exact, xp.abs(y) * (xp.abs(dy) + xp.sum(xp.abs(terms), axis=-1, keepdims=True))
        powers = xp.exp(y)
        exact = dy - powers * xp.sum(dy, axis=-1, keepdims=True)
        return exact, xp.abs(dy) + powers * xp.sum(xp.abs(dy), axis=-1, keepdims=True)

    def _answer(self, op: str) -> Any:
        if is_gradient(op) and op not in self._answers:
            exact, self._sizes[op] = self._gradient(op)
            self._answers[op] = self._space.rounded(exact, self._dtype)
        if op not in self._answers:
            xp, x = self._space.xp, self._x
            with np.errstate(invalid="ignore", divide="ignore"):
                shifted = x - xp.amax(x, axis=-1, keepdims=True)
                exp = xp.exp(shifted)
                total = xp.sum(exp, axis=-1, keepdims=True)
                exact = exp / total if op == "softmax" else shifted - xp.log(total)
            self._answers[op] = self._space.rounded(exact, self._dtype)
        return self._answers[op]

    def _holds_nan(self, y: Any) -> bool:
        with np.errstate(over="ignore"):
            return bool(self._space.xp.isnan(y.sum()))

    def check(self, op: str, y: Any) -> Verdict:
        """Compare a result of ``op``, of the input's shape, with the reference."""
        if op == TOPK:
            return self._check_topk(*y)
        xp, tolerance = self._space.xp, TOLERANCES[op.removesuffix("_backward"), self._dtype]
        if tuple(y.shape) != self._shape or y.dtype != self._space.dtype(self._dtype):
            return Verdict(None, math.nan, f"returned {y.dtype} of shape {tuple(y.shape)}")
        right, got = self._answer(op), self._space.wide(self._take(y))
        nan_as_it_should = xp.isnan(right) == xp.isnan(got)
        with np.errstate(invalid="ignore"):
            size, error = xp.abs(right), xp.abs(got - right)
            same = (got == right) | xp.isnan(right)  # infinities too, whose difference is NaN
            error = xp.where(same, xp.zeros_like(error), error)
            allowed = self._sizes.get(op, size)
            close = (same | (error <= tolerance.relative * allowed + tolerance.absolute)) & nan_as_it_should
            normal = xp.isfinite(right) & (size >= tolerance.smallest)
            relative = error[normal] / size[normal]
            finite = error[xp.isfinite(error)]
        bad = math.prod(close.shape) - int(close.sum())
        worst_relative = float(relative.max()) if len(relative) else None
        worst = float(finite.max()) if len(finite) else math.nan
        fault = None
        if bad:
            nans = int((~nan_as_it_should).sum())
            fault = f"{bad} of {math.prod(close.shape)} values off, by up to {worst:.1e}"
            fault += f"; {nans} NaN out of place" if nans else ""
        elif not self._all and not bool(xp.isnan(right).any()) and self._holds_nan(y):
            fault = "NaN in a row outside the sample, or a row never written"
        return Verdict(_finite(worst_relative), worst, fault)

    def _check_topk(self, probabilities: Any, indices: Any) -> Verdict:
        """The k largest, in their order, and each where it is said to be: equal ones may be any of those."""
        xp, tolerance = self._space.xp, TOLERANCES["softmax", self._dtype]
        right = self._answer("softmax")
        got, where = self._space.wide(self._take(probabilities)), self._take(indices)
        largest, there = self._space.largest(right, got.shape[-1]), self._space.gather(right, where)
        error = xp.abs(got - largest)
        allowed = tolerance.relative * largest + tolerance.absolute
        close = (error <= allowed) & (xp.abs(there - largest) <= allowed)
        relative = (error / largest)[largest >= tolerance.smallest]
        worst = float(relative.max()) if len(relative) else None
        bad = math.prod(close.shape) - int(close.sum())
        fault = f"{bad} of {math.prod(close.shape)} of the largest are wrong" if bad else None
        if self._space.repeats(where):
            fault = "an index comes twice"
        return Verdict(_finite(worst), float(error.max()), fault)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
