"""softmax and log_softmax: check, choose, run, return the caller's kind of array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from . import arrays, dispatch
from .arrays import HALF_TYPES, Framework
from .dispatch import Decision
from .problem import ITEMSIZE, OPS, Kernel, Problem
from .registry import REGISTRY, BackendError

Array = TypeVar("Array")

_calls: dict[tuple[Any, ...], Callable[[Any], Any]] = {}
_fills: dict[tuple[Any, ...], Callable[[Any, Any], None]] = {}
REGISTRY.on_change(_calls.clear)
REGISTRY.on_change(_fills.clear)


def softmax(
    x: Array,
    dim: int = -1,
    *,
    backend: str = "auto",
    dtype: Any = None,
    out: Array | None = None,
    **unknown: Any,
) -> Array:
    """Softmax along one axis: ``exp(x - max) / sum(exp(x - max))``, as ``torch.nn.functional.softmax``.

    Args:
        x: Array of any shape and strides: a PyTorch tensor, a CuPy or NumPy array, or another array in
            host memory with ``__dlpack__``; float16, bfloat16, float32 or float64. Half types and float32
            accumulate in float32, float64 in float64.
        dim: The axis that sums to 1; negative counts from the end.
        backend: A name from :func:`minikernel.list_backends`, or ``"auto"`` for the best available.
        dtype: Cast the input to this floating dtype first: PyTorch's, NumPy's, or a name.
        out: Array of the right shape, dtype and device to fill and return; it may be ``x`` itself.

    Returns:
        A new contiguous array of the same kind, shape and device as ``x``, ordered on the current stream
        of its framework. A row with NaN or +inf, or of nothing but -inf, is NaN.

    Raises:
        TypeError: ``x`` isn't an array of a kind or dtype that has a path here.
        IndexError: ``dim`` is out of range.
        ValueError: ``backend`` isn't a backend's name, or ``out`` doesn't fit.
        BackendError: No backend can take the input; lists every backend with its reasons.
        NotImplementedError: The input requires grad or carries a tangent, which would be lost.
    """
    return _call("softmax", x, dim, backend, dtype, out, unknown)


def log_softmax(
    x: Array,
    dim: int = -1,
    *,
    backend: str = "auto",
    dtype: Any = None,
    out: Array | None = None,
    **unknown: Any,
) -> Array:
    """Logarithm of softmax along one axis: ``x - max - log(sum(exp(x - max)))``.

    Takes, returns and raises what :func:`softmax` does.
    """
    return _call("log_softmax", x, dim, backend, dtype, out, unknown)


def explain(
    x: Any,
    dim: int = -1,
    *,
    op: str = "softmax",
    backend: str = "auto",
    dtype: Any = None,
    out: Any = None,
    **unknown: Any,
) -> Decision:
    """Which backend :func:`softmax` would run for these arguments, why, and why none of the others.

    Args:
        op: ``"softmax"`` or ``"log_softmax"``; the rest as in :func:`softmax`. Nothing is computed.

    Returns:
        The :class:`~minikernel.Decision`; its ``backend`` is None where :func:`softmax` would raise
        :class:`~minikernel.BackendError`.
    """
    _refuse(unknown)
    framework = arrays.framework_of(x)
    request = _examine(framework, op, x, dim, framework.effective_dtype(x, dtype), out)
    if request.problem is None:
        return Decision(None, "The input is empty: nothing runs.")
    # Preparing finds out what only compiling can: whether the kernel builds on this device.
    try:
        decision, _ = dispatch.resolve(request.problem, backend)
    except BackendError:
        decision = dispatch.choose(request.problem, backend)
    return Decision(
        decision.backend,
        " ".join([decision.reason, *request.notes]),
        decision.rejected,
        decision.through,
        decision.fallback,
        decision.passed_over,
    )


def _call(op: str, x: Any, dim: int, backend: str, dtype: Any, out: Any, unknown: dict[str, Any]) -> Any:
    if unknown:
        _refuse(unknown)
    framework = arrays.framework_of(x)
    dtype = framework.effective_dtype(x, dtype)
    if out is not None:
        return _call_into(framework, op, x, dim, backend, dtype, out)
    signature = framework.key(x)
    if signature is None or type(dim) is not int:
        return _bind(framework, op, x, dim, backend, dtype, plain=False)(x)
    key = (op, dim, backend, dtype, dispatch.override.get(), signature)
    call = _calls.get(key)
    if call is None:
        call = _bind(framework, op, x, dim, backend, dtype, plain=True)
        dispatch.remember(_calls, key, call)
    return call(x)


def _refuse(unknown: dict[str, Any]) -> None:
    for name in unknown:
        if name == "axis":
            raise TypeError("there is no argument 'axis': the axis is called 'dim', as in PyTorch")
        raise TypeError(f"there is no argument {name!r}; there are dim, backend, dtype, out")


@dataclass(frozen=True)
class _Request:
    """An input after checking: what there is to compute, and what must be done to the input first."""

    out_dtype: str
    problem: Problem | None  # None: there is nothing to compute
    cast: str | None = None
    copy: bool = False
    notes: tuple[str, ...] = ()

    def prepare(self, framework: Framework, x: Any) -> Any:
        x = framework.check(x)
        if self.cast:
            x = framework.cast(x, self.cast)
        return framework.contiguous(x) if self.copy else x


def _examine(framework: Framework, op: str, x: Any, dim: Any, dtype: Any, out: Any = None) -> _Request:
    if op not in OPS:
        raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPS)}")
    x = framework.check(x)
    given = framework.dtype(x)
    wanted = given if dtype is None else arrays.dtype_name(dtype)
    _check_dtypes(given, wanted, op)
    fused = given == wanted or (given in HALF_TYPES and wanted == "float32")
    shape, strides = framework.geometry(x)
    axis = arrays.normalize_dim(dim, len(shape))
    if 0 in shape:
        return _Request(wanted, None)

    notes = []
    seen = arrays.view(shape, strides, axis)
    copy = fused and seen is None
    if not fused:
        notes.append(f"The input is cast from {given} to {wanted} first.")
    elif copy:
        notes.append(
            f"The input is copied first: strides {strides} aren't outer x cols x inner with one stride each."
        )
    fresh = copy or not fused
    if fresh or seen is None:
        seen = arrays.contiguous_view(shape, axis)
    kind, index = framework.device(x)
    on_device = kind != "cpu" and kind != "meta"
    problem = Problem(
        op,
        kind,
        index,
        given if fused else wanted,
        wanted,
        seen.outer,
        seen.cols,
        seen.inner,
        seen.strides,
        x_offset=framework.address(x) % 16 if on_device and not fresh else 0,
        out_offset=framework.address(out) % 16 if on_device and out is not None else 0,
    )
    return _Request(wanted, problem, None if fused else wanted, copy, tuple(notes))


def _check_dtypes(given: str, wanted: str, op: str) -> None:
    if wanted not in ITEMSIZE:
        if wanted == given:
            cure = (
                "pass dtype= (for example dtype='float32') to cast it first"
                if given == "bool" or "int" in given
                else f"cast it to one of {', '.join(ITEMSIZE)}"
            )
            raise TypeError(f"{op} has no meaning for the dtype {given}: {cure}")
        raise TypeError(f"dtype must be one of {', '.join(ITEMSIZE)}, not {wanted}")
    if given not in ITEMSIZE and not (given == "bool" or "int" in given):
        raise TypeError(f"{op} can't cast the dtype {given}: cast it to one of {', '.join(ITEMSIZE)}")


def _executor(
    framework: Framework, decision: Decision, kernel: Kernel, problem: Problem
) -> Callable[[Any, Any], None]:
    """``run(x, out)`` for arrays in the layout of ``problem``."""
    if decision.through is None:
        if problem.device == "cuda":
            return framework.launcher(kernel, problem.index)
        return lambda x, out: arrays.run_on_host(kernel, problem, framework.host(x), framework.host(out))
    if problem.device == "cpu":
        return lambda x, out: arrays.run_through_device(kernel, framework.host(x), framework.host(out))

    target = dispatch.moved(problem, "cpu")

    def run_on_host(x: Any, out: Any) -> None:
        values = framework.to_host(x)
        result = np.empty(values.shape, arrays.storage_dtype(problem.out_dtype))
        arrays.run_on_host(kernel, target, values, result)
        framework.from_host(out, result)

    return run_on_host


def _bind(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, *, plain: bool
) -> Callable[[Any], Any]:
    """What a call with these arguments comes to, as a function of the array alone.

    ``plain`` says that ``framework.check`` would return every array with this key as it is.
    """
    request = _examine(framework, op, x, dim, dtype)
    out_dtype = request.out_dtype
    if request.problem is None:
        dispatch.requested(backend)  # a wrong name is an error for an empty array too
        return lambda x: framework.finish(framework.empty(framework.check(x), out_dtype), x)
    decision, kernel = dispatch.resolve(request.problem, backend)
    execute = _executor(framework, decision, kernel, request.problem)

    def call(x: Any) -> Any:
        prepared = request.prepare(framework, x)
        out = framework.empty(prepared, out_dtype)
        execute(prepared, out)
        return framework.finish(out, x)

    if not plain or request.cast or request.copy or decision.through:
        return call
    return framework.fast_call(x, request.problem, kernel) or call


def _call_into(framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any) -> Any:
    if arrays.framework_of(out) is not framework:
        raise TypeError(f"out must be the same kind of array as the input, not {type(out).__name__}")
    signatures = framework.key(x), framework.key(out)
    if None in signatures or type(dim) is not int:
        _bind_into(framework, op, x, dim, backend, dtype, out)(x, out)
        return out
    key = (op, dim, backend, dtype, dispatch.override.get(), *signatures)
    fill = _fills.get(key)
    if fill is None:
        fill = _bind_into(framework, op, x, dim, backend, dtype, out)
        dispatch.remember(_fills, key, fill)
    fill(x, out)
    return out


def _bind_into(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any
) -> Callable[[Any, Any], None]:
    """What a call with these arguments comes to, as a function of the array and its output."""
    framework.check_out(out)
    given = framework.dtype(framework.check(x)) if dtype is None else arrays.dtype_name(dtype)
    x_shape, x_strides = framework.geometry(framework.check(x))
    out_shape, out_strides = framework.geometry(out)
    if out_shape != x_shape:
        raise ValueError(f"out must have the input's shape {x_shape}, not {out_shape}")
    if framework.dtype(out) != given and given in ITEMSIZE:
        raise TypeError(f"out must have the dtype {given}, not {framework.dtype(out)}")
    if framework.device(out) != framework.device(x):
        raise ValueError(f"out must be on the input's device {framework.device(x)}, not {framework.device(out)}")
    if 0 not in out_shape and any(
        size > 1 and stride == 0 for size, stride in zip(out_shape, out_strides, strict=True)
    ):
        raise ValueError("out has several elements in one place (it is expanded): it can't be filled")

    filled_directly = arrays.is_contiguous(out_shape, out_strides)
    request = _examine(framework, op, x, dim, dtype, out if filled_directly else None)
    if request.problem is None:
        dispatch.requested(backend)
        return lambda x, out: None
    decision, kernel = dispatch.resolve(request.problem, backend)
    execute = _executor(framework, decision, kernel, request.problem)
    same_layout = x_strides == out_strides

    def fill(x: Any, out: Any) -> None:
        if not (same_layout and framework.address(x) == framework.address(out)) and arrays.overlap(
            framework, x, out
        ):
            raise ValueError(
                "out overlaps the input without being the input: part of it would be read after writing"
            )
        prepared = request.prepare(framework, x)
        if filled_directly:
            execute(prepared, out)
        else:
            temporary = framework.empty(prepared, request.out_dtype)
            execute(prepared, temporary)
            framework.copy_into(out, temporary)

    return fill
