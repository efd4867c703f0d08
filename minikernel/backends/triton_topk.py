"""The k largest of softmax's results, in Triton: the plan, what is compiled and how it is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import driver
from ..integers import ceil_div, power_of_two
from ..problem import ITEMSIZE, Kernel, Problem
from . import triton_fused as fused

#: Longest rows: of more, what a program chooses from doesn't fit in its registers.
MAX_COLS = 60_000_000
# The longest rows that are selected from in one go, for many rows and for few.
_SHORT_COLS, _FEW_SHORT_COLS = 256, 1024
# The fewest columns that are worth a program, and the most that one takes even where there are many.
_FEWEST_COLS, _MOST_COLS = 1024, 8192
# The most that a program chooses from at once, elements of the largest tile, and what a warp has of either.
_MOST_KEYS, _LARGEST_TILE, _PER_WARP = 8192, 4096, 256
# Programs of one warp that keep a multiprocessor busy.
_PROGRAMS_PER_SM = 16


@dataclass(frozen=True)
class TopkPlan:
    """How a problem is laid out over programs; see ``triton_topk_kernels`` for what the words mean.

    Attributes:
        rows, cols: A tile; powers of two.
        tiles: Tiles that a program reads at a time.
        keep: How many a selection keeps: at least k, a power of two.
        parts: Programs a row.
        reach: At least as many as the columns that a slot sees, a power of two.
        warps, pick_warps: Warps a program of the first launch, and of the second.
        blocks: How many blocks of ``rows`` rows there are.
        picks: Programs of the second launch; 0 if there is none.
        within: Whether a block's rows are neighbors along ``inner``.
        vector: Neighbors that may be read with one access, as far as the arguments tell.
        peel: Whether a row's columns are counted from a 16-byte boundary.
        overlap: Whether a launch may start before its predecessor in the stream has ended.
    """

    rows: int
    cols: int
    tiles: int
    keep: int
    parts: int
    reach: int
    warps: int
    pick_warps: int
    blocks: int
    picks: int
    within: bool
    vector: int
    peel: bool
    overlap: bool

    @property
    def grids(self) -> tuple[int, ...]:
        """Programs of each launch."""
        scans = self.blocks * self.parts
        return (scans, self.picks) if self.picks else (scans,)


def plan(problem: Problem, device: driver.Device) -> TopkPlan:
    """Choose the launches for a problem; a pure function."""
    itemsize, keep = ITEMSIZE[problem.dtype], max(2, power_of_two(problem.k))  # tl.topk keeps two or more
    x_outer, x_col = (fused.kernel_arguments(problem)[name] for name in ("x_outer", "x_col"))
    widest = 16 // itemsize
    vector = fused.vector_width(replace(problem, out_dtype=problem.dtype, out_offset=0))
    within = x_col != 1 and problem.inner > 8
    extent = problem.inner if within else problem.rows

    peel = False
    if x_col != 1 and (problem.inner > 1 or x_outer == 1):  # lanes along rows
        rows, cols = min(power_of_two(extent), 64 // itemsize), min(64, power_of_two(problem.cols))
        vector = vector if within or problem.inner == 1 else 1
    elif problem.cols <= (_FEW_SHORT_COLS if problem.rows <= 4 * device.sm_count else _SHORT_COLS):
        cols = power_of_two(problem.cols)
        rows = max(1, min(power_of_two(extent), 2 * _PER_WARP // cols))
        while rows > 1 and problem.rows < rows * _PROGRAMS_PER_SM * device.sm_count:
            rows //= 2
    else:
        rows, cols = 1, 32 * widest
        peel = vector < widest and x_col == 1
        vector = widest if peel else vector
    cols = max(keep, cols)
    end = problem.cols + (vector - 1 if peel else 0)

    def blocks_of(rows: int) -> int:
        return problem.outer * ceil_div(problem.inner, rows) if within else ceil_div(problem.rows, rows)

    def reach_of(cols: int) -> int:
        return power_of_two(ceil_div(ceil_div(end, parts), cols))

    parts, wanted = 1, _PROGRAMS_PER_SM * device.sm_count
    while (
        end * rows > parts * _FEWEST_COLS
        and keep * parts < _MOST_KEYS
        and (end > parts * _MOST_COLS or 2 * parts * blocks_of(rows) <= wanted)
    ):
        parts *= 2
    while keep * reach_of(cols) > _MOST_KEYS:
        if rows > 1 and rows * cols >= _LARGEST_TILE:
            rows //= 2
        cols *= 2
    reach, warps = reach_of(cols), _warps(rows * cols)
    held = (8 if problem.dtype == "float64" else 32) * 32 * warps  # elements in registers
    return TopkPlan(
        rows=rows,
        cols=cols,
        tiles=min(reach, max(1, held // (rows * cols))),
        keep=keep,
        parts=parts,
        reach=reach,
        warps=warps,
        pick_warps=_warps(keep * max(parts, reach)),
        blocks=blocks_of(rows),
        picks=problem.rows if parts * reach > 1 else 0,
        within=within,
        vector=vector,
        peel=peel,
        overlap=device.capability >= 90,
    )


def _warps(keys: int) -> int:
    return max(1, min(16, keys // _PER_WARP))


def _arguments(problem: Problem) -> dict[str, int]:
    return fused.kernel_arguments(problem) | {"k": problem.k}


def sources(problem: Problem, plan: TopkPlan) -> list[fused.KernelSource]:
    """The one or two kernels that a plan launches, in their order."""
    arguments = _arguments(problem)
    constants: dict[str, Any] = {
        name: 1 for name in ("inner", "x_outer", "x_col", "x_inner") if arguments[name] == 1
    }
    types = {"x": "*" + fused.TYPE_NAMES[problem.dtype], "out": "*" + fused.TYPE_NAMES[problem.out_dtype]}
    if plan.picks:
        types["partials"] = "*i64"
    else:
        constants["partials"] = None
    types |= {"indices": "*i64"} | {name: "i64" for name in arguments if name not in constants}
    divisibility: dict[str, int] = {}
    if plan.vector > 1 and not plan.peel:
        divisibility = {"x": plan.vector * ITEMSIZE[problem.dtype]}
        divisibility |= {name: plan.vector for name in fused.alignment_facts(problem) if name in types}
    words = ("cols", "vector", "peel", "parts", "keep", "overlap")
    constants |= {word.upper(): getattr(plan, word) for word in words}

    def source(name: str, warps: int, more: dict[str, Any]) -> fused.KernelSource:
        compiled_in = tuple((constants | more).items())
        facts = tuple(divisibility.items())
        return fused.KernelSource(name, tuple(types.items()), compiled_in, facts, warps, "triton_topk_kernels")

    scan = {"WITHIN": plan.within, "ROWS": plan.rows, "TILES": plan.tiles}
    found = [source("softmax_topk_scan", plan.warps, scan)]
    if plan.picks:
        found.append(source("softmax_topk_pick", plan.pick_warps, {"REACH": plan.reach}))
    return found


def _scratch(problem: Problem, plan: TopkPlan) -> int:
    """Bytes for what the second launch chooses from."""
    return problem.rows * plan.parts * (1 + plan.keep) * 16 if plan.picks else 0


def reasons(problem: Problem, device: driver.Device) -> list[str]:
    """Why it can't take this problem; empty if it can."""
    if problem.cols > MAX_COLS:
        return [f"it selects from rows of at most {MAX_COLS} elements; these have {problem.cols}"]
    if max(plan(problem, device).grids) > fused.MAX_GRID:
        return [f"{problem.rows} rows of {problem.cols} need more than {fused.MAX_GRID} programs"]
    return []


def build(problem: Problem, plan: TopkPlan) -> Kernel:
    """Make a plan callable on the problem's device."""
    if fused.INTERPRETED:
        return Kernel(partial(_interpret, problem, plan))
    kernels = []
    for source, grid in zip(sources(problem, plan), plan.grids, strict=True):
        scratch = _scratch(problem, plan)
        launch = driver.Launch(grid, 32 * source.warps, overlap=plan.overlap, scratch=scratch, per_call="P")
        kernels.append(fused.bind_kernel(source, problem.index, launch, _arguments(problem)))
    if len(kernels) == 1:
        return kernels[0]
    scan, pick = (kernel.run for kernel in kernels)

    def run(x: int, out: int, stream: int, scratch: int, indices: int) -> None:
        scan(x, out, stream, scratch, indices)
        pick(x, out, stream, scratch, indices)

    return Kernel(run, _scratch(problem, plan))


def _interpret(problem: Problem, plan: TopkPlan, x: Any, out: Any, stream: int, scratch: Any, indices: Any) -> None:
    """Run a plan on NumPy arrays in Triton's interpreter."""
    arguments: dict[str, Any] = {
        **_arguments(problem),
        "x": fused.pointer_to(x, problem.dtype),
        "out": fused.pointer_to(out, problem.out_dtype),
        "indices": fused.pointer_to(indices, "int64"),
    }
    if size := _scratch(problem, plan):
        partials = np.empty(size // 8, np.int64)
        arguments["partials"] = fused.pointer_to(partials, "int64")
    # The interpreter keeps its grid in a global, and rows that don't exist make NaN of nothing but -inf.
    with fused.interpreter_lock, np.errstate(all="ignore"):
        for source, grid in zip(sources(problem, plan), plan.grids, strict=True):
            source.function()[(grid,)](**(arguments | dict(source.constants)))
