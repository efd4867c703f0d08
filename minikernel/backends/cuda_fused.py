"""``cuda-fused``: parallel reduction and online softmax; a row is read once, kept on chip, and written once.

The online softmax is Milakov & Gimelshein 2018, arXiv:1805.02867. What is here is the choice of a launch; the
numbers in it were measured on an H200.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

from .. import cuda, driver
from ..driver import Device, Launch
from ..problem import DTYPES, ITEMSIZE, Kernel, Problem
from ..registry import Backend

_ACCESS_BYTES = 16
_WARP = 32
_REGISTERS_PER_SM = 65536
# Shared memory that the driver keeps for itself in each block, and the kernel's own few variables.
_RESERVED_BYTES = 1024 + 1024

# Rows up to this size are shared by lanes of one warp; by one element at a time where they are out of line.
_SHORT_ROW_BYTES = 2048
_SHORT_UNALIGNED_BYTES = 512
# Vectors that a thread may hold in registers; each is a kernel of its own, so few.
_VECTORS = (2, 3, 4, 6, 8, 12, 16)
_SHORT_VECTORS = (1, 2, 4, 8)
# Packs that a block of 256 threads holds well: 64 KiB, so that four blocks fit on a multiprocessor; at most, three.
_PACKS = 4096
_MOST_PACKS = 4864
# softmax_fused.cu counts packs, two elements at least, in 32 bits.
_MOST_COLS = 2**31
# Fewer than this aren't worth a block of a cluster.
_FEWEST_PACKS = 1000
# Of a large block's packs, those that a thread holds in registers; the rest are in shared memory.
_FEW_VECTORS = 4
# From here on a grid that waits for itself beats clusters.
_GRID_BYTES = 12_000_000
# Blocks are compiled for at most so many threads.
_BLOCK_SIZES = (128, 256, 512)
# Registers that a thread needs to hold so many vectors; the tests compile them all and find no spills.
_REGISTERS = {2: 56, 3: 64, 4: 64, 6: 96, 8: 128, 12: 128, 16: 128}


@dataclass(frozen=True)
class RowPlan:
    """How softmax_fused.cu takes rows whose elements are neighbors in memory.

    Attributes:
        rows: Rows of the problem.
        team: Lanes of a warp that share a row; 0: a block or several.
        vectors: Packs that a thread holds in registers.
        threads: Threads a block.
        blocks_per_sm: Blocks that fit on a multiprocessor: what the compiler may spend on registers.
        wide: Elements a pack: 16 bytes of input, or 1.
        congruent: Whether the input is at a multiple of 16 bytes where the output is.
        overlap: Whether the launch may start before its predecessor in the stream has ended.
        parts: Blocks that share a row: a cluster, or with ``cooperative`` a part of the grid.
        cooperative: Whether all blocks run at once and wait for one another.
        shared_vectors: Packs that a thread holds in shared memory besides.
        streamed: Whether there is more than all that, which is read twice.
    """

    rows: int
    team: int
    vectors: int
    threads: int
    blocks_per_sm: int
    wide: int
    congruent: bool
    overlap: bool
    parts: int = 1
    cooperative: bool = False
    shared_vectors: int = 0
    streamed: bool = False

    @property
    def grid(self) -> int:
        return _ceil(self.rows, self.threads // self.team) if self.team else self.rows * self.parts

    def macros(self) -> dict[str, object]:
        return {
            "TEAM": self.team,
            "CLUSTER": 1 if self.cooperative else self.parts,
            "GRID": self.cooperative,
            "VECTORS": self.vectors,
            "SHARED": self.shared_vectors > 0,
            "STREAMED": self.streamed,
            "WIDE": self.wide,
            "CONGRUENT": self.congruent,
            "THREADS": _up(self.threads, _BLOCK_SIZES),
            "BLOCKS": self.blocks_per_sm,
        }

    def launch(self) -> Launch:
        return Launch(
            self.grid,
            self.threads,
            shared=self.shared_vectors * self.threads * _ACCESS_BYTES,
            cluster=1 if self.cooperative else self.parts,
            cooperative=self.cooperative,
            overlap=self.overlap,
            scratch=self.grid * 16 if self.cooperative else 0,
        )


@dataclass(frozen=True)
class StridedPlan:
    """How softmax_fused_strided.cu takes all other layouts; its macros explain the fields."""

    lanes: int
    turn_in: bool
    turn_out: bool
    grid: int

    def macros(self) -> dict[str, object]:
        return {"LANES": self.lanes, "TURN_IN": self.turn_in, "TURN_OUT": self.turn_out}

    def launch(self) -> Launch:
        return Launch(self.grid, block=256)


def plan(problem: Problem, device: Device) -> RowPlan | StridedPlan:
    """Choose the launch: a pure function of the problem and the GPU."""
    rows_are_contiguous = problem.inner == 1 and (problem.strides[1] == 1 or problem.cols == 1)
    if not rows_are_contiguous or problem.cols > _MOST_COLS:
        return _plan_strided(problem, device)
    _, _, congruent = _alignment(problem)
    short = _SHORT_ROW_BYTES if congruent else _SHORT_UNALIGNED_BYTES
    if problem.cols * ITEMSIZE[problem.dtype] <= short:
        return _plan_short(problem, device)
    return _plan_long(problem, device)


def _alignment(problem: Problem) -> tuple[int, bool, bool]:
    """Elements in 16 bytes of input, and two answers.

    The first is whether all rows start at a multiple of 16 bytes. The second is whether input and output are in
    step: wherever one is at such a multiple, so is the other.
    """
    wide = _ACCESS_BYTES // ITEMSIZE[problem.dtype]
    x_start = problem.x_offset // ITEMSIZE[problem.dtype]
    out_start = problem.out_offset // ITEMSIZE[problem.out_dtype]
    stride = problem.strides[0] if problem.outer > 1 else problem.cols
    out_wide = min(wide, _ACCESS_BYTES // ITEMSIZE[problem.out_dtype])
    congruent = (x_start - out_start) % out_wide == 0 and (stride - problem.cols) % out_wide == 0
    aligned = congruent and x_start % wide == 0 and (stride % wide == 0 or problem.outer == 1)
    return wide, aligned, congruent


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _up(value: int, choices: tuple[int, ...]) -> int:
    return next((c for c in choices if c >= value), choices[-1])


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _plan_short(problem: Problem, device: Device) -> RowPlan:
    wide, aligned, congruent = _alignment(problem)
    if not aligned and problem.cols * ITEMSIZE[problem.dtype] <= _SHORT_UNALIGNED_BYTES:
        wide = 1  # neighboring lanes take neighboring elements, at any alignment
    packs = _ceil(problem.cols, wide)
    # Two vectors a lane: enough in flight, and half the shuffles.
    team = min(_WARP, _power_of_two(_ceil(packs, 2)))
    return RowPlan(
        rows=problem.rows,
        team=team,
        vectors=_up(_ceil(packs, team), _SHORT_VECTORS),
        threads=128,
        blocks_per_sm=1,
        wide=wide,
        congruent=congruent and wide > 1,
        overlap=device.capability >= 90,
    )


def _plan_long(problem: Problem, device: Device) -> RowPlan:
    wide, _, congruent = _alignment(problem)
    packs = _ceil(problem.cols, wide)
    parts, cooperative = _spread(problem, packs, device)
    share = _share(packs, parts)

    threads, vectors = _block(problem, share, parts, congruent, device)
    excess = max(0, _ceil(share, threads) - vectors)
    registers = _registers(problem, vectors, congruent)
    blocks_per_sm = max(1, _REGISTERS_PER_SM // (_up(threads, _BLOCK_SIZES) * registers))
    while blocks_per_sm > 1 and excess > _room(device, blocks_per_sm, threads):
        blocks_per_sm -= 1
    shared_vectors = min(excess, _room(device, blocks_per_sm, threads))
    return RowPlan(
        rows=problem.rows,
        team=0,
        vectors=vectors,
        threads=threads,
        blocks_per_sm=blocks_per_sm,
        wide=wide,
        congruent=congruent,
        # It costs where many clusters wait for their turn.
        overlap=device.capability >= 90 and (parts == 1 or problem.rows * parts <= 8 * device.sm_count),
        parts=parts,
        cooperative=cooperative,
        shared_vectors=shared_vectors,
        streamed=excess > shared_vectors,
    )


def _registers(problem: Problem, vectors: int, congruent: bool) -> int:
    """Registers that a thread needs to hold so many vectors."""
    twice = problem.dtype == "float64" or not congruent
    return min(128, _REGISTERS[vectors] * (2 if twice else 1))


def _room(device: Device, blocks_per_sm: int, threads: int) -> int:
    """Vectors a thread that fit in shared memory with that many blocks on a multiprocessor."""
    room = min(device.shared_per_block, device.shared_per_sm // blocks_per_sm) - _RESERVED_BYTES
    return room // (threads * _ACCESS_BYTES)


def _is_half(problem: Problem) -> bool:
    return ITEMSIZE[problem.dtype] == 2


def _share(packs: int, parts: int) -> int:
    """Packs of a row for each of several blocks: whole lines of 128 bytes."""
    return packs if parts == 1 else _ceil(packs, parts * 8) * 8


def _spread(problem: Problem, packs: int, device: Device) -> tuple[int, bool]:
    """Blocks that share a row, and whether they are the whole grid rather than clusters."""
    if device.cooperative and (parts := _grid_parts(problem, packs, device)):
        return parts, True
    most = _largest_cluster(device)
    best, best_cost = most, float("inf")
    for parts in (1, 2, 4, 8, 16):
        share = _share(packs, parts)
        if parts > most or (parts > 1 and share < _FEWEST_PACKS):
            break
        if share > (2 * _PACKS if parts == 1 else _MOST_PACKS) and parts < most:
            continue
        # What the busiest multiprocessor has to do; a larger cluster must earn its cost.
        resident = 4 if share <= _PACKS else 2 if parts == 1 else 3
        blocks = problem.rows * parts
        waves = _ceil(blocks, device.sm_count * resident)
        cost = share * (waves * resident if waves > 1 else _ceil(blocks, device.sm_count))
        if cost < 0.8 * best_cost:
            best, best_cost = parts, cost
    return best, False


def _largest_cluster(device: Device) -> int:
    return device.max_cluster if device.capability >= 90 else 1


def _grid_parts(problem: Problem, packs: int, device: Device) -> int:
    """Blocks a row if the grid holds the whole input and gains by it, else 0.

    Clusters don't fill the chip, and end one by one; but waiting for the grid takes as long as reading 4 MB.
    """
    parts = device.sm_count // problem.rows
    too_long = _share(packs, _largest_cluster(device)) > 2 * _PACKS
    if not parts or not (too_long or problem.rows * packs * _ACCESS_BYTES > _GRID_BYTES):
        return 0
    if too_long and parts > 1 and _share(packs, parts) <= (_FEW_VECTORS + _room(device, 1, 512)) * 512:
        return parts
    parts *= 4  # four smaller blocks a multiprocessor
    return parts if _share(packs, parts) <= (_FEW_VECTORS + _room(device, 4, 256)) * 256 else 0


def _block(problem: Problem, packs: int, parts: int, congruent: bool, device: Device) -> tuple[int, int]:
    """Threads, and vectors a thread, for a block that takes so many packs."""
    # Most that fit in 128 registers. float64, and an input that is out of step with the output, take more of them.
    most = 8 if problem.dtype == "float64" or not congruent else 16
    if device.capability < 80 or device.capability >= 120:
        most = min(most, 8)
    few = problem.rows * parts <= device.sm_count
    # Mostly in shared memory: several such blocks fit on a multiprocessor.
    if packs > _MOST_PACKS or (packs > _PACKS and parts == 1):
        return 512, _FEW_VECTORS
    if packs > most * 256 or (parts > 1 and not few):
        return 256, _FEW_VECTORS
    if _is_half(problem) and packs > _PACKS // 2 and problem.rows < 8 * device.sm_count:
        return 256, _FEW_VECTORS
    # A line of 128 bytes is peeled one element a thread.
    fewest = 96 if _is_half(problem) else 64
    candidates = [
        (max(fewest, _ceil(_ceil(packs, vectors), _WARP) * _WARP), vectors)
        for vectors in _VECTORS
        if vectors <= (6 if packs <= 1536 else most)
    ]
    # The fewest places left empty; then about 96 threads for short rows, few for long ones unless there are few.
    return min(
        (c for c in candidates if c[0] <= 256),
        key=lambda c: (c[0] * c[1], abs(c[0] - 96) if packs <= 1536 and not few else -c[0] if few else c[0], -c[1]),
    )


def _plan_strided(problem: Problem, device: Device) -> StridedPlan:
    x_outer, x_col, x_inner = problem.strides
    x_row, out_row = (x_inner, 1) if problem.inner > 1 else (x_outer, problem.cols)
    # Fewer rows a block where there are too few for the chip, but whole 32-byte sectors.
    lanes = min(_WARP, _power_of_two(problem.rows))
    fewest = 32 // ITEMSIZE[problem.dtype]
    while lanes > fewest and _ceil(problem.rows, lanes) < 2 * device.sm_count:
        lanes //= 2
    return StridedPlan(
        lanes=lanes,
        turn_in=abs(x_col) < abs(x_row) and problem.rows > 1,
        turn_out=out_row > problem.inner and problem.rows > 1,
        grid=min(_ceil(problem.rows, lanes), cuda.MAX_GRID),
    )


def prepare(problem: Problem) -> Kernel:
    device = driver.device(problem.index)
    while True:
        chosen = plan(problem, device)
        try:
            return prepare_planned(problem, chosen)
        except driver.DoesNotFit:  # a slice of a GPU, say: do with less
            if isinstance(chosen, RowPlan) and chosen.parts > 1 and not chosen.cooperative:
                device = replace(device, max_cluster=chosen.parts // 2)
            else:
                device = replace(device, cooperative=False)


def prepare_planned(problem: Problem, chosen: RowPlan | StridedPlan) -> Kernel:
    """The kernel for a launch that was chosen elsewhere; tests and tuning force theirs this way."""
    macros = cuda.defines(problem, **chosen.macros())
    if isinstance(chosen, StridedPlan):
        return cuda.kernel("softmax_fused_strided.cu", problem, macros, chosen.launch())
    shared_vectors = ctypes.c_int(chosen.shared_vectors)
    return cuda.kernel("softmax_fused.cu", problem, macros, chosen.launch(), shared_vectors)


BACKEND = Backend(
    name="cuda-fused",
    rank=10,
    devices=("cuda",),
    dtypes=DTYPES,
    prepare=prepare,
    requires=cuda.REQUIRES,
    obstacles=cuda.obstacles,
)
