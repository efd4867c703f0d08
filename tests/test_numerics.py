"""Hard numbers: infinities, NaN, large and small magnitudes, long sums, on every backend."""

import pytest
import torch
from cases import DTYPES, INF, NAN, OPS, mismatch, randn, reference, torch_dtype

INFINITE = {
    "nothing but -inf": [[-INF] * 8] * 2,
    "+inf in one row": [[0.0, INF], [0.0, 1.0]],
    "+inf, NaN, NaN beside -inf": [
        [INF, 0.0],
        [NAN, 0.0],
        [NAN, -INF],
        [-INF, -INF],
        [INF, -INF],
        [INF, INF],
    ],
    "-inf among numbers": [[-INF, 0.0, 1.0], [0.0, -INF, -INF]],
    "NaN first, in the middle, last": [[NAN, 0.0, 1.0], [0.0, NAN, 1.0], [0.0, 1.0, NAN], [0.0, 1.0, 2.0]],
}


@pytest.mark.parametrize("op", OPS)
def test_infinities_and_nan(route, op, failures):
    for dtype in route.dtypes:
        for name, values in INFINITE.items():
            with failures.case(f"{name}, {dtype}"):
                route.verify(route.array(values, dtype), op=op, poison=True)
            with failures.case(f"{name}, {dtype}, columns"):
                route.verify(route.array(torch.tensor(values).T.contiguous(), dtype), dim=0, op=op, poison=True)


def test_a_bad_row_spoils_no_other(torch_route, failures):
    for cols in (5, 600, 3000, 12000):
        for bad in (NAN, INF, -INF):
            x = randn(7, cols)
            x[2] = -INF if bad == -INF else x[2]
            x[2, cols // 2] = bad
            x[5, -1] = NAN
            with failures.case(f"{cols} columns, {bad}"):
                y = torch_route.kind.tensor(torch_route.verify(torch_route.array(x), poison=True))
                assert y.isnan().any(-1).tolist() == [row in (2, 5) for row in range(7)]
                assert y.isnan().all(-1).tolist() == [row in (2, 5) for row in range(7)]


def test_a_part_that_saw_only_minus_infinity_contributes_nothing(torch_route, failures):
    """The whole of a warp, a block or a piece of the row can be masked."""
    for dtype in DTYPES:
        for cols in (40, 300, 5000, 100_000):
            if torch_route.passes_over(1, cols, dtype):
                continue
            for k in (0, cols // 2, cols - 1):
                x = torch.full((1, cols), -INF)
                x[0, k] = 10
                with failures.case(f"{dtype}, {cols} columns, k = {k}"):
                    y = torch_route(x, dtype=dtype)
                    assert y[0, k] == 1
                    assert y.sum() == 1
                    log = torch_route(x, op="log_softmax", dtype=dtype)
                    assert log[0, k] == 0
                    assert log.isneginf().sum() == cols - 1


def test_half_a_row_masked(torch_route, failures):
    for cols in (64, 1000, 9000, 60000):
        for mask in ("left", "right", "all but a few"):
            x = randn(3, cols)
            kept = {
                "left": slice(cols // 2, None),
                "right": slice(0, cols // 2),
                "all but a few": slice(7, 12),
            }[mask]
            masked = torch.full_like(x, -INF)
            masked[:, kept] = x[:, kept]
            if not torch_route.passes_over(3, cols):
                with failures.case(f"{cols} columns, {mask}"):
                    torch_route.verify(torch_route.array(masked), poison=True)


@pytest.mark.parametrize(
    ("dtype", "cols"), [("float16", 4096), ("bfloat16", 512), ("float16", 2**17), ("bfloat16", 2**17)]
)
def test_sums_are_kept_in_float32(torch_route, dtype, cols):
    if reasons := torch_route.reasons(1, cols, dtype):
        pytest.skip("; ".join(reasons))
    assert (torch_route(torch.zeros(1, cols), dtype=dtype) == 1 / cols).all()


@pytest.mark.parametrize("op", OPS)
def test_large_and_small_magnitudes(torch_route, op, failures):
    """The max is subtracted, so a row's level doesn't matter, even at the ends of the dtype's range."""
    for dtype in DTYPES:
        largest = torch.full((3, 50), torch.finfo(torch_dtype(dtype)).max, dtype=torch.float64)
        zeros = torch.zeros_like(largest)
        rows = {
            "at -1000": torch.full((4, 512), -1e3),
            "at the lowest": -largest,
            "at the highest": largest,
            "all of the range": torch.cat([-largest, zeros, largest], 1),
            "the mask of a model": torch.cat([randn(3, 20).double(), -largest], 1),
            "wide": randn(16, 1000, scale=30.0),
            "narrow": randn(16, 1000, scale=1e-3),
            "large level": randn(16, 1000) + 1000,
            "zeros": torch.zeros(3, 77),
        }
        for name, x in rows.items():
            with failures.case(f"{name}, {dtype}"):
                torch_route.verify(torch_route.array(x, dtype), op=op, poison=True)


def test_every_magnitude_below_the_max(torch_route):
    """Exponentials of every size, down to where they vanish, are accurate to float32."""
    x = torch.linspace(-104.0, 0.0, 5000)[None]
    torch_route.verify(torch_route.array(x))
    torch_route.verify(torch_route.array(x.double()))
    torch_route.verify(torch_route.array(x.half()), dtype="float32")
    torch_route.verify(torch_route.array(x.bfloat16()), dtype="float32")


def test_subnormal_results_are_right_or_zero(route):
    y = route([0.0, -88.0, -100.0]).double()
    assert y[0] == 1
    for actual, expected in zip(y[1:].tolist(), (6.0546e-39, 3.7835e-44), strict=True):
        assert actual == 0 or actual == pytest.approx(expected, rel=0.05)


def test_a_square_input_is_reduced_over_the_right_axis(route):
    x = torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    for dim in (0, 1):
        torch.testing.assert_close(route(x, dim), reference(x, dim).float())
        torch.testing.assert_close(route(x, dim).sum(dim), torch.ones(2))


def test_float64_is_float64_all_the_way(route):
    y = route([2.0**24, 2.0**24 + 0.5], dtype="float64")
    torch.testing.assert_close(y, torch.tensor([0.37754066879814546, 0.6224593312018546], dtype=torch.float64))
    x = route.array(randn(50, 300, dtype="float64", scale=5.0))
    route.verify(x)
    route.verify(x, op="log_softmax")


@pytest.mark.parametrize(("rows", "dim"), [(3, 1), (3, 0), (64, 0)])
def test_rounding_errors_of_long_sums_do_not_pile_up(torch_route, rows, dim):
    """All terms but one are equal, so that every addition to a plain sum would round the same way."""
    cols = 2**20 if dim == 1 or torch_route.kind.on_gpu else 2**18
    cols = cols if not torch_route.reasons(rows, cols) else 50_000
    if torch_route.backend == "cuda-naive":
        cols = 2**16  # one thread a row takes its time
    x = torch.full((rows, cols), -0.7)
    x[:, cols // 3] = 0
    x = x.T.contiguous() if dim == 0 else x
    torch_route.verify(torch_route.array(x), dim)


def test_a_row_of_sixteen_million(torch_route):
    if torch_route.backend in ("cuda-naive", "numpy"):
        pytest.skip("takes minutes in one thread")
    x = randn(1, 2**24 + 3)
    if reasons := torch_route.reasons(*x.shape):
        pytest.skip("; ".join(reasons))
    torch_route.verify(torch_route.array(x), poison=True)


def test_mismatch_sees_what_it_should():
    """The judge of all these tests can say no."""
    x = randn(4, 10)
    right = reference(x)
    assert mismatch(right.float(), right) is None
    assert "0.5" in (mismatch(torch.full_like(x, 0.5), right) or "")
    for spoil in (NAN, INF, 0.0):
        wrong = right.float()
        wrong[2, 3] = spoil
        assert "(2, 3)" in (mismatch(wrong, right) or "")
    assert mismatch((right * (1 + 3e-5)).float(), right)
    assert mismatch((right * (1 + 2**-8)).half(), right)
    assert mismatch(right.float()[:2], right)
