"""How the ``numpy`` backend cuts a problem up: a pure function of the problem and the number of processors.

NumPy's innermost loop goes along one axis, the *fast* one, and each of its runs costs some nanoseconds before
the first element. Long runs make it fast, so which axis that is matters more than anything else here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt, prod

from minikernel.problem import ITEMSIZE, Problem

TILE_BYTES = 1 << 20  # smaller tiles cost more in calls than they save in misses
LONG_TILE = 2  # such tiles in one that takes in whole rows
BLOCK_BYTES = 1 << 19  # of what is transposed at once
SCRATCH_BYTES = 14 << 20  # of all threads together
MASK_BYTES = 2  # an element, while a tile's part of a mask is made
WIDTH = 4096  # elements of a tile along an axis that isn't reduced
LANES = 64, 256  # elements of a tile along the axis of neighbors in a transposed input or output
SHORT = 16  # elements of a run up to which NumPy had better go across runs
LONG_RUN = 256  # and from which its cost no longer shows
ADDENDS = 128  # numbers added one by one, or up to twice as many
MERGED = 1 << 17  # pairs of peak and sum kept for rows that are split
MAX_THREADS = 8  # more would only wait for memory
SMALL_SIZE = 1 << 18  # elements that one thread handles in one tile: to wake another costs more than it saves
SCRATCH_SIZE = 1 << 11  # elements up to which a copy costs more than it saves in any case
SHARE = 1 << 16  # elements in a tile of a larger problem, at least

# What the choice of the fast axis weighs, in nanoseconds; of two figures the second is for a small problem, which
# stays in the cache.
ROW_LOOPS = 75.0  # the inner loops for a row, where the fast axis is the reduced one
RUN_LOOPS = 15.0  # those for a run of neighbors, where it is another
FAR_RUN = 300.0, 30.0  # those where runs are cut short, for whole rows to fit in scratch memory
TRANSPOSED_IN = 0.9  # an element read across its neighbors
TRANSPOSED_OUT = 0.6, 0.4  # and one written
SCRATCH_CALLS = 10000.0  # the calls that go through scratch memory


@dataclass(frozen=True)
class Plan:
    """How a problem is cut up. Only ``threads`` depends on the machine, and no bit of the result on it.

    Attributes:
        order: The axes outer, cols and inner as the kernel sees them; all other axes here count in this order.
        fast: The axis along which NumPy's innermost loop goes.
        x_axis, out_axis: The axes along which neighbors lie in the input and in the output.
        tile: Extents of a tile.
        work_dtype: What exponentials are computed in: float32, or float64 for float64.
        staged: Whether the input is copied to the working tile first.
        in_output: Whether the output itself serves as the working tile.
        scratch_tiles: How many tiles of scratch memory a thread needs.
        max_fold, sum_fold: In how many parts a row is reduced side by side, before these are reduced to one.
            It makes longer runs, and sums of fewer addends.
        strips: How many groups of rows there are that can be worked on independently.
        pieces: How many tiles a row is split into.
        threads: How many threads work on it.
    """

    order: tuple[int, int, int]
    fast: int
    x_axis: int
    out_axis: int
    tile: tuple[int, int, int]
    work_dtype: str
    staged: bool
    in_output: bool
    scratch_tiles: int
    max_fold: int
    sum_fold: int
    strips: int
    pieces: int
    threads: int


def is_masked(problem: Problem) -> bool:
    """Whether some elements may not count."""
    return problem.mask is not None or problem.causal


def plan(problem: Problem, cpus: int) -> Plan:
    """Choose a :class:`Plan` for ``problem`` on ``cpus`` processors."""
    shape = outer, cols, inner = problem.outer, problem.cols, problem.inner
    work_dtype = "float64" if problem.dtype == "float64" else "float32"
    out_axis = 2 if inner > 1 else 1
    fast, x_axis = _axes(problem, out_axis)
    order = (0, 1, 2) if fast == out_axis else (2, 1, 0) if fast == 0 else (0, 2, 1)
    in_output = fast == out_axis and problem.out_dtype == work_dtype
    masked = is_masked(problem)
    scratch_tiles = (not in_output) + (problem.is_log or problem.out_dtype != work_dtype or masked)
    large = prod(shape) > SMALL_SIZE
    tile, threads = shape, 1
    if large:
        limit = TILE_BYTES // max(1, scratch_tiles) // ITEMSIZE[work_dtype]
        tile = _tile(shape, fast, x_axis, out_axis, limit, limit * (LONG_TILE if scratch_tiles else 2 * LONG_TILE))
        scratch = prod(tile) * (scratch_tiles * ITEMSIZE[work_dtype] + MASK_BYTES * masked) + BLOCK_BYTES
        threads = min(cpus, MAX_THREADS, SCRATCH_BYTES // scratch)
    height, length, width = tile
    # Arithmetic that reads across neighbors is as fast as a copy, unless they are few or the cache is too small.
    copied = large or fast != out_axis or (tile[x_axis] <= SHORT and prod(shape) > SCRATCH_SIZE)
    return Plan(
        order=order,
        fast=order.index(fast),
        x_axis=order.index(x_axis),
        out_axis=order.index(out_axis),
        tile=(tile[order[0]], tile[order[1]], tile[order[2]]),
        work_dtype=work_dtype,
        staged=problem.dtype != work_dtype or (x_axis != fast and copied),
        in_output=in_output,
        scratch_tiles=scratch_tiles,
        max_fold=_fold(length, LONG_RUN // tile[fast]) if fast != 1 else 1,
        sum_fold=_fold(length, max(LONG_RUN // tile[fast], length // ADDENDS)) if fast != 1 else 1,
        strips=-(-outer // height) * -(-inner // width),
        pieces=-(-cols // length),
        threads=threads,
    )


def _axes(problem: Problem, out_axis: int) -> tuple[int, int]:
    """The fast axis, and the axis along which neighbors in the input lie: another one if it is transposed."""
    shape = problem.outer, problem.cols, problem.inner
    size = prod(shape)
    small = size <= SMALL_SIZE
    steps = [abs(stride) for stride in problem.strides]
    apart = [axis for axis in (out_axis, 2, 1, 0) if shape[axis] > 1 and steps[axis]]
    nearest = min(apart, key=steps.__getitem__, default=out_axis)

    def x_axis(fast: int) -> int:
        return nearest if steps[fast] else fast  # one element, read again and again, is a neighbor of itself

    def cost(fast: int) -> float:
        moves = TRANSPOSED_IN * (x_axis(fast) != fast)
        if fast != out_axis:
            moves += TRANSPOSED_OUT[small] + SCRATCH_CALLS / size
        if fast == 1:
            return moves + ROW_LOOPS / problem.cols
        if fast == out_axis:
            return moves + RUN_LOOPS / min(shape[fast], WIDTH)
        return moves + FAR_RUN[small] / min(shape[fast], max(LANES[0], TILE_BYTES // 4 // problem.cols))

    fast = min((out_axis, 1, 0), key=cost)
    return fast, x_axis(fast)


def _tile(
    shape: tuple[int, int, int], fast: int, x_axis: int, out_axis: int, limit: int, row_limit: int
) -> tuple[int, int, int]:
    """Extents of a tile of at most ``limit`` elements, or ``row_limit`` where that takes in whole rows."""
    share = prod(shape) // 4  # for some threads to have something to do
    limit = min(limit, max(SHARE, share))
    tile = [1, 1, 1]

    def grow(axis: int, extent: int, limit: int) -> None:
        room = limit * tile[axis] // prod(tile)
        tile[axis] = _even_share(shape[axis], max(tile[axis], min(extent, room)))

    for axis in {x_axis, out_axis} - {fast, 1}:
        if axis == x_axis or shape[axis] > SHORT:
            grow(axis, min(LANES[1], max(LANES[0], row_limit // shape[1])), row_limit)
    if fast == out_axis != 1:
        rows = isqrt(limit * MERGED // shape[1])  # in a tile, so that what pieces keep is bounded
        grow(fast, min(WIDTH, max(1, rows // prod(tile))), limit)
    elif fast != 1:
        grow(fast, max(LANES[0], limit // (shape[1] * prod(tile))), limit)
    grow(1, shape[1], row_limit if shape[1] * prod(tile) <= row_limit else limit)
    if tile[1] == shape[1]:
        for axis in (fast, 2, 0):
            grow(axis, shape[axis], limit)
    return tile[0], tile[1], tile[2]


def _even_share(extent: int, most: int) -> int:
    """The largest part, ``most`` at most, if ``extent`` is cut evenly and for two or four threads alike."""
    parts = -(-extent // most)
    return -(-extent // (parts if parts <= 2 else -(-parts // 4) * 4))


def _fold(length: int, parts: int) -> int:
    return parts if parts > 1 and length >= max(2 * ADDENDS, 8 * parts) else 1
