"""``cuda-fused``: parallel reduction and online softmax; a row is read once, kept on chip, and written once.

The online softmax is Milakov & Gimelshein 2018, arXiv:1805.02867. What is here is the choice of a launch; the
numbers in it were measured on an H200.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from .. import cuda, driver
from ..driver import Device, Launch
from ..integers import ceil_div, power_of_two
from ..problem import ALL_OPS, DTYPES, FEATURES, ITEMSIZE, TOPK, Kernel, Problem
from ..registry import Backend
from . import fused_backward, fused_scores, fused_topk
from .fused_columns import ColumnsPlan, plan_columns
from .fused_rows import ACCESS_BYTES, BLOCK_SIZES, WARP, TeamPlan, round_up, share_of

_REGISTERS_PER_SM = 65536
# Shared memory that the driver keeps for itself in each block, and the kernel's own few variables.
_RESERVED_BYTES = 1024 + 1024

# Most elements that a lane of a warp has of a short row; fewer where a multiprocessor has so few rows that what
# counts is how long one takes.
_MOST_OF_LANE = 40
_FEW_ROWS_PER_SM = 16
_MOST_OF_FEW = 32
# Shorter rows that begin anywhere are taken one element at a time.
_FEWEST_TO_PEEL = 24
# Vectors that a thread may hold in registers, and the registers that it needs for that; each is a kernel of its
# own, so few. The tests compile them all and find no spills.
_REGISTERS = {2: 56, 3: 64, 4: 64, 6: 96, 8: 128, 12: 128, 16: 128}
_SHORT_VECTORS = (1, 2, 3, 4, 5, 6, 8)
# The same for longer rows, whose terms aren't kept.
_LONG_REGISTERS = {2: 64, 3: 64, 4: 64, 6: 64, 7: 64, 8: 80}
# Most packs of a row that a block holds in registers alone; for half types shared memory is better sooner.
_MOST_PACKS = 4096
_MOST_HALF_PACKS = 2048
# Shorter rows aren't worth a cluster, and fewer packs of a longer one not a block of it.
_SPLIT_PACKS = 2048
_FEWEST_PACKS = 250
# Rows of a megabyte, and no more of them than this, are better off with the grid.
_GRID_PACKS = 65536
_GRID_ROWS = 16
# softmax_fused.cu counts packs, two elements at least, in 32 bits.
_MOST_COLS = 2**31
# Threads that a multiprocessor runs at 64 registers each.
_THREADS_PER_SM = 1024


@dataclass(frozen=True, kw_only=True)
class RowPlan(TeamPlan):
    """How softmax_fused.cu takes rows whose elements are neighbors in memory.

    Attributes:
        congruent: Whether the input is at a multiple of 16 bytes where the output is.
        cooperative: Whether all blocks run at once and wait for one another; ``parts`` of the grid share a row
            then, otherwise a cluster.
        shared_vectors: Packs that a thread holds in shared memory besides.
    """

    congruent: bool
    cooperative: bool = False
    shared_vectors: int = 0

    file = "softmax_fused.cu"

    def macros(self) -> dict[str, object]:
        return super().macros() | {
            "CLUSTER": 1 if self.cooperative else self.parts,
            "GRID": self.cooperative,
            "SHARED": self.shared_vectors > 0,
            "CONGRUENT": self.congruent,
        }

    def launch(self) -> Launch:
        return Launch(
            self.grid,
            self.threads,
            shared=self.shared_vectors * self.threads * ACCESS_BYTES,
            cluster=1 if self.cooperative else self.parts,
            cooperative=self.cooperative,
            overlap=self.overlap,
            scratch=self.grid * 16 if self.cooperative else 0,
        )

    def constants(self) -> list[ctypes.c_int]:
        """The kernel's parameters after the layout."""
        return [ctypes.c_int(self.shared_vectors)]


@dataclass(frozen=True)
class StridedPlan:
    """How softmax_fused_strided.cu takes all other layouts; its macros explain the fields."""

    lanes: int
    turn_in: bool
    turn_out: bool
    grid: int

    file = "softmax_fused_strided.cu"

    def macros(self) -> dict[str, object]:
        return {"LANES": self.lanes, "TURN_IN": self.turn_in, "TURN_OUT": self.turn_out}

    def launch(self) -> Launch:
        return Launch(self.grid, block=256)

    def constants(self) -> list[ctypes.c_int]:
        """The kernel has no parameters after the layout."""
        return []


Plan: TypeAlias = RowPlan | ColumnsPlan | StridedPlan


def plan(problem: Problem, device: Device) -> Plan:
    """Choose the launch: a pure function of the problem and the GPU."""
    rows_are_contiguous = problem.inner == 1 and (problem.strides[1] == 1 or problem.cols == 1)
    if not rows_are_contiguous or problem.cols > _MOST_COLS:
        return plan_columns(problem, device) or _plan_strided(problem, device)
    return _plan_short(problem, device) or _plan_long(problem, device)


def _alignment(problem: Problem) -> tuple[int, bool, bool]:
    """Elements in 16 bytes of input, and two answers.

    The first is whether all rows start at a multiple of 16 bytes. The second is whether input and output are in
    step: wherever one is at such a multiple, so is the other.
    """
    wide = ACCESS_BYTES // ITEMSIZE[problem.dtype]
    x_start = problem.x_offset // ITEMSIZE[problem.dtype]
    out_start = problem.out_offset // ITEMSIZE[problem.out_dtype]
    stride = problem.strides[0] if problem.outer > 1 else problem.cols
    out_wide = min(wide, ACCESS_BYTES // ITEMSIZE[problem.out_dtype])
    congruent = (x_start - out_start) % out_wide == 0 and (stride - problem.cols) % out_wide == 0
    aligned = congruent and x_start % wide == 0 and (stride % wide == 0 or problem.outer == 1)
    return wide, aligned, congruent


def _plan_short(problem: Problem, device: Device) -> RowPlan | None:
    """Lanes of a warp that share a row, or None if it's too long for that."""
    wide, aligned, congruent = _alignment(problem)
    if not congruent or (not aligned and problem.cols < _FEWEST_TO_PEEL):
        wide, most = 1, 8  # neighboring lanes take neighboring elements, at any alignment
        packs = problem.cols
        team = power_of_two(ceil_div(packs, most))
    else:
        most = min(6, _MOST_OF_LANE // wide)
        packs = ceil_div(problem.cols, wide)
        # Two or three packs a lane: enough in flight, and few shuffles.
        team = power_of_two(ceil_div(packs, 2 if packs <= 4 else 3))
        if not aligned:
            team = max(team, 4)  # up to two packs less one element a row are taken one by one
    team = min(WARP, team)
    vectors = round_up(ceil_div(packs, team), _SHORT_VECTORS)
    few = problem.rows <= _FEW_ROWS_PER_SM * device.sm_count
    if packs > most * team or (few and vectors * wide > _MOST_OF_FEW):
        return None
    return RowPlan(
        rows=problem.rows,
        team=team,
        vectors=vectors,
        threads=128,
        blocks_per_sm=1,
        wide=wide,
        congruent=congruent and wide > 1,
        overlap=device.capability >= 90,
    )


@dataclass(frozen=True)
class _Split:
    """Blocks that share a row, and the threads of each with the vectors that they hold in registers."""

    parts: int
    threads: int
    vectors: int
    cooperative: bool = False


def _plan_long(problem: Problem, device: Device) -> RowPlan:
    wide, _, congruent = _alignment(problem)
    packs = ceil_div(problem.cols, wide)
    split = _split(problem, packs, device)
    excess = max(0, ceil_div(share_of(packs, split.parts), split.threads) - split.vectors)
    registers = _REGISTERS if split.parts == 1 and not excess else _LONG_REGISTERS
    needed = min(128, registers[split.vectors] * _register_factor(problem))
    blocks_per_sm = max(1, _REGISTERS_PER_SM // (round_up(split.threads, BLOCK_SIZES) * needed))
    if problem.mask and problem.causal:  # both take registers
        blocks_per_sm = max(1, blocks_per_sm * 3 // 4)
    if split.cooperative:
        blocks_per_sm = max(blocks_per_sm, ceil_div(problem.rows * split.parts, device.sm_count))
    while blocks_per_sm > 1 and excess > _room(device, blocks_per_sm, split.threads):
        blocks_per_sm -= 1
    shared_vectors = min(excess, _room(device, blocks_per_sm, split.threads))
    return RowPlan(
        rows=problem.rows,
        team=0,
        vectors=split.vectors,
        threads=split.threads,
        blocks_per_sm=blocks_per_sm,
        wide=wide,
        congruent=congruent,
        overlap=device.capability >= 90,
        parts=split.parts,
        cooperative=split.cooperative,
        shared_vectors=shared_vectors,
        streamed=excess > shared_vectors,
    )


def _register_factor(problem: Problem) -> int:
    """float64, and an input that is out of step with the output, take twice the registers."""
    return 1 if problem.dtype != "float64" and _alignment(problem)[2] else 2


def _room(device: Device, blocks_per_sm: int, threads: int) -> int:
    """Vectors a thread that fit in shared memory with that many blocks on a multiprocessor."""
    room = min(device.shared_per_block, device.shared_per_sm // blocks_per_sm) - _RESERVED_BYTES
    return room // (threads * ACCESS_BYTES)


def _split(problem: Problem, packs: int, device: Device) -> _Split:
    largest_cluster = device.max_cluster if device.capability >= 90 else 1
    return (
        _grid_in_registers(problem, packs, device)
        or _split_few_rows(problem, packs, device, largest_cluster)
        or _block_in_registers(problem, packs, device)
        or _split_as_little_as_possible(problem, packs, device, largest_cluster)
        or _split_over_grid(problem, packs, device, largest_cluster)
        or _Split(largest_cluster, 512, 4)
    )


def _full_blocks(problem: Problem, threads: int) -> int:
    """How many blocks of 64 registers a thread a multiprocessor runs."""
    return _THREADS_PER_SM // threads // _register_factor(problem)


def _vectors(problem: Problem, share: int, threads: int, device: Device) -> int | None:
    """Vectors in registers for a share of a row, the excess in shared memory; None if it's too much.

    More of them where that leaves none for shared memory, or where it has no room for the rest.
    """
    room = _room(device, _full_blocks(problem, threads), threads)
    each = ceil_div(share, threads)
    # Elsewhere the compiler needs more registers, and so does a mask.
    usual = 80 <= device.capability < 100 and not problem.mask
    few, many = (3, 6 if usual else 4) if _is_half(problem) else (4, 4 if problem.mask else 7)
    if whole := next((vectors for vectors in (4, many) if each <= vectors), None):
        return whole
    return next((vectors for vectors in (few, many) if each <= vectors + room), None)


def _is_half(problem: Problem) -> bool:
    return ITEMSIZE[problem.dtype] == 2


def _grid_in_registers(problem: Problem, packs: int, device: Device) -> _Split | None:
    """All multiprocessors for a few rows that are too long for a cluster to take quickly."""
    if not device.cooperative or packs < _GRID_PACKS or problem.rows > _GRID_ROWS:
        return None
    most = 4 if _is_half(problem) else 8
    for threads, blocks_per_sm in ((256, 1), (512, 1), (512, 2 // _register_factor(problem))):
        parts = device.sm_count * blocks_per_sm // problem.rows
        each = ceil_div(share_of(packs, parts), threads)
        if parts > 1 and each <= most:
            return _Split(parts, threads, round_up(each, (2, 4, 8)), cooperative=True)
    return None


def _split_few_rows(problem: Problem, packs: int, device: Device, largest_cluster: int) -> _Split | None:
    """All rows at once, each in as many blocks as the chip can run; small blocks if they hold that in registers."""
    if problem.rows > device.sm_count or packs < _SPLIT_PACKS:
        return None

    def parts_of(threads: int) -> int:
        blocks = device.sm_count * _full_blocks(problem, threads) // problem.rows
        parts = min(largest_cluster, power_of_two(blocks + 1) // 2)
        while parts > 1 and share_of(packs, parts) < _FEWEST_PACKS:
            parts //= 2
        return parts

    parts, more_parts = parts_of(256), parts_of(128)
    if more_parts <= 1:
        return None
    small = share_of(packs, more_parts)
    if small <= 4 * 128:
        return _Split(more_parts, 128, 2 if small <= 2 * 128 else 4)
    each = ceil_div(share_of(packs, parts), 256)
    vectors = _vectors(problem, share_of(packs, parts), 256, device)
    if parts > 1 and vectors and (each <= vectors or parts == more_parts):
        # With two such blocks a multiprocessor there are registers enough.
        few_blocks = problem.rows * parts * _register_factor(problem) <= 2 * device.sm_count
        return _Split(parts, 256, 8 if vectors < each <= 8 and few_blocks and not problem.mask else vectors)
    if vectors := _vectors(problem, small, 128, device):
        return _Split(more_parts, 128, vectors)
    return None


def _block_in_registers(problem: Problem, packs: int, device: Device) -> _Split | None:
    """A block a row."""
    half = _is_half(problem)
    # Most that fit in 128 registers.
    most = 8 if _register_factor(problem) == 2 or not 80 <= device.capability < 120 else 12 if problem.mask else 16
    if packs > min(most * 256, _MOST_HALF_PACKS if half else _MOST_PACKS):
        return None
    few = problem.rows <= device.sm_count
    # A line of 128 bytes is peeled one element a thread.
    fewest = 96 if half else 64
    candidates = [
        (max(fewest, ceil_div(ceil_div(packs, vectors), WARP) * WARP), vectors)
        for vectors in _REGISTERS
        if vectors <= (6 if packs <= 1536 else most)
    ]
    # The fewest places left empty; then about 96 threads for short rows, few for long ones unless there are few.
    threads, vectors = min(
        (c for c in candidates if c[0] <= 256),
        key=lambda c: (c[0] * c[1], abs(c[0] - 96) if packs <= 1536 and not few else -c[0] if few else c[0], -c[1]),
    )
    return _Split(1, threads, vectors)


def _split_as_little_as_possible(
    problem: Problem, packs: int, device: Device, largest_cluster: int
) -> _Split | None:
    """The fewest blocks that can hold a row; two of 256 threads are worse than one of 512."""
    if largest_cluster == 1 and 2 * problem.rows <= device.sm_count:
        return None  # the grid is the only way to share a row
    for parts, threads in ((1, 256), (1, 512), (3, 256), (4, 256), (8, 256), (16, 256)):
        vectors = _vectors(problem, share_of(packs, parts), threads, device)
        # The last kilobytes of registers are for what would need twice as many blocks otherwise.
        if parts <= largest_cluster and vectors and (vectors <= 4 or parts >= 4):
            # In the longest rows as many vectors as registers hold: 1% faster.
            return _Split(
                parts, threads, 7 if parts == 16 and not _is_half(problem) and not problem.mask else vectors
            )
    return None


def _split_over_grid(problem: Problem, packs: int, device: Device, largest_cluster: int) -> _Split | None:
    """All rows at once, over all multiprocessors."""
    if not device.cooperative:
        return None
    vectors = 4 if device.capability >= 80 else 3  # there the compiler needs more registers
    for threads, blocks_per_sm in ((512, 1), (256, _full_blocks(problem, 256))):
        parts = device.sm_count * blocks_per_sm // problem.rows
        room = _room(device, blocks_per_sm, threads)
        if parts > 1 and ceil_div(share_of(packs, parts), threads) <= vectors + room:
            return _Split(parts, threads, vectors, cooperative=True)
    # What the chip can't hold is read twice, but by all of it.
    parts = device.sm_count // problem.rows
    return _Split(parts, 512, vectors, cooperative=True) if parts > largest_cluster else None


def _plan_strided(problem: Problem, device: Device) -> StridedPlan:
    x_outer, x_col, x_inner = problem.strides
    x_row, out_row = (x_inner, 1) if problem.inner > 1 else (x_outer, problem.cols)
    # Fewer rows a block where there are too few for the chip, but whole 32-byte sectors.
    lanes = min(WARP, power_of_two(problem.rows))
    fewest = 32 // ITEMSIZE[problem.dtype]
    while lanes > fewest and ceil_div(problem.rows, lanes) < 2 * device.sm_count:
        lanes //= 2
    return StridedPlan(
        lanes=lanes,
        turn_in=abs(x_col) < abs(x_row) and problem.rows > 1,
        turn_out=out_row > problem.inner and problem.rows > 1,
        grid=min(ceil_div(problem.rows, lanes), cuda.MAX_GRID),
    )


def prepare(problem: Problem) -> Kernel:
    device = driver.device(problem.index)
    if problem.is_backward:
        return fused_backward.prepare(problem, device)
    if problem.op == TOPK:
        return fused_topk.prepare(problem, device)
    return driver.prepare_fitting(device, partial(plan, problem), partial(prepare_planned, problem))


def prepare_planned(problem: Problem, chosen: Plan) -> Kernel:
    """The kernel for a launch that was chosen elsewhere; tests and tuning force theirs this way."""
    macros = chosen.macros()
    return fused_scores.kernel(
        chosen.file, problem, chosen.launch(), scores_macros(problem, chosen), macros, *chosen.constants()
    )


def scores_macros(problem: Problem, chosen: Plan) -> dict[str, object]:
    """The macros of fused_scores.cuh that go with a plan."""
    if isinstance(chosen, StridedPlan):
        return fused_scores.macros(problem, 1)
    if isinstance(chosen, ColumnsPlan):
        return fused_scores.macros(problem, chosen.wide, across=True)
    _, aligned, _ = _alignment(problem)
    return fused_scores.macros(problem, chosen.wide, anywhere=not aligned)


BACKEND = Backend(
    name="cuda-fused",
    rank=10,
    devices=("cuda",),
    dtypes=DTYPES,
    ops=ALL_OPS,
    features=FEATURES,
    prepare=prepare,
    requires=cuda.REQUIRES,
    obstacles=cuda.obstacles,
    reasons=fused_topk.reasons,
)
