"""The border's own parts: seeing an array as outer x cols x inner, axes, dtype names, overlap."""

import ctypes
import gc
import itertools
import sys
import weakref
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from cases import randn

import minikernel
from minikernel import BackendError, Kernel, Problem, arrays, layout
from minikernel.arrays import NumPy, Torch


def elements(shape, strides, dim, seen):
    """For each row of a view, the places of its elements; and what they are by NumPy."""
    places = np.zeros(shape, np.int64)
    for axis, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        places += (np.arange(size) * stride).reshape([-1 if a == axis else 1 for a in range(len(shape))])
    expected = np.moveaxis(places, dim, -1).reshape(-1, shape[dim])
    outer, cols, inner = (
        np.arange(n) * s for n, s in zip((seen.outer, seen.cols, seen.inner), seen.strides, strict=True)
    )
    found = outer[:, None, None] + inner[None, :, None] + cols[None, None, :]
    return found.reshape(-1, seen.cols), expected


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (2, 1, 3), (1, 1), (2, 3, 2, 5), (1, 4, 1, 3, 1)])
def test_a_view_reaches_every_element_in_order(shape):
    found_some = 0
    for axes in itertools.permutations(range(len(shape))):
        x = np.zeros(shape).transpose(axes)
        for index in itertools.product((np.s_[:], np.s_[::2], np.s_[::-1]), repeat=len(shape)):
            part = x[index]
            strides = tuple(s // 8 for s in part.strides)
            for dim in range(len(shape)):
                seen = layout.view(part.shape, strides, dim)
                if seen is None:
                    continue
                found_some += 1
                found, expected = elements(part.shape, strides, dim, seen)
                np.testing.assert_array_equal(found, expected)
    assert found_some


def test_what_can_and_can_not_be_seen_with_one_stride_each():
    assert layout.view((4, 5, 6), (30, 6, 1), 1) == layout.View(4, 5, 6, (30, 6, 1))
    assert layout.view((4, 5, 6), (30, 6, 1), 2) == layout.View(20, 6, 1, (6, 1, 1))
    assert layout.view((4, 5, 6), (30, 6, 1), 0) == layout.View(1, 4, 30, (1, 30, 1))
    assert layout.view((4, 5, 6), (0, 6, 1), 0) == layout.View(1, 4, 30, (1, 0, 1))
    assert layout.view((4, 5, 6), (60, 6, 1), 2) is None, "a gap between planes"
    assert layout.view((4, 5, 6), (6, 24, 1), 2) is None, "planes and rows exchanged"
    assert layout.view((), (), 0) == layout.View(1, 1, 1, (1, 1, 1))


def test_a_contiguous_array_can_always_be_seen():
    for shape in ((), (5,), (3, 4), (2, 3, 4, 5)):
        strides = tuple(s // 8 for s in np.zeros(shape).strides)
        for dim in range(max(1, len(shape))):
            seen = layout.contiguous_view(shape, dim)
            assert seen.outer * seen.cols * seen.inner == int(np.prod(shape))
            if shape:
                np.testing.assert_array_equal(*elements(shape, strides, dim, seen))


def test_axes():
    assert [layout.normalize_dim(d, 3) for d in (-3, -2, -1, 0, 1, 2)] == [0, 1, 2, 0, 1, 2]
    assert layout.normalize_dim(np.int8(-1), 4) == 3
    assert layout.normalize_dim(0, 0) == layout.normalize_dim(-1, 0) == 0
    with pytest.raises(IndexError, match="-3 to 2 for a 3-d input, got 3"):
        layout.normalize_dim(3, 3)
    with pytest.raises(TypeError):
        layout.normalize_dim(0.0, 3)


def test_dtype_names():
    spellings = {
        "float16": (torch.float16, torch.half, np.float16, "half", "float16", "<f2", "torch.float16"),
        "float32": (torch.float32, torch.float, np.float32, np.dtype("f4"), "single", "float32"),
        "float64": (torch.double, np.float64, float, "double", "d"),
        "bfloat16": (torch.bfloat16, "bfloat16", "torch.bfloat16"),
        "int64": (torch.int64, np.int64),
        "str": (str, "U3"),
        "bytes": ("S2",),
        "void": ("V4", [("a", "f4")]),
    }
    for name, given in spellings.items():
        for spelling in given:
            assert arrays.dtype_name(spelling) == name
    with pytest.raises(TypeError, match="say which"):
        arrays.dtype_name("float")
    for wrong in ("nonsense", object(), 3.5, ["f4", 1], {"names": ["a"]}):
        with pytest.raises(TypeError):
            arrays.dtype_name(wrong)


def test_ml_dtypes_bfloat16_is_a_dtype():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert arrays.dtype_name(ml_dtypes.bfloat16) == "bfloat16"
    assert arrays.dtype_name(np.dtype(ml_dtypes.bfloat16)) == "bfloat16"


def test_contiguity_ignores_axes_of_one_element():
    for x in (
        np.zeros((3, 4)),
        np.zeros((3, 4)).T,
        np.zeros((3, 1, 4)),
        np.zeros((4, 6))[:, ::2],
        np.zeros((1, 4)),
    ):
        strides = tuple(s // 8 for s in x.strides)
        assert layout.is_contiguous(x.shape, strides) == x.flags.c_contiguous
    assert layout.is_contiguous((1, 4), (77, 1))
    assert not layout.is_contiguous((2, 4), (0, 1))


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_overlap_is_exact_for_what_slices_make(framework):
    memory = randn(200)
    memory, border = (memory.numpy(), NumPy()) if framework == "numpy" else (memory, Torch(torch))

    def overlap(a, b):
        return layout.overlap(border.footprint(a), border.address(a), border.footprint(b), border.address(b))

    for first, second, expected in (
        (np.s_[:50], np.s_[50:100], False),
        (np.s_[:51], np.s_[50:100], True),
        (np.s_[0:100:2], np.s_[1:100:2], False),
        (np.s_[0:100:2], np.s_[2:100:2], True),
        (np.s_[0:100:3], np.s_[1:100:3], False),
        (np.s_[0:100:3], np.s_[0:100:2], True),
    ):
        assert overlap(memory[first], memory[second]) is expected
        assert overlap(memory[second], memory[first]) is expected


def test_overlap_in_doubt_is_overlap():
    """Telling costs too much for some arrays, and a wrong no would be a wrong result."""
    strides = [8 * n for n in (1, 3, 7, 19, 53, 151)]
    a, b = (layout.Footprint.of((5,) * 6, s, 8) for s in (strides, strides[::-1]))
    assert layout.overlap(a, 4096, b, 4104)


def test_a_footprint_s_first_and_last_byte():
    x = np.zeros((4, 1, 6), np.float32)
    for part in (x, x[::-1], x[:, :, ::-2], x[1:, :, 2:].transpose(2, 0, 1), x[0, 0, 0]):
        seen = NumPy().footprint(part)
        start = NumPy().address(part)
        places = [
            start + sum(i * s for i, s in zip(at, part.strides, strict=True)) for at in np.ndindex(part.shape)
        ]
        assert (start + seen.low, start + seen.high) == (min(places), max(places) + 4)
    assert NumPy().footprint(x) == NumPy().footprint(x[:, :, :])
    assert NumPy().footprint(x) != NumPy().footprint(x.view(np.float16)[..., ::2])


def test_a_framework_is_recognized_by_type():
    assert arrays.framework_of(np.zeros(3)).name == "numpy"
    assert arrays.framework_of(np.float32(3)).name == "numpy"
    assert arrays.framework_of(torch.zeros(3)).name == "torch"
    assert arrays.framework_of(torch.nn.Parameter(torch.zeros(3))).name == "torch"
    with pytest.raises(TypeError, match=r"^x must be .*not list: np\.asarray"):
        arrays.framework_of([1.0])
    with pytest.raises(TypeError, match=r"^out must be .*not set$"):
        arrays.framework_of({1.0}, "out")


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_a_framework_that_is_half_imported_bothers_nobody(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(arrays, "by_type", {})
    assert arrays.framework_of(np.zeros(3)).name == "numpy"
    with pytest.raises(TypeError, match="not object"):
        arrays.framework_of(object())


def test_a_user_s_type_is_not_kept_alive():
    def use():
        class Own(np.ndarray):
            pass

        minikernel.softmax(np.zeros(3).view(Own))
        return weakref.ref(Own)

    gone = use()
    gc.collect()
    assert gone() is None
    assert np.ndarray in arrays.by_type


class Courier:
    """What host_launcher needs of CuPy, with a device in host memory."""

    def __init__(self):
        self.current, self.seen = [0], []

    def module(self):
        cupy = ModuleType("cupy")
        courier = self

        class Device:
            def __init__(self, index):
                self.id = index

            def __enter__(self):
                courier.current.append(self.id)

            def __exit__(self, *error):
                courier.current.pop()

        class ndarray:
            def __init__(self, size):
                self.memory = np.zeros(size, np.uint8)
                self.dtype, self.device = self.memory.dtype, Device(courier.current[-1])
                self.data = SimpleNamespace(ptr=self.memory.ctypes.data)

            def set(self, values):
                self.memory[:] = values

        cupy.ndarray = ndarray
        cupy.empty = lambda size, dtype: ndarray(size)
        cupy.asnumpy = lambda x: x.memory.copy()
        cupy.cuda = SimpleNamespace(
            Device=Device,
            runtime=SimpleNamespace(getDeviceCount=lambda: 2),
            get_current_stream=lambda: SimpleNamespace(ptr=100 + courier.current[-1]),
        )
        return cupy


@pytest.mark.parametrize("index", [0, 1])
def test_host_arrays_go_to_the_device_that_the_kernel_is_for(index, monkeypatch):
    courier = Courier()
    monkeypatch.setitem(sys.modules, "cupy", courier.module())
    monkeypatch.setattr(arrays, "_frameworks", {})

    def run(x, out, stream, scratch):
        courier.seen.append((courier.current[-1], stream, bool(scratch)))
        ctypes.memmove(out, x, 24)

    courier.current.append(1 - index)  # the caller's current device is another
    x, out = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((2, 3), np.float32)
    x.flags.writeable = False
    problem = Problem("softmax", "cuda", index, "float32", "float32", 2, 3, 1, (3, 1, 1))
    arrays.host_launcher(Kernel(run, scratch=8), problem)(x, out)
    np.testing.assert_array_equal(out, x)
    assert courier.seen == [(index, 100 + index, True)]


def test_nothing_to_copy_a_host_array_with_is_a_backend_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for torch_ in (None, SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))):
        monkeypatch.setitem(sys.modules, "torch", torch_)
        with pytest.raises(BackendError, match="pip install"):
            arrays.find_courier()


@pytest.mark.parametrize("strides", [(6, 1, 1), (1, 2, 1)])
def test_a_kernel_can_not_write_to_its_input(strides):
    x = np.zeros((2, 6) if strides[0] == 6 else (6, 2), np.float32)

    def run(x, out, stream, scratch):
        assert out.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 1

    problem = Problem("softmax", "cpu", 0, "float32", "float32", 2, 6, 1, strides)
    arrays.run_on_host(Kernel(run), problem, x if strides[0] == 6 else x.T, np.zeros((2, 6), np.float32))
    NumPy().fast_call(np.zeros((2, 6)), problem, Kernel(run))(np.zeros((2, 6)))
    assert x.flags.writeable


@pytest.mark.parametrize("x", [np.zeros((3, 4)), torch.zeros(3, 4)], ids=["numpy", "torch"])
def test_the_key_has_all_that_a_choice_depends_on(x):
    key = arrays.framework_of(x).key
    reverse = np.s_[:2, :3]
    assert key(x) == key(x + 0)
    for other in (x[:2], x.T, x[reverse], x.astype(np.float32) if isinstance(x, np.ndarray) else x.double()):
        assert key(other) != key(x)


def test_the_key_has_pytorch_s_alignment():
    memory = torch.zeros(64)
    key = arrays.framework_of(memory).key
    assert key(memory[:8]) == key(memory[4:12])
    assert key(memory[:8]) != key(memory[1:9])


def test_bfloat16_is_rounded_to_nearest_even_and_never_from_nan_to_infinity():
    """Through NumPy, which has no bfloat16 of its own; against PyTorch's conversion."""
    from minikernel import log_softmax

    generator = torch.Generator().manual_seed(42)
    x = torch.randn(64, 300, generator=generator) * 5
    x[3, 5] = torch.nan
    exact = torch.nn.functional.log_softmax(x.bfloat16().float(), -1)
    y = log_softmax(x.bfloat16())
    assert y.dtype == torch.bfloat16
    rounded = exact.bfloat16()
    same = (y == rounded) | (y.isnan() & rounded.isnan())
    assert same.double().mean() > 0.999, "apart from ties that float32's last bit decides"
    assert y[3].isnan().all()


def test_a_tensor_of_more_axes_than_numpy_has():
    x = torch.randn([1] * 69 + [2, 3])
    for dim in (-1, -2, 0):
        y = minikernel.softmax(x, dim)
        assert y.shape == x.shape
        torch.testing.assert_close(y.reshape(-1), torch.softmax(x, dim).reshape(-1))
    y = minikernel.softmax(x.transpose(-1, -2), -1)
    torch.testing.assert_close(y.reshape(-1), torch.softmax(x.transpose(-1, -2), -1).reshape(-1))


def test_what_is_no_array_is_a_type_error():
    with pytest.raises(TypeError, match="it is the class ndarray itself"):
        minikernel.softmax(np.ndarray)
    with pytest.raises(TypeError, match="is not a dtype"):
        minikernel.softmax(np.ones(3), dtype="f4,(")
