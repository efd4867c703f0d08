"""The launches of gradients, as pure functions: every element is someone's, and no launch is too much for a GPU."""

from __future__ import annotations

from itertools import product

import pytest
from test_plan import DEVICES, LENGTHS

from minikernel import cuda
from minikernel.backends import fused_backward, triton_fused
from minikernel.backends.fused_backward import BackwardColumnsPlan, BackwardPlan
from minikernel.backends.fused_rows import share_of
from minikernel.problem import ITEMSIZE, Problem


def problems(dtype: str = "float32", op: str = "softmax_backward"):
    for outer, cols, inner in product((1, 8, 512, 65537), LENGTHS, (1, 2, 3, 64, 4096)):
        if outer * cols * inner < 2**40:
            yield Problem(op, "cuda", 0, dtype, dtype, outer, cols, inner, (cols * inner, inner, 1))


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_launches(dtype, capability):
    device = DEVICES[capability]
    for problem in problems(dtype):
        plan = fused_backward.plan(problem, device)
        launch = plan.launch()
        assert launch.block % 32 == 0
        assert launch.block <= 512
        assert launch.inputs == 2
        assert launch.cluster <= (device.max_cluster if capability >= 90 else 1)
        assert not launch.overlap or capability >= 90
        if isinstance(plan, BackwardColumnsPlan):
            assert problem.inner > 1
            assert plan.wide == 1 or problem.inner % plan.wide == 0
            assert plan.lanes * plan.wide * plan.tiles >= problem.inner
            assert plan.lanes * plan.wide * (plan.tiles - 1) < problem.inner
            assert launch.grid == min(problem.outer * plan.tiles, cuda.MAX_GRID)
            continue
        assert isinstance(plan, BackwardPlan)
        packs = problem.cols / plan.wide
        if plan.team:
            assert launch.grid * (plan.threads // plan.team) >= problem.rows
            assert plan.team * plan.vectors >= packs
        else:
            assert launch.grid == problem.rows * plan.parts
            held = plan.threads * plan.vectors
            assert plan.streamed == (share_of(-(-problem.cols // plan.wide), plan.parts) > held)
            # A line of elements before the packs, and less than a pack behind them: one a thread.
            assert plan.threads >= 128 // ITEMSIZE[dtype] + plan.wide - 2
            assert int(plan.macros()["THREADS"]) * int(plan.macros()["BLOCKS"]) <= 1024


def test_few_kernels():
    for dtype in ("float32", "bfloat16"):
        found = {
            (p.file, tuple(p.macros().items()))
            for p in (fused_backward.plan(q, DEVICES[90]) for q in problems(dtype))
        }
        assert len(found) <= 50


def test_no_grid_is_too_large(monkeypatch):
    monkeypatch.setattr(triton_fused, "_device", lambda problem: DEVICES[90])
    for outer, cols, inner in ((2**31, 8, 1), (2**31, 2, 2), (2**31, 1, 3), (2**33, 2, 2)):
        strides = (cols * inner, inner, 1)
        problem = Problem("softmax_backward", "cuda", 0, "float16", "float16", outer, cols, inner, strides)
        assert fused_backward.plan(problem, DEVICES[90]).grid <= cuda.MAX_GRID
    large = Problem("softmax_backward", "cuda", 0, "float16", "float16", 2**31, 2, 2, (4, 2, 1))
    assert "programs" in triton_fused._reasons(large)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_triton_covers_every_element(dtype):
    for capability in (80, 90):
        for problem in problems(dtype):
            plan = triton_fused.plan(problem, DEVICES[capability])
            extent = problem.inner if plan.within else problem.rows
            assert plan.blocks * plan.rows >= (extent * problem.outer if plan.within else extent)
            assert plan.rows * plan.cols <= 2**20
            if not plan.long:
                share = -(-problem.cols // plan.parts)
                assert plan.cols * plan.tiles * plan.pieces >= share
            assert plan.pieces in (1, plan.warps)
