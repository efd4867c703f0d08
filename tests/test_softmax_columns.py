"""softmax_fused_columns.cu on a GPU: rows side by side, launched in every way, also such as wouldn't be chosen."""

from __future__ import annotations

import pytest
import torch
from cases import NAN, OPS, mismatch, randn, reference
from test_plan import DEVICES, H200, PAIRS
from test_plan_columns import forced

import minikernel
from minikernel import Problem, cuda, driver
from minikernel.backends.fused_columns import ColumnsPlan, plan_columns

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fused")]


@pytest.fixture
def fused():
    info = minikernel.list_backends()["cuda-fused"]
    if not info.available:
        pytest.skip("; ".join(info.reasons))


def problem_of(x: torch.Tensor, y: torch.Tensor, op: str = "softmax") -> Problem:
    """Softmax over the middle axis of ``x``, or over the last where that is transposed."""
    dtype, out_dtype = (str(t.dtype).removeprefix("torch.") for t in (x, y))
    outer, cols, inner = x.shape if x.dim() == 3 else (*x.shape, 1)
    strides = x.stride() if x.dim() == 3 else (*x.stride(), 1)
    offsets = x.data_ptr() % 16, y.data_ptr() % 16
    return Problem(op, "cuda", 0, dtype, out_dtype, outer, cols, inner, strides, *offsets)


def verify(plan: ColumnsPlan | None, x: torch.Tensor, y: torch.Tensor, op: str = "softmax") -> None:
    """Run a plan into ``y``, with NaN around it, and compare."""
    assert plan is not None
    problem = problem_of(x, y, op)
    macros = cuda.defines(problem, **plan.macros())
    kernel = cuda.kernel("softmax_fused_columns.cu", problem, macros, plan.launch(), *plan.constants())
    expected = reference(x, 1, op)  # first: y may be x
    if y.data_ptr() != x.data_ptr():
        y.fill_(NAN)
    kernel.run(x.data_ptr(), y.data_ptr(), torch.cuda.current_stream().cuda_stream, 0)
    wrong = mismatch(y, expected, op)
    assert wrong is None, f"{wrong}\n{plan}"


def arrays(
    shape: tuple[int, ...], dtype: str, out_dtype: str, x_start: int = 0, out_start: int = 0, pad: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output, so many elements from a 16-byte boundary; two axes: transposed."""
    turn = len(shape) == 2
    planes, cols, side = (1, shape[1], shape[0]) if turn else shape
    apart = side + pad
    memory = randn(planes * cols * apart + 16, dtype=dtype).cuda()[x_start:]
    x = memory.as_strided(shape, (1, apart) if turn else (cols * apart, apart, 1))
    out = torch.empty(x.numel() + 16, dtype=getattr(torch, out_dtype), device="cuda")[out_start:]
    return x, out[: x.numel()].view(shape)


def fits(plan: ColumnsPlan) -> bool:
    """Whether this GPU has what the plan needs."""
    device = driver.device(0)
    return plan.shared <= device.shared_per_block and (plan.parts == 1 or device.capability >= 90)


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_what_is_chosen(dtype, out_dtype, failures):
    """Every alignment, few columns and many, a width that is odd, a multiple of 2, of 4 and of 8."""
    device = driver.device(0)
    for shape in (
        (2, 1, 33), (1, 3, 70_001), (3, 21, 4096), (2, 81, 1514), (5, 67, 301), (1, 700, 1000), (2, 1000, 68),
        (1, 4097, 40), (1, 8192, 136), (1, 20_000, 8),
        (33, 3), (1000, 40), (90, 70), (257, 300), (272, 512), (96, 1001), (144, 4096), (80, 4097),
    ):  # fmt: skip
        for x_start, out_start, pad in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 2, 0), (0, 0, 1), (4, 4, 4)):
            x, y = arrays(shape, dtype, out_dtype, x_start, out_start, pad)
            plan = plan_columns(problem_of(x, y), device)
            if plan is None:
                small = len(shape) == 3 and shape[0] > 1 and shape[1] * shape[2] * x.element_size() < 1024
                assert small or shape[1] > 500
                continue
            with failures.case(f"{shape} starts {x_start}, {out_start}, pad {pad}"):
                verify(plan, x, y)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_every_kind_of_launch(dtype, out_dtype, op, failures):
    """Clusters of every size, some with nothing to do; tiles of every width; in registers and in shared memory."""
    for shape in ((2, 67, 301), (1, 1000, 144), (272, 259), (144, 512)):
        x, y = arrays(shape, dtype, out_dtype)
        plans = [plan for plan in forced(problem_of(x, y, op)) if fits(plan)]
        for plan in plans if op == "softmax" else plans[::5]:
            with failures.case(f"{shape} {plan}"):
                verify(plan, x, y, op)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 1000, 144), (144, 1000)])
def test_infinities_and_nan_stay_in_their_row(shape, dtype, failures):
    x, y = arrays(shape, dtype, dtype)
    rows = x if x.dim() == 2 else x[0].T
    rows[0, 500], rows[5, 999], rows[9, :], rows[17, 1:] = NAN, torch.inf, -torch.inf, -torch.inf
    rows[18, :500], rows[19, 500:], rows[20, ::2] = -torch.inf, -torch.inf, -torch.inf
    for op in OPS:
        plans = [plan for plan in forced(problem_of(x, y, op)) if fits(plan)]
        for plan in plans[:: 2 if op == "softmax" else 7]:
            with failures.case(f"{op} {plan}"):
                verify(plan, x, y, op)
                bad = (y if y.dim() == 2 else y[0].T).isnan()
                assert bad.any(1).nonzero().flatten().tolist() == [0, 5, 9]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_place(dtype, failures):
    for shape in ((3, 21, 500), (2, 81, 151), (1, 3000, 136)):
        for plan_of in (lambda p: plan_columns(p, driver.device(0)), lambda p: next(forced(p))):
            x, _ = arrays(shape, dtype, dtype)
            if plan := plan_of(problem_of(x, x)):
                with failures.case(f"{shape} {plan}"):
                    verify(plan, x, x)


@pytest.mark.parametrize("capability", [75, 80, 86])
def test_plans_of_older_gpus(capability, failures):
    """No clusters, less shared memory: what an older GPU would run runs here too."""
    for dtype, out_dtype in PAIRS[1::2]:
        for shape in ((3, 21, 500), (2, 81, 151), (1, 600, 136), (144, 300), (1000, 7)):
            x, y = arrays(shape, dtype, out_dtype)
            plan = plan_columns(problem_of(x, y), DEVICES[capability])
            with failures.case(f"{dtype} to {out_dtype}, {shape}"):
                assert plan is not None
                assert (plan.parts, plan.overlap) == (1, False)
                verify(plan, x, y)


def test_nothing_else_is_written(failures):
    for shape in ((2, 67, 301), (1, 1000, 8), (33, 70), (30, 1001)):
        x, _ = arrays(shape, "float32", "float32")
        memory = torch.full((x.numel() + 64,), NAN, device="cuda")
        y = memory[32:-32].view(shape)
        with failures.case(shape):
            plan = plan_columns(problem_of(x, y), H200 if driver.device(0).capability >= 90 else DEVICES[80])
            verify(plan, x, y)
            assert memory[:32].isnan().all()
            assert memory[-32:].isnan().all()
