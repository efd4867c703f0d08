"""The ``numpy`` backend's ``softmax_topk``: order, ties, what its blocks and tiles could get wrong."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_numpy_blocked import EPS, as_float32, bfloat16_bits, normal, permuted

from minikernel.backends import numpy_topk
from minikernel.backends.numpy_blocked import prepare
from minikernel.backends.numpy_topk import TopK
from minikernel.problem import MOST_K, Problem

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def make_problem(x, k, dtype=None, out_dtype=None):
    dtype = dtype or x.dtype.name
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return Problem("softmax_topk", "cpu", 0, dtype, out_dtype or dtype, *x.shape, strides, k=k)


def run(x, k, *, dtype=None, out_dtype=None, cpus=2):
    problem = make_problem(x, k, dtype, out_dtype)
    shape = x.shape[0], k, x.shape[2]
    out = np.full(shape, 7, "uint16" if problem.out_dtype == "bfloat16" else problem.out_dtype)
    indices = np.full(shape, -1, np.int64)
    TopK(problem, cpus)(x, out, 0, 0, indices)
    return (as_float32(out) if problem.out_dtype == "bfloat16" else out), indices


def check(x, k, *, dtype=None, out_dtype=None):
    """Compare with a stable sort, and with softmax in higher precision."""
    result, indices = run(x, k, dtype=dtype, out_dtype=out_dtype)
    dtype = dtype or x.dtype.name
    values = as_float32(np.ascontiguousarray(x)) if dtype == "bfloat16" else x
    values = values.astype(np.longdouble if dtype == "float64" else np.float64)
    peak = values.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        powers = np.exp(values - peak)
        expected = powers / powers.sum(axis=1, keepdims=True)
        size = np.where(np.isfinite(values), peak - values, 0)
    order = np.argsort(np.where(np.isfinite(peak), -values, 0), axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(indices, order)
    expected, size = (np.take_along_axis(array, order, axis=1) for array in (expected, size))
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    finite = ~np.isnan(expected)
    single, given_dtype = EPS["float64" if dtype == "float64" else "float32"], out_dtype or dtype
    rounding = EPS[given_dtype] / 2 if given_dtype in ("float16", "bfloat16") else 0
    bound = expected * (rounding + single * (8 + size)) + {"float16": 2**-24, "float64": 2**-1022}.get(
        given_dtype, 2**-126
    )
    assert (np.abs(result - expected)[finite] <= bound[finite]).all()
    return result, indices


@pytest.fixture
def small_blocks(monkeypatch):
    """Rows searched by blocks of blocks, and many tiles, without the size that takes them."""
    monkeypatch.setattr(numpy_topk, "_BLOCK", 4)
    monkeypatch.setattr(numpy_topk, "_TILE", 1 << 9)


# One row and many, rows of less than a block, of whole blocks and not, inner axes, tiles cut along either.
SHAPES = [(1, 1, 1), (7, 2, 1), (900, 50, 1), (60, 500, 1), (3, 512, 1), (2, 30011, 1), (3, 70, 40), (2, 5000, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("small", [False, True])
def test_agrees_with_the_reference(shape, axes, dtype, small, request):
    if small:
        request.getfixturevalue("small_blocks")
    values = normal(shape, "float32" if dtype == "bfloat16" else dtype)
    x = permuted(bfloat16_bits(values) if dtype == "bfloat16" else values, axes)
    for k in {1, min(2, shape[1]), min(8, shape[1]), min(MOST_K, shape[1])}:
        check(x, k, dtype=dtype)
        if dtype.endswith("16"):
            check(x, k, dtype=dtype, out_dtype="float32")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 8, MOST_K])
def test_a_vocabulary(dtype, k):
    values = normal((8, 128256, 1), "float32" if dtype == "bfloat16" else dtype)
    check(bfloat16_bits(values) if dtype == "bfloat16" else values, k, dtype=dtype)


@pytest.mark.parametrize("layout", ["reversed", "sliced", "expanded", "columns expanded", "read-only"])
def test_layouts(layout, small_blocks):
    x = normal((6, 300, 5))
    view = {
        "reversed": lambda: x[::-1, ::-1, ::-1],
        "sliced": lambda: np.repeat(x, 2, axis=1)[:, ::2],
        "expanded": lambda: np.broadcast_to(x[:1], x.shape),
        "columns expanded": lambda: np.broadcast_to(x[:, :1], x.shape),
        "read-only": x.view,
    }[layout]()
    view.flags.writeable = False
    before = view.tobytes()
    check(view, 7)
    assert view.tobytes() == before


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ties_go_to_the_lower_index(data):
    rows, cols, inner = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 200), st.integers(1, 3)))
    k = data.draw(st.integers(1, min(cols, MOST_K)))
    largest = data.draw(st.integers(0, 5))
    seed = data.draw(st.integers(0, 2**32 - 1))
    x = np.random.default_rng(seed).integers(-largest, largest, (rows, cols, inner), endpoint=True)
    x = (x * data.draw(st.sampled_from([1, 1000]))).astype(
        data.draw(st.sampled_from(["float16", "float32", "float64"]))
    )
    x[data.draw(st.sampled_from([0, -1]))] *= -1  # zeros of the other sign
    x[x == -largest] = data.draw(st.sampled_from([-largest, -np.inf]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_topk, "_BLOCK", data.draw(st.sampled_from([2, 3, 8, 512])))
        patch.setattr(numpy_topk, "_TILE", data.draw(st.sampled_from([1, 100, 1 << 17])))
        check(x, k)


@pytest.mark.parametrize("shape", [(3, 40, 1), (3, 40000, 1), (300, 500, 1)], ids=str)
@pytest.mark.parametrize("k", [1, 5, 40])
def test_equal_elements_are_in_order(shape, k):
    result, indices = run(np.zeros(shape, np.float32), k)
    np.testing.assert_allclose(result, 1 / shape[1], rtol=1e-6)
    assert (indices == np.arange(k)[:, None]).all()
    x = np.zeros(shape, np.float32)
    x[:, ::2] = -0.0
    np.testing.assert_array_equal(run(x, k)[1], indices)


@pytest.mark.parametrize("cols", [40, 40000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_softmax_are_nan_in_order(cols, dtype):
    values = normal((5, cols, 2))
    values[0, 3, 0], values[1, -1, 1], values[2, :, 0] = np.nan, np.inf, -np.inf
    values[3, :, 0], values[3, 5, 0] = -np.inf, -1000
    with np.errstate(invalid="ignore"):
        x = bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
    result, indices = check(x, 8, dtype=dtype)
    for row in ((0, 0), (1, 1), (2, 0)):
        assert np.isnan(result[row[0], :, row[1]]).all()
        assert (indices[row[0], :, row[1]] == np.arange(8)).all()
    assert np.isnan(result).sum() == 3 * 8
    assert result[3, :, 0].tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert indices[3, :, 0].tolist() == [5, 0, 1, 2, 3, 4, 6, 7]


@pytest.mark.parametrize("cols", [20, 40000])
def test_what_underflows_is_still_in_order(cols):
    x = np.full((2, cols, 1), -3e38, np.float32)
    x[:, 7:12, 0] = 1e30, -2e38, -1e38, -2e38, 1e20
    result, indices = run(x, 7)
    assert result[0, :, 0].tolist() == [1, 0, 0, 0, 0, 0, 0]
    assert indices[0, :, 0].tolist() == [7, 11, 9, 8, 10, 0, 1]


@pytest.mark.parametrize("shape", [(64, 5000, 1), (5000, 64, 1), (4, 900, 100)], ids=str)
def test_threads_change_no_bit(shape):
    x = normal(shape)
    one, *more = (run(x, 5, cpus=cpus) for cpus in (1, 2, 5))
    for other in more:
        np.testing.assert_array_equal(other, one)


def test_the_error_of_a_sum_does_not_grow_with_its_length():
    x = np.random.default_rng(7).uniform(-1, 0, (1, 3_000_000, 1)).astype(np.float32)
    result, _ = run(x, 3)
    powers = np.exp(x.astype(np.float64) - x.max())
    expected = np.sort(powers.ravel())[:-4:-1] / powers.sum()
    np.testing.assert_allclose(result.ravel(), expected, rtol=5 * EPS["float32"])


def test_prepared_kernels_run_it():
    x = normal((5, 90, 1))
    kernel = prepare(make_problem(x, 4))
    out, indices = np.empty((5, 4, 1), np.float32), np.empty((5, 4, 1), np.int64)
    with np.errstate(all="raise"):
        kernel.run(x, out, 0, 0, indices)
    np.testing.assert_array_equal((out, indices), run(x, 4))
    assert kernel.scratch == 0
