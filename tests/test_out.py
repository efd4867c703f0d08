"""``out=``: filled where it fits, in place where it is the input, a clear error everywhere else."""

import re

import numpy as np
import pytest
import torch
from cases import GPU_BACKENDS, NAN, OPS, mismatch, randn, reference

from minikernel import explain, layout, softmax


@pytest.fixture
def fits(route):
    if not route.kind.takes_out:
        pytest.skip("an object with nothing but DLPack can't be written to")
    return route


@pytest.mark.parametrize("op", OPS)
def test_it_is_filled_and_returned(fits, op, failures):
    for dtype in fits.dtypes:
        for shape, dim in (((5, 600), -1), ((5, 600), 0), ((2, 3, 4), 1), ((), 0), ((2, 9000), -1)):
            with failures.case(f"{dtype}, {shape}, dim {dim}"):
                x = fits.array(randn(*shape), dtype)
                out = fits.kind.poisoned(shape, dtype)
                for _ in range(2):
                    assert fits.run(x, dim, op, out=out) is out
                    assert mismatch(fits.kind.tensor(out), reference(fits.kind.tensor(x), dim, op), op) is None


def test_in_place(fits, failures):
    for dtype in fits.dtypes:
        for shape, dim in (
            ((5, 600), -1), ((5, 600), 0), ((33, 65), 0), ((2, 3, 4), 1), ((7,), 0), ((3, 20_000), -1),
            ((2, 200_000), -1),
        ):  # fmt: skip
            if dim == -1 and fits.passes_over(1, shape[-1], dtype):
                continue
            with failures.case(f"{dtype}, {shape}, dim {dim}"):
                x = fits.array(randn(*shape), dtype)
                expected = reference(fits.kind.tensor(x).clone(), dim)
                apart = fits.kind.tensor(fits.run(x, dim)).clone()
                assert fits.run(x, dim, out=x) is x
                assert mismatch(fits.kind.tensor(x), expected) is None
                assert torch.equal(fits.kind.tensor(x), apart), "in place and out of place differ"


def test_in_place_where_the_strides_are_odd(fits, failures):
    for dim in (0, 1):
        whole = fits.array(randn(40, 30))
        for name, x in (("transposed", fits.kind.permute(whole, (1, 0))), ("sliced", whole[::2, 1::3])):
            expected = reference(fits.kind.tensor(x).clone(), dim)
            with failures.case(f"{name}, dim {dim}"):
                assert fits.run(x, dim, out=x) is x
                assert mismatch(fits.kind.tensor(x), expected) is None


def test_the_same_memory_through_another_object_is_in_place(fits):
    x = fits.array(randn(6, 300))
    expected = reference(fits.kind.tensor(x).clone())
    fits.run(x, out=x[:])
    assert mismatch(fits.kind.tensor(x), expected) is None


def test_a_strided_one_is_filled_and_nothing_beside_it(fits, failures):
    x = fits.array(randn(8, 30))
    for name, shape, index in (
        ("every second column", (8, 60), np.s_[:, ::2]),
        ("a window", (10, 40), np.s_[1:9, 5:35]),
        ("every third row", (24, 30), np.s_[::3]),
    ):
        for dim in (0, 1):
            memory = fits.kind.poisoned(shape, "float32")
            out = memory[index]
            with failures.case(f"{name}, dim {dim}"):
                assert fits.run(x, dim, out=out) is out
                assert mismatch(fits.kind.tensor(out), reference(fits.kind.tensor(x), dim)) is None
                assert int((~fits.kind.tensor(memory).isnan()).sum()) == 8 * 30
    out = fits.kind.permute(fits.kind.poisoned((30, 8), "float32"), (1, 0))
    fits.run(x, out=out)
    assert mismatch(fits.kind.tensor(out), reference(fits.kind.tensor(x))) is None


def test_a_wrong_shape(fits):
    x = fits.array(randn(4, 6))
    for shape in ((4, 7), (6, 4), (4,), (1, 4, 6), (24,), (0, 6)):
        with pytest.raises(ValueError, match=r"\(4, 6\)"):
            fits.run(x, out=fits.kind.poisoned(shape, "float32"))


def test_a_wrong_dtype(fits):
    x = fits.array(randn(4, 6))
    for dtype in {"float16", "float64"} & set(fits.dtypes):
        out = fits.kind.poisoned((4, 6), dtype)
        with pytest.raises(TypeError, match=rf"float32.*{dtype}"):
            fits.run(x, out=out)
        fits.run(x, out=out, dtype=dtype)  # what dtype= asks for is right
    with pytest.raises(TypeError, match="float64"):
        fits.run(x, out=fits.kind.poisoned((4, 6), "float32"), dtype="float64")


def test_half_to_float32_into_out(fits, failures):
    for dtype in {"float16", "bfloat16"} & set(fits.dtypes):
        for cols in (5, 600, 5000):
            with failures.case(f"{dtype}, {cols} columns"):
                x = fits.array(randn(3, cols), dtype)
                out = fits.kind.poisoned((3, cols), "float32")
                fits.run(x, out=out, dtype="float32")
                assert mismatch(fits.kind.tensor(out), reference(fits.kind.tensor(x))) is None


def test_another_kind_of_array(fits):
    x = fits.array(randn(4, 6))
    other = np.empty((4, 6), np.float32) if not isinstance(x, np.ndarray) else torch.empty(4, 6)
    with pytest.raises(TypeError, match="same kind of array"):
        fits.run(x, out=other)
    with pytest.raises(TypeError, match=r"^out must be .*not list"):
        fits.run(x, out=[0.0] * 6)


def test_one_that_has_only_dlpack_can_not_be_written_to(route):
    if route.kind.takes_out:
        pytest.skip("this kind of array takes out=")
    for call in (route.run, explain):
        with pytest.raises(TypeError, match="out= works for NumPy, PyTorch and CuPy arrays"):
            call(route.array(randn(4, 6)), out=route.array(randn(4, 6)))
    with pytest.raises(TypeError, match=r"out must be the same kind of array.*not numpy\.ndarray"):
        route.run(route.array(randn(4, 6)), out=np.empty((4, 6), np.float32))


def test_overlapping_in_part(fits, failures):
    def assert_refused(name, memory, x, out):
        before = fits.kind.tensor(memory).clone()
        with failures.case(name):
            for _ in range(2):
                with pytest.raises(ValueError, match="overlap"):
                    fits.run(x, out=out)
            assert torch.equal(fits.kind.tensor(memory), before), "something was written"

    memory = fits.array(randn(100))
    assert_refused("shifted by an element", memory, memory[:60].reshape(6, 10), memory[1:61].reshape(6, 10))
    assert_refused("shifted by a row", memory, memory[:60].reshape(6, 10), memory[10:70].reshape(6, 10))
    assert_refused("the last with the first", memory, memory[:50].reshape(5, 10), memory[49:99].reshape(5, 10))
    square = fits.array(randn(10, 10))
    assert_refused("transposed", square, square, fits.kind.permute(square, (1, 0)))
    wide = fits.array(randn(6, 21))
    assert_refused("crossed", wide, wide[:, 0:20:2], wide[:, 10:20])


def test_interleaved_without_overlapping(fits):
    memory = fits.array(randn(6, 20))
    x, out = memory[:, ::2], memory[:, 1::2]
    expected = reference(fits.kind.tensor(x).clone())
    fits.run(x, out=out)
    assert mismatch(fits.kind.tensor(out), expected) is None


def test_what_was_remembered_of_one_pair_is_checked_for_the_next(fits):
    """Overlap is a matter of addresses, which a cached decision doesn't know."""
    memory = fits.array(randn(4, 32))
    x = memory[:2]
    fits.run(x, out=memory[2:])
    expected = reference(fits.kind.tensor(x).clone())
    fits.run(x, out=x)
    assert mismatch(fits.kind.tensor(x), expected) is None
    with pytest.raises(ValueError, match="overlap"):
        fits.run(memory[:2], out=memory[1:3])


def test_the_same_memory_in_another_dtype_is_not_the_input(fits):
    """Reading halves where float32 is being written."""
    if fits.kind.name == "cupy":
        pytest.skip("cupy's view takes other arguments")
    memory = fits.array(randn(4, 8))
    halves = memory.view(fits.kind.type_of("float16"))[:, :8]
    with pytest.raises(ValueError, match="overlap"):
        fits.run(halves, out=memory, dtype="float32")
    integers = memory.view(torch.int32 if fits.kind.name.startswith("torch") else np.int32)
    with pytest.raises(ValueError, match="overlap"):
        fits.run(integers[:3], out=memory[1:], dtype="float32")


def test_arrays_far_apart_need_no_exact_test_of_overlap(fits, monkeypatch):
    def overlap(*arguments):
        raise AssertionError("asked")

    monkeypatch.setattr(layout, "overlap", overlap)
    memory = fits.array(randn(10, 10))
    fits.run(memory[:5], out=memory[5:])
    fits.run(memory[5:], out=memory[:5])
    fits.run(memory[:5], out=memory[:5])
    with pytest.raises(AssertionError, match="asked"):
        fits.run(memory[:5], out=memory[4:9])


def test_expanded_out(fits):
    if fits.kind.name == "numpy":
        memory = np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (4, 6), (0, 4))
    else:
        memory = fits.kind.expand(fits.array(randn(1, 6)), (4, 6))
    with pytest.raises(ValueError, match="expanded"):
        fits.run(fits.array(randn(4, 6)), out=memory)


def test_out_that_no_kernel_can_write_to_as_it_lies():
    x = randn(6, 30)
    record = np.zeros((6, 30), [("flag", np.uint8), ("value", np.float32)])
    unaligned = np.zeros(6 * 30 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(6, 30)
    for out in (record["value"], unaligned):
        for dim in (0, 1):
            assert softmax(x.numpy(), dim, out=out) is out
            assert mismatch(torch.from_numpy(out.copy()), reference(x, dim)) is None
            assert "temporary" in explain(x.numpy(), dim, out=out).reason
        out[...] = x.numpy()
        softmax(out, out=out)
        assert mismatch(torch.from_numpy(out.copy()), reference(x)) is None
    assert not record["flag"].any()


def test_subclasses_of_numpy_arrays_as_out():
    out = np.matrix(np.zeros((2, 3), np.float32), copy=False)
    softmax(np.zeros((2, 3), np.float32), out=out)
    np.testing.assert_allclose(out, 1 / 3)
    with pytest.raises(TypeError, match="mask"):
        softmax(np.zeros((2, 3)), out=np.ma.masked_array(np.zeros((2, 3)), mask=True))


def test_explain_checks_out_as_softmax_does(fits):
    x = fits.array(randn(4, 6))
    other = np.empty((4, 6), np.float32) if not isinstance(x, np.ndarray) else torch.empty(4, 6)
    for out in (other, [0.0], fits.kind.poisoned((4, 7), "float32"), fits.kind.poisoned((4, 6), "float64")):
        with pytest.raises((TypeError, ValueError)) as wanted:
            fits.run(x, out=out)
        with pytest.raises(wanted.type, match=re.escape(str(wanted.value))):
            explain(x, backend=fits.backend, out=out)
    with pytest.raises(ValueError, match="overlap"):
        explain(x[:3], backend=fits.backend, out=x[1:])
    strided = fits.kind.poisoned((4, 12), "float32")[:, ::2]
    assert "temporary" in explain(x, backend=fits.backend, out=strided).reason
    assert "temporary" not in explain(x, backend=fits.backend, out=x).reason


def test_empty_out(fits):
    out = fits.kind.poisoned((0, 5), "float32")
    assert fits.run(fits.array(randn(0, 5)), out=out) is out


def test_read_only_out():
    x, out = np.zeros((2, 3), np.float32), np.full((2, 3), NAN, np.float32)
    softmax(x, out=out)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"writ|read-only"):
        softmax(x, out=out)


def test_foreign_byte_order_out():
    with pytest.raises((TypeError, ValueError), match="byte order"):
        softmax(np.zeros((2, 3), np.float32), out=np.zeros((2, 3), ">f4"))


def test_gradients_are_not_lost_through_out(torch_route):
    x, out = torch_route.array(randn(2, 3)), torch_route.array(randn(2, 3))
    torch_route.run(x, out=out)
    with pytest.raises(RuntimeError, match="grad"):
        torch_route.run(x.clone().requires_grad_(), out=out)
    with pytest.raises(ValueError, match="grad"):
        torch_route.run(x, out=out.clone().requires_grad_())
    with torch.no_grad():
        torch_route.run(x.clone().requires_grad_(), out=out)
        parameter = out.clone().requires_grad_()
        torch_route.run(x, out=parameter)
        assert mismatch(parameter.detach(), reference(x)) is None


def test_backward_sees_that_what_it_needs_was_overwritten(torch_route, failures):
    w = torch_route.array(randn(4, 6)).requires_grad_()
    for name, index in (("whole", np.s_[:]), ("a window", np.s_[:, 1:4]), ("rows", np.s_[1:3])):
        for into in ("x", "out"):
            with failures.case(f"{name}, {into}"):
                a = torch_route.array(randn(4, 6))
                y = (w * a).sum()
                for _ in range(2):
                    torch_route.run(a[index] if into == "x" else a[index] + 1, out=a[index])
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    y.backward()


def test_a_fill_counts_as_pytorch_s_own_do(torch_route):
    x, out = torch_route.array(randn(2, 3)), torch_route.array(randn(2, 3))
    with torch.inference_mode():
        inside = torch_route.array(randn(2, 3))
        version = out._version
        torch_route.run(x, out=out)
        torch_route.run(x, out=inside)
    assert out._version == version + 1
    assert x._version == 0


def test_lazily_negated_out(torch_route):
    memory = torch.zeros(2, 3, dtype=torch.complex64, device=torch_route.kind.device).conj().imag
    with pytest.raises(ValueError, match="negation"):
        torch_route.run(torch_route.array(randn(2, 3)), out=memory)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_wrong_device(backend):
    x, host = torch.zeros(2, 3, device="cuda"), torch.zeros(2, 3)
    with pytest.raises(ValueError, match="device cuda:0, not cpu"):
        softmax(x, backend=backend, out=host)
    with pytest.raises(ValueError, match="device"):
        softmax(host, backend=backend, out=x)
    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match="device"):
            softmax(x, backend=backend, out=torch.zeros(2, 3, device="cuda:1"))


def test_from_the_host_through_a_gpu(copied_route, failures):
    if not copied_route.kind.takes_out:
        pytest.skip("an object with nothing but DLPack can't be written to")
    for shape, dim in (((5, 600), -1), ((5, 600), 0)):
        with failures.case(f"{shape}, dim {dim}"):
            copied_route.verify(copied_route.array(randn(*shape)), dim, poison=True)
    x = copied_route.array(randn(6, 30))
    expected = reference(copied_route.kind.tensor(x).clone())
    copied_route.run(x, out=x)
    assert mismatch(copied_route.kind.tensor(x), expected) is None


def test_another_view_of_the_same_memory_is_no_input():
    """Where bytes are read as something else, writing the result would destroy the input."""
    x = np.arange(35, dtype=np.int32).reshape(5, 7)
    with pytest.raises(ValueError, match="overlaps"):
        softmax(x, dtype="float32", out=x.view(np.float32))
    swapped = np.ones((5, 7), np.dtype(np.float32).newbyteorder())
    with pytest.raises(ValueError, match="overlaps"):
        softmax(swapped, out=swapped.view(np.float32))
    half = torch.ones(5, 7, dtype=torch.float16)
    with pytest.raises(ValueError, match="overlaps"):
        softmax(half, dtype=torch.bfloat16, out=half.view(torch.bfloat16))
    assert (x == np.arange(35).reshape(5, 7)).all()


def test_an_inference_tensor_is_written_in_inference_mode_alone():
    with torch.inference_mode():
        out = torch.empty(5, 7)
        softmax(torch.ones(5, 7), out=out)
    with pytest.raises(ValueError, match="inference"):
        softmax(torch.ones(5, 7), out=out)


def test_an_out_that_overlaps_itself_is_refused():
    x = np.ones((4, 4), np.float32)
    out = np.lib.stride_tricks.as_strided(np.zeros(7, np.float32), (4, 4), (4, 4))
    with pytest.raises(ValueError, match="several elements in one place"):
        softmax(x, out=out)
    with pytest.raises(ValueError, match="several elements in one place"):
        softmax(torch.ones(4, 4), out=torch.zeros(7).as_strided((4, 4), (1, 1)))


def test_a_masked_out_is_refused_whatever_was_called_before():
    x = np.ones((4, 4), np.float32)
    for _ in range(2):
        softmax(x, out=np.zeros((4, 4), np.float32).view(np.matrix))
        with pytest.raises(TypeError, match="masked array"):
            softmax(x, out=np.ma.array(np.zeros((4, 4), np.float32), mask=True))
