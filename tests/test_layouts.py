"""Any axis, any strides, any alignment, any number of rows; the input is only read, the output contiguous."""

import itertools

import numpy as np
import pytest
import torch
from cases import OPS, mismatch, randn, reference


@pytest.mark.parametrize("op", OPS)
def test_every_axis_of_every_permutation(route, op, failures):
    for shape in ((3, 4, 5), (2, 3, 4, 5), (1, 17, 33), (40, 1, 9)):
        x = route.array(randn(*shape))
        for axes in itertools.permutations(range(len(shape))):
            for dim in range(-len(shape), len(shape)):
                with failures.case(f"{shape} permuted {axes}, dim {dim}"):
                    route.verify(route.kind.permute(x, axes), dim, op, poison=dim < 0)


def test_axes_of_awkward_extents(torch_route, failures):
    """Rows that lie side by side in the input, in the output, in both and in neither."""
    x = torch_route.array(randn(5, 67, 301))
    for dtype in torch_route.dtypes:
        values = torch_route.array(x.cpu(), dtype)
        for axes in ((0, 1, 2), (0, 2, 1), (2, 1, 0), (1, 0, 2)):
            for dim in range(3):
                with failures.case(f"{dtype}, permuted {axes}, dim {dim}"):
                    torch_route.verify(torch_route.kind.permute(values, axes), dim, poison=True)


def test_tall_wide_and_tiny_with_columns_apart(torch_route, failures):
    for shape in ((1, 1), (2, 1), (1, 2), (1000, 3), (3, 1000), (4097, 65), (65, 4097), (257, 2), (33, 513)):
        x = torch_route.array(randn(*shape))
        with failures.case(f"{shape}, dim 0"):
            torch_route.verify(x, 0, poison=True)
        with failures.case(f"{shape}, transposed"):
            torch_route.verify(x.T, -1, poison=True)
        with failures.case(f"{shape}, transposed, dim 0"):
            torch_route.verify(x.T, 0, poison=True)


def test_slices(route, failures):
    x = route.array(randn(6, 40, 50))
    slices = {
        "every second row": np.s_[:, ::2],
        "every third column": np.s_[:, :, ::3],
        "columns from 1": np.s_[..., 1:],
        "a window": np.s_[1:5, 3:30, 7:31],
        "one plane": np.s_[2],
        "one column": np.s_[..., 3],
        "one element wide": np.s_[:, 4:5, :],
        "outer step": np.s_[::5],
        "all three": np.s_[::2, ::3, ::4],
    }
    for name, index in slices.items():
        part = x[index] if hasattr(x, "ndim") else type(x)(x.array[index])
        for dim in (-1, 0, 1):
            with failures.case(f"{name}, dim {dim}"):
                route.verify(part, dim)


def test_expanded(route, failures):
    for given, shape in (
        ((3, 1, 5), (3, 4, 5)),
        ((1, 7), (6, 7)),
        ((6, 1), (6, 700)),
        ((1, 1), (4, 9)),
        ((1,), (3000,)),
    ):
        x = route.kind.expand(route.array(randn(*given)), shape)
        for dim in range(len(shape)):
            with failures.case(f"{given} to {shape}, dim {dim}"):
                route.verify(x, dim)


@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_negative_strides(route, axis, failures):
    if route.kind.name.startswith("torch"):
        pytest.skip("PyTorch has no negative strides")
    for shape in ((3, 4), (37, 501), (5, 2050)):
        values = randn(*shape)
        plain = route.array(values)
        x = type(plain)(np.flip(plain.array, axis)) if route.kind.name == "dlpack" else _flip(route, plain, axis)
        for dim in (0, 1):
            with failures.case(f"{shape}, dim {dim}"):
                y = route.verify(x, dim)
                expected = reference(values.flip(axis if isinstance(axis, tuple) else (axis,)), dim)
                assert mismatch(route.kind.tensor(y).cpu(), expected) is None


def _flip(route, x, axis):
    return (route.kind.cupy if route.kind.name == "cupy" else np).flip(x, axis)


def test_lazy_negation_is_seen(torch_route):
    """The imaginary part of a conjugate is a view whose signs PyTorch only pretends to have changed."""
    z = torch.complex(randn(5, 40), randn(5, 40, seed=7)).to(torch_route.kind.device)
    x = z.conj().imag
    assert x.is_neg()
    for _ in range(2):
        torch_route.verify(z.imag)  # the same strides: what was remembered of it must not be used
        torch_route.verify(x)


def test_every_alignment(torch_route, failures):
    """A row may start at any element, whatever the width of an access."""
    for dtype in torch_route.dtypes:
        for cols in (9, 64, 1031, 4100, 20_000):
            if torch_route.passes_over(3, 2 * cols, dtype):
                continue
            memory = torch_route.array(randn(3 * (cols + 9) + 32), dtype)
            for start in range(9):
                for pad in (0, 1, 8):
                    with failures.case(f"{dtype}, {cols} columns, start {start}, pad {pad}"):
                        x = memory[start:].as_strided((3, cols), (cols + pad, 1))
                        torch_route.verify(x, poison=True)


def test_every_alignment_of_the_output(torch_route, failures):
    for dtype, out_dtype in [
        *((d, d) for d in torch_route.dtypes),
        ("float16", "float32"),
        ("bfloat16", "float32"),
    ]:
        for cols in (64, 1031, 4096, 20_000):
            if torch_route.passes_over(2, 2 * cols, dtype):
                continue
            x = torch_route.array(randn(2 * cols + 16), dtype)
            memory = torch_route.kind.poisoned((2 * cols + 16,), out_dtype)
            for start in range(9):
                for x_start in (0, 1, start):
                    with failures.case(f"{dtype} to {out_dtype}, {cols} columns, x at {x_start}, out at {start}"):
                        memory.fill_(torch.nan)
                        values = x[x_start : x_start + 2 * cols].view(2, cols)
                        out = memory[start : start + 2 * cols].view(2, cols)
                        y = torch_route.run(values, out=out, dtype=out_dtype)
                        assert y is out
                        wrong = mismatch(out, reference(values))
                        assert wrong is None, wrong
                        outside = torch.cat([memory[:start], memory[start + 2 * cols :]])
                        assert outside.isnan().all(), "elements outside of out were written"


def test_half_rows_from_a_slice(torch_route, failures):
    x = torch_route.array(randn(9, 1031), "float16")
    for k in range(1, 8):
        with failures.case(f"k = {k}"):
            torch_route.verify(x[2:, k:], poison=True)


def test_the_result_can_be_viewed(route):
    for x in (route.array(randn(32, 32)), route.kind.permute(route.array(randn(32, 32)), (1, 0))):
        y = route.run(x)
        assert route.kind.is_contiguous(y)
        if route.kind.name.startswith("torch"):
            y.view(-1)


@pytest.mark.parametrize("op", OPS)
def test_the_input_is_only_read(route, op, failures):
    for shape, dim in (((8, 256), -1), ((8, 256), 0), ((3, 5, 7), 1), ((2, 9000), 1)):
        for dtype in (None, "float64"):
            x = route.array(randn(*shape))
            before = route.kind.tensor(x).clone()
            with failures.case(f"{shape}, dim {dim}, dtype {dtype}"):
                route.run(x, dim, op, dtype=dtype)
                assert torch.equal(route.kind.tensor(x), before)


def test_a_result_is_no_view_of_the_input_or_another_result(route):
    x = route.array(randn(4, 8))
    first = route.run(x)
    kept = route.kind.tensor(first).clone()
    second = route.run(x)
    third = route.run(route.array(randn(4, 8, seed=1)))
    assert first is not second
    assert first is not third
    assert torch.equal(route.kind.tensor(first), kept)


@pytest.mark.parametrize("shape", [(1, 2, 65536), (65536, 4), (70_000, 1), (1, 1, 70_000, 3)])
def test_no_limit_of_65535(torch_route, shape, failures):
    x = torch_route.array(randn(*shape))
    for dim in (1, -1):
        if not torch_route.reasons(1, x.shape[dim]):
            with failures.case(f"dim {dim}"):
                torch_route.verify(x, dim, poison=True)


@pytest.mark.gpu
class TestOffsets:
    """More elements than 32 bits can count; the memory is given back before the next test."""

    @pytest.fixture(autouse=True)
    def _room(self):
        free, _ = torch.cuda.mem_get_info()
        if free < 40 * 2**30:
            pytest.skip(f"needs 40 GiB of free GPU memory; there are {free / 2**30:.0f}")
        yield
        torch.cuda.empty_cache()

    def test_past_two_to_the_31_elements(self, torch_route):
        x = torch.zeros(2**22 + 8, 1024, dtype=torch.half, device="cuda")
        x[-1, 7] = 1
        tail = torch_route.run(x)[-8:]
        assert mismatch(tail, reference(x[-8:])) is None

    def test_past_two_to_the_31_rows(self, torch_route):
        assert bool((torch_route.run(torch.zeros(2**31 + 8, 1, dtype=torch.half, device="cuda")) == 1).all())

    def test_past_two_to_the_31_elements_between_columns(self, torch_route):
        x = torch.zeros(3, 2**30 + 4, dtype=torch.half, device="cuda")
        x[2, -8:] = 1
        y = torch_route.run(x, 0)
        assert mismatch(y[:, -8:], reference(x[:, -8:], 0)) is None

    def test_a_row_of_two_to_the_31_elements(self):
        from minikernel import softmax

        x = torch.empty_strided((2**31 - 1,), (0,), dtype=torch.half, device="cuda").fill_(1)
        y = softmax(x, dtype="float32")
        for part in (y[:1000], y[2**30 : 2**30 + 1000], y[-1000:]):
            assert mismatch(part, torch.full_like(part, 1 / (2**31 - 1)).double()) is None


@pytest.mark.parametrize("shape", [(64, 32000), (32, 64), (300, 7), (2, 200_000)])
@pytest.mark.parametrize("dim", [-1, 0])
def test_the_same_bits_every_time(torch_route, shape, dim):
    serial = torch_route.backend in ("cuda-naive", "cuda-smem", "numpy")
    if serial and shape == (2, 200_000):
        pytest.skip("a serial reduction has no order that could change")
    x = torch_route.array(randn(*shape))
    first = torch_route.run(x, dim)
    copies = [torch_route.run(x, dim) for _ in range(5 if serial else 200)]
    assert all(torch.equal(first, y) for y in copies)
    other = torch_route.run(x.clone(), dim)
    assert torch.equal(first, other)


def test_expanded_and_negative_strides_are_not_copied(route):
    """What one stride an axis can describe is read where it lies; the rest is copied, and explain says so."""
    from minikernel import explain

    x = route.array(randn(4, 5, 6, 7))
    seen = route.kind.permute(x, (3, 0, 1, 2))
    copied = route.kind.permute(x, (0, 2, 1, 3))
    assert "copied first" not in explain(seen, dim=0, backend=route.backend).reason
    assert "copied first" in explain(copied, dim=3, backend=route.backend).reason
    route.verify(copied, 3)
