"""How ``cuda-fused`` takes gradients: the launches of softmax_backward.cu and softmax_backward_columns.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from .. import cuda, driver
from ..driver import Device, Launch
from ..integers import ceil_div, power_of_two
from ..problem import ITEMSIZE, Kernel, Problem
from . import fused_scores
from .fused_rows import ACCESS_BYTES, BLOCK_SIZES, WARP, TeamPlan, round_up, share_of

# Packs of y, and of dy, that a thread may hold; each is a kernel of its own, so few.
_VECTORS = (1, 2, 3, 4)
# So many of which a multiprocessor runs.
_THREADS_PER_SM = 1024
# Elements before a row's first whole line are a thread's each.
_LINE_BYTES = 128
_COLUMNS_THREADS = 256


@dataclass(frozen=True, kw_only=True)
class BackwardPlan(TeamPlan):
    """How softmax_backward.cu takes rows whose elements are neighbors in memory: ``parts`` blocks are a cluster."""

    file = "softmax_backward.cu"

    def launch(self) -> Launch:
        return Launch(self.grid, self.threads, cluster=self.parts, overlap=self.overlap, inputs=2)

    def constants(self) -> list[ctypes.c_int]:
        """The kernel's parameters after the layout."""
        return []


@dataclass(frozen=True)
class BackwardColumnsPlan:
    """How softmax_backward_columns.cu takes rows that lie side by side.

    Attributes:
        planes: The extent of the outer axis.
        side: Rows side by side in each.
        wide: Elements a pack, each of another row.
        lanes: Threads side by side along the rows.
        overlap: Whether the launch may start before its predecessor in the stream has ended.
    """

    planes: int
    side: int
    wide: int
    lanes: int
    overlap: bool = False

    file = "softmax_backward_columns.cu"

    @property
    def tiles(self) -> int:
        return ceil_div(self.side, self.lanes * self.wide)

    @property
    def grid(self) -> int:
        return min(self.planes * self.tiles, cuda.MAX_GRID)

    def macros(self) -> dict[str, object]:
        return {"WIDE": self.wide, "LANES": self.lanes}

    def launch(self) -> Launch:
        return Launch(self.grid, _COLUMNS_THREADS, overlap=self.overlap, inputs=2)

    def constants(self) -> list[ctypes.c_int]:
        """The kernel's parameters after the layout."""
        return [ctypes.c_int(self.tiles)]


Plan: TypeAlias = BackwardPlan | BackwardColumnsPlan


def plan(problem: Problem, device: Device) -> Plan:
    """Choose the launch: a pure function of the problem and the GPU."""
    wide = ACCESS_BYTES // ITEMSIZE[problem.dtype]
    overlap = device.capability >= 90
    if problem.inner > 1:
        if problem.inner % wide or (problem.mask and problem.mask.rows and problem.mask.rows[-1][0] % wide):
            wide = 1  # a pack's elements lie one stride apart in the mask
        lanes = min(WARP, power_of_two(ceil_div(problem.inner, wide)))
        # Fewer rows a block where there are too few for the chip, but whole sectors of 32 bytes.
        while lanes * wide * ITEMSIZE[problem.dtype] > 32 and (
            problem.outer * ceil_div(problem.inner, lanes * wide) < 2 * device.sm_count
        ):
            lanes //= 2
        return BackwardColumnsPlan(problem.outer, problem.inner, wide, lanes, overlap)
    packs = ceil_div(problem.cols, wide)
    if packs <= WARP * _VECTORS[-1]:
        team = min(WARP, power_of_two(ceil_div(packs, 2 if packs <= 4 else 3)))
        if problem.cols % wide:
            team = max(team, 4)  # up to two packs less one element a row are taken one by one
        return BackwardPlan(
            rows=problem.rows,
            team=team,
            vectors=round_up(ceil_div(packs, team), _VECTORS),
            threads=128,
            blocks_per_sm=1,
            wide=wide,
            overlap=overlap,
        )
    largest = device.max_cluster if device.capability >= 90 else 1
    parts = 1
    while parts < largest and share_of(packs, parts) > BLOCK_SIZES[-1] * _VECTORS[-1]:
        parts *= 2
    while (
        2 * parts <= largest and problem.rows * parts * 2 <= device.sm_count and share_of(packs, 2 * parts) >= 256
    ):
        parts *= 2  # few rows: all multiprocessors
    share = share_of(packs, parts)
    singles = _LINE_BYTES // ITEMSIZE[problem.dtype] + wide - 2
    threads, vectors = _fewest_empty(share, ceil_div(singles, WARP) * WARP)
    # A mask and causality together take registers.
    factor = 2 if problem.dtype == "float64" or (problem.mask and problem.causal) else 1
    return BackwardPlan(
        rows=problem.rows,
        team=0,
        vectors=vectors,
        threads=threads,
        blocks_per_sm=max(1, _THREADS_PER_SM // round_up(threads, BLOCK_SIZES) // factor),
        wide=wide,
        parts=parts,
        streamed=share > threads * vectors,
        overlap=overlap,
    )


def _fewest_empty(share: int, fewest_threads: int) -> tuple[int, int]:
    """Threads and packs of each for a part of a row: few places left empty, then few threads."""
    candidates = [
        (max(fewest_threads, min(BLOCK_SIZES[-1], ceil_div(ceil_div(share, vectors), WARP) * WARP)), vectors)
        for vectors in _VECTORS[1:]
    ]
    fitting = [c for c in candidates if c[0] * c[1] >= share]
    return min(fitting, key=lambda c: (c[0] * c[1], c[0])) if fitting else (BLOCK_SIZES[-1], 3)


def prepare(problem: Problem, device: Device) -> Kernel:
    return driver.prepare_fitting(device, partial(plan, problem), partial(prepare_planned, problem))


def prepare_planned(problem: Problem, planned: Plan) -> Kernel:
    """The kernel for a launch that was chosen elsewhere; tests force theirs this way."""
    scores = scores_macros(problem, planned)
    return fused_scores.kernel(
        planned.file, problem, planned.launch(), scores, planned.macros(), *planned.constants()
    )


def scores_macros(problem: Problem, planned: Plan) -> dict[str, object]:
    """The macros of fused_scores.cuh that go with a plan."""
    across = isinstance(planned, BackwardColumnsPlan)
    return fused_scores.macros(
        problem, planned.wide, across=across, anywhere=not across and problem.cols % planned.wide > 0
    )
