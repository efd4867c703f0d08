"""Dtypes: what is kept, what ``dtype=`` means, what autocast does, and what is refused, the same everywhere."""

import numpy as np
import pytest
import torch
from cases import DTYPES, GPU_BACKENDS, LENGTHS, OPS, mismatch, randn, reference

import minikernel


@pytest.mark.parametrize("op", OPS)
def test_each_dtype_is_kept(route, op, failures):
    for dtype in route.dtypes:
        for cols in LENGTHS:
            for dim, shape in ((1, (3, cols)), (0, (cols, 3))):
                if cols in (2049, 4097) and dim == 0:
                    continue
                with failures.case(f"{dtype}, {cols} columns, dim {dim}"):
                    route.verify(route.array(randn(*shape, scale=3.0), dtype), dim, op, poison=True)


@pytest.mark.parametrize("op", OPS)
def test_half_to_float32_keeps_float32_accuracy(route, op, failures):
    for dtype in {"float16", "bfloat16"} & set(route.dtypes):
        for shape, dim in (((3, 600), -1), ((2, 4097), -1), ((33, 5), 0), ((3, 7), -1)):
            with failures.case(f"{dtype}, {shape}, dim {dim}"):
                route.verify(route.array(randn(*shape), dtype), dim, op, dtype="float32")


def test_dtype_casts_the_input_first(route, failures):
    for given in route.dtypes:
        for wanted in route.dtypes:
            x = route.array(randn(5, 33, scale=4.0), given)
            cast = route.kind.tensor(x).to(getattr(torch, wanted))
            with failures.case(f"{given} to {wanted}"):
                y = route.run(x, dtype=wanted)
                assert route.kind.dtype(y) == wanted
                assert mismatch(route.kind.tensor(y), reference(cast)) is None


def test_integers_and_booleans_with_dtype(route, failures):
    for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool):
        x = route.kind.array(torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype))
        with failures.case(dtype):
            y = route.run(x, dtype="float32")
            assert mismatch(route.kind.tensor(y), reference(route.kind.tensor(x))) is None


def test_every_spelling_of_a_dtype(route):
    x = route.array(randn(2, 5))
    expected = route.kind.tensor(route.run(x, dtype="float64"))
    for spelling in (torch.float64, np.float64, np.dtype("float64"), "float64", "double", "torch.float64", "f8"):
        assert torch.equal(route.kind.tensor(route.run(x, dtype=spelling)), expected)
    for spelling in (torch.float16, np.float16, "half"):
        assert route.kind.dtype(route.run(x, dtype=spelling)) == "float16"


@pytest.mark.parametrize(
    "wrong", ["float", "int32", torch.int64, np.int8, "complex64", "bool", "nonsense", object(), ["f4"], {}, {1: 2}]
)
def test_what_is_no_floating_dtype(route, wrong):
    with pytest.raises(TypeError, match="dtype"):
        route.run(route.array(randn(2, 5)), dtype=wrong)


@pytest.mark.parametrize("op", OPS)
def test_integers_and_booleans_are_refused_alike(route, copied_or_auto, op):
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        x = route.kind.array(torch.tensor([0, 1, 2]).to(dtype))
        for backend in (route.backend, *copied_or_auto):
            with pytest.raises(TypeError) as raised:
                route.run(x, op=op, backend=backend)
            name = str(dtype).removeprefix("torch.")
            assert str(raised.value) == (
                f"{op} has no meaning for the dtype {name}: "
                "pass dtype= (for example dtype='float32') to cast it first"
            )


@pytest.fixture
def copied_or_auto():
    """Backends by name, available or not: the dtype is wrong before it matters which."""
    return ("auto", "numpy", *GPU_BACKENDS)


def test_complex_is_refused(route):
    if route.kind.name == "dlpack":
        x = type(route.array(randn(2)))(np.zeros(3, np.complex64))
    else:
        x = route.kind.array(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="complex64"):
        route.run(x)
    with pytest.raises(TypeError, match="complex64"):
        route.run(x, dtype="float32")


def test_a_cast_of_any_layout(route, failures):
    """What a cast makes of a transposed array must be read in the order in which it was made."""
    values = torch.arange(24).reshape(2, 3, 4)
    for dtype in (torch.int64, torch.uint8, torch.float64):
        for axes in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)):
            x = route.kind.permute(route.kind.array(values.to(dtype)), axes)
            for dim in range(3):
                with failures.case(f"{dtype}, {axes}, dim {dim}"):
                    y = route.run(x, dim, dtype="float32")
                    assert mismatch(route.kind.tensor(y), reference(route.kind.tensor(x), dim)) is None


def test_whatever_the_framework_can_cast(torch_route):
    values = randn(3, 8).to(torch_route.kind.device)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x = values.to(dtype)
        for given in (x, x.t()):
            y = torch_route.run(given, dtype="float32")
            assert mismatch(y, reference(given.float())) is None
        with pytest.raises(TypeError, match=r"dtype float8_e.*pass dtype="):
            torch_route.run(x)
    wide = randn(3, 8).numpy().astype(np.longdouble)
    if wide.dtype.itemsize > 8:
        np.testing.assert_allclose(minikernel.softmax(wide, dtype="float64"), reference(randn(3, 8)).numpy())
        with pytest.raises(TypeError, match=r"dtype float\d+: pass dtype="):
            minikernel.softmax(wide)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("str", "U3"), ("bytes", "S3"), ("void", "V3"), ("void", []), ("void", [("a", "f4")]), ("object", "O")],
)
def test_dtypes_are_called_as_users_know_them(name, dtype):
    for options in ({}, {"dtype": "float32"}, {"out": np.zeros(3, dtype)}):
        for call in (minikernel.softmax, minikernel.explain):
            with pytest.raises(TypeError, match=rf"no meaning for the dtype {name}: it takes float16"):
                call(np.zeros(3, dtype), **options)
    with pytest.raises(TypeError, match=f"not {name}$"):
        minikernel.softmax(np.zeros(3), dtype=np.dtype(dtype))


def test_bfloat16_is_never_taken_for_float16(route):
    if "bfloat16" not in route.dtypes:
        pytest.skip(f"{route.kind.name} has no bfloat16")
    y = route.run(route.array([[0.0, 1.0, 2.0]], "bfloat16"))
    assert route.kind.dtype(y) == "bfloat16"
    exact = torch.tensor([[0.0900, 0.2447, 0.6652]])
    torch.testing.assert_close(route.kind.tensor(y).float().cpu(), exact, atol=1e-4, rtol=2**-8)
    zeros = route.run(route.array([0.0] * 4, "bfloat16"))
    assert (route.kind.tensor(zeros) == 0.25).all()


def test_nothing_is_remembered_by_shape_alone(route, failures):
    """One shape, many dtypes, axes, operations and strides, again and again."""
    x = randn(12, 12)
    for _ in range(3):
        for dtype in route.dtypes:
            for dim in (0, 1):
                for op in OPS:
                    with failures.case(f"{dtype}, dim {dim}, {op}"):
                        array = route.array(x, dtype)
                        route.verify(array, dim, op)
                        route.verify(route.kind.permute(array, (1, 0)), dim, op)


def test_byte_order():
    for dtype in (">f4", ">f8", ">f2"):
        x = np.array([1.0, 2.0], dtype)
        y = minikernel.softmax(x)
        assert y.dtype.isnative
        np.testing.assert_allclose(y.astype(float), [0.26894142, 0.73105858], rtol=1e-3)
    assert x.dtype == np.dtype(">f2")


def test_unaligned_memory():
    """What is remembered of an unaligned array, which is copied, must not be used for an aligned one."""
    values = randn(6, 40).numpy()
    memory = np.zeros(values.nbytes + 1, np.uint8)
    unaligned = memory[1:].view(np.float32).reshape(6, 40)
    unaligned[...] = values
    assert not unaligned.flags.aligned
    for index in (np.s_[:], np.s_[:, ::2], np.s_[::2, 1::3]):
        expected = reference(torch.from_numpy(values[index].copy())).float().numpy()
        for x in (unaligned[index], values[index], unaligned[index]):
            np.testing.assert_allclose(minikernel.softmax(x), expected, rtol=1e-5)


def test_strides_that_are_no_multiple_of_the_element():
    record = np.zeros(7, [("flag", np.uint8), ("value", np.float32)])
    record["value"] = randn(7).numpy()
    assert record["value"].strides == (5,)
    expected = reference(torch.from_numpy(record["value"].copy())).float().numpy()
    np.testing.assert_allclose(minikernel.softmax(record["value"]), expected, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_does_what_it_does_to_pytorch(device, failures):
    for autocast in (torch.bfloat16, torch.float16):
        for dtype in DTYPES:
            for wanted in (None, torch.float64):
                x = randn(5, 40, dtype=dtype).to(device)
                with failures.case(f"{dtype} under {autocast}, dtype {wanted}"), torch.autocast(device, autocast):
                    for ours, theirs in (
                        (minikernel.softmax, torch.nn.functional.softmax),
                        (minikernel.log_softmax, torch.nn.functional.log_softmax),
                    ):
                        expected = theirs(x, -1, dtype=wanted)
                        y = ours(x, -1, dtype=wanted)
                        assert y.dtype == expected.dtype
                        slack = {"float16": 2e-3, "bfloat16": 1e-2}.get(str(y.dtype).removeprefix("torch."), 1e-5)
                        torch.testing.assert_close(y, expected, atol=slack, rtol=slack)
                assert minikernel.softmax(x).dtype == x.dtype, "autocast outlived its block"


def test_inference_mode(torch_route):
    x = torch_route.array(randn(5, 40))
    with torch.inference_mode():
        y = torch_route.verify(x)
        inside = torch_route.verify(torch_route.array(randn(5, 40)))
    assert y.is_inference()
    torch_route.verify(inside)


@pytest.mark.gpu
def test_bfloat16_in_a_fresh_process():
    from isolated import run

    available = [name for name in GPU_BACKENDS if minikernel.list_backends()[name].available]
    output = run(f"""
import torch, minikernel
for backend in {available!r}:
    y = minikernel.softmax(torch.zeros(4, dtype=torch.bfloat16, device="cuda"), backend=backend)
    print(y.dtype, y.tolist())
""")
    assert output.splitlines() == ["torch.bfloat16 [0.25, 0.25, 0.25, 0.25]"] * len(available)
