"""How ``cuda-fused`` takes rows that lie side by side in memory: the launches of softmax_fused_columns.cu.

Rows lie side by side where softmax runs over another axis than the last, or over the last of a transposed input.
The numbers in here were measured on an H200.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from .. import cuda
from ..driver import Device, Launch
from ..integers import ceil_div, power_of_two
from ..problem import ITEMSIZE, Problem

_ACCESS_BYTES = 16
_WARP = 32
_LINE_BYTES = 128
_SECTOR_BYTES = 32
_NARROW_BYTES = 8
# Shared memory that the driver keeps for itself in each block.
_RESERVED_BYTES = 1024
# A block has 128 to 512 threads; a multiprocessor runs 1024 at 64 registers each, if it has as much shared memory.
_FEWEST_THREADS = 128
# So few columns are a thread's alone: there is nothing to merge then.
_FEW_COLS = 32
_MOST_THREADS = 512
_MOST_IN_REGISTERS = 256
_THREADS_PER_SM = 1024
_SHARED_PER_THREAD = 228
# What a thread holds, in registers and shared memory together, in a tile that one block or a cluster can hold so.
_THREAD_BYTES = 256
# Of these so many in registers. That leaves the rest of 64 registers for the work.
_REGISTER_BYTES = 64
# Packs of 16 bytes that a thread may hold in registers alone; each is a kernel of its own, so few.
_VECTORS = (2, 3, 4, 12)
# A turned tile is written so many bytes of a row at a time, if there are as many.
_SEGMENT_BYTES = 64
# With so few turned tiles the last blocks run alone for long: then smaller ones. (Measured for half types.)
_FEW_BLOCKS_PER_SM = 4
# Smaller planes are left to the general kernel: a block each would have next to nothing to do.
_FEWEST_BYTES = 1024
# More of a row than any cluster holds, a sector of rows at a time.
_MOST_BYTES = 2**22


@dataclass(frozen=True)
class ColumnsPlan:
    """How softmax_fused_columns.cu takes rows that are neighbors in memory.

    Attributes:
        planes: Parts of the array that lie apart: the extent of the outer axis, or 1 for a transposed input.
        side: Rows side by side in each.
        cols: Elements a row.
        itemsize, out_itemsize: Bytes an element of the input and of the output.
        wide: Elements a pack, each of another row.
        across: Threads side by side along the rows; a tile is so many packs wide.
        groups: Groups of so many threads in a block; they take columns in turn.
        vectors: Packs that a thread holds in registers.
        most_threads: Threads that blocks of the same kernel may have.
        blocks_per_sm: So large blocks that fit on a multiprocessor: what the compiler may spend on registers.
        overlap: Whether the launch may start before its predecessor in the stream has ended.
        shared_vectors: Packs that a thread holds in shared memory besides.
        parts: Blocks of a cluster that share the columns of a tile.
        turn: Whether the input is transposed, so that the output has its rows apart.
        aligned: Whether the rows of such an output begin at multiples of 16 bytes.
    """

    planes: int
    side: int
    cols: int
    itemsize: int
    out_itemsize: int
    wide: int
    across: int
    groups: int
    vectors: int
    most_threads: int
    blocks_per_sm: int
    overlap: bool
    shared_vectors: int = 0
    parts: int = 1
    turn: bool = False
    aligned: bool = False

    file = "softmax_fused_columns.cu"

    @property
    def threads(self) -> int:
        return self.across * self.groups

    @property
    def run(self) -> int:
        """Neighboring columns that a thread takes of a transposed input: a word of the output."""
        return 2 if self.turn and self.out_itemsize == 2 else 1

    @property
    def tiles(self) -> int:
        return ceil_div(self.side, self.across * self.wide)

    @property
    def share(self) -> int:
        """Columns of a block."""
        return _share(self.cols, self.parts, self.turn, self.out_itemsize)

    @property
    def grid(self) -> int:
        return self.planes * self.tiles * self.parts

    @property
    def shared(self) -> int:
        """Bytes of shared memory a block."""
        return self.shared_vectors * self.threads * self._slot + self._work

    @property
    def _slot(self) -> int:
        return _slot(self.wide * self.itemsize)

    @property
    def in_place(self) -> bool:
        """Whether a turned tile takes the room of packs in shared memory that have been read."""
        return self.turn and self.shared_vectors > 0 and self.out_itemsize <= self.itemsize

    @property
    def _work(self) -> int:
        """Bytes of shared memory in which threads meet: as the kernel lays them out."""
        rows = self.across * self.wide
        partial = 2 * max(4, self.itemsize)
        writers = self.groups if self.across >= _WARP else self.threads // _WARP
        partials = rows * partial * (writers + (self.parts if self.parts > 1 else 0))
        alone = writers == 1 and self.parts == 1
        # Other stages of a turned output lie where the partials were.
        stages = 2 * rows * self.groups * self.run * self.out_itemsize if self.turn and not self.in_place else 0
        return rows * partial + max(0 if alone else partials, stages)

    def macros(self) -> dict[str, object]:
        return {
            "WIDE": self.wide,
            "LANES": min(self.across, _WARP),
            "CLUSTER": 16 if self.parts > 1 else 1,
            "VECTORS": self.vectors,
            "SHARED": self.shared_vectors > 0,
            "TURN": self.turn,
            "ALIGNED": self.aligned,
            "THREADS": self.most_threads,
            "BLOCKS": self.blocks_per_sm,
        }

    def launch(self) -> Launch:
        return Launch(self.grid, self.threads, shared=self.shared, cluster=self.parts, overlap=self.overlap)

    def constants(self) -> list[ctypes.c_int]:
        """The kernel's parameters after the layout."""
        return [ctypes.c_int(n) for n in (self.across, self.tiles, self.share, self.shared_vectors)]


def plan_columns(problem: Problem, device: Device) -> ColumnsPlan | None:
    """Choose the launch, or None where the rows don't lie side by side or are more than a cluster can hold."""
    planes, side, turn = _sides(problem)
    if side < 2 or problem.strides[0 if turn else 2] != 1 or abs(problem.strides[1]) < side:
        return None
    size = ITEMSIZE[problem.dtype]
    if problem.cols * size > _MOST_BYTES or (planes > 1 and problem.cols * side * size < _FEWEST_BYTES):
        return None
    wide = widest(problem)
    # Tiles of a line, or of half of one where narrow packs, as all of half types are, would make a turned tile low;
    # narrower if they must.
    first = _LINE_BYTES // 2 if turn and wide * size <= _NARROW_BYTES else _LINE_BYTES
    sizes = _cluster_sizes(device)
    for width in (first, first // 2, _SECTOR_BYTES):
        across = min(max(1, width // (wide * size)), power_of_two(ceil_div(side, wide)))
        across = max(across, 4) if turn else across
        for parts in sizes:
            if found := _plan_tile(problem, device, wide, across, parts):
                if turn and size == 2 and parts < sizes[-1] and found.grid < _FEW_BLOCKS_PER_SM * device.sm_count:
                    halved = build(problem, device, wide, found.across, found.groups, found.vectors, 2 * parts)
                    if halved and halved.share < found.share:
                        found = halved
                return found if found.grid <= cuda.MAX_GRID else None
    return None


def build(
    problem: Problem,
    device: Device,
    wide: int,
    across: int,
    groups: int,
    vectors: int,
    parts: int = 1,
    resident: int = 1,
) -> ColumnsPlan | None:
    """A launch with the packs that registers don't hold in shared memory, or None if there is too little of it.

    ``resident`` such blocks must fit on a multiprocessor.
    """
    planes, side, turn = _sides(problem)
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    run = _run(problem)
    shared_vectors = max(0, ceil_div(_share(problem.cols, parts, turn, out_size), groups * run) * run - vectors)
    if turn:
        shared_vectors = max(shared_vectors, 2 * run)  # room for two stages
    in_registers = not shared_vectors and across * groups <= _MOST_IN_REGISTERS
    most_threads = _MOST_IN_REGISTERS if in_registers else _MOST_THREADS
    found = ColumnsPlan(
        planes=planes,
        side=side,
        cols=problem.cols,
        itemsize=size,
        out_itemsize=out_size,
        wide=wide,
        across=across,
        groups=groups,
        vectors=vectors,
        most_threads=most_threads,
        blocks_per_sm=_blocks_per_sm(problem, device, vectors * _slot(wide * size), most_threads),
        overlap=device.capability >= 90,
        shared_vectors=shared_vectors,
        parts=parts,
        turn=turn,
        aligned=turn and _out_is_aligned(problem),
    )
    room = min(device.shared_per_block, device.shared_per_sm // resident - _RESERVED_BYTES)
    return found if found.shared <= room else None


def widest(problem: Problem) -> int:
    """Elements of the widest pack, up to 16 bytes of input, that is aligned wherever one begins.

    Of a transposed half type up to 8 bytes: for more rows a thread has too few registers.
    """
    planes, side, turn = _sides(problem)
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    apart = [side, problem.strides[1]] + ([] if planes == 1 else [problem.strides[0]])
    if problem.mask and problem.mask.rows:
        apart.append(problem.mask.rows[-1][0])  # a pack's elements lie one stride apart in the mask
    wide = _ACCESS_BYTES // (2 * size if turn and size == 2 else size)
    while wide > 1 and (
        any(n % wide for n in apart)
        or problem.x_offset % (wide * size)
        or (not turn and problem.out_offset % min(_ACCESS_BYTES, wide * out_size))
    ):
        wide //= 2
    return wide


def _sides(problem: Problem) -> tuple[int, int, bool]:
    """Planes, rows side by side in each, and whether the input is transposed."""
    turn = problem.inner == 1
    return (1, problem.outer, True) if turn else (problem.outer, problem.inner, False)


def _slot(pack: int) -> int:
    """Bytes that a pack takes on the chip."""
    return max(4, pack)


def _run(problem: Problem) -> int:
    """Columns in a row that a thread takes: a word of a turned output."""
    return 2 if problem.inner == 1 and ITEMSIZE[problem.out_dtype] == 2 else 1


def _out_is_aligned(problem: Problem) -> bool:
    """Whether the rows of a turned output begin at multiples of 16 bytes."""
    return problem.out_offset == 0 and problem.cols * ITEMSIZE[problem.out_dtype] % _ACCESS_BYTES == 0


def _share(cols: int, parts: int, turn: bool, out_itemsize: int) -> int:
    share = ceil_div(cols, parts)
    line = _LINE_BYTES // out_itemsize
    return ceil_div(share, line) * line if turn and parts > 1 else share


def _plan_tile(problem: Problem, device: Device, wide: int, across: int, parts: int) -> ColumnsPlan | None:
    """Blocks for a tile at least ``across`` packs wide, or None if so many can't hold it."""
    _, side, turn = _sides(problem)
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    slot, run = _slot(wide * size), _run(problem)
    share = _share(problem.cols, parts, turn, out_size)
    # Threads that each hold as much as they may: the fewer, the less there is to merge.
    groups = 1 if share <= _FEW_COLS and not turn else power_of_two(ceil_div(share * slot, _THREAD_BYTES))
    if turn:
        words = power_of_two(ceil_div(share, run))
        groups = max(groups, 4, min(words, _SEGMENT_BYTES // (run * out_size)))
    if across * groups < (_FEWEST_THREADS if parts == 1 else _WARP):
        # Where columns are few, tiles are wide; where rows are few too, a thread has less to do.
        widest_tile = power_of_two(ceil_div(side, wide))
        across = max(across, min(max(_WARP, _FEWEST_THREADS // groups), widest_tile))
        groups = max(groups, min(_FEWEST_THREADS // across, power_of_two(share)), ceil_div(_WARP, across))
    groups = min(groups, _MOST_THREADS // across)
    vectors = _REGISTER_BYTES // slot
    if turn and size == 2:
        vectors = min(vectors, 4)  # more are slower
    elif turn and not _out_is_aligned(problem):
        vectors = min(vectors, 2)  # writing one by one takes registers
    if across >= _WARP and across * groups <= _MOST_IN_REGISTERS and not turn:
        alone = (_VECTORS[:3] if problem.mask else _VECTORS) if slot == _ACCESS_BYTES else (4, vectors)
        vectors = next((v for v in alone if v >= ceil_div(share, groups)), vectors)
    # A multiprocessor full of threads, or more than half full; fewer only where more blocks can't share a tile.
    threads = min(_THREADS_PER_SM, device.shared_per_sm // _SHARED_PER_THREAD)
    full = max(1, threads // (across * groups))
    fewest = 1 if parts == _cluster_sizes(device)[-1] else full // 2 + 1
    for resident in range(full, fewest - 1, -1):
        if found := build(problem, device, wide, across, groups, vectors, parts, resident):
            return found
    return None


def _cluster_sizes(device: Device) -> list[int]:
    most = device.max_cluster if device.capability >= 90 else 1
    return [parts for parts in (1, 2, 4, 8, 16) if parts <= most]


def _blocks_per_sm(problem: Problem, device: Device, held_bytes: int, most_threads: int) -> int:
    """Blocks of the most threads that leave each the registers it needs: 64, 80 or 128."""
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    many = size == 8 or held_bytes > _REGISTER_BYTES or (size == 2 and not 80 <= device.capability < 120)
    many = many or problem.mask is not None or problem.causal
    if many or (out_size > size and most_threads == _MOST_IN_REGISTERS):
        return 512 // most_threads
    return 3 if size == 2 and most_threads == _MOST_IN_REGISTERS else 1024 // most_threads
