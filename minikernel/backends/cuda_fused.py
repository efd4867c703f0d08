"""``cuda-fused``: parallel reduction and online softmax; each row read once, kept on chip, written once."""

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
# Packs of a row that one block holds well: 64 KiB, so that several blocks are on a multiprocessor.
_PACKS = 4096
# Of a larger block's, those that are in registers; the rest are in shared memory.
_GRID_VECTORS = 4
# Blocks are compiled for at most so many threads.
_BLOCK_SIZES = (128, 256, 512)
_FEW_WAVES = 8
# Registers that a thread needs to hold so many vectors; the tests compile them all and find no spills.
_REGISTERS = {2: 56, 3: 64, 4: 64, 6: 96, 8: 128, 12: 128, 16: 128}


@dataclass(frozen=True)
class RowPlan:
    """How softmax_fused.cu takes rows whose elements are neighbors in memory; its macros explain the fields."""

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
    if not rows_are_contiguous:
        return _plan_strided(problem, device)
    _, _, congruent = _alignment(problem)
    short = _SHORT_ROW_BYTES if congruent else _SHORT_UNALIGNED_BYTES
    if problem.cols * ITEMSIZE[problem.dtype] <= short:
        return _plan_short(problem, device)
    return _plan_long(problem, device)


def _alignment(problem: Problem) -> tuple[int, bool, bool]:
    """Elements in 16 bytes of input; whether every row starts at a multiple of that; whether, where the
    output is at such a multiple, the input is too."""
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
    share = packs if parts == 1 else _ceil(packs, parts * 8) * 8

    threads, vectors = _block(problem, share, congruent, device, few=problem.rows * parts <= device.sm_count)
    excess = max(0, _ceil(share, threads) - vectors)
    registers = min(128, _REGISTERS[vectors] * (2 if problem.dtype == "float64" or not congruent else 1))
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


def _room(device: Device, blocks_per_sm: int, threads: int) -> int:
    """Vectors a thread that fit in shared memory with that many blocks on a multiprocessor."""
    room = min(device.shared_per_block, device.shared_per_sm // blocks_per_sm) - _RESERVED_BYTES
    return room // (threads * _ACCESS_BYTES)


def _is_half(problem: Problem) -> bool:
    return ITEMSIZE[problem.dtype] == 2


def _waves(problem: Problem, device: Device) -> float:
    """How many times the input would fill the chip, at about 200 KB a multiprocessor."""
    return problem.rows * problem.cols * ITEMSIZE[problem.dtype] / (device.sm_count * 200_000)


def _spread(problem: Problem, packs: int, device: Device) -> tuple[int, bool]:
    """Blocks that share a row, and whether they are the whole grid rather than clusters."""
    largest = device.max_cluster if device.capability >= 90 else 1
    # A few long rows: the grid holds what clusters, which don't fill the chip, would have to read twice.
    parts = device.sm_count // problem.rows
    held = (_GRID_VECTORS + _room(device, 1, 512)) * 512
    if device.cooperative and parts > 1 and packs > largest * _PACKS and _ceil(packs, parts * 8) * 8 <= held:
        return parts, True
    # Where the input fills the chip only a few times, smaller blocks leave less of it idle at the end.
    most = _PACKS if _is_half(problem) else 2 * _PACKS
    if _waves(problem, device) < _FEW_WAVES:
        most //= 2
    parts = 1
    while parts < largest and (
        packs > parts * most or (problem.rows * parts * 4 < device.sm_count and packs > parts * 1024)
    ):
        parts *= 2
    return parts, False


def _block(problem: Problem, packs: int, congruent: bool, device: Device, few: bool) -> tuple[int, int]:
    """Threads, and vectors a thread, for a block that takes so many packs."""
    # Most that fit in 128 registers. float64, and an input that is out of step with the output, take more of them.
    most = 8 if problem.dtype == "float64" or not congruent else 16
    if device.capability < 80 or device.capability >= 120:
        most = min(most, 8)
    if packs > _PACKS:
        return 512, _GRID_VECTORS
    if packs > most * 256:
        return 256, 4
    if not few and problem.cols > packs * _ACCESS_BYTES // ITEMSIZE[problem.dtype] and packs > 1024:
        # Part of a row, most of it in shared memory: several blocks fit on a multiprocessor.
        return 256, 2 if _waves(problem, device) < _FEW_WAVES else 4
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
