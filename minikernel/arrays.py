"""The border: PyTorch, CuPy, NumPy and DLPack arrays in, the same kind out.

Frameworks are recognized by type through ``sys.modules``: an array of a framework that nobody imported
can't exist, so none is ever imported here to find out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .problem import ITEMSIZE, Kernel, Problem

HALF_TYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class View:
    """An array seen as ``outer x cols x inner``, strides in elements."""

    outer: int
    cols: int
    inner: int
    strides: tuple[int, int, int]


def view(shape: Sequence[int], strides: Sequence[int], dim: int) -> View | None:
    """See an array as outer x cols x inner around ``dim``, or None if one stride each can't describe it."""
    outer = _merge(shape[:dim], strides[:dim])
    inner = _merge(shape[dim + 1 :], strides[dim + 1 :])
    if outer is None or inner is None:
        return None
    cols = shape[dim] if shape else 1
    col_stride = strides[dim] if cols > 1 else inner[0] * inner[1]
    return View(outer[0], cols, inner[0], (outer[1], col_stride, inner[1]))


def contiguous_view(shape: Sequence[int], dim: int) -> View:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    found = view(shape, strides, dim)
    assert found is not None
    return found


def _merge(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Adjacent axes as one (extent, stride), or None."""
    extent, stride = 1, 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if extent == 1:
            extent, stride = size, step
        elif step == stride * extent:
            extent *= size
        else:
            return None
    return extent, stride


def normalize_dim(dim: Any, rank: int) -> int:
    """``dim`` as an index from 0; a 0-d array counts as having one axis.

    Raises:
        TypeError: It isn't an integer.
        IndexError: It is out of range; the message gives the range.
    """
    try:
        index = dim.__index__()
    except (AttributeError, TypeError):
        raise TypeError(f"dim must be an integer, not {type(dim).__name__}") from None
    axes = max(1, rank)
    if not -axes <= index < axes:
        raise IndexError(f"dim is out of range: expected {-axes} to {axes - 1} for a {rank}-d input, got {index}")
    return int(index % axes)


def run_on_host(kernel: Kernel, problem: Problem, x: np.ndarray, out: np.ndarray) -> None:
    """Run a kernel on host memory; ``out`` is contiguous, and both are seen in the layout of ``problem``."""
    shape = (problem.outer, problem.cols, problem.inner)
    strides = tuple(s * x.itemsize for s in problem.strides)
    if x.flags.c_contiguous and x.size == problem.rows * problem.cols:
        seen = x.reshape(shape)
    else:
        seen = np.lib.stride_tricks.as_strided(x, shape, strides)
    kernel.run(seen, out.reshape(shape), 0, 0)


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds such values on the host; bfloat16 as its bit pattern."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after another in C order; an axis of one element may have any stride."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class _Footprint:
    """Where an array's elements lie. NumPy only reasons about the addresses, so they may be a device's."""

    def __init__(self, framework: Framework, x: Any) -> None:
        shape, strides = framework.geometry(x)
        size = ITEMSIZE.get(framework.dtype(x), 1)
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(shape),
            "strides": tuple(s * size for s in strides),
            "typestr": f"|V{size}",
            "data": (framework.address(x), True),
        }


def overlap(framework: Framework, a: Any, b: Any) -> bool:
    """Whether two arrays of one framework share any memory; in doubt, that they do."""
    if framework.device(a) != framework.device(b):
        return False
    footprints = [np.asarray(_Footprint(framework, x)) for x in (a, b)]
    try:
        return np.shares_memory(*footprints, max_work=10_000)  # type: ignore[arg-type, misc]  # stub: -1 and 0
    except np.exceptions.TooHardError:
        return True


def run_through_device(kernel: Kernel, x: np.ndarray, out: np.ndarray) -> None:
    """Run a device's kernel on host memory: bytes over, bytes back, whatever dtype they spell."""
    source = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    target = out.reshape(-1).view(np.uint8)
    try:
        import cupy
    except ImportError:
        import torch

        x_device = torch.from_numpy(source).cuda()
        out_device = torch.empty(target.size, dtype=torch.uint8, device=x_device.device)
        scratch = torch.empty(kernel.scratch, dtype=torch.uint8, device=x_device.device)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.run(x_device.data_ptr(), out_device.data_ptr(), stream, scratch.data_ptr())
        target[:] = out_device.cpu().numpy()
    else:
        x_device = cupy.asarray(source)
        out_device = cupy.empty(target.size, dtype=np.uint8)
        scratch = cupy.empty(kernel.scratch, dtype=np.uint8)
        stream = cupy.cuda.get_current_stream().ptr
        kernel.run(x_device.data.ptr, out_device.data.ptr, stream, scratch.data.ptr)
        target[:] = cupy.asnumpy(out_device)


class Framework:
    """What the library needs of an array framework; one subclass each."""

    name: str

    def check(self, x: Any) -> Any:
        """``x``, or an equal plain array where the library can't read ``x`` itself.

        Raises:
            TypeError: There is no path for this kind of array; says why.
            NotImplementedError: A gradient or a tangent would be lost.
        """
        return x

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape, and strides in elements."""
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        """Name of the dtype, in the spelling of NumPy."""
        raise NotImplementedError

    def device(self, x: Any) -> tuple[str, int]:
        """Kind and ordinal of the device."""
        raise NotImplementedError

    def address(self, x: Any) -> int:
        raise NotImplementedError

    def cast(self, x: Any, dtype: str) -> Any:
        raise NotImplementedError

    def contiguous(self, x: Any) -> Any:
        raise NotImplementedError

    def empty(self, x: Any, dtype: str) -> Any:
        """A new contiguous array of the shape and device of ``x``."""
        raise NotImplementedError

    def copy_into(self, out: Any, y: Any) -> None:
        raise NotImplementedError

    def host(self, x: Any) -> np.ndarray:
        """A NumPy view of an array in host memory; bfloat16 as uint16."""
        raise NotImplementedError

    def to_host(self, x: Any) -> np.ndarray:
        """A contiguous copy of a device array in host memory; bfloat16 as uint16."""
        raise NotImplementedError

    def from_host(self, out: Any, values: np.ndarray) -> None:
        """Copy what :meth:`to_host` would give into a contiguous device array."""
        raise NotImplementedError

    def launcher(self, kernel: Kernel, index: int) -> Callable[[Any, Any], None]:
        """``run(x, out)`` on the current stream of the device of that ordinal."""
        raise NotImplementedError

    def finish(self, y: Any, like: Any) -> Any:
        """``y`` as the caller's own kind of array."""
        return y

    def check_out(self, out: Any) -> None:
        """Raise a ValueError if ``out`` can't be written."""

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[[Any], Any] | None:
        """A shorter way to call a kernel for arrays with the key of ``x``, where there is one."""
        return None

    def key(self, x: Any) -> tuple[Any, ...] | None:
        """All that a choice may depend on, or None where ``check`` must see every array.

        Asked on every call, so it must be cheap.
        """
        raise NotImplementedError

    def effective_dtype(self, x: Any, dtype: Any) -> Any:
        """``dtype``, or what the framework's own rules (autocast) make of None."""
        return dtype


class NumPy(Framework):
    name = "numpy"

    def check(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a masked array has no path here: its mask would be ignored; fill it with -inf first")
        x = np.asarray(x)
        if not x.dtype.isnative:
            x = x.astype(x.dtype.newbyteorder("="))
        if not x.flags.aligned or any(s % x.itemsize for s in x.strides):
            x = x.copy()
        return x

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return x.shape, tuple(s // x.itemsize for s in x.strides)

    def dtype(self, x: Any) -> str:
        return str(x.dtype.name)

    def device(self, x: Any) -> tuple[str, int]:
        return "cpu", 0

    def address(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0])

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(numpy_dtype(dtype))

    def contiguous(self, x: Any) -> Any:
        return np.ascontiguousarray(x)

    def empty(self, x: Any, dtype: str) -> Any:
        return np.empty(x.shape, x.dtype if x.dtype.name == dtype else numpy_dtype(dtype))

    def copy_into(self, out: Any, y: Any) -> None:
        out[...] = y

    def host(self, x: Any) -> np.ndarray:
        return x.view(np.uint16) if x.dtype.name == "bfloat16" else x

    def check_out(self, out: Any) -> None:
        if not isinstance(out, np.ndarray) or not out.flags.writeable or not out.dtype.isnative:
            raise ValueError("out must be a writable NumPy array in native byte order")

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[[Any], Any] | None:
        if type(x) is not np.ndarray or self.check(x) is not x or not x.flags.c_contiguous:
            return None
        if x.dtype.name == "bfloat16" or problem.out_dtype == "bfloat16":
            return None
        empty, run, shape, dtype = np.empty, kernel.run, x.shape, np.dtype(problem.out_dtype)
        seen = problem.outer, problem.cols, problem.inner

        def call(x: Any) -> Any:
            out = empty(shape, dtype)
            run(x.reshape(seen), out.reshape(seen), 0, 0)
            return out

        return call

    def key(self, x: Any) -> tuple[Any, ...] | None:
        return type(x), x.dtype, x.shape, x.strides, x.flags.aligned


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 needs the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError("NumPy has bfloat16 only through ml_dtypes (pip install ml_dtypes)") from None
    return np.dtype(ml_dtypes.bfloat16)


class DLPack(NumPy):
    """Any other array in host memory that exports DLPack: read through NumPy, given back as its own kind."""

    name = "dlpack"

    def check(self, x: Any) -> np.ndarray:
        kind, _ = x.__dlpack_device__()
        if int(kind) != 1:
            raise TypeError(
                f"{_type_name(x)} is not in host memory (DLPack device type {int(kind)}): on a device there is a "
                "path for PyTorch tensors and CuPy arrays; see torch.from_dlpack and cupy.from_dlpack"
            )
        try:
            array = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError):  # NumPy's DLPack has no bfloat16
            array = np.asarray(x)
        return super().check(array)

    def key(self, x: Any) -> None:
        return None  # nothing of the array can be read without importing it

    def finish(self, y: Any, like: Any) -> Any:
        namespace: Any = like.__array_namespace__() if hasattr(like, "__array_namespace__") else None
        if namespace is None:
            namespace = sys.modules.get(type(like).__module__.partition(".")[0])
        if not hasattr(namespace, "from_dlpack"):
            return y
        return namespace.from_dlpack(y) if y.dtype.kind == "f" else namespace.asarray(y)


def _no_cuda(*arguments: Any) -> int:
    raise RuntimeError("this PyTorch was built without CUDA")


class Torch(Framework):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.dtypes = {name: getattr(torch, name) for name in ITEMSIZE}
        self.plain_types = (torch.Tensor, torch.nn.Parameter)
        self.strided = torch.strided
        functorch = getattr(torch._C, "_functorch", None)
        self.is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", lambda x: False)
        self.forward_ad = torch.autograd.forward_ad
        self.dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self.any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
        # Absent from a build without CUDA, which has no tensors to use them for.
        self.raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
        self.current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)

    def check(self, x: Any) -> Any:
        torch = self.torch
        if self.is_wrapped(x):
            raise NotImplementedError("there are no gradients or batching rules yet: call it outside torch.func")
        if type(x) not in self.plain_types:
            raise TypeError(
                f"{_type_name(x)} is a subclass of torch.Tensor with rules of its own, which a kernel would "
                "bypass; pass a plain tensor"
            )
        if x.is_nested or x.is_quantized or x.layout != torch.strided:
            kind = "nested" if x.is_nested else "quantized" if x.is_quantized else str(x.layout)
            raise TypeError(
                f"a {kind} tensor has no path here: pass a dense one (x.to_dense(), x.dequantize(), ...)"
            )
        if self.dispatch_modes() and type(torch.empty_like(x)) is not torch.Tensor:
            raise NotImplementedError(
                "under this TorchDispatchMode tensors aren't real: there is nothing to compute"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                "the input requires grad and there are no gradients yet: use torch.no_grad() or x.detach()"
            )
        if self.forward_ad._current_level >= 0 and self.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("the input carries a forward-mode tangent, which would be lost")
        x = x.detach()
        return x.resolve_neg() if x.is_neg() else x

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(x.shape), x.stride()

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def device(self, x: Any) -> tuple[str, int]:
        kind = x.device.type
        if kind == "cuda" and self.torch.version.hip:
            kind = "rocm"
        return kind, x.device.index or 0

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtypes[dtype])

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def empty(self, x: Any, dtype: str) -> Any:
        return self.torch.empty(x.shape, dtype=self.dtypes[dtype], device=x.device)

    def copy_into(self, out: Any, y: Any) -> None:
        out.copy_(y)

    def host(self, x: Any) -> np.ndarray:
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(np.uint16)
        return x.numpy()

    def to_host(self, x: Any) -> np.ndarray:
        return self.host(x.contiguous().cpu())

    def from_host(self, out: Any, values: np.ndarray) -> None:
        if out.dtype == self.torch.bfloat16:
            out = out.view(self.torch.int16)
            values = values.view(np.int16)
        out.copy_(self.torch.from_numpy(values))

    def check_out(self, out: Any) -> None:
        if out.requires_grad and self.torch.is_grad_enabled():
            raise ValueError("out requires grad: results can't be recorded in a tensor that is given")
        self.check(out)
        if out.is_neg():
            raise ValueError("out has PyTorch's lazy negation set: pass a plain tensor")

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[[Any], Any] | None:
        if problem.device != "cuda" or kernel.scratch:
            return None
        torch, index, run = self.torch, problem.index, kernel.run
        raw_stream, current_device = self.raw_stream, self.current_device
        launch = self.launcher(kernel, index)
        shape, device, dtype = x.shape, x.device, self.dtypes[problem.out_dtype]
        empty_like, empty = torch.empty_like, torch.empty
        alike = x.is_contiguous() and x.dtype == dtype

        def call(x: Any) -> Any:
            out = empty_like(x) if alike else empty(shape, dtype=dtype, device=device)
            if current_device() == index:
                run(x.data_ptr(), out.data_ptr(), raw_stream(index), 0)
            else:
                launch(x, out)
            return out

        return call

    def launcher(self, kernel: Kernel, index: int) -> Callable[[Any, Any], None]:
        run, scratch_bytes = kernel.run, kernel.scratch
        raw_stream, current_device = self.raw_stream, self.current_device
        torch = self.torch

        def launch(x: Any, out: Any) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    launch(x, out)
            elif scratch_bytes:
                scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=x.device)
                run(x.data_ptr(), out.data_ptr(), raw_stream(index), scratch.data_ptr())
            else:
                run(x.data_ptr(), out.data_ptr(), raw_stream(index), 0)

        return launch

    def key(self, x: Any) -> tuple[Any, ...] | None:
        if (
            type(x) not in self.plain_types
            or x.requires_grad
            or x.layout is not self.strided
            or x.is_nested
            or x.is_neg()
            or self.is_wrapped(x)
            or self.forward_ad._current_level >= 0
            or self.dispatch_modes()
        ):
            return None
        return x.dtype, x.shape, x.stride(), x.device, x.data_ptr() & 15

    def effective_dtype(self, x: Any, dtype: Any) -> Any:
        if dtype is None and self.any_autocast() and x.device.type == "cuda":
            half = x.dtype in (self.torch.float16, self.torch.bfloat16)
            if half and self.torch.is_autocast_enabled("cuda"):
                return self.torch.float32
        return dtype


class CuPy(Framework):
    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def check(self, x: Any) -> Any:
        return x if all(s % x.itemsize == 0 for s in x.strides) else x.copy()

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return x.shape, tuple(s // x.itemsize for s in x.strides)

    def dtype(self, x: Any) -> str:
        return str(x.dtype.name)

    def device(self, x: Any) -> tuple[str, int]:
        return ("rocm" if self.cupy.cuda.runtime.is_hip else "cuda"), x.device.id

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def cast(self, x: Any, dtype: str) -> Any:
        with x.device:
            return x.astype(numpy_dtype(dtype))

    def contiguous(self, x: Any) -> Any:
        with x.device:
            return self.cupy.ascontiguousarray(x)

    def empty(self, x: Any, dtype: str) -> Any:
        with x.device:
            return self.cupy.empty(x.shape, x.dtype if x.dtype.name == dtype else numpy_dtype(dtype))

    def copy_into(self, out: Any, y: Any) -> None:
        with out.device:
            out[...] = y

    def to_host(self, x: Any) -> np.ndarray:
        values = self.cupy.asnumpy(x)
        return values.view(np.uint16) if values.dtype.name == "bfloat16" else values

    def from_host(self, out: Any, values: np.ndarray) -> None:
        with out.device:
            out.set(values.view(out.dtype))

    def launcher(self, kernel: Kernel, index: int) -> Callable[[Any, Any], None]:
        cupy = self.cupy

        def launch(x: Any, out: Any) -> None:
            with x.device:
                scratch = cupy.empty(kernel.scratch, np.uint8) if kernel.scratch else None
                stream = cupy.cuda.get_current_stream().ptr
                kernel.run(x.data.ptr, out.data.ptr, stream, scratch.data.ptr if scratch is not None else 0)

        return launch

    def key(self, x: Any) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.strides, x.device.id, x.data.ptr & 15


def _type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}"


_frameworks: dict[str, Framework] = {}
_by_type: dict[type, Framework] = {}


def framework_of(x: Any) -> Framework:
    """The framework that an array belongs to.

    Raises:
        TypeError: It isn't an array of any kind that has a path here.
    """
    found = _by_type.get(type(x))
    if found is None:
        found = _by_type[type(x)] = _find(x)
    return found


def _find(x: Any) -> Framework:
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(x, torch.Tensor):
        return _once("torch", lambda: Torch(torch))
    if cupy is not None and isinstance(x, cupy.ndarray):
        return _once("cupy", lambda: CuPy(cupy))
    if isinstance(x, np.ndarray | np.generic):
        return _once("numpy", NumPy)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _once("dlpack", DLPack)
    raise TypeError(
        f"softmax takes a NumPy array, a PyTorch tensor, a CuPy array or another array with __dlpack__, "
        f"not {_type_name(x)}"
    )


def _once(name: str, make: Callable[[], Framework]) -> Framework:
    return _frameworks.setdefault(name, _frameworks.get(name) or make())


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as PyTorch's, NumPy's, CuPy's or its name.

    Raises:
        TypeError: It isn't a dtype.
    """
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    if isinstance(dtype, str) and (dtype in ITEMSIZE or dtype.removeprefix("torch.") in ITEMSIZE):
        return dtype.removeprefix("torch.")
    if isinstance(dtype, str) and dtype in ("half", "float", "double"):
        # PyTorch and NumPy disagree on what "float" is.
        return {"half": "float16", "double": "float64"}.get(dtype) or _ambiguous(dtype)
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        raise TypeError(f"dtype={dtype!r} is not a dtype") from None


def _ambiguous(dtype: str) -> str:
    raise TypeError(f"dtype={dtype!r} is float32 in PyTorch and float64 in NumPy: say which")
