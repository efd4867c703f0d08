"""The tuned rungs, cuda-smem and cuda-fused (and the other backends beside them): every row length, every launch.

Float32 is held to 1e-5 of float64: the online softmax needs no more. Float16 is held to 1e-2 of PyTorch's softmax
and to one unit in the last place of float64 rounded to half.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import NAN, OPS, TOLERANCES, mismatch, randn, reference
from test_plan import DEVICES, PAIRS

import minikernel
from minikernel import Problem
from minikernel.backends import cuda_fused
from minikernel.backends.cuda_fused import RowPlan
from minikernel.problem import ITEMSIZE

#: Around what launches may change at.
AROUND = tuple(n + d for n in (1024, 2048, 4096, 8192, 12288, 16384, 32768) for d in (-1, 0, 1, 2))
BEYOND = (65536, 65537, 151936, 2**20 + 1)


def test_tolerances_are_those_promised():
    assert TOLERANCES["float32"].relative <= 1e-5
    assert TOLERANCES["float16"].relative <= 1e-2


@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "unaligned"])
def test_every_length(torch_route, start, failures):
    """Unaligned: the first row begins an element after a 16-byte boundary, and rows are a prime apart."""
    quick = torch_route.backend in ("cuda-fused", "triton-fused", "numpy")
    if start:
        lengths = [*range(1, 301, 1 if torch_route.backend == "cuda-fused" else 11), *AROUND[::3]]
    else:
        lengths = [*range(1, 301, 1 if quick else 9), *AROUND]
    memory = torch_route.array(randn(3 * (max(lengths) + 40)))
    out = torch_route.kind.poisoned(memory.shape, "float32")
    for cols in lengths:
        if torch_route.reasons(3, cols):
            continue
        pitch = cols if not start else (cols | 1) + 30
        x = memory[start:].as_strided((3, cols), (pitch, 1))
        y = out[: 3 * cols].view(3, cols).fill_(NAN)
        with failures.case(f"{cols} columns"):
            torch_route.run(x, out=y)
            wrong = mismatch(y, reference(x))
            assert wrong is None, wrong


@pytest.mark.parametrize("op", OPS)
def test_long_rows(torch_route, op, failures):
    for cols in BEYOND:
        if torch_route.backend == "cuda-naive" and cols > 70_000:
            continue
        x = torch_route.array(randn(1, cols))
        with failures.case(f"{cols} columns"):
            if reasons := torch_route.reasons(1, cols):
                with pytest.raises(minikernel.BackendError, match=r"at most \d+"):
                    torch_route.run(x)
                assert reasons
            else:
                torch_route.verify(x, op=op, poison=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_around_the_edges_of_launches(torch_route, dtype, failures):
    lengths = [
        *range(1, 20),
        31,
        63,
        64,
        65,
        100,
        127,
        128,
        129,
        255,
        256,
        257,
        511,
        512,
        513,
        *AROUND[1::4],
        50257,
    ]
    for cols in lengths if torch_route.backend in ("cuda-fused", "numpy") else lengths[::3]:
        if torch_route.passes_over(3, cols, dtype):
            continue
        with failures.case(f"{cols} columns"):
            torch_route.verify(torch_route.array(randn(3, cols), dtype), poison=True)


def test_real_shapes(torch_route, failures):
    """The lab's, a model's logits, attention, routers."""
    for rows, cols in (
        (1, 600),
        (512, 600),
        (2048, 600),
        (8, 50257),
        (64, 32000),
        (8, 128256),
        (300, 4096),
        (5000, 8),
    ):
        if torch_route.passes_over(rows, cols):
            continue
        with failures.case(f"{rows} x {cols}"):
            torch_route.verify(torch_route.array(randn(rows, cols)), poison=True)


@pytest.mark.parametrize("op", OPS)
def test_float16_beside_pytorch(torch_route, op, failures):
    for rows, cols in ((512, 600), (3, 4097), (64, 128)):
        x = torch_route.array(randn(rows, cols), "float16")
        theirs = getattr(torch.nn.functional, op)(x, -1)
        with failures.case(f"{rows} x {cols}"):
            torch.testing.assert_close(torch_route.run(x, op=op), theirs, rtol=1e-2, atol=1e-2)
            torch_route.verify(x, op=op)


@pytest.mark.parametrize("op", OPS)
def test_float32_beside_pytorch(torch_route, op):
    """No less accurate than PyTorch, for rows of every magnitude."""
    for scale in (1e-3, 1.0, 10.0, 100.0):
        x = torch_route.array(randn(64, 1000, scale=scale))
        exact = reference(x, op=op)
        kept = exact.abs() > 2**-100
        floor = 2**-100 if op == "softmax" else 1.0

        def worst(y, exact=exact, kept=kept, floor=floor):
            return ((y.double() - exact).abs() / exact.abs().clamp(min=floor))[kept].max().item()

        theirs = worst(getattr(torch.nn.functional, op)(x, -1))
        assert worst(torch_route.run(x, op=op)) <= 2 * theirs + 5e-7


def test_long_and_short_rows_take_turns(torch_route, failures):
    """One kernel may be launched with much shared memory, with little, and with much again."""
    lengths = [
        n for n in (50_000, 14_000, 30_000, 12_288, 57_000, 600, 12_500) if not torch_route.passes_over(2, n)
    ]
    arrays = [torch_route.array(randn(2, cols)) for cols in lengths]
    for _ in range(3):
        for x in arrays:
            with failures.case(f"{x.shape[-1]} columns"):
                torch_route.verify(x)


# Launches that this GPU wouldn't choose


def problem_of(x: torch.Tensor, y: torch.Tensor, op: str = "softmax") -> Problem:
    dtype, out_dtype = (str(t.dtype).removeprefix("torch.") for t in (x, y))
    rows, cols = x.shape
    offsets = x.data_ptr() % 16, y.data_ptr() % 16
    return Problem(op, "cuda", 0, dtype, out_dtype, rows, cols, 1, (x.stride(0), 1, 1), *offsets)


def verify_plan(plan: object, x: torch.Tensor, y: torch.Tensor, op: str = "softmax") -> None:
    kernel = cuda_fused.prepare_planned(problem_of(x, y, op), plan)
    y.fill_(NAN)
    scratch = torch.empty(kernel.scratch, dtype=torch.uint8, device="cuda")
    kernel.run(x.data_ptr(), y.data_ptr(), torch.cuda.current_stream().cuda_stream, scratch.data_ptr())
    wrong = mismatch(y, reference(x, op=op), op)
    assert wrong is None, f"{wrong}\n{plan}"


@pytest.fixture
def fused():
    info = minikernel.list_backends()["cuda-fused"]
    if not info.available:
        pytest.skip("; ".join(info.reasons))


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [75, 80, 86])
@pytest.mark.usefixtures("fused")
def test_plans_of_older_gpus(capability, failures):
    """No clusters, less shared memory: what an older GPU would run runs here too."""
    device = DEVICES[capability]
    for dtype, out_dtype in PAIRS[1::2]:
        for cols in (5, 600, 4097, 12_288, 33_000, 100_003):
            for start in (0, 1):
                memory = randn(3 * cols + 1, dtype=dtype).cuda()
                x = memory[start : start + 3 * cols].view(3, cols)
                y = torch.empty(3, cols, dtype=getattr(torch, out_dtype), device="cuda")
                with failures.case(f"{dtype} to {out_dtype}, {cols} columns, start {start}"):
                    plan = cuda_fused.plan(problem_of(x, y), device)
                    assert isinstance(plan, RowPlan)
                    assert (plan.launch().cluster, plan.overlap) == (1, False)
                    verify_plan(plan, x, y)


def launches(x: torch.Tensor, y: torch.Tensor) -> list[RowPlan]:
    """Every way to work on rows in one piece, each with room for the rows of ``x`` or reading the rest twice."""
    wide = 16 // ITEMSIZE[str(x.dtype).removeprefix("torch.")]
    rows, cols = x.shape
    alike = (x.data_ptr() // x.itemsize - y.data_ptr() // y.itemsize) % wide == 0 and x.stride(
        0
    ) % wide == cols % wide
    found = []
    for parts, cooperative in (
        (1, False),
        (2, False),
        (4, False),
        (8, False),
        (16, False),
        (3, True),
        (16, True),
        (40, True),
    ):
        packs = -(-cols // wide)
        share = packs if parts == 1 else -(-packs // (parts * 8)) * 8
        for vectors, shared_vectors, threads in ((1, 0, 96), (2, 3, 128)) if parts in (1, 4, 16) else ((4, 2, 96),):
            for congruent in {False, alike}:
                found.append(
                    RowPlan(
                        rows=rows,
                        team=0,
                        vectors=vectors,
                        threads=threads,
                        blocks_per_sm=1,
                        wide=wide,
                        congruent=congruent,
                        overlap=False,
                        parts=parts,
                        cooperative=cooperative,
                        shared_vectors=shared_vectors,
                        streamed=share > (vectors + shared_vectors) * threads,
                    )
                )
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("fused")
def test_every_kind_of_launch(dtype, failures):
    """Clusters of every size, in registers, in shared memory or read twice, in step with the output or not."""
    for cols, start, pad in ((1, 0, 0), (15, 1, 0), (257, 0, 0), (1000, 3, 1), (4099, 1, 0), (20_001, 0, 0)):
        memory = randn(3 * (cols + pad) + 8, dtype=dtype).cuda()
        x = memory[start:].as_strided((3, cols), (cols + pad, 1))
        y = torch.empty(3, cols, dtype=x.dtype, device="cuda")
        for plan in launches(x, y):
            with failures.case(f"{cols} columns, start {start}, {plan}"):
                verify_plan(plan, x, y)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
def test_forced_launches_see_infinities_and_nan(failures):
    x = randn(6, 5000).cuda()
    x[0, 17], x[1, -1], x[2], x[3, 1:], x[4, 2500:] = NAN, torch.inf, -torch.inf, -torch.inf, -torch.inf
    y = torch.empty_like(x)
    for op in OPS:
        for plan in launches(x, y)[:: 1 if op == "softmax" else 5]:
            with failures.case(f"{op}, {plan}"):
                verify_plan(plan, x, y, op)


@pytest.mark.gpu
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("shared_bytes", [48 * 1024 - 256, 48 * 1024 - 16, 48 * 1024, 48 * 1024 + 16])
def test_dynamic_shared_memory_around_what_needs_no_opting_in(shared_bytes):
    """The kernel's own variables count too."""
    x = randn(2, 40_000).cuda()
    y = torch.empty_like(x)
    for threads in (64, 256):
        plan = replace(
            cuda_fused.plan(problem_of(x, y), DEVICES[90]),
            vectors=4,
            threads=threads,
            parts=1,
            cooperative=False,
            shared_vectors=shared_bytes // 16 // threads,
            streamed=True,
        )
        verify_plan(plan, x, y)
