"""What holds for every softmax, on arrays that hypothesis makes up."""

import pytest
import torch
from cases import DTYPES, LENGTHS, OPS, TOLERANCES, dtype_name, mismatch, reference, torch_dtype
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minikernel

quickly = settings(
    max_examples=20 if torch.cuda.is_available() else 60,  # there, new shapes mean new kernels
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def tensors(draw, dtypes=DTYPES, largest=100.0):
    """Rows of a few levels and spreads, with or without some -inf; values from a seed, so that they shrink well."""
    dtype = torch_dtype(draw(st.sampled_from(dtypes)))
    rows, cols = draw(st.sampled_from((1, 2, 3, 7))), draw(st.sampled_from(LENGTHS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    spread = draw(st.sampled_from((0.0, 0.01, 1.0, 10.0)))
    level = draw(st.floats(-largest, largest, width=32))
    x = torch.randn(rows, cols, generator=generator) * spread + level
    if draw(st.booleans()):
        masked = torch.rand(rows, cols, generator=generator) < 0.3
        masked[:, draw(st.integers(0, cols - 1))] = False
        x[masked] = -torch.inf
    return x.to(dtype)


def slack(y: torch.Tensor) -> float:
    return TOLERANCES[dtype_name(y.dtype)].relative


@quickly
@given(x=tensors(), op=st.sampled_from(OPS), dim=st.sampled_from((0, 1)))
def test_it_is_what_it_says(torch_route, x, op, dim):
    x = torch_route.array(x)
    y = torch_route.run(x, dim, op)
    wrong = mismatch(y, reference(x, dim, op), op)
    assert wrong is None, wrong


@quickly
@given(x=tensors())
def test_rows_sum_to_1(torch_route, x):
    y = torch_route.run(torch_route.array(x)).double()
    assert (y >= 0).all()
    assert (y <= 1).all()
    step = torch.finfo(x.dtype).eps
    assert ((y.sum(-1) - 1).abs() <= step * 4 + x.shape[1] * torch.finfo(x.dtype).tiny * step).all()


@quickly
@given(x=tensors(("float32", "float64"), largest=8.0), shift=st.integers(-512, 512))
def test_a_shift_changes_nothing(torch_route, x, shift):
    x = (x * 64).round() / 64  # so that adding is exact
    y, shifted = (torch_route.run(torch_route.array(values)) for values in (x, x + shift))
    torch.testing.assert_close(shifted, y, rtol=2 * slack(y), atol=2**-126)


@quickly
@given(x=tensors(), seed=st.integers(0, 2**16))
def test_a_permutation_of_columns_is_kept(torch_route, x, seed):
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(seed))
    y = torch_route.run(torch_route.array(x)).cpu()
    permuted = torch_route.run(torch_route.array(x[:, order])).cpu()
    wrong = mismatch(permuted, y[:, order].double())
    assert wrong is None, wrong


@quickly
@given(x=tensors(("float32", "float64")))
def test_log_softmax_is_its_logarithm(torch_route, x):
    x = torch_route.array(x)
    log = torch_route.run(x, op="log_softmax")
    seen = torch_route.run(x).double() > 2**-100
    torch.testing.assert_close(
        log.double().exp()[seen],
        torch_route.run(x).double()[seen],
        rtol=1e-4 if x.dtype == torch.float32 else 1e-10,
        atol=0,
    )


@quickly
@given(x=tensors(), dim=st.sampled_from((0, 1)), op=st.sampled_from(OPS))
def test_in_place_is_the_same_to_the_bit(torch_route, x, dim, op):
    x = torch_route.array(x)
    apart = torch_route.run(x, dim, op)
    assert torch_route.run(x, dim, op, out=x) is x
    torch.testing.assert_close(x, apart, rtol=0, atol=0, equal_nan=True)


@quickly
@given(x=tensors(), scale=st.sampled_from((0.5, 2.0)))
def test_order_is_kept(torch_route, x, scale):
    """The larger of two elements has no smaller probability; Triton's exp2 is monotonic but for the last digit."""
    x = torch_route.array(x) * scale
    y = torch_route.run(x)
    order = x.sort(-1).indices
    last_digit = y.max() * 2**-22 if torch_route.backend == "triton-fused" else 0
    assert (y.gather(-1, order).diff(dim=-1) >= -last_digit).all()


@pytest.mark.gpu
@quickly
@given(x=tensors(), op=st.sampled_from(OPS), dim=st.sampled_from((0, 1)))
def test_all_backends_agree(x, op, dim):
    available = [name for name, info in minikernel.list_backends().items() if info.available]
    assert {"cuda-fused", "cuda-smem", "cuda-naive", "numpy"} <= set(available)
    function = getattr(minikernel, op)
    results = {name: function(x.cuda(), dim, backend=name).cpu() for name in available}
    expected = reference(x, dim, op)
    for name, y in results.items():
        wrong = mismatch(y, expected, op)
        assert wrong is None, f"{name}: {wrong}"
