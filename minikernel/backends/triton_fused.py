"""Softmax in Triton: one read and one write of every row that fits in a program's registers.

Triton compiles and the driver launches: Triton's own launcher costs twice the time, wants PyTorch and a
C compiler, and compiles anew when an argument happens to be 1 or a multiple of 16. Here the plan alone
says what is compiled in. With ``TRITON_INTERPRET=1`` the same kernels run on the CPU, in Triton's
interpreter, for tests and for those who'd like to step through them.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver, images
from ..images import Image
from ..integers import ceil_div, power_of_two
from ..problem import ALL_OPS, DTYPES, FEATURES, ITEMSIZE, TOPK, Kernel, Mask, Problem
from ..registry import Backend, BackendUnavailable, Requirement

#: Read once: Triton, too, decides when its kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")

TYPE_NAMES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
MAX_GRID = 2**31 - 1
_MIN_CAPABILITY = 80
_MIN_TRITON = (3, 5)  # the first whose grid dependency control compiles here
# The longest row that lanes of one warp share, in vectors; of two arrays for a gradient.
_SHORT_PACKS, _SHORT_BACKWARD_PACKS = 160, 128
# Bytes of a row that a program may hold alone, or as one of a cluster; and the fewest that are worth a program.
_ALONE_BYTES, _PART_BYTES, _FEWEST_BYTES = 64 << 10, 32 << 10, 3800
# Inputs up to a 16th of the L2 cache are the first to leave it, which gains up to 8%. Were larger ones, what others
# have left in the cache would stay there: a loss of 4%.
_L2_PER_SMALL_INPUT = 16
# Elements of a tile of y, and of dy, in a program that takes the gradient.
_BACKWARD_TILE = 8192
_CPU = driver.Device(capability=0, sm_count=1, shared_per_block=0, shared_per_sm=0, l2_bytes=0)


@dataclass(frozen=True)
class TritonPlan:
    """How a problem is laid out over programs; see ``triton_kernels`` for what the words mean.

    Attributes:
        rows, cols: A tile; powers of two.
        tiles: Tiles that a program holds in registers, side by side.
        packed: Whether elements of a half type stay packed in registers, and are unpacked for each step.
        pieces: Pieces of a row in a program, one a warp; then ``cols`` is the width of a piece's tile.
        warps: Warps a program.
        blocks: How many blocks of ``rows`` rows there are.
        within: Whether a block's rows are neighbors along ``inner``.
        vector: Neighbors that may be read and written with one access, as far as the arguments tell.
        peel: Whether rows are peeled to a 16-byte boundary.
        long: Whether a row is read twice.
        parts: Programs a row, as a cluster; two launches if ``long``.
        overlap: Whether a launch may start before its predecessor in the stream has ended.
        evicted: Whether the input is the first to leave the L2 cache, of a softmax that reads it once.
    """

    rows: int
    cols: int
    warps: int
    blocks: int
    within: bool
    vector: int
    peel: bool
    tiles: int = 1
    pieces: int = 1
    packed: bool = False
    long: bool = False
    parts: int = 1
    overlap: bool = False
    evicted: bool = False

    @property
    def grid(self) -> int:
        return self.blocks * self.parts

    @property
    def cluster(self) -> int:
        return 1 if self.long else self.parts


def kernel_arguments(problem: Problem) -> dict[str, int]:
    """The kernels' integer arguments; the stride of an axis of extent 1 is free, and made 1 or 0."""
    x_outer, x_col, x_inner = problem.strides
    return {
        "outer": problem.outer,
        "cols": problem.cols,
        "inner": problem.inner,
        "x_outer": x_outer if problem.outer > 1 else 0,
        "x_col": x_col if problem.cols > 1 else 1,
        "x_inner": x_inner if problem.inner > 1 else 1,
    }


def _mask_arguments(mask: Mask | None) -> tuple[dict[str, int], dict[str, int | None]]:
    """The kernels' integers for a mask's layout, see ``find_mask_rows``: those passed, and those compiled in."""
    unused: dict[str, int | None] = {"m_col": 0, "m_inner": None}
    unused |= dict.fromkeys(("m_0", "m_1", "m_2", "m_3"), 0) | dict.fromkeys(("n_1", "n_2", "n_3"), 1)
    used = {}
    if mask:
        axes = [*mask.rows]
        used["m_col"] = mask.col
        if len(mask.inner) == 1:
            used["m_inner"] = axes.pop()[1]
        used |= {f"m_{i}": stride for i, (_, stride) in enumerate(axes)}
        used |= {f"n_{i}": extent for i, (extent, _) in enumerate(axes) if i}
    compiled_in = {name: value for name, value in unused.items() if name not in used}
    compiled_in |= {name: 1 for name in ("m_col", "m_inner") if used.get(name) == 1}
    return {name: used[name] for name in unused if name not in compiled_in}, compiled_in


def _mask_vector(mask: Mask, vector: int) -> int:
    """What all strides of a mask that are passed, and its address, are multiples of: at most ``vector``."""
    given, _ = _mask_arguments(mask)
    return gcd(vector, mask.offset, *(value for name, value in given.items() if name.startswith("m_")))


def _integers(problem: Problem) -> dict[str, int]:
    """All integers that a kernel may be given, in the order of its parameters."""
    return kernel_arguments(problem) | _mask_arguments(problem.mask)[0]


def alignment_facts(problem: Problem) -> dict[str, int]:
    """The integers that the vector width must divide, for lanes along whichever axis is contiguous."""
    arguments = kernel_arguments(problem)
    facts = {name: value for name, value in arguments.items() if name.startswith("x_") and value != 1}
    if problem.inner > 1:
        facts["inner"] = problem.inner
    if problem.inner == 1 or arguments["x_col"] == 1:
        facts["cols"] = problem.cols
    if arguments["x_outer"] == 1:
        facts["outer"] = problem.outer
    return facts


def _widest(problem: Problem) -> int:
    """Elements of the widest access: 16 bytes of the wider dtype."""
    return 16 // max(ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype])


def vector_width(problem: Problem) -> int:
    width = _widest(problem)
    offsets = (problem.x_offset // ITEMSIZE[problem.dtype], problem.out_offset // ITEMSIZE[problem.out_dtype])
    while width > 1 and any(value % width for value in (*offsets, *alignment_facts(problem).values())):
        width //= 2
    return width


def _peels(problem: Problem) -> bool:
    """Whether each row lies equally far from a 16-byte boundary in x and in out."""
    widest = _widest(problem)
    x_outer = problem.strides[0] if problem.outer > 1 else problem.cols
    return (
        problem.inner == 1
        and problem.strides[1] == 1
        and problem.cols >= 8 * widest
        and problem.dtype == problem.out_dtype
        and problem.x_offset == problem.out_offset
        and (x_outer - problem.cols) % widest == 0
    )


def plan(problem: Problem, device: driver.Device) -> TritonPlan:
    """Choose the launch for a problem; a pure function."""
    chosen = _plan(problem, device)
    mask = problem.mask
    if mask and chosen.cluster > 1:
        in_step = mask.col == 1 and not chosen.peel and _mask_vector(mask, chosen.vector) == chosen.vector
        if not in_step:
            # Threads that read it would hold other elements than merge_over_cluster counts on.
            return _plan(problem, replace(device, max_cluster=1))
    return chosen


def _plan(problem: Problem, device: driver.Device) -> TritonPlan:
    if problem.is_backward:
        return _plan_backward(problem, device)
    contiguous = problem.inner == 1 and (problem.strides[1] == 1 or problem.cols == 1)
    chosen = (_plan_rows(problem, device) if contiguous else None) or _plan_any(problem, device)
    small = problem.rows * problem.cols * ITEMSIZE[problem.dtype] <= device.l2_bytes // _L2_PER_SMALL_INPUT
    return replace(chosen, evicted=small and not chosen.long)


def _plan_rows(problem: Problem, device: driver.Device) -> TritonPlan | None:
    """The launch for rows whose elements are neighbors, if the registers of a cluster can hold one."""
    widest, vector = _widest(problem), vector_width(problem)
    peel = not problem.is_backward and vector < widest and _peels(problem)
    if peel:
        vector = widest
    held = 2 if problem.is_backward else 1  # values an element
    packs = ceil_div(problem.cols + (vector - 1 if peel else 0), vector)
    narrow = min(4, widest // vector)  # so many accesses take the place of a wide one
    parts = _parts(problem, device, ceil_div(packs, narrow) * 16 * held)
    share = packs if parts == 1 else ceil_div(packs, 8 * parts) * 8
    if share <= (_SHORT_BACKWARD_PACKS if problem.is_backward else _SHORT_PACKS):
        lanes, tiles, warps = _share_warps(problem, device, share, vector, peel)
        rows, pieces = min(32 * warps // lanes, power_of_two(problem.rows)), 1
    elif layout := _share_row(problem, device, held * ceil_div(share, narrow), parts):
        lanes, rows, pieces = 32, 1, layout[0]
        warps, tiles = layout[0], ceil_div(layout[1], held) * narrow
    else:
        return None
    return TritonPlan(
        rows=rows,
        cols=lanes * vector,
        warps=warps,
        blocks=ceil_div(problem.rows, rows),
        within=False,
        vector=vector,
        peel=peel,
        tiles=tiles,
        pieces=pieces,
        packed=_is_packed(problem, device, pieces, held * tiles * vector),
        parts=parts,
        overlap=device.capability >= 90,
    )


def _is_packed(problem: Problem, device: driver.Device, pieces: int, elements: int) -> bool:
    """Whether a thread with so many elements keeps them packed: where registers limit how many programs run."""
    # Of gradients so many run, up to eight warps a program, that unpacking twice is a loss.
    enough = pieces > (8 if problem.is_backward else 1) and elements > 32
    return enough and device.capability > 0 and ITEMSIZE[problem.dtype] == 2


def _parts(problem: Problem, device: driver.Device, size: int) -> int:
    """Programs a row: as few as can hold it; more if all of them can run at once."""
    largest = device.max_cluster if device.capability >= 90 else 1
    parts = 1
    if size > _ALONE_BYTES:
        while 2 * parts <= largest and size > _PART_BYTES * parts:
            parts *= 2
    at_once = 4 * device.sm_count // problem.rows
    while 2 * parts <= min(largest, at_once) and size >= _FEWEST_BYTES * 2 * parts:
        parts *= 2
    return parts


def _share_warps(
    problem: Problem, device: driver.Device, packs: int, vector: int, peel: bool
) -> tuple[int, int, int]:
    """Lanes and tiles of a row that a warp can hold, and warps a program."""
    # Eight elements a lane; one access each where all rows run at once. Peeled rows have their edges besides, an
    # access for each row: many rows a warp, few lanes each.
    many = problem.rows * packs > 512 * device.sm_count
    each = (5 if peel else max(1, 8 // vector)) if many else 1
    lanes = min(32, power_of_two(ceil_div(packs, each)))
    tiles = next(tiles for tiles in (1, 2, 3, 4, 5, 8) if packs <= lanes * tiles)
    fitting = 5120 // (32 * tiles * vector * ITEMSIZE[problem.dtype])
    warps = max(1, min(8, power_of_two(fitting + 1) // 2))
    if ITEMSIZE[problem.dtype] == 2 and not problem.is_backward:
        # Fewer programs, where still many follow one another.
        while warps < 4 and problem.rows * lanes >= 32 * 2 * warps * 8 * device.sm_count:
            warps *= 2
    while warps > 1 and problem.rows * lanes < 32 * warps * 2 * device.sm_count:
        warps //= 2
    return lanes, tiles, warps


def _share_row(problem: Problem, device: driver.Device, packs: int, parts: int) -> tuple[int, int] | None:
    """Warps of a program that share a row, and tiles; None if it's too long for that."""
    spread = device.capability < 90 and 4 * problem.rows <= device.sm_count
    if spread and problem.cols >= 32768:
        return None
    # With few programs what counts is how long one takes; else few warps a row, and few kernels.
    few = problem.rows * parts <= 4 * device.sm_count
    for warps, fewest in ((4, (1, 2, 4)), (8, (4, 8))) if few else ():
        for tiles in fewest:
            if packs <= 32 * warps * tiles:
                return warps, tiles
    for warps in (2, 4, 8, 16, 32) if parts == 1 else (2, 4, 8, 16):
        counts: tuple[int, ...] = (4, 5, 6, 8)
        if warps == 32 and (problem.dtype != "float32" or problem.features):
            counts = (4,)  # they have 64 registers a thread: fewer for data where the arithmetic takes more
        elif (problem.is_backward and warps == 4) or (problem.mask and warps < 16):
            counts = (4, 5, 6)  # then there are as many warps more; a mask takes registers of its own
        for tiles in counts:
            if packs <= 32 * warps * tiles:
                return warps, tiles
    return None


def _plan_any(problem: Problem, device: driver.Device) -> TritonPlan:
    """The launch for any other layout, and for the longest rows."""
    itemsize = ITEMSIZE[problem.dtype]
    widest = _widest(problem)
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    arguments = kernel_arguments(problem)

    within = inner > 8  # below, blocks that stop at the end of inner would be mostly empty
    vector = vector_width(problem) if within or inner == 1 else 1
    peel = vector < widest and _peels(problem)
    extent = inner if within else outer * inner
    lanes_along_rows = within or (inner == 1 and arguments["x_outer"] == 1 and cols > 1)

    # What the registers of one program hold without spilling.
    limit = 8192 if problem.dtype == "float64" else 16384 if problem.features else 32768
    per_warp = 256 if problem.dtype == "float64" else 512
    tile_cols = power_of_two(cols // widest * widest if peel else cols)

    if lanes_along_rows:
        rows = min(power_of_two(extent), max(128 // itemsize, 2048 // tile_cols))
        while rows * tile_cols > limit // 2 and rows * itemsize > 32:
            rows //= 2
    elif tile_cols <= 32 * widest:  # a warp holds whole rows and needs no barrier
        rows = min(power_of_two(extent), 2048 // tile_cols)
    else:
        rows = power_of_two(inner) if inner <= 8 else 1  # those lie in the same cache lines
        if rows * tile_cols > limit:
            rows = 1

    def blocks_of(rows: int) -> int:
        return outer * -(-inner // rows) if within else -(-outer * inner // rows)

    wanted = 2 * device.sm_count  # programs that keep the GPU busy
    while rows > 1 and not lanes_along_rows and blocks_of(rows) < wanted:
        rows //= 2

    long = rows * tile_cols > limit
    pieces = 1
    if long and lanes_along_rows:
        rows = min(power_of_two(extent), 64 // itemsize)
    if long or (cols >= 32768 and 8 * blocks_of(rows) <= wanted):
        long = True
        share = -(-wanted // blocks_of(rows))
        tile_cols = max(1024, min(limit // 8, power_of_two(-(-cols // share)))) // rows
        if share > 2:
            pieces = min(power_of_two(share), power_of_two(-(-cols // tile_cols)), 1024)

    warps = rows * tile_cols // per_warp
    if blocks_of(rows) * pieces < 2 * wanted:  # few programs: the fewest accesses a thread
        warps = max(warps, rows * tile_cols // (32 * widest))
    warps = max(1, min(32 if rows * tile_cols >= limit else 16, warps))
    grid = blocks_of(rows) * pieces
    return TritonPlan(
        rows=rows,
        cols=tile_cols,
        warps=warps,
        blocks=blocks_of(rows),
        within=within,
        vector=widest if peel else vector,
        peel=peel,
        long=long,
        parts=pieces,
        # It gains where one wave of programs covers the grid, and costs where there are several.
        overlap=device.capability >= 90 and grid * warps <= 32 * device.sm_count,
    )


def _plan_backward(problem: Problem, device: driver.Device) -> TritonPlan:
    """The launch for a gradient, whose arrays all lie like the output."""
    overlap = device.capability >= 90
    vector = vector_width(problem)
    if problem.inner == 1:
        return _plan_rows(problem, device) or TritonPlan(
            1, _BACKWARD_TILE // 2, 16, problem.rows, False, vector, peel=False, long=True, overlap=overlap
        )
    rows = min(power_of_two(problem.inner), 128 // ITEMSIZE[problem.dtype])
    cols = power_of_two(problem.cols)
    long = rows * cols > _BACKWARD_TILE
    cols = min(cols, _BACKWARD_TILE // (2 * rows)) if long else cols
    within = problem.inner > 8
    if long and not within:
        vector = 1  # of columns, which that kernel counts in vectors
    blocks = problem.outer * ceil_div(problem.inner, rows) if within else ceil_div(problem.rows, rows)
    warps = max(1, min(16, rows * cols // 256))
    return TritonPlan(rows, cols, warps, blocks, within, vector, peel=False, long=long, overlap=overlap)


@dataclass(frozen=True)
class KernelSource:
    """A kernel with everything that is compiled into it: what tells one binary from another."""

    name: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisibility: tuple[tuple[str, int], ...]
    warps: int
    module: str = "triton_kernels"

    def function(self) -> Any:
        """What Triton made of it in its module, which imports Triton."""
        return getattr(import_module(f".{self.module}", __package__), self.name)

    def compile(self, capability: int) -> Any:
        """Triton's ``CompiledKernel`` for a compute capability. Needs no GPU."""
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        fn = self.function()
        source = ASTSource(
            fn,
            dict(self.types) | {name: "constexpr" for name, _ in self.constants},
            dict(self.constants),
            {(fn.arg_names.index(name),): [["tt.divisibility", by]] for name, by in self.divisibility},
        )
        options = {"num_warps": self.warps, "enable_fp_fusion": True}
        return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def sources(problem: Problem, plan: TritonPlan) -> list[KernelSource]:
    """The one or two kernels that a plan launches, in their order."""
    given, compiled_in = _mask_arguments(problem.mask)
    arguments = kernel_arguments(problem)
    element, result = ("*" + TYPE_NAMES[dtype] for dtype in (problem.dtype, problem.out_dtype))
    number = "fp64" if problem.dtype == "float64" else "fp32"
    if problem.is_backward:
        types = {"y": element, "out": result, "dy": element}
        arguments = {name: value for name, value in arguments.items() if not name.startswith("x_")}
    else:
        types = {"x": element, "out": result}
    arrays = [*types]
    strides = ("inner", "x_outer", "x_col", "x_inner")  # of out and x
    constants: dict[str, Any] = compiled_in | {name: 1 for name in strides if arguments.get(name) == 1}
    if _scratch(problem, plan):
        types["partials"] = "*" + number
    if problem.features:
        types |= {"mask": "*u8", "scale": number}
    else:
        constants |= {"mask": None, "scale": None}
    types |= {name: "i64" for name in (*arguments, *given) if name not in constants}

    divisibility: dict[str, int] = {}
    if plan.vector > 1 and not plan.peel:
        sizes = [(name, problem.out_dtype if name == "out" else problem.dtype) for name in arrays]
        divisibility = {name: min(16, plan.vector * ITEMSIZE[dtype]) for name, dtype in sizes}
        divisibility |= {name: plan.vector for name in alignment_facts(problem) if name in types}
        if problem.mask:
            layout = [name for name in given if name.startswith("m_")]
            by = _mask_vector(problem.mask, plan.vector)
            divisibility |= dict.fromkeys(("mask", *layout), by) if by > 1 else {}

    constants |= {
        "LOG": problem.is_log,
        "WITHIN": plan.within,
        "ROWS": plan.rows,
        "COLS": plan.cols,
        "VECTOR": plan.vector,
        "OVERLAP": plan.overlap,
        "MASKED": problem.mask is not None,
        "CAUSAL": problem.causal,
        "SCALED": problem.scaled,
    }
    if not problem.is_backward:
        constants["PEEL"] = plan.peel
    name = "softmax_backward" if problem.is_backward else "softmax"
    launches: list[dict[str, Any]] = [{}]
    if not plan.long:
        name += "_tile"
        extent = problem.inner if plan.within else problem.rows
        held = plan.parts * plan.tiles * plan.cols
        # Masks cost little in long rows, and a kernel without them would be one more.
        even = not (plan.peel or problem.causal) and plan.pieces == 1
        even = even and problem.cols == held and extent % plan.rows == 0
        constants |= {"TILES": plan.tiles, "PIECES": plan.pieces, "PARTS": plan.parts, "EVEN": even}
        constants["PACKED"] = plan.packed
        if not problem.is_backward:
            constants["POLICY"] = "evict_first" if plan.evicted else ""
    else:
        name += "_long"
        if not problem.is_backward:
            constants["PARTS"] = plan.parts
            if plan.parts == 1:
                launches = [{"partials": None, "SCAN": True, "WRITE": True}]
            else:
                launches = [{"SCAN": scan, "WRITE": not scan} for scan in (True, False)]
    return [
        KernelSource(
            name, tuple(types.items()), tuple((constants | more).items()), tuple(divisibility.items()), plan.warps
        )
        for more in launches
    ]


_functions: dict[tuple[KernelSource, int], tuple[int, int]] = {}
interpreter_lock = threading.Lock()


@cache
def _text(file: str) -> str:
    return Path(__file__).with_name(file).read_text(encoding="utf-8")


@cache
def _triton_version() -> str:
    """The version of what is installed; "" for a build under another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _image(source: KernelSource, capability: int) -> Image:
    compiled = source.compile(capability)
    return Image(compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared)


def _load(source: KernelSource, index: int) -> tuple[int, int]:
    capability = driver.device(index).capability

    def compile() -> Image:
        return _image(source, capability)

    def load(image: Image) -> tuple[int, int]:
        return driver.load(image.code, image.name, index), image.shared

    if not _triton_version():  # then nothing tells one compiler from another
        return load(compile())
    texts = [_text(f"{name}.py") for name in ("triton_kernels", "triton_fused", source.module)]
    depends_on = ("triton", _triton_version(), *texts, repr(source))
    return images.loaded((*depends_on, str(capability)), compile, load)


def _function(source: KernelSource, index: int) -> tuple[int, int]:
    """``CUfunction`` and bytes of shared memory of a kernel on a device; compiled and loaded once."""
    with interpreter_lock:  # held while compiling, so that threads that want the same kernel compile it once
        if (source, index) not in _functions:
            try:
                _functions[source, index] = _load(source, index)
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
                raise BackendUnavailable(f"{source.name} failed to compile: {reason}") from error
        return _functions[source, index]


def _scratch(problem: Problem, plan: TritonPlan) -> int:
    """Bytes for each part's maximum and sum, from one launch to the next."""
    size = 8 if problem.dtype == "float64" else 4
    return plan.grid * plan.rows * 2 * size if plan.long and plan.parts > 1 else 0


def bind_kernel(source: KernelSource, index: int, launch: driver.Launch, arguments: dict[str, int]) -> Kernel:
    """A kernel with its launch and those of the integer arguments that aren't compiled in."""
    function, shared = _function(source, index)
    given = dict(source.types)
    constants = [ctypes.c_int64(value) for name, value in arguments.items() if name in given]
    return driver.kernel(function, index, replace(launch, shared=shared), constants)


def build(problem: Problem, plan: TritonPlan) -> Kernel:
    """Make a plan callable on the problem's device."""
    if INTERPRETED:
        return Kernel(partial(_interpret, problem, plan))
    launch = driver.Launch(
        plan.grid,
        32 * plan.warps,
        cluster=plan.cluster,
        overlap=plan.overlap,
        scratch=_scratch(problem, plan),
        inputs=2 if problem.is_backward else 1,
        per_call=("Pd" if problem.dtype == "float64" else "Pf") if problem.features else "",
    )
    kernels = [bind_kernel(source, problem.index, launch, _integers(problem)) for source in sources(problem, plan)]
    if len(kernels) == 1:
        return kernels[0]
    scan, write = (kernel.run for kernel in kernels)

    def run(x: int, out: int, stream: int, scratch: int, *more: float) -> None:
        scan(x, out, stream, scratch, *more)
        write(x, out, stream, scratch, *more)

    return Kernel(run, _scratch(problem, plan))


def pointer_to(array: Any, dtype: str) -> Any:
    """An array as the interpreter takes it. Only its address and dtype count, so any strides will do."""
    import torch

    memory = (ctypes.c_byte * array.itemsize).from_address(array.ctypes.data)
    return torch.frombuffer(memory, dtype=getattr(torch, dtype))


def _interpret(
    problem: Problem,
    plan: TritonPlan,
    x: Any,
    out: Any,
    stream: int,
    scratch: Any,
    mask: Any = None,
    scale: float = 1.0,
) -> None:
    """Run a plan on NumPy arrays in Triton's interpreter."""
    import torch
    from triton import language
    from triton.runtime.interpreter import TensorHandle

    number = "float64" if problem.dtype == "float64" else "float32"
    arguments: dict[str, Any] = dict(_integers(problem))
    if problem.is_backward:
        arguments |= {"y": pointer_to(x, problem.dtype), "dy": pointer_to(scratch, problem.dtype)}
    else:
        arguments["x"] = pointer_to(x, problem.dtype)
    arguments["out"] = pointer_to(out, problem.out_dtype)
    if problem.features:
        arguments["mask"] = None if mask is None else pointer_to(mask, "uint8")
        dtype = getattr(language, number)  # a Python float would be a float32
        arguments["scale"] = language.tensor(TensorHandle(np.array([scale], number), dtype), dtype)
    if scratch_size := _scratch(problem, plan):
        arguments["partials"] = torch.empty(scratch_size, dtype=torch.uint8).view(getattr(torch, number))
    # The interpreter keeps its grid in a global, and rows that don't exist make NaN of nothing but -inf.
    with interpreter_lock, np.errstate(all="ignore"):
        for source in sources(problem, plan):
            function, given = source.function(), arguments | dict(source.constants)
            function[(plan.grid,)](**{name: given[name] for name in function.arg_names if name in given})


def _device(problem: Problem) -> driver.Device:
    return _CPU if INTERPRETED else driver.device(problem.index)


@cache
def _obstacles() -> list[str]:
    installed = _triton_version()
    if installed and tuple(map(int, installed.split(".")[:2])) < _MIN_TRITON:
        return [f"Triton {installed} is too old: it takes 3.5 or newer ({_TRITON.cure})"]
    return [] if INTERPRETED else driver.obstacles()


def _reasons(problem: Problem) -> list[str]:
    device = _device(problem)
    if not INTERPRETED and device.capability < _MIN_CAPABILITY:
        return [f"Triton needs compute capability 8.0; device {problem.index} has {device.capability / 10}"]
    if problem.op == TOPK:
        from . import triton_topk

        return triton_topk.reasons(problem, device)
    if plan(problem, device).grid > MAX_GRID:
        return [f"{problem.rows} rows of {problem.cols} need more than {MAX_GRID} programs"]
    return []


def _prepare(problem: Problem) -> Kernel:
    device = _device(problem)
    if problem.op == TOPK:
        from . import triton_topk

        return triton_topk.build(problem, triton_topk.plan(problem, device))
    return driver.prepare_fitting(device, partial(plan, problem), partial(build, problem))


_TORCH = Requirement("torch", "pip install 'minikernel[torch]'")
_TRITON = Requirement("triton", "pip install 'minikernel[triton]'")

BACKEND = Backend(
    name="triton-fused",
    rank=20,
    devices=("cpu",) if INTERPRETED else ("cuda",),
    dtypes=DTYPES,
    ops=ALL_OPS,
    features=FEATURES,
    prepare=_prepare,
    requires=(_TORCH, _TRITON) if INTERPRETED else (_TRITON,),
    limits={"compute capability": "8.0 or newer"},
    obstacles=_obstacles,
    reasons=_reasons,
)
