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
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from .. import driver
from ..problem import DTYPES, ITEMSIZE, Kernel, Problem
from ..registry import Backend, BackendUnavailable, Requirement

#: Read once: Triton, too, decides when its kernels are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on")

_TYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}
_MAX_GRID = 2**31 - 1
_MIN_CAPABILITY = 80
_MIN_TRITON = (3, 5)  # the first whose grid dependency control compiles here
_CPU = driver.Device(capability=0, sm_count=1, shared_per_block=0, shared_per_sm=0, l2_bytes=0)


@dataclass(frozen=True)
class TritonPlan:
    """How a problem is laid out over programs; see ``triton_kernels`` for what the words mean.

    Attributes:
        rows, cols: The tile that a program holds in registers; powers of two.
        warps: Warps a program.
        blocks: How many blocks of ``rows`` rows there are.
        within: Whether a block's rows are neighbors along ``inner``.
        vector: Neighbors that may be read and written with one access, as far as the arguments tell.
        peel: Whether rows are peeled to a 16-byte boundary.
        long: Whether a row takes several tiles.
        pieces: Programs a row; more than 1 takes two launches.
        overlap: Whether a launch may start before its predecessor in the stream has ended.
    """

    rows: int
    cols: int
    warps: int
    blocks: int
    within: bool
    vector: int
    peel: bool
    long: bool = False
    pieces: int = 1
    overlap: bool = False

    @property
    def grid(self) -> int:
        return self.blocks * self.pieces


def _power_of_two(n: int) -> int:
    """The lowest power of two that is at least ``n``."""
    return 1 << max(0, n - 1).bit_length()


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
    tile_cols = _power_of_two(cols // widest * widest if peel else cols)

    if lanes_along_rows:
        rows = min(_power_of_two(extent), max(128 // itemsize, 2048 // tile_cols))
        while rows * tile_cols > limit // 2 and rows * itemsize > 32:
            rows //= 2
    elif tile_cols <= 32 * widest:  # a warp holds whole rows and needs no barrier
        rows = min(_power_of_two(extent), 2048 // tile_cols)
    else:
        rows = _power_of_two(inner) if inner <= 8 else 1  # those lie in the same cache lines
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
        rows = min(_power_of_two(extent), 64 // itemsize)
    if long or (cols >= 32768 and 8 * blocks_of(rows) <= wanted):
        long = True
        share = -(-wanted // blocks_of(rows))
        tile_cols = max(1024, min(limit // 4, _power_of_two(-(-cols // share)))) // rows
        if share > 2:
            pieces = min(_power_of_two(share), _power_of_two(-(-cols // tile_cols)), 1024)

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
        vector=1 if peel else vector,
        peel=peel,
        long=long,
        pieces=pieces,
        # It gains where one wave of programs covers the grid, and costs where there are several.
        overlap=device.capability >= 90 and grid * warps <= 32 * device.sm_count,
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
    arguments = _arguments(problem)
    acc = "*fp64" if problem.dtype == "float64" else "*fp32"
    strides = ("inner", "x_outer", "x_col", "x_inner")  # of out and x
    compiled_in: dict[str, Any] = {name: 1 for name in strides if arguments[name] == 1}
    types = {"x": "*" + _TYPES[problem.dtype], "out": "*" + _TYPES[problem.out_dtype]}
    if plan.pieces > 1:
        types["partials"] = acc
    types |= {name: "i64" for name in arguments if name not in compiled_in}

    divisibility: dict[str, int] = {}
    if plan.vector > 1:
        divisibility = {
            "x": min(16, plan.vector * ITEMSIZE[problem.dtype]),
            "out": min(16, plan.vector * ITEMSIZE[problem.out_dtype]),
        } | dict.fromkeys(_facts(problem), plan.vector)

    switches = compiled_in | {
        "LOG": problem.op == "log_softmax",
        "WITHIN": plan.within,
        "ROWS": plan.rows,
        "COLS": plan.cols,
        "PEEL": plan.peel,
        "OVERLAP": plan.overlap,
    }
    if not plan.long:
        extent = problem.inner if plan.within else problem.rows
        even = not plan.peel and problem.cols == plan.cols and extent % plan.rows == 0
        launches = [("softmax_tile", switches | {"EVEN": even})]
    else:
        switches |= {"PIECES": plan.pieces}
        if plan.pieces == 1:
            phases = [{"SCAN": True, "WRITE": True, "partials": None}]
        else:
            phases = [{"SCAN": True, "WRITE": False}, {"SCAN": False, "WRITE": True}]
        launches = [("softmax_long", switches | phase) for phase in phases]
    return [
        _Source(name, tuple(types.items()), tuple(constants.items()), tuple(divisibility.items()), plan.warps)
        for name, constants in launches
    ]


_functions: dict[tuple[_Source, int], tuple[int, int]] = {}
_lock = threading.Lock()


def _function(source: _Source, index: int) -> tuple[int, int]:
    """``CUfunction`` and bytes of shared memory of a kernel on a device; compiled and loaded once."""
    with _lock:  # held while compiling, so that threads that want the same kernel compile it once
        if (source, index) not in _functions:
            try:
                compiled = source.compile(driver.device(index).capability)
                _functions[source, index] = (
                    driver.load(compiled.asm["cubin"], compiled.metadata.name, index),
                    compiled.metadata.shared,
                )
            except Exception as error:
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
                raise BackendUnavailable(f"{source.name} failed to compile: {reason}") from error
        return _functions[source, index]


def _scratch(problem: Problem, plan: TritonPlan) -> int:
    """Bytes for each piece's maximum and sum."""
    return plan.grid * plan.rows * 2 * (8 if problem.dtype == "float64" else 4) if plan.pieces > 1 else 0


def build(problem: Problem, plan: TritonPlan) -> Kernel:
    """Make a plan callable on the problem's device."""
    if INTERPRETED:
        return Kernel(partial(_interpret, problem, plan))
    kernels = []
    for source in sources(problem, plan):
        function, shared = _function(source, problem.index)
        launch = driver.Launch(
            plan.grid, 32 * plan.warps, shared, overlap=plan.overlap, scratch=_scratch(problem, plan)
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


def _interpret(problem: Problem, plan: TritonPlan, x: Any, out: Any, stream: int, scratch: int) -> None:
    """Run a plan on NumPy arrays in Triton's interpreter."""
    import torch

    from . import triton_kernels

    # Only address and dtype count, so any strides will do.
    def pointer(array: Any, dtype: str) -> torch.Tensor:
        memory = (ctypes.c_byte * ITEMSIZE[dtype]).from_address(array.ctypes.data)
        return torch.frombuffer(memory, dtype=getattr(torch, dtype))

    arguments: dict[str, Any] = dict(_arguments(problem))
    arguments |= {"x": pointer(x, problem.dtype), "out": pointer(out, problem.out_dtype)}
    if plan.pieces > 1:
        acc = torch.float64 if problem.dtype == "float64" else torch.float32
        arguments["partials"] = torch.empty(plan.grid * plan.rows * 2, dtype=acc)
    # The interpreter keeps its grid in a global, and rows that don't exist make NaN of nothing but -inf.
    with _lock, np.errstate(all="ignore"):
        for source in sources(problem, plan):
            getattr(triton_kernels, source.name)[(plan.grid,)](**(arguments | dict(source.constants)))


def _device(problem: Problem) -> driver.Device:
    return _CPU if INTERPRETED else driver.device(problem.index)


@cache
def _obstacles() -> list[str]:
    try:
        installed = version("triton")
    except PackageNotFoundError:  # a build under another name
        installed = ""
    if installed and tuple(map(int, installed.split(".")[:2])) < _MIN_TRITON:
        return [f"Triton {installed} is too old: it takes 3.5 or newer ({_TRITON.cure})"]
    return [] if INTERPRETED else driver.obstacles()


def _reasons(problem: Problem) -> list[str]:
    device = _device(problem)
    if not INTERPRETED and device.capability < _MIN_CAPABILITY:
        return [f"Triton needs compute capability 8.0; device {problem.index} has {device.capability / 10}"]
    if plan(problem, device).grid > _MAX_GRID:
        return [f"{problem.rows} rows of {problem.cols} need more than {_MAX_GRID} programs"]
    return []


def _prepare(problem: Problem) -> Kernel:
    return build(problem, plan(problem, _device(problem)))


_TORCH = Requirement("torch", "pip install 'minikernel[torch]'")
_TRITON = Requirement("triton", "pip install 'minikernel[triton]'")

BACKEND = Backend(
    name="triton-fused",
    rank=20,
    devices=("cpu",) if INTERPRETED else ("cuda",),
    dtypes=DTYPES,
    prepare=_prepare,
    requires=(_TORCH, _TRITON) if INTERPRETED else (_TRITON,),
    limits={"compute capability": "8.0 or newer"},
    obstacles=_obstacles,
    reasons=_reasons,
)
