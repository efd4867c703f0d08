"""How ``cuda-fused`` takes the k largest results of each row: the launches of softmax_topk.cu."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import partial

from .. import cuda, driver
from ..driver import Device, Launch
from ..integers import ceil_div, power_of_two
from ..problem import ITEMSIZE, Kernel, Problem
from .fused_rows import ACCESS_BYTES, WARP, TeamPlan, round_up

# Elements that a lane takes at a time; float64's exponential needs many registers.
_ELEMENTS = 16
_ELEMENTS_OF_FLOAT64 = 4
# Fewer of elements that aren't neighbors: each is an access of its own.
_SINGLE_ELEMENTS = 8
# Shorter rows are taken so, too: packs would leave lanes with nothing.
_SHORT_COLS = 4 * WARP
# Packs that a lane has of a row that a warp takes; each is a kernel of its own, so few.
_VECTORS = (1, 2, 4, 8)
_THREADS_OF_WARPS = 256
# A block has a thread at least for each of the k largest, and is compiled for the most it may have.
_FEWEST_THREADS = 64
_USUAL_THREADS = 256
_MOST_THREADS = 512
# Threads that a multiprocessor runs at 64 registers each.
_THREADS_PER_SM = 1024
# Shorter rows aren't worth a cluster, and fewer packs of a longer one not a block of it.
_SPLIT_PACKS = 4096
_FEWEST_PACKS = 1024
# Indices have 32 bits on the way.
_MOST_COLS = 2**31
# An element's key and index.
_CANDIDATE_BYTES = {2: 8, 4: 8, 8: 16}


@dataclass(frozen=True, kw_only=True)
class TopkPlan(TeamPlan):
    """How softmax_topk.cu takes rows of any layout, in chunks of ``vectors`` packs a thread.

    Attributes:
        k: Results of each row.
        candidate: Bytes of shared memory that each of the k largest of a warp or block takes.
    """

    k: int
    candidate: int

    file = "softmax_topk.cu"

    def macros(self) -> dict[str, object]:
        threads = _THREADS_OF_WARPS if self.team else _MOST_THREADS
        return super().macros() | {"HELD": ceil_div(self.k, WARP), "THREADS": threads}

    def launch(self) -> Launch:
        # The lists of all warps, and in a cluster those of all blocks.
        lists = 0 if self.team else self.threads // WARP + (self.parts if self.parts > 1 else 0)
        return Launch(
            self.grid,
            self.threads,
            shared=lists * self.k * self.candidate,
            cluster=self.parts,
            overlap=self.overlap,
            per_call="P",
        )


def reasons(problem: Problem) -> list[str]:
    """Why the kernel can't take this problem; empty if it can."""
    if problem.k and problem.cols >= _MOST_COLS:
        return [f"it takes the largest of fewer than 2**31 columns; there are {problem.cols}"]
    return []


def plan(problem: Problem, device: Device) -> TopkPlan:
    """Choose the launch: a pure function of the problem and the GPU."""
    itemsize = ITEMSIZE[problem.dtype]
    wide = ACCESS_BYTES // itemsize if problem.strides[1] == 1 and problem.cols > _SHORT_COLS else 1
    packs = ceil_div(problem.cols, wide)
    elements = _ELEMENTS_OF_FLOAT64 if itemsize == 8 else _ELEMENTS if wide > 1 else _SINGLE_ELEMENTS
    by_warp = TopkPlan(
        rows=problem.rows,
        team=WARP,
        vectors=round_up(ceil_div(packs, WARP), _VECTORS),
        threads=_THREADS_OF_WARPS,
        blocks_per_sm=1,
        wide=wide,
        overlap=device.capability >= 90,
        k=problem.k,
        candidate=_CANDIDATE_BYTES[itemsize],
    )
    if packs <= WARP * elements // wide:
        return by_warp

    # As many blocks as the chip runs at once, as long as each has something to do.
    blocks_per_sm = 1 if itemsize == 8 else _THREADS_PER_SM // _MOST_THREADS
    blocks = device.sm_count * blocks_per_sm
    largest = device.max_cluster if device.capability >= 90 and packs >= _SPLIT_PACKS else 1
    parts = 1
    while 2 * parts <= largest and 2 * parts * problem.rows <= blocks and packs >= 2 * parts * _FEWEST_PACKS:
        parts *= 2
    # A list of more than an entry a lane takes registers that 16 elements of float32 would need.
    vectors = 3 if problem.dtype == "float32" and wide > 1 and problem.k > WARP else elements // wide
    # Where there are more, small ones: some stream while others merge.
    most = _MOST_THREADS if parts * problem.rows <= blocks else _USUAL_THREADS
    threads = power_of_two(ceil_div(ceil_div(packs, parts), vectors))
    return replace(
        by_warp,
        team=0,
        streamed=True,
        vectors=vectors,
        threads=max(_FEWEST_THREADS, min(most, threads)),
        blocks_per_sm=blocks_per_sm,
        parts=parts,
    )


def prepare(problem: Problem, device: Device) -> Kernel:
    return driver.prepare_fitting(device, partial(plan, problem), partial(prepare_planned, problem))


def prepare_planned(problem: Problem, planned: TopkPlan) -> Kernel:
    """The kernel for a launch that was chosen elsewhere; tests force theirs this way."""
    macros = cuda.defines(problem, **planned.macros())
    return cuda.kernel(planned.file, problem, macros, planned.launch(), ctypes.c_int(problem.k))
