"""Gradients of the ``numpy`` backend: tile by tile in the cache, on several threads for large inputs.

dx = y * (dy - sum(dy * y)) for softmax, dx = dy - exp(y) * sum(dy) for log-softmax.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np

from ..problem import Problem
from .numpy_tiles import Array, pack, share, unpacked

# Elements of a tile, four of which fit in a core's cache.
_TILE = 1 << 15
# Below so many elements threads cost more than they save.
_FEWEST_FOR_THREADS = 1 << 17


def tiles(problem: Problem) -> list[tuple[slice, slice, slice]]:
    """Cuts of ``(outer, cols, inner)`` into tiles of whole rows, each about as large as the cache likes."""
    cols, inner = problem.cols, problem.inner
    wide = min(inner, max(1, _TILE // cols))
    high = max(1, _TILE // (cols * wide)) if wide == inner else 1
    outer_cuts = [slice(i, i + high) for i in range(0, problem.outer, high)]
    inner_cuts = [slice(i, i + wide) for i in range(0, inner, wide)]
    return [(one, slice(None), other) for one, other in product(outer_cuts, inner_cuts)]


class Backward:
    """The gradient for one problem: ``backward(y, dx, 0, dy)``."""

    def __init__(self, problem: Problem, threads: int) -> None:
        self.log = problem.op == "log_softmax_backward"
        self.dtype, self.out_dtype = problem.dtype, problem.out_dtype
        self.cuts = tiles(problem)
        self.threads = threads if problem.rows * problem.cols >= _FEWEST_FOR_THREADS else 1
        # Along the contiguous axis NumPy sums pairwise; along another one after the other, in which float32 loses.
        self.sum_dtype = np.float64 if problem.inner > 1 else None

    def __call__(self, y: Array, dx: Array, stream: int, dy: Any) -> None:
        def take(cut: tuple[slice, slice, slice], scratch: None) -> None:
            dx_of_cut = self.gradient(unpacked(y[cut], self.dtype), unpacked(dy[cut], self.dtype))
            pack(dx_of_cut, dx[cut], self.out_dtype)

        share(take, self.cuts, self.threads, lambda: None)

    def gradient(self, y: Array, dy: Array) -> Array:
        if self.log:
            total = np.add.reduce(dy, axis=1, keepdims=True, dtype=self.sum_dtype).astype(dy.dtype, copy=False)
            result = np.exp(y)
            np.multiply(result, total, out=result)
            return np.subtract(dy, result, out=result)
        result = np.multiply(dy, y)
        total = np.add.reduce(result, axis=1, keepdims=True, dtype=self.sum_dtype).astype(dy.dtype, copy=False)
        np.subtract(dy, total, out=result)
        return np.multiply(result, y, out=result)
