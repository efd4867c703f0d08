"""The launches of the k largest, as pure functions: every element is someone's, no launch too much for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from test_plan import DEVICES, LENGTHS

from minikernel import cuda
from minikernel.backends import fused_topk
from minikernel.backends.fused_rows import share_of
from minikernel.backends.fused_topk import TopkPlan
from minikernel.integers import power_of_two
from minikernel.problem import ITEMSIZE, MOST_K, TOPK, Problem


def topk_problem(
    cols: int, rows: int = 512, k: int = 8, dtype: str = "float32", out_dtype: str | None = None,
    col_stride: int = 1,
) -> Problem:  # fmt: skip
    """Rows whose elements are ``col_stride`` apart."""
    strides = (cols * col_stride, col_stride, 1)
    return Problem(TOPK, "cuda", 0, dtype, out_dtype or dtype, rows, cols, 1, strides, k=k)


def topk_problems(dtype: str = "float32", out_dtype: str | None = None) -> Iterator[Problem]:
    for rows, cols, k in product((1, 8, 64, 300, 65536), LENGTHS, (1, 8, 33, MOST_K)):
        if k <= cols:
            yield topk_problem(cols, rows, k, dtype, out_dtype)
            yield topk_problem(cols, rows, k, dtype, out_dtype, col_stride=2)


def visits(plan: TopkPlan, cols: int, head: int) -> np.ndarray:
    """How often each element of a row is taken, by the index arithmetic of softmax_topk.cu."""
    head = min(head, cols)
    packs = (cols - head) // plan.wide
    seen, of_pack = np.zeros(cols, np.int64), np.zeros(packs, np.int64)
    warps = 1 if plan.team else plan.threads // 32
    share = share_of(packs, plan.parts)
    chunk = np.arange(32 * plan.vectors)
    for part in range(plan.parts):
        begin = min(part * share, packs)
        end = min(begin + share, packs)
        for warp in range(warps):
            first = begin + warp * chunk.size
            while True:
                at = first + chunk
                of_pack[at[at < end]] += 1
                first += warps * chunk.size
                if plan.team or first >= end:
                    break
    seen[head : head + packs * plan.wide] = np.repeat(of_pack, plan.wide)
    if plan.wide > 1:
        singles = [*range(head), *range(head + packs * plan.wide, cols)]
        seen[singles[:32]] += 1
    return seen


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_launches(dtype, capability):
    device = DEVICES[capability]
    for problem in topk_problems(dtype):
        plan = fused_topk.plan(problem, device)
        launch, macros = plan.launch(), plan.macros()
        assert launch.per_call == "P"
        assert launch.block <= int(macros["THREADS"])
        assert launch.grid <= cuda.MAX_GRID
        assert launch.cluster <= (device.max_cluster if capability >= 90 else 1)
        assert not launch.overlap or capability >= 90
        assert 32 * int(macros["HELD"]) >= problem.k
        assert plan.wide in (1, 16 // ITEMSIZE[dtype])
        assert plan.wide == 1 or problem.strides[1] == 1
        assert int(macros["THREADS"]) * int(macros["BLOCKS"]) <= 1024
        if plan.team:
            assert plan.team == 32
            assert plan.parts == 1
            assert 0 <= launch.grid * (launch.block // 32) - problem.rows < launch.block // 32
            continue
        assert launch.grid == problem.rows * plan.parts
        # Groups of lanes, at least k of them, and no more than the kernel has places for.
        assert launch.block >= MOST_K
        assert launch.block == power_of_two(launch.block)
        # What all warps and all blocks may bring, on top of the static variables; no opting in.
        lists = launch.block // 32 + (plan.parts if plan.parts > 1 else 0)
        assert launch.shared == lists * problem.k * (16 if dtype == "float64" else 8)
        assert launch.shared <= 40 * 1024
        if plan.parts > 1:
            assert launch.grid <= device.sm_count * int(macros["BLOCKS"])


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_every_element_is_taken_once(dtype, capability):
    for cols, rows, stride in product((1, 7, 128, 129, 257, 512, 1025, 4099, 50257, 128256), (1, 64, 4096), (1, 2)):
        for k in {1, min(cols, MOST_K)}:
            problem = topk_problem(cols, rows, k, dtype, col_stride=stride)
            plan = fused_topk.plan(problem, DEVICES[capability])
            for head in {0, plan.wide - 1}:
                assert (visits(plan, cols, head) == 1).all(), (cols, rows, head, plan)


def test_few_rows_have_all_of_the_chip():
    for rows, parts in ((1, 16), (8, 16), (16, 16), (64, 4), (132, 2), (133, 1), (4096, 1)):
        assert fused_topk.plan(topk_problem(128256, rows), DEVICES[90]).parts == parts
    assert fused_topk.plan(topk_problem(4096, 1), DEVICES[90]).parts == 1, "a cluster isn't worth its barriers"


def test_a_smaller_gpu_has_smaller_clusters():
    for most in (1, 2, 8):
        plan = fused_topk.plan(topk_problem(128256, 1), replace(DEVICES[90], max_cluster=most))
        assert plan.parts == most


def test_few_kernels():
    for dtype in ("float32", "bfloat16", "float64"):
        found = {tuple(fused_topk.plan(p, DEVICES[90]).macros().items()) for p in topk_problems(dtype)}
        assert len(found) <= 40


def test_rows_too_long_for_its_indices_are_declined():
    long = replace(topk_problem(2**31 - 1, 1), cols=2**31)
    assert fused_topk.reasons(long) == [f"it takes the largest of fewer than 2**31 columns; there are {2**31}"]
    assert fused_topk.reasons(topk_problem(2**31 - 1, 1)) == []
    assert fused_topk.reasons(replace(long, op="softmax", k=0)) == []
