"""Gradients of the ``numpy`` backend: tile by tile in the cache, on several threads for large inputs.

dx = y * (dy - sum(dy * y)) for softmax, dx = dy - exp(y) * sum(dy) for log-softmax; times the scale, if there is
one, and 0 where an element doesn't count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem import Problem
from .numpy_scores import dropped_of
from .numpy_tiles import FEWEST_FOR_THREADS, Array, Cut, pack, row_tiles, share, unpacked

# Elements of a tile, four of which fit in a core's cache.
_TILE = 1 << 15


class Backward:
    """The gradient for one problem: ``backward(y, dx, 0, dy)``, and a mask and a scale where it has features."""

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem = problem
        self.dtype, self.out_dtype, self.log = problem.dtype, problem.out_dtype, problem.is_log
        self.cuts = row_tiles(problem, _TILE)
        self.threads = threads if problem.rows * problem.cols >= FEWEST_FOR_THREADS else 1
        # Along the contiguous axis NumPy sums pairwise; along another one after the other, in which float32 loses.
        self.sum_dtype = np.float64 if problem.inner > 1 else None

    def __call__(
        self, y: Array, dx: Array, stream: int, dy: Any, mask: Array | None = None, scale: float = 1.0
    ) -> None:
        dtype, out_dtype = self.dtype, self.out_dtype
        drop = dropped_of(self.problem, mask)

        def take(cut: Cut, scratch: None) -> None:
            of_cut = unpacked(y[cut], dtype), unpacked(dy[cut], dtype)
            keep = None if drop is None else _bits(drop[cut].tile(), of_cut[0].dtype.itemsize)
            result = self.gradient(*of_cut, keep)
            if scale != 1:
                np.multiply(result, scale, out=result)
            if keep is not None:
                _clear(result, keep)
            pack(result, dx[cut], out_dtype)

        share(take, self.cuts, self.threads, lambda: None)

    def gradient(self, y: Array, dy: Array, keep: Array | None) -> Array:
        result = np.exp(y) if self.log else np.multiply(dy, y)
        if keep is not None and not self.log:
            _clear(result, keep)
        total = np.add.reduce(dy if self.log else result, axis=1, keepdims=True, dtype=self.sum_dtype)
        total = total.astype(dy.dtype, copy=False)
        if self.log:
            np.multiply(result, total, out=result)
            return np.subtract(dy, result, out=result)
        np.subtract(dy, total, out=result)
        return np.multiply(result, y, out=result)


def _bits(dropped: Array, size: int) -> Array:
    """Integers of ``size`` bytes: no bit set where an element doesn't count, else all."""
    return np.subtract(dropped, 1, dtype=f"u{size}")


def _clear(values: Array, keep: Array) -> None:
    """Put 0 where elements don't count, also for NaN; in bits, as a random mask would mislead branches."""
    bits = values.view(keep.dtype)
    np.bitwise_and(bits, keep, out=bits)
