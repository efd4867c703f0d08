"""The k largest softmax results of each row, on the CPU: tiles of whole rows, on several threads for large inputs.

Of a long row the largest k can only be in the k blocks with the largest peaks, so little more than those is sorted.
Among equals the lower index comes first, for blocks as for elements.
"""

from __future__ import annotations

import numpy as np

from ..problem import Problem
from .numpy_tiles import FEWEST_FOR_THREADS, Array, Cut, pack, row_tiles, share, unpacked

# Elements of a tile, three of which fit in a core's cache.
_TILE = 1 << 17
# Elements of a block: shorter ones take longer to reduce than to search.
_BLOCK = 512
# It pays to search by blocks if that leaves such a part of a row.
_PART = 3


class TopK:
    """Softmax's k largest results for one problem: ``topk(x, out, 0, 0, indices)``."""

    def __init__(self, problem: Problem, threads: int) -> None:
        self.dtype, self.out_dtype, self.k = problem.dtype, problem.out_dtype, problem.k
        self.cuts = row_tiles(problem, _TILE)
        self.threads = threads if problem.rows * problem.cols >= FEWEST_FOR_THREADS else 1

    def __call__(self, x: Array, out: Array, stream: int, scratch: int, indices: Array) -> None:
        def take(cut: Cut, scratch: None) -> None:
            values = unpacked(x[cut].transpose(0, 2, 1), self.dtype)
            height, width, cols = values.shape
            largest, positions = self.largest(np.ascontiguousarray(values).reshape(-1, cols))
            pack(largest.reshape(height, width, -1).transpose(0, 2, 1), out[cut], self.out_dtype)
            indices[cut] = positions.reshape(height, width, -1).transpose(0, 2, 1)

        share(take, self.cuts, self.threads, lambda: None)

    def largest(self, values: Array) -> tuple[Array, Array]:
        """Of each row the k largest results, and where they are."""
        peak = np.maximum.reduce(values, axis=1, keepdims=True)
        powers = np.subtract(values, peak)
        total = np.add.reduce(np.exp(powers, out=powers), axis=1, keepdims=True)
        if not (finite := np.isfinite(peak)).all():
            values = np.where(finite, values, 0)  # results that are all NaN are in order
        positions = search(values, self.k)
        found = np.take_along_axis(values, positions, axis=1)
        order = np.argsort(-found, axis=1, kind="stable")
        found, positions = (np.take_along_axis(array, order, axis=1) for array in (found, positions))
        return np.divide(np.exp(np.subtract(found, peak, out=found), out=found), total, out=found), positions


def search(values: Array, k: int) -> Array:
    """Where in each row the k largest are, in ascending order; of equals those with the lowest indices."""
    rows, cols = values.shape
    if cols < _PART * k * _BLOCK:
        return _search_all(values, k)
    even = cols // _BLOCK * _BLOCK
    peaks = np.maximum.reduceat(values[:, :even], np.arange(0, even, _BLOCK), axis=1)
    blocks = search(peaks, k)
    candidates = values[:, :even].reshape(rows, -1, _BLOCK)[np.arange(rows)[:, None], blocks].reshape(rows, -1)
    found = _search_all(np.concatenate((candidates, values[:, even:]), axis=1), k)
    starts = np.concatenate((blocks * _BLOCK, np.full((rows, 1), even)), axis=1)
    return np.take_along_axis(starts, found // _BLOCK, axis=1) + found % _BLOCK


def _search_all(values: Array, k: int) -> Array:
    rows, cols = values.shape
    least = np.partition(values, cols - k, axis=1)[:, cols - k, None]
    chosen = values >= least
    if np.count_nonzero(chosen) > rows * k:
        tied = np.flatnonzero(values == least)
        row = tied // cols
        rank = np.arange(tied.size) - np.searchsorted(row, np.arange(rows))[row]
        room = k - np.count_nonzero(values > least, axis=1)
        chosen.reshape(-1)[tied[rank >= room[row]]] = False
    return np.flatnonzero(chosen).reshape(rows, k) % cols  # in one dimension NumPy is ten times as fast
