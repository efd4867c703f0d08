"""What the NumPy kernels fuse with softmax and its gradient: a scale, and the elements that don't count."""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np

from ..problem import Mask, Problem
from .numpy_plan import is_masked
from .numpy_tiles import Array

Ranges = tuple[range, ...]


#: Subtracting less than this of the largest number doesn't change it.
_SMALL = 2.0**-60


class Dropped:
    """Which elements don't count: the mask drops them, or they are past the diagonal.

    It is sliced as the input is, and only a tile of it is ever made.
    """

    def __init__(self, problem: Problem, mask: Any, order: tuple[int, ...], at: Ranges | None = None) -> None:
        self.problem, self.mask, self.order = problem, mask, order
        extents = problem.outer, problem.cols, problem.inner
        self.at: Ranges = at or tuple(range(extents[axis]) for axis in order)

    def __getitem__(self, cut: tuple[slice, ...]) -> Dropped:
        at = tuple(whole[part] for whole, part in zip(self.at, cut, strict=False)) + self.at[len(cut) :]
        return Dropped(self.problem, self.mask, self.order, at)

    def tile(self) -> Array:
        """True where an element doesn't count."""
        outer, cols, inner = (self.at[self.order.index(axis)] for axis in range(3))
        if self.problem.mask is not None:
            dropped = np.logical_not(_part(self.mask, self.problem.mask, outer, cols, inner))
        if self.problem.causal:
            small = np.min_scalar_type(self.problem.cols)  # several times as fast to compare
            last = (np.arange(outer.start, outer.stop) % self.problem.cols).astype(small)
            later = np.arange(cols.start, cols.stop, dtype=small)[:, None] > last[:, None, None]
            dropped = later if self.problem.mask is None else np.logical_or(dropped, later, out=dropped)
        return dropped.transpose(self.order)

    def fill(self, values: Array, lowest: float, out: Array, spare: Array) -> Array:
        """The values, with ``lowest``, an infinity, where elements don't count; in ``out``, or as they are."""
        dropped = self.tile()
        if not dropped.any():
            return values
        # Where an element counts, 0 * inf is NaN, which fmin and fmax pass over. A branch would be slower by far
        # where the mask is random.
        np.multiply(dropped, values.dtype.type(lowest), out=spare)
        return (np.fmin if lowest < 0 else np.fmax)(values, spare, out=out)


def _part(array: Array, mask: Mask, outer: range, cols: range, inner: range) -> Array:
    """A tile of the mask: a view, unless several axes are cut before cols or behind."""
    rows, row_extents = _index(outer, mask.outer)
    columns, column_extents = _index(inner, mask.inner)
    array = array.reshape(*row_extents, -1, *column_extents)
    both = len(rows) > 1 and len(columns) > 1
    if both:  # then NumPy puts cols last
        rows = [index[:, None] for index in rows]
    part: Array = array[(*rows, slice(cols.start, cols.stop), *columns)]
    return part.transpose(0, 2, 1) if both else part


def _index(at: range, axes: tuple[tuple[int, int], ...]) -> tuple[list[Any], list[int]]:
    """The index of a range of elements into the axes that they count over, and the extents of those."""
    extents = [extent for extent, _ in axes] or [1]
    if len(extents) == 1:
        return [slice(at.start, at.stop)], extents
    return [*np.unravel_index(np.arange(at.start, at.stop), extents)], extents


def dropped_of(problem: Problem, mask: Any, order: tuple[int, ...] = (0, 1, 2)) -> Dropped | None:
    """Which elements of an array whose axes are in ``order`` don't count; None if all do."""
    return Dropped(problem, mask, order) if is_masked(problem) else None


class Scores:
    """An input, or a part of it, with what is fused.

    With a negative scale the smallest element has the highest score: it takes the place of the largest one, and no
    element changes its sign.

    Attributes:
        x: The elements.
        dropped: Which of them don't count; None if all do.
        scale: What they are multiplied by.
        highest: Finds the element with the highest score.
        lowest: The element with the lowest score, an infinity.
    """

    def __init__(self, x: Array, dropped: Dropped | None, scale: float) -> None:
        self.x, self.dropped, self.scale = x, dropped, scale
        self.highest = np.maximum if scale > 0 else np.minimum
        self.lowest = -inf if scale > 0 else inf

    def __getitem__(self, cut: tuple[slice, ...]) -> Scores:
        return Scores(self.x[cut], self.dropped and self.dropped[cut], self.scale)

    def subtract(self, values: Array, peak: Array, out: Array) -> Array:
        """How far their scores are from that of ``peak``; scaled last, which is accurate and can't overflow."""
        if abs(self.scale) < 1 and (np.abs(peak) > np.finfo(out.dtype).max * _SMALL).any():
            # Of halves the difference can't overflow.
            np.subtract(np.multiply(values, 0.5, out=out), 0.5 * peak, out=out)
            return np.multiply(out, 2 * self.scale, out=out)
        np.subtract(values, peak, out=out)
        if self.scale != 1:
            np.multiply(out, self.scale, out=out)
        return out
