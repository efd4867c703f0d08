"""The border: PyTorch, CuPy, NumPy and DLPack arrays in, the same kind out.

Frameworks are recognized by type through ``sys.modules``: an array of a framework that nobody imported
can't exist, so none is ever imported here to find out.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np

from .layout import Footprint, type_name
from .problem import ITEMSIZE, Kernel, Problem
from .registry import BackendError

HALF_TYPES = ("float16", "bfloat16")
#: As NumPy has them; a tensor with more goes to the CPU's kernels flat.
MOST_AXES = 64


def run_on_host(kernel: Kernel, problem: Problem, x: np.ndarray, out: np.ndarray, *more: Any) -> None:
    """Run a kernel on host memory; ``out`` is contiguous, and both are seen in the layout of ``problem``."""
    shape = (problem.outer, problem.cols, problem.inner)
    if x.flags.c_contiguous:
        seen = read_only(x.reshape(shape))
    else:
        strides = tuple(s * x.itemsize for s in problem.strides)
        seen = np.lib.stride_tricks.as_strided(x, shape, strides, writeable=False)
    kernel.run(seen, out.reshape(out_shape(problem)), 0, 0, *more_on_host(problem, more))


def out_shape(problem: Problem) -> tuple[int, int, int]:
    return problem.outer, problem.out_cols, problem.inner


def more_on_host(problem: Problem, more: Sequence[Any]) -> list[Any]:
    """What else a kernel gets, arrays in the layout of ``problem``: the mask and the scale, or where indices go."""
    if problem.k:
        (indices,) = more
        return [indices.reshape(out_shape(problem))]
    if not more or problem.mask is None:
        return [*more]
    mask, scale = more
    axes = [*problem.mask.outer, (problem.cols, problem.mask.col), *problem.mask.inner]
    shape, strides = zip(*axes, strict=True)
    return [np.lib.stride_tricks.as_strided(mask, shape, strides, writeable=False), scale]


def read_only(fresh: np.ndarray) -> np.ndarray:
    """A view that nobody else has, made read-only: no kernel may write to the caller's input."""
    fresh.setflags(write=False)
    return fresh


def storage_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype that holds such values on the host; bfloat16 as its bit pattern."""
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def host_launcher(kernel: Kernel, problem: Problem) -> Callable[..., None]:
    """``run(x, out, *more)`` for a kernel of the problem's GPU and arrays in host memory.

    Bytes over, bytes back, whatever dtype they spell; ``out`` and indices are contiguous.

    Raises:
        BackendError: Nothing is installed that can copy them.
    """
    courier, index = find_courier(), problem.index
    launch = courier.launcher(kernel, index)

    def over(array: np.ndarray) -> Any:
        source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        there = courier.device_bytes(source.size, index)
        courier.from_host(there, source)
        return there

    def run(x: np.ndarray, out: np.ndarray, *more: Any) -> None:
        filled = [out, *more] if problem.k else [out]
        there = [courier.device_bytes(array.nbytes, index) for array in filled]
        read = [over(value) if isinstance(value, np.ndarray) else value for value in (() if problem.k else more)]
        launch(over(x), *there, *read)
        for array, result in zip(filled, there, strict=True):
            array.reshape(-1).view(np.uint8)[:] = courier.to_host(result)

    return run


def find_courier() -> Framework:
    """The framework that copies host arrays to the GPU and back.

    Raises:
        BackendError: There is none that can; says what to install.
    """
    with suppress(Exception):  # absent, or not the one for this driver, which CuPy reports in many ways
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        return _once("cupy", lambda: CuPy(cupy))
    with suppress(Exception):
        import torch

        if torch.cuda.is_available():
            return _once("torch", lambda: Torch(torch))
    raise BackendError(
        "a host array is copied to the GPU and back with CuPy or a CUDA build of PyTorch, and neither works here: "
        "pip install 'minikernel[cuda12]', or [cuda13] for a driver of CUDA 13, or [torch]"
    )


def is_traced(x: Any) -> bool:
    """Whether ``torch.compile`` is tracing this very call, on a tensor, rather than running it."""
    torch: Any = sys.modules.get("torch")
    compiler = getattr(torch, "compiler", None)
    # Not is_compiling, which is true for every thread while one compiles.
    return compiler is not None and bool(compiler.is_dynamo_compiling()) and isinstance(x, torch.Tensor)


def is_proxy(x: Any) -> bool:
    """Whether ``torch.fx`` stands behind ``x``, and records which functions are called."""
    return type(x).__module__ == "torch.fx.proxy"


def record_call(function: Callable[..., Any], x: Any, *arguments: Any, **named: Any) -> Any:
    """Let ``torch.fx`` record a call."""
    return sys.modules["torch"].overrides.handle_torch_function(function, (x,), x, *arguments, **named)


def _never() -> bool:
    return False


class Framework:
    """What the library needs of an array framework; one subclass each."""

    name: str

    #: Whether the framework's compiler is tracing this very call.
    is_compiling: Callable[[], bool] = staticmethod(_never)

    def check(self, x: Any) -> Any:
        """``x`` as the framework's plain array, its values where they were.

        Raises:
            TypeError: There is no path for this kind of array; says why.
            NotImplementedError: A gradient or a tangent would be lost.
        """
        return x

    def flaw(self, x: Any) -> str:
        """Why no kernel can read a checked ``x`` where it lies, whatever its axes, or ``""``."""
        return ""

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape, and strides in elements; the strides mean nothing if ``x`` has a flaw."""
        raise NotImplementedError

    def footprint(self, x: Any) -> Footprint:
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
        """A contiguous copy in another dtype."""
        raise NotImplementedError

    def contiguous(self, x: Any) -> Any:
        """A contiguous copy without flaws."""
        raise NotImplementedError

    def empty(self, x: Any, dtype: str, shape: Sequence[int] | None = None) -> Any:
        """A new contiguous array on the device of ``x``, of its shape or the one given."""
        raise NotImplementedError

    def expanded(self, mask: Any, shape: Sequence[int]) -> Any:
        """A contiguous copy of a mask, broadcast to that shape."""
        raise NotImplementedError

    def copy_into(self, out: Any, y: Any) -> None:
        raise NotImplementedError

    def host(self, x: Any) -> np.ndarray:
        """A NumPy view of an array in host memory; bfloat16 as uint16."""
        raise NotImplementedError

    def hosts(self, more: Sequence[Any]) -> list[Any]:
        """What else a kernel on the host gets, arrays as :meth:`host` has them."""
        return [v if isinstance(v, float) or v is None else self.host(v) for v in more]

    def to_host(self, x: Any) -> np.ndarray:
        """A contiguous copy of a device array in host memory; bfloat16 as uint16."""
        raise NotImplementedError

    def from_host(self, out: Any, values: np.ndarray) -> None:
        """Copy what :meth:`to_host` would give into a contiguous device array."""
        raise NotImplementedError

    def device_bytes(self, size: int, index: int) -> Any:
        """A new array of so many bytes on the device of that ordinal."""
        raise NotImplementedError

    def launcher(self, kernel: Kernel, index: int) -> Callable[..., None]:
        """``run(x, out, *more)`` on the current stream of the device of that ordinal."""
        raise NotImplementedError

    def raw(self, more: Sequence[Any]) -> list[Any]:
        """What else a kernel on a device gets, arrays by their addresses."""
        return [v if isinstance(v, float) else 0 if v is None else self.address(v) for v in more]

    def finish(self, y: Any, like: Any) -> Any:
        """``y`` as the caller's own kind of array."""
        return y

    def check_out(self, out: Any) -> None:
        """Raise a TypeError or ValueError if ``out`` can't be written."""

    def check_writable(self, out: Any) -> None:
        """Raise a ValueError if ``out`` can't be written now: asked on every call, as its key doesn't tell."""

    def wrote(self, out: Any) -> None:
        """Tell the framework that a kernel has filled one of its arrays."""

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[..., Any] | None:
        """A shorter way, ``call(x, *more)``, to call a kernel for arrays with the key of ``x``, if there is one."""
        return None

    key: Callable[[Any], tuple[Any, ...] | None]
    """All that a choice may depend on, or None where ``check`` must see every array.

    Asked on every call, so it must be cheap.
    """

    def effective_dtype(self, x: Any, dtype: Any) -> Any:
        """``dtype``, or what the framework's own rules (autocast) make of None."""
        return dtype

    def is_recorded(self, x: Any) -> bool:
        """Whether the framework records what happens to ``x``, for its gradient."""
        return False

    def is_transformed(self, x: Any) -> bool:
        """Whether ``x`` is inside a function transform, or carries a tangent."""
        return False

    def is_symbolic(self, x: Any) -> bool:
        """Whether ``x`` stands for values that aren't there, or what happens to it is recorded as a program."""
        return False

    def aligned(self, x: Any) -> Any:
        """``x``, or a copy: contiguous, and at a multiple of 16 bytes."""
        raise NotImplementedError("gradients are for PyTorch's tensors")

    def backward_launcher(self, kernel: Kernel, problem: Problem) -> Callable[..., None]:
        """``run(y, dy, dx, *more)`` for a kernel that takes gradients."""
        raise NotImplementedError("gradients are for PyTorch's tensors")


class _NumPyLike(Framework):
    """What NumPy and CuPy arrays say of themselves in the same words."""

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return x.shape, tuple(s // x.itemsize for s in x.strides)

    def footprint(self, x: Any) -> Footprint:
        return Footprint.of(x.shape, x.strides, x.itemsize)

    def dtype(self, x: Any) -> str:
        return _plain_name(x.dtype)


class NumPy(_NumPyLike):
    name = "numpy"

    def check(self, x: Any) -> np.ndarray:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError("a masked array has no path here: its mask would be ignored; fill it with -inf first")
        return np.asarray(x)

    def flaw(self, x: Any) -> str:
        if not x.dtype.isnative:
            return "its byte order isn't this machine's"
        if not x.flags.aligned:
            return f"its {x.itemsize}-byte elements aren't aligned in memory"
        return _odd_strides(x)

    def device(self, x: Any) -> tuple[str, int]:
        return "cpu", 0

    def address(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0])

    def cast(self, x: Any, dtype: str) -> Any:
        with np.errstate(all="ignore"):  # infinities are answers here
            return x.astype(numpy_dtype(dtype), order="C")

    def contiguous(self, x: Any) -> Any:
        return x.astype(x.dtype.newbyteorder("="), order="C")

    def empty(self, x: Any, dtype: str, shape: Sequence[int] | None = None) -> Any:
        shape = x.shape if shape is None else shape
        return np.empty(shape, x.dtype.newbyteorder("=") if x.dtype.name == dtype else numpy_dtype(dtype))

    def expanded(self, mask: Any, shape: Sequence[int]) -> Any:
        return np.ascontiguousarray(np.broadcast_to(mask, shape))

    def copy_into(self, out: Any, y: Any) -> None:
        out[...] = y

    def host(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        return x.view(np.uint16) if x.dtype.name == "bfloat16" else x

    def check_out(self, out: Any) -> None:
        self.check(out)
        self.check_writable(out)
        if not isinstance(out, np.ndarray) or not out.dtype.isnative:
            raise ValueError("out must be a NumPy array in native byte order")

    def check_writable(self, out: Any) -> None:
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        if type(out) is not np.ndarray:  # subclasses have one key
            self.check(out)

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[..., Any] | None:
        if type(x) is not np.ndarray or not x.flags.c_contiguous or problem.features or problem.k:
            return None
        if x.dtype.name == "bfloat16" or problem.out_dtype == "bfloat16":
            return None
        empty, run, shape, dtype = np.empty, kernel.run, x.shape, np.dtype(problem.out_dtype)
        seen = problem.outer, problem.cols, problem.inner

        def call(x: Any) -> Any:
            out = empty(shape, dtype)
            run(read_only(x.reshape(seen)), out.reshape(seen), 0, 0)
            return out

        return call

    def key(self, x: Any) -> tuple[Any, ...] | None:
        # Not the type itself: remembering it would keep a user's subclass alive.
        return type(x) is np.ndarray, x.dtype, x.shape, x.strides, x.flags.aligned


def _odd_strides(x: Any) -> str:
    if x.itemsize and any(stride % x.itemsize for stride in x.strides):
        return f"its strides {x.strides} aren't multiples of its {x.itemsize}-byte elements"
    return ""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 needs the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError("NumPy has bfloat16 only through ml_dtypes (pip install ml_dtypes)") from None
    return np.dtype(ml_dtypes.bfloat16)


# DLPack's kinds of device: the CPU, host memory that is pinned for CUDA, and CUDA.
_HOST_MEMORY = (1, 3)
_CUDA_MEMORY = 2


class DLPack(NumPy):
    """Any other array in host memory that exports DLPack: read through NumPy, given back as its own kind."""

    name = "dlpack"

    def check(self, x: Any) -> np.ndarray:
        try:
            kind, _ = x.__dlpack_device__()
        except Exception as error:
            raise TypeError(f"{type_name(x)} doesn't say where it lies: {error}") from error
        if int(kind) not in _HOST_MEMORY:
            raise TypeError(
                f"{type_name(x)} is neither in host memory nor on an NVIDIA GPU (DLPack device type {int(kind)})"
            )
        try:
            return np.from_dlpack(x)
        except Exception as error:  # NumPy's DLPack has no bfloat16, and before NumPy 2.1 nothing read-only
            try:
                return self._import_otherwise(x)
            except Exception:
                raise TypeError(
                    f"{type_name(x)} can't be read through DLPack: {error} "
                    "(NumPy reads no bfloat16 through it; PyTorch does, if it and ml_dtypes are imported)"
                ) from error

    def _import_otherwise(self, x: Any) -> np.ndarray:
        if hasattr(x, "__array__"):
            return np.asarray(x)
        torch = sys.modules["torch"]
        border = _once("torch", lambda: Torch(torch))
        tensor = torch.from_dlpack(x)
        return border.host(tensor).view(numpy_dtype(border.dtype(tensor)))

    def key(self, x: Any) -> None:
        return None  # nothing of the array can be read without importing it

    def check_out(self, out: Any) -> None:
        _refuse_out(out)

    def finish(self, y: Any, like: Any) -> Any:
        namespace = _namespace(like)
        if not hasattr(namespace, "from_dlpack"):
            return y
        if y.dtype.kind != "V":
            return namespace.from_dlpack(y)
        if hasattr(namespace, "asarray"):
            return namespace.asarray(y)
        torch = sys.modules["torch"]  # which read the input
        return namespace.from_dlpack(torch.from_numpy(y.view(np.int16)).view(torch.bfloat16))


def _refuse_out(out: Any) -> NoReturn:
    raise TypeError(f"out= works for NumPy, PyTorch and CuPy arrays, not {type_name(out)}")


def _namespace(x: Any) -> Any:
    """Where the functions for an array's kind are, ``from_dlpack`` among them if it has one."""
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules.get(type(x).__module__.partition(".")[0])


def autocast_dtype(torch: Any, x: Any) -> Any:
    """The dtype that autocast turns a PyTorch tensor into first; None if it leaves it."""
    # Without an argument is_autocast_enabled means CUDA's.
    casts = torch.is_autocast_enabled() and x.is_cuda and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if casts else None


def _no_cuda(*arguments: Any) -> int:
    raise RuntimeError("this PyTorch was built without CUDA")


class Torch(Framework):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.dtypes = {name: getattr(torch, name) for name in ITEMSIZE}
        self.plain_types = (torch.Tensor, torch.nn.Parameter)
        functorch = getattr(torch._C, "_functorch", None)
        # Inside a transform even a plain tensor's results are wrapped.
        self.transform: Callable[[], Any] = getattr(functorch, "maybe_current_level", lambda: None)
        self.is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", lambda x: False)
        self.forward_ad = torch.autograd.forward_ad
        self.dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
        self.is_tracing: Callable[[], bool] = getattr(torch._C, "_is_tracing", lambda: False)
        self.is_compiling = torch.compiler.is_dynamo_compiling
        self.key = self._make_key()
        # Absent from a build without CUDA, which has no tensors to use them for.
        self.raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
        self.current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", _no_cuda)

    def check(self, x: Any) -> Any:
        torch = self.torch
        if self.is_wrapped(x) or self.transform() is not None:
            raise NotImplementedError("inside a torch.func transform there is no memory to look at")
        if x.is_nested:
            raise TypeError(
                "a nested tensor has no path here: pass a dense one (torch.nested.to_padded_tensor(x, -torch.inf))"
            )
        if type(x) not in self.plain_types:
            raise TypeError(
                f"{type_name(x)} is a subclass of torch.Tensor, and a kernel would bypass what rules it has; "
                "pass a plain tensor (x.as_subclass(torch.Tensor))"
            )
        if x.is_quantized:
            raise TypeError("a quantized tensor has no path here: pass a dense one (x.dequantize())")
        if x.layout != torch.strided:
            raise TypeError(f"a {x.layout} tensor has no path here: pass a dense one (x.to_dense())")
        if self.is_tracing() or (self.dispatch_modes() and self._is_recording()):
            raise NotImplementedError("a tracer can't record a kernel: trace the model without minikernel")
        if self.dispatch_modes() and type(torch.empty_like(x)) is not torch.Tensor:
            raise NotImplementedError(
                "under this TorchDispatchMode tensors aren't real: there is nothing to compute"
            )
        if self.forward_ad._current_level >= 0 and self.forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError("the input carries a forward-mode tangent, which would be lost")
        if x.device.type in ("cpu", "cuda") and x.numel() and not x.data_ptr():
            raise ValueError("the input has no memory: its storage was freed or never allocated")
        return x.detach()

    def _is_recording(self) -> bool:
        """Whether make_fx or torch.export is recording what happens to tensors."""
        modes = getattr(self.torch._C, "_TorchDispatchModeKey", None)
        return modes is not None and self.torch._C._get_dispatch_mode(modes.PROXY) is not None

    def flaw(self, x: Any) -> str:
        return "PyTorch negates it lazily (x.is_neg())" if x.is_neg() else ""

    def geometry(self, x: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(x.shape), x.stride()

    def footprint(self, x: Any) -> Footprint:
        size = x.element_size()
        return Footprint.of(x.shape, [s * size for s in x.stride()], size)

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
        return x.to(self.dtypes[dtype], memory_format=self.torch.contiguous_format)

    def contiguous(self, x: Any) -> Any:
        return x.resolve_neg().contiguous()

    def empty(self, x: Any, dtype: str, shape: Sequence[int] | None = None) -> Any:
        shape = x.shape if shape is None else shape
        return self.torch.empty(shape, dtype=getattr(self.torch, dtype), device=x.device)

    def expanded(self, mask: Any, shape: Sequence[int]) -> Any:
        return mask.expand(*shape).contiguous()

    def copy_into(self, out: Any, y: Any) -> None:
        out.copy_(y)

    def host(self, x: Any) -> np.ndarray:
        x = x.detach()
        if x.dim() > MOST_AXES:
            x = x.reshape(-1)
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(np.uint16)
        return x.numpy()

    def to_host(self, x: Any) -> np.ndarray:
        return self.host(x.contiguous().cpu())

    def from_host(self, out: Any, values: np.ndarray) -> None:
        if out.dtype == self.torch.bfloat16:
            out = out.view(self.torch.int16)
            values = values.view(np.int16)
        # PyTorch has no read-only tensors, and warns of them.
        out.copy_(self.torch.from_numpy(values if values.flags.writeable else values.copy()))

    def device_bytes(self, size: int, index: int) -> Any:
        return self.torch.empty(size, dtype=self.torch.uint8, device=f"cuda:{index}")

    def check_out(self, out: Any) -> None:
        if out.requires_grad and self.torch.is_grad_enabled():
            raise ValueError("out requires grad: results can't be recorded in a tensor that is given")
        self.check_writable(out)
        self.check(out)
        if out.is_neg():
            raise ValueError("out has PyTorch's lazy negation set: pass a plain tensor")

    def check_writable(self, out: Any) -> None:
        if out.is_inference() and not self.torch.is_inference_mode_enabled():
            raise ValueError("out is an inference tensor, which can't be written outside of inference mode")

    def wrote(self, out: Any) -> None:
        # Otherwise backward would use what the kernel overwrote, in silence.
        if not out.is_inference():
            self.torch.autograd.graph.increment_version(out)

    def fast_call(self, x: Any, problem: Problem, kernel: Kernel) -> Callable[..., Any] | None:
        if problem.device != "cuda" or problem.k:
            return None
        torch, index, run, raw_stream = self.torch, problem.index, kernel.run, self.raw_stream
        launch = self.launcher(kernel, index)
        shape, device, dtype = x.shape, x.device, self.dtypes[problem.out_dtype]
        empty = torch.empty
        alike = x.is_contiguous() and x.dtype == dtype
        new = self._empty_like(x) if alike else lambda x: empty(shape, dtype=dtype, device=device)

        def call_on_the_only_device(x: Any) -> Any:
            out = new(x)
            run(x.data_ptr(), out.data_ptr(), raw_stream(index), 0)
            return out

        def call(x: Any, *more: Any) -> Any:
            out = new(x)
            launch(x, out, *more)
            return out

        at_length = kernel.scratch or problem.features or torch.cuda.device_count() > 1
        return call if at_length else call_on_the_only_device

    def _empty_like(self, x: Any) -> Callable[[Any], Any]:
        """``torch.empty_like`` for tensors with the key of ``x``, on a machine with one GPU in half the time."""
        torch = self.torch
        like = torch.empty_like(x, memory_format=torch.contiguous_format)
        shape, stride, dtype = tuple(x.shape), like.stride(), x.dtype
        # What code that torch.compile generates calls; it isn't public, so it is tried first.
        with suppress(Exception):
            empty: Callable[..., Any] = torch._C._dynamo.guards._empty_strided_cuda
            made = empty(shape, stride, dtype)
            same = all(getattr(made, of) == getattr(like, of) for of in ("shape", "dtype", "device", "layout"))
            if torch.cuda.device_count() == 1 and type(made) is torch.Tensor and same and made.stride() == stride:
                return lambda x: empty(shape, stride, dtype)
        return lambda x: torch.empty_like(x)

    def launcher(self, kernel: Kernel, index: int) -> Callable[..., None]:
        run, scratch_bytes = kernel.run, kernel.scratch
        raw_stream, current_device, raw = self.raw_stream, self.current_device, self.raw
        torch = self.torch

        def launch(x: Any, out: Any, *more: Any) -> None:
            if current_device() != index:
                with torch.cuda.device(index):
                    launch(x, out, *more)
            elif scratch_bytes:
                scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=x.device)
                run(x.data_ptr(), out.data_ptr(), raw_stream(index), scratch.data_ptr(), *raw(more))
            else:
                run(x.data_ptr(), out.data_ptr(), raw_stream(index), 0, *raw(more))

        return launch

    def _make_key(self) -> Callable[[Any], tuple[Any, ...] | None]:
        """``key`` as a closure: it is on every call's path, and attributes of ``self`` would take a third of it."""
        plain_types, forward_ad = self.plain_types, self.forward_ad
        half_types, transform = tuple(self.dtypes[name] for name in HALF_TYPES), self.transform
        dispatch_modes, is_tracing, autocasts = self.dispatch_modes, self.is_tracing, self.torch.is_autocast_enabled
        is_grad_enabled = self.torch.is_grad_enabled

        def key(x: Any) -> tuple[Any, ...] | None:
            if (
                type(x) not in plain_types
                or x.is_neg()
                or forward_ad._current_level >= 0
                or dispatch_modes()
                or is_tracing()
                or transform() is not None
            ):
                return None
            try:
                if not (address := x.data_ptr()):
                    return None
                dtype = x.dtype
                autocast = dtype in half_types and autocasts()
                recorded = x.requires_grad and is_grad_enabled()
                return dtype, x.shape, x.is_contiguous() or x.stride(), x.device, address & 15, autocast, recorded
            except RuntimeError:  # nested, sparse, or wrapped by a transform: it has no strides or no memory
                return None

        return key

    def effective_dtype(self, x: Any, dtype: Any) -> Any:
        return autocast_dtype(self.torch, x) if dtype is None else dtype

    def is_recorded(self, x: Any) -> bool:
        return bool(x.requires_grad) and self.torch.is_grad_enabled()

    def is_transformed(self, x: Any) -> bool:
        if self.is_wrapped(x) or self.transform() is not None:
            return True
        return self.forward_ad._current_level >= 0 and self.forward_ad.unpack_dual(x).tangent is not None

    def is_symbolic(self, x: Any) -> bool:
        return type(x) is self.fake_type() or (self.dispatch_modes() > 0 and self._is_recording())

    def fake_type(self) -> Any:
        """The class of fake tensors, if there are any yet."""
        module = sys.modules.get("torch._subclasses.fake_tensor")
        return getattr(module, "FakeTensor", None)

    def aligned(self, x: Any) -> Any:
        x = x.contiguous()
        return x.clone() if x.data_ptr() % 16 else x

    def backward_launcher(self, kernel: Kernel, problem: Problem) -> Callable[..., None]:
        run, index = kernel.run, problem.index
        if problem.device != "cuda":
            shape = (problem.outer, problem.cols, problem.inner)

            def on_host(y: Any, dy: Any, dx: Any, *more: Any) -> None:
                y, dy, dx = (self.host(tensor).reshape(shape) for tensor in (y, dy, dx))
                run(y, dx, 0, dy, *more_on_host(problem, self.hosts(more)))

            return on_host

        def launch(y: Any, dy: Any, dx: Any, *more: Any) -> None:
            if self.current_device() != index:
                with self.torch.cuda.device(index):
                    launch(y, dy, dx, *more)
            else:
                run(y.data_ptr(), dx.data_ptr(), self.raw_stream(index), dy.data_ptr(), *self.raw(more))

        return launch


class CuPy(_NumPyLike):
    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def flaw(self, x: Any) -> str:
        return _odd_strides(x)

    def device(self, x: Any) -> tuple[str, int]:
        return ("rocm" if self.cupy.cuda.runtime.is_hip else "cuda"), x.device.id

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def cast(self, x: Any, dtype: str) -> Any:
        with x.device:
            return x.astype(numpy_dtype(dtype), order="C")

    def contiguous(self, x: Any) -> Any:
        with x.device:
            return x.copy(order="C")

    def empty(self, x: Any, dtype: str, shape: Sequence[int] | None = None) -> Any:
        shape = x.shape if shape is None else shape
        with x.device:
            return self.cupy.empty(shape, x.dtype if x.dtype.name == dtype else numpy_dtype(dtype))

    def expanded(self, mask: Any, shape: Sequence[int]) -> Any:
        with mask.device:
            return self.cupy.ascontiguousarray(self.cupy.broadcast_to(mask, shape))

    def copy_into(self, out: Any, y: Any) -> None:
        with out.device:
            out[...] = y

    def to_host(self, x: Any) -> np.ndarray:
        with x.device:
            values = self.cupy.asnumpy(x)
        return values.view(np.uint16) if values.dtype.name == "bfloat16" else values

    def from_host(self, out: Any, values: np.ndarray) -> None:
        with out.device:
            out.set(values.view(out.dtype))

    def device_bytes(self, size: int, index: int) -> Any:
        with self.cupy.cuda.Device(index):
            return self.cupy.empty(size, np.uint8)

    def launcher(self, kernel: Kernel, index: int) -> Callable[..., None]:
        cupy = self.cupy

        def launch(x: Any, out: Any, *more: Any) -> None:
            with x.device:
                scratch = cupy.empty(kernel.scratch, np.uint8) if kernel.scratch else None
                stream = cupy.cuda.get_current_stream().ptr
                at = scratch.data.ptr if scratch is not None else 0
                kernel.run(x.data.ptr, out.data.ptr, stream, at, *self.raw(more))

        return launch

    def key(self, x: Any) -> tuple[Any, ...]:
        return x.dtype, x.shape, x.strides, x.device.id, x.data.ptr & 15


class DLPackOnGPU(CuPy):
    """Any other array on an NVIDIA GPU that exports DLPack, JAX's for example: read through CuPy, without a copy.

    The exchange makes CuPy's current stream wait for the array's own, and the array's for the result. Nothing tells
    its framework when the kernel has read the input, so that is held until it has.
    """

    name = "dlpack on a GPU"

    def __init__(self, cupy: Any) -> None:
        super().__init__(cupy)
        self._being_read: deque[tuple[Any, Any]] = deque()

    def launcher(self, kernel: Kernel, index: int) -> Callable[..., None]:
        plain, being_read = super().launcher(kernel, index), self._being_read

        def launch(x: Any, out: Any, *more: Any) -> None:
            plain(x, out, *more)
            with x.device:
                read = self.cupy.cuda.Event(disable_timing=True)
                read.record()
            being_read.append((read, (x, *more)))
            with suppress(IndexError):  # another thread may have let go of the last one
                while being_read[0][0].done:
                    being_read.popleft()

        return launch

    def check(self, x: Any) -> Any:
        try:
            return self.cupy.from_dlpack(x)
        except Exception as error:
            raise TypeError(f"{type_name(x)} can't be read through CuPy's DLPack: {error}") from error

    def key(self, x: Any) -> None:  # type: ignore[override]
        return None  # nothing of the array can be read without importing it

    def check_out(self, out: Any) -> None:
        _refuse_out(out)

    def finish(self, y: Any, like: Any) -> Any:
        namespace = _namespace(like)
        return namespace.from_dlpack(y) if hasattr(namespace, "from_dlpack") else y


_frameworks: dict[str, Framework] = {}
#: The framework of each type of its own; most calls look no further.
by_type: dict[type, Framework] = {}


def framework_of(x: Any, role: str = "x") -> Framework:
    """The framework that an array belongs to.

    Raises:
        TypeError: It isn't an array of any kind that has a path here; says so of ``role``.
    """
    found = by_type.get(type(x))
    if found is None:
        found = _find(x, role)
        # A framework's own types are there for good; others may come and go, and remembering would keep them.
        if type(x).__module__.partition(".")[0] == found.name:
            by_type[type(x)] = found
    return found


def _find(x: Any, role: str) -> Framework:
    if isinstance(x, np.ndarray | np.generic):
        return _once("numpy", NumPy)
    # Another package may be in the middle of importing one of these two.
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if isinstance(x, getattr(torch, "Tensor", ())):
        return _once("torch", lambda: Torch(torch))
    if isinstance(x, getattr(cupy, "ndarray", ())):
        return _once("cupy", lambda: CuPy(cupy))
    if any(kind.__name__ == "Tracer" and kind.__module__.startswith("jax.") for kind in type(x).__mro__):
        raise TypeError(
            f"{role} is a JAX tracer, which has no values yet: call it outside jax.jit, jax.grad and so on"
        )
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__") and not isinstance(x, type):
        return _dlpack(x)
    cure = ""
    if isinstance(x, type):
        cure = f": it is the class {x.__name__} itself"
    elif hasattr(x, "__dlpack__"):
        cure = ": it has __dlpack__ but not __dlpack_device__, which DLPack needs too"
    elif isinstance(x, list | tuple | int | float):
        cure = ": np.asarray makes an array of it"
    raise TypeError(
        f"{role} must be a NumPy array, a PyTorch tensor, a CuPy array or another array with __dlpack__, "
        f"not {type_name(x)}{cure}"
    )


def _dlpack(x: Any) -> Framework:
    kind = 0
    with suppress(Exception):  # the framework's own check says what is wrong
        kind = int(x.__dlpack_device__()[0])
    if kind != _CUDA_MEMORY:
        return _once("dlpack", DLPack)
    try:
        import cupy
    except ImportError:
        cure = "install it (pip install 'minikernel[cuda12]'), or pass torch.from_dlpack(x)"
        raise TypeError(f"{type_name(x)} on a GPU is read through CuPy: {cure}") from None
    return _once(DLPackOnGPU.name, lambda: DLPackOnGPU(cupy))


def _once(name: str, make: Callable[[], Framework]) -> Framework:
    return _frameworks.setdefault(name, _frameworks.get(name) or make())


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as PyTorch's, NumPy's, CuPy's or its name.

    Raises:
        TypeError: It isn't a dtype.
    """
    name = str(dtype).removeprefix("torch.")
    if name in ITEMSIZE or name != str(dtype):
        return name
    if isinstance(dtype, str) and dtype in ("half", "float", "double"):
        # PyTorch and NumPy disagree on what "float" is.
        return {"half": "float16", "double": "float64"}.get(dtype) or _ambiguous(dtype)
    try:
        return _plain_name(np.dtype(dtype))
    except (TypeError, ValueError, SyntaxError):
        raise TypeError(f"dtype={dtype!r} is not a dtype") from None


def _plain_name(dtype: Any) -> str:
    """The name of a NumPy dtype without the size of a string, which comes in bits; bfloat16's kind is V."""
    return str(dtype.type.__name__.rstrip("_") if dtype.kind in "SUTV" else dtype.name)


def _ambiguous(dtype: str) -> str:
    raise TypeError(f"dtype={dtype!r} is float32 in PyTorch and float64 in NumPy: say which")
