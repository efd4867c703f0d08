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
from importlib.metadata import PackageNotFoundError, version
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np

from .. import driver, images
from ..images import Image
from ..integers import ceil_div, power_of_two
from ..problem import ALL_OPS, BACKWARD, DTYPES, ITEMSIZE, Kernel, Problem
from ..registry import Backend, BackendUnavailable, Requirement

#: Read once: Triton, too, decides when its kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")

_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_MAX_GRID = 2**31 - 1
_MIN_CAPABILITY = 80
_MIN_TRITON = (3, 5)  # the first whose grid dependency control compiles here
# The longest row that lanes of one warp share, in vectors.
_SHORT_PACKS = 160
# Bytes of a row that a program may hold alone, or as one of a cluster; and the fewest that are worth a program.
_ALONE_BYTES, _PART_BYTES, _FEWEST_BYTES = 64 << 10, 32 << 10, 3800
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

    @property
    def grid(self) -> int:
        return self.blocks * self.parts

    @property
    def cluster(self) -> int:
        return 1 if self.long else self.parts


def _arguments(problem: Problem) -> dict[str, int]:
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


def _facts(problem: Problem) -> dict[str, int]:
    """The integers that the vector width must divide, for lanes along whichever axis is contiguous."""
    arguments = _arguments(problem)
    facts = {name: value for name, value in arguments.items() if name.startswith("x_") and value != 1}
    if problem.inner > 1:
        facts["inner"] = problem.inner
    if problem.inner == 1 or arguments["x_col"] == 1:
        facts["cols"] = problem.cols
    if arguments["x_outer"] == 1:
        facts["outer"] = problem.outer
    return facts


def _widest(problem: Problem) -> int:
    """Elements of the widest access: 16 bytes of x, or of out where that is the wider dtype."""
    return 16 // ITEMSIZE[problem.out_dtype]


def _vector(problem: Problem) -> int:
    width = _widest(problem)
    offsets = (problem.x_offset // ITEMSIZE[problem.dtype], problem.out_offset // ITEMSIZE[problem.out_dtype])
    while width > 1 and any(value % width for value in (*offsets, *_facts(problem).values())):
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
    if problem.op in BACKWARD.values():
        return _plan_backward(problem, device)
    contiguous = problem.inner == 1 and (problem.strides[1] == 1 or problem.cols == 1)
    if contiguous and (chosen := _plan_rows(problem, device)):
        return chosen
    return _plan_any(problem, device)


def _plan_rows(problem: Problem, device: driver.Device) -> TritonPlan | None:
    """The launch for rows whose elements are neighbors, if the registers of a cluster can hold one."""
    widest, vector = _widest(problem), _vector(problem)
    peel = vector < widest and _peels(problem)
    if peel:
        vector = widest
    packs = ceil_div(problem.cols + (vector - 1 if peel else 0), vector)
    narrow = min(4, widest // vector)  # so many accesses take the place of a wide one
    parts = _parts(problem, device, ceil_div(packs, narrow) * 16)
    share = packs if parts == 1 else ceil_div(packs, 8 * parts) * 8
    if share <= _SHORT_PACKS:
        lanes, tiles, warps = _share_warps(problem, device, share, vector, peel)
        rows, pieces = min(32 * warps // lanes, power_of_two(problem.rows)), 1
    elif layout := _share_row(problem, device, ceil_div(share, narrow), parts):
        lanes, rows, pieces = 32, 1, layout[0]
        warps, tiles = layout[0], layout[1] * narrow
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
        packed=device.capability > 0 and pieces > 1 and ITEMSIZE[problem.dtype] == 2 and tiles * vector > 32,
        parts=parts,
        overlap=device.capability >= 90,
    )


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
    problem: Problem, device: driver.Device, packs: int, vector: int, peel: bool = False
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
    for warps, counts in ((4, (1, 2, 4)), (8, (4, 8))) if few else ():
        for tiles in counts:
            if packs <= 32 * warps * tiles:
                return warps, tiles
    for warps in (2, 4, 8, 16, 32) if parts == 1 else (2, 4, 8, 16):
        # 32 warps have 64 registers a thread: fewer for data where the arithmetic takes more.
        for tiles in (4,) if warps == 32 and problem.dtype != "float32" else (4, 5, 6, 8):
            if packs <= 32 * warps * tiles:
                return warps, tiles
    return None


def _plan_any(problem: Problem, device: driver.Device) -> TritonPlan:
    """The launch for any other layout, and for the longest rows."""
    itemsize = ITEMSIZE[problem.dtype]
    widest = _widest(problem)
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    arguments = _arguments(problem)

    within = inner > 8  # below, blocks that stop at the end of inner would be mostly empty
    vector = _vector(problem) if within or inner == 1 else 1
    peel = vector < widest and _peels(problem)
    extent = inner if within else outer * inner
    lanes_along_rows = within or (inner == 1 and arguments["x_outer"] == 1 and cols > 1)

    # What the registers of one program hold without spilling.
    limit = 8192 if problem.dtype == "float64" else 32768
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
    itemsize = ITEMSIZE[problem.dtype]
    widest = 16 // itemsize
    vector = gcd(widest, problem.cols if problem.inner == 1 else problem.inner)
    overlap = device.capability >= 90
    if problem.inner > 1:
        rows = min(power_of_two(problem.inner), 128 // itemsize)
        cols = power_of_two(problem.cols)
        long = rows * cols > _BACKWARD_TILE
        cols = min(cols, _BACKWARD_TILE // (2 * rows)) if long else cols
        within = problem.inner > 8
        blocks = problem.outer * ceil_div(problem.inner, rows) if within else ceil_div(problem.rows, rows)
        warps = max(1, min(16, rows * cols // 256))
        return TritonPlan(rows, cols, warps, blocks, within, vector, peel=False, long=long, overlap=overlap)

    packs = ceil_div(problem.cols, vector)
    narrow = min(4, widest // vector)
    # Two values are held where the forward pass holds one.
    parts = _parts(problem, device, ceil_div(packs, narrow) * 32)
    share = packs if parts == 1 else ceil_div(packs, 8 * parts) * 8
    if share <= _SHORT_PACKS // 2:
        lanes, tiles, warps = _share_warps(problem, device, share, vector)
        rows, pieces = min(32 * warps // lanes, power_of_two(problem.rows)), 1
    elif layout := _share_row(problem, device, 2 * ceil_div(share, narrow), parts):
        lanes, rows, pieces = 32, 1, layout[0]
        warps, tiles = layout[0], ceil_div(share, 32 * layout[0])
    else:
        return TritonPlan(
            1, _BACKWARD_TILE // 2, 16, problem.rows, False, vector, peel=False, long=True, overlap=overlap
        )
    return TritonPlan(
        rows=rows,
        cols=lanes * vector,
        warps=warps,
        blocks=ceil_div(problem.rows, rows),
        within=False,
        vector=vector,
        peel=False,
        tiles=tiles,
        pieces=pieces,
        parts=parts,
        overlap=overlap,
    )


@dataclass(frozen=True)
class _Source:
    """A kernel with everything that is compiled into it: what tells one binary from another."""

    name: str
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    divisibility: tuple[tuple[str, int], ...]
    warps: int

    def compile(self, capability: int) -> Any:
        """Triton's ``CompiledKernel`` for a compute capability. Needs no GPU."""
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from . import triton_kernels

        fn = getattr(triton_kernels, self.name)
        source = ASTSource(
            fn,
            dict(self.types) | {name: "constexpr" for name, _ in self.constants},
            dict(self.constants),
            {(fn.arg_names.index(name),): [["tt.divisibility", by]] for name, by in self.divisibility},
        )
        options = {"num_warps": self.warps, "enable_fp_fusion": True}
        return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def sources(problem: Problem, plan: TritonPlan) -> list[_Source]:
    """The one or two kernels that a plan launches, in their order."""
    if problem.op in BACKWARD.values():
        return [_backward_source(problem, plan)]
    arguments = _arguments(problem)
    strides = ("inner", "x_outer", "x_col", "x_inner")  # of out and x
    constants: dict[str, Any] = {name: 1 for name in strides if arguments[name] == 1}
    types = {"x": "*" + _TYPES[problem.dtype], "out": "*" + _TYPES[problem.out_dtype]}
    if _scratch(problem, plan):
        types["partials"] = "*fp64" if problem.dtype == "float64" else "*fp32"
    types |= {name: "i64" for name in arguments if name not in constants}

    divisibility: dict[str, int] = {}
    if plan.vector > 1 and not plan.peel:
        divisibility = {
            "x": min(16, plan.vector * ITEMSIZE[problem.dtype]),
            "out": min(16, plan.vector * ITEMSIZE[problem.out_dtype]),
        } | dict.fromkeys(_facts(problem), plan.vector)

    constants |= {
        "LOG": problem.op == "log_softmax",
        "WITHIN": plan.within,
        "ROWS": plan.rows,
        "COLS": plan.cols,
        "TILES": plan.tiles,
        "VECTOR": plan.vector,
        "PEEL": plan.peel,
        "OVERLAP": plan.overlap,
        "PARTS": plan.parts,
    }
    launches: list[tuple[str, dict[str, Any]]]
    if not plan.long:
        extent = problem.inner if plan.within else problem.rows
        held = plan.parts * plan.tiles * plan.cols
        # Masks cost little in long rows, and a kernel without them would be one more.
        even = not plan.peel and plan.pieces == 1 and problem.cols == held and extent % plan.rows == 0
        launches = [("softmax_tile", {"PIECES": plan.pieces, "PACKED": plan.packed, "EVEN": even})]
    elif plan.parts == 1:
        launches = [("softmax_long", {"partials": None, "SCAN": True, "WRITE": True})]
    else:
        launches = [("softmax_long", {"SCAN": scan, "WRITE": not scan}) for scan in (True, False)]
    found = []
    for name, more in launches:
        compiled_in = tuple((constants | more).items())
        found.append(_Source(name, tuple(types.items()), compiled_in, tuple(divisibility.items()), plan.warps))
    return found


def _backward_source(problem: Problem, plan: TritonPlan) -> _Source:
    element = "*" + _TYPES[problem.dtype]
    types = {"y": element, "out": "*" + _TYPES[problem.out_dtype], "dy": element, "outer": "i64", "cols": "i64"}
    constants: dict[str, Any] = {
        "LOG": problem.op.startswith("log_"),
        "WITHIN": plan.within,
        "ROWS": plan.rows,
        "COLS": plan.cols,
        "VECTOR": plan.vector,
        "OVERLAP": plan.overlap,
    }
    divisibility: dict[str, int] = {}
    if plan.vector > 1:
        divisibility = dict.fromkeys(("y", "dy", "out"), 16)
        divisibility["cols" if problem.inner == 1 else "inner"] = plan.vector
    if problem.inner == 1:
        constants["inner"] = 1
    else:
        types["inner"] = "i64"
    name = "softmax_backward_long"
    if not plan.long:
        name = "softmax_backward_tile"
        extent = problem.inner if plan.within else problem.rows
        whole = problem.cols == plan.parts * plan.tiles * plan.cols and extent % plan.rows == 0
        constants |= {
            "TILES": plan.tiles,
            "PIECES": plan.pieces,
            "EVEN": plan.pieces == 1 and whole,
            "PARTS": plan.parts,
        }
    return _Source(name, tuple(types.items()), tuple(constants.items()), tuple(divisibility.items()), plan.warps)


_functions: dict[tuple[_Source, int], tuple[int, int]] = {}
_lock = threading.Lock()


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


def _image(source: _Source, capability: int) -> Image:
    compiled = source.compile(capability)
    return Image(compiled.asm["cubin"], compiled.metadata.name, compiled.metadata.shared)


def _load(source: _Source, index: int) -> tuple[int, int]:
    capability = driver.device(index).capability

    def compile() -> Image:
        return _image(source, capability)

    def load(image: Image) -> tuple[int, int]:
        return driver.load(image.code, image.name, index), image.shared

    if not _triton_version():  # then nothing tells one compiler from another
        return load(compile())
    depends_on = ("triton", _triton_version(), _text("triton_kernels.py"), _text("triton_fused.py"), repr(source))
    return images.loaded((*depends_on, str(capability)), compile, load)


def _function(source: _Source, index: int) -> tuple[int, int]:
    """``CUfunction`` and bytes of shared memory of a kernel on a device; compiled and loaded once."""
    with _lock:  # held while compiling, so that threads that want the same kernel compile it once
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


def build(problem: Problem, plan: TritonPlan) -> Kernel:
    """Make a plan callable on the problem's device."""
    if INTERPRETED:
        return Kernel(partial(_interpret, problem, plan))
    kernels = []
    for source in sources(problem, plan):
        function, shared = _function(source, problem.index)
        launch = driver.Launch(
            plan.grid,
            32 * plan.warps,
            shared,
            cluster=plan.cluster,
            overlap=plan.overlap,
            scratch=_scratch(problem, plan),
            inputs=2 if problem.op in BACKWARD.values() else 1,
        )
        given = dict(source.types)
        constants = [ctypes.c_int64(v) for name, v in _arguments(problem).items() if name in given]
        kernels.append(driver.kernel(function, problem.index, launch, constants))
    if len(kernels) == 1:
        return kernels[0]
    scan, write = (kernel.run for kernel in kernels)

    def run(x: int, out: int, stream: int, scratch: int) -> None:
        scan(x, out, stream, scratch)
        write(x, out, stream, scratch)

    return Kernel(run, _scratch(problem, plan))


def _interpret(problem: Problem, plan: TritonPlan, x: Any, out: Any, stream: int, scratch: Any) -> None:
    """Run a plan on NumPy arrays in Triton's interpreter."""
    import torch

    from . import triton_kernels

    # Only address and dtype count, so any strides will do.
    def pointer(array: Any, dtype: str) -> torch.Tensor:
        memory = (ctypes.c_byte * ITEMSIZE[dtype]).from_address(array.ctypes.data)
        return torch.frombuffer(memory, dtype=getattr(torch, dtype))

    arguments: dict[str, Any] = dict(_arguments(problem))
    if problem.op in BACKWARD.values():
        arguments = {name: value for name, value in arguments.items() if not name.startswith("x_")}
        arguments |= {"y": pointer(x, problem.dtype), "dy": pointer(scratch, problem.dtype)}
    else:
        arguments["x"] = pointer(x, problem.dtype)
    arguments["out"] = pointer(out, problem.out_dtype)
    if scratch_size := _scratch(problem, plan):
        acc = torch.float64 if problem.dtype == "float64" else torch.float32
        arguments["partials"] = torch.empty(scratch_size, dtype=torch.uint8).view(acc)
    # The interpreter keeps its grid in a global, and rows that don't exist make NaN of nothing but -inf.
    with _lock, np.errstate(all="ignore"):
        for source in sources(problem, plan):
            getattr(triton_kernels, source.name)[(plan.grid,)](**(arguments | dict(source.constants)))


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
    problems = [problem]
    if problem.recorded:
        contiguous = (problem.cols * problem.inner, problem.inner, 1)
        backward = replace(problem, op=BACKWARD[problem.op], strides=contiguous)
        problems.append(replace(backward, dtype=problem.out_dtype, out_dtype=problem.dtype))
    if any(plan(of, device).grid > _MAX_GRID for of in problems):
        return [f"{problem.rows} rows of {problem.cols} need more than {_MAX_GRID} programs"]
    return []


def _prepare(problem: Problem) -> Kernel:
    device = _device(problem)
    while True:
        chosen = plan(problem, device)
        try:
            return build(problem, chosen)
        except driver.DoesNotFit:  # a slice of a GPU, say: do with smaller clusters
            device = replace(device, max_cluster=chosen.cluster // 2)


_TORCH = Requirement("torch", "pip install 'minikernel[torch]'")
_TRITON = Requirement("triton", "pip install 'minikernel[triton]'")

BACKEND = Backend(
    name="triton-fused",
    rank=20,
    devices=("cpu",) if INTERPRETED else ("cuda",),
    dtypes=DTYPES,
    ops=ALL_OPS,
    prepare=_prepare,
    requires=(_TORCH, _TRITON) if INTERPRETED else (_TRITON,),
    limits={"compute capability": "8.0 or newer"},
    obstacles=_obstacles,
    reasons=_reasons,
)
