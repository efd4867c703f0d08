"""softmax and log_softmax: check, choose, run, return the caller's kind of array."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import numpy as np

from . import arrays, dispatch, layout
from .arrays import HALF_TYPES, Framework
from .dispatch import Decision
from .layout import normalize_dim
from .problem import ITEMSIZE, OPS, Kernel, Problem
from .registry import REGISTRY, BackendError

Array = TypeVar("Array")

OUT_IS_NOT_RECORDED = "out= can't be recorded by autograd, and the input requires grad or is being transformed"

_calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
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
    **unknown: NoReturn,
) -> Array:
    """Softmax along one axis: ``exp(x - max) / sum(exp(x - max))``, as ``torch.nn.functional.softmax``.

    Args:
        x: Array of any shape and strides: a PyTorch tensor, a CuPy or NumPy array, or another array in
            host memory with ``__dlpack__``; float16, bfloat16, float32 or float64. Half types and float32
            accumulate in float32, float64 in float64.
        dim: The axis that sums to 1; negative counts from the end.
        backend: A name from :func:`minikernel.list_backends`. ``"auto"`` is no name: :func:`use_backend`
            and then ``MINIKERNEL_BACKEND`` may give one, and the best available is used if they don't.
        dtype: Cast the input to this floating dtype first: PyTorch's, NumPy's, or a name.
        out: PyTorch, CuPy or NumPy array of the right shape, dtype and device to fill and return; it may be
            ``x`` itself.

    Returns:
        A new contiguous array of the same kind, shape and device as ``x``, ordered on the current stream
        of its framework. A row with NaN or +inf, or of nothing but -inf, is NaN. The kind of an array with
        ``__dlpack__`` is kept through ``__array_namespace__``, or ``from_dlpack`` in its package; where it
        has neither, a NumPy array is returned.

    Raises:
        TypeError: ``x`` isn't an array of a kind or dtype that has a path here, ``dim`` or ``dtype`` isn't
            an axis or a floating dtype, or ``out`` is of another kind or dtype than the result.
        IndexError: ``dim`` is out of range.
        ValueError: ``backend`` isn't a backend's name; or ``out`` has another shape or device, can't be
            written, overlaps the input without being it, or requires grad.
        BackendError: No backend can take the input; lists every backend with its reasons.
        RuntimeError: ``out`` is given, and the input requires grad or carries a tangent, which would be lost.
    """
    # What _call does where an earlier call was alike: one call less, a tenth of a microsecond, on the busiest path.
    framework = arrays.by_type.get(type(x))
    common = type(dim) is int and type(backend) is str and dtype is None and out is None and not unknown
    if common and framework is not None and not framework.is_compiling():
        signature = framework.key(x)
        if call := _calls.get(("softmax", dim, backend, None, dispatch.override.get(), signature)):
            return call(x)
    return _call("softmax", x, dim, backend, dtype, out, unknown)


def log_softmax(
    x: Array,
    dim: int = -1,
    *,
    backend: str = "auto",
    dtype: Any = None,
    out: Array | None = None,
    **unknown: NoReturn,
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
    **unknown: NoReturn,
) -> Decision:
    """Which backend :func:`softmax` would run for these arguments, why, and why none of the others.

    Nothing is computed, but the kernel is prepared: only compiling it tells whether it builds here.

    Args:
        op: ``"softmax"`` or ``"log_softmax"``; the rest as in :func:`softmax`.

    Returns:
        The :class:`~minikernel.Decision`. Its ``reason`` names every copy and cast that is made. Its
        ``backend`` is None where :func:`softmax` would raise :class:`~minikernel.BackendError`, and for an
        empty input, for which nothing runs.

    Raises:
        TypeError, IndexError, ValueError, NotImplementedError: As :func:`softmax` would for these arguments.
    """
    if unknown:
        _refuse(unknown)
    framework = arrays.framework_of(x)
    request = _examine(framework, op, x, dim, framework.effective_dtype(x, dtype), out)
    if request.problem is None:
        dispatch.requested(backend)
        return Decision(None, "The input is empty: nothing runs.")
    if out is not None:
        _overlap_guard(framework, x, out)(x, out)
    problem = replace(request.problem, recorded=framework.is_recorded(x))
    try:
        decision, kernel = dispatch.resolve(problem, backend)
        _executor(framework, decision, kernel, problem)
    except BackendError as error:
        decision = dispatch.choose(problem, backend)
        if decision.backend is not None:  # it could run, were there something to copy the input with
            return replace(decision, backend=None, reason=str(error))
    return replace(decision, reason=" ".join([decision.reason, *request.notes]))


def _show_named(function: Callable[..., Any]) -> None:
    """Leave ``**unknown`` out of what help() shows; NoReturn tells type checkers that nothing fits it."""
    shown = inspect.signature(function)
    named = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
    vars(function)["__signature__"] = shown.replace(parameters=named)


for _function in (softmax, log_softmax, explain):
    _show_named(_function)
_PUBLIC: dict[str, Callable[..., Any]] = {"softmax": softmax, "log_softmax": log_softmax}


def _call(op: str, x: Any, dim: int, backend: str, dtype: Any, out: Any, unknown: Mapping[str, Any]) -> Any:
    if unknown:
        _refuse(unknown)
    if arrays.is_traced(x):
        from . import torch_ops

        return torch_ops.traced(op, x, dim, backend, dtype, out)
    if arrays.is_proxy(x):
        return arrays.record_call(_PUBLIC[op], x, dim, backend=backend, dtype=dtype, out=out)
    framework = arrays.by_type.get(type(x)) or arrays.framework_of(x)
    if framework.is_symbolic(x):
        from . import torch_ops

        return torch_ops.traced(op, x, dim, backend, dtype, out)
    if out is not None:
        return _call_into(framework, op, x, dim, backend, framework.effective_dtype(x, dtype), out)
    signature = framework.key(x)
    if signature is None and framework.is_transformed(x):
        from . import torch_ops

        return torch_ops.transformed(op, x, dim, backend, dtype)
    if signature is None or type(dim) is not int:
        return _bind(framework, op, x, dim, backend, dtype, plain=False)(x)
    key = (op, dim, backend, dtype, dispatch.override.get(), signature)
    try:
        call = _calls.get(key)
    except TypeError:  # backend or dtype can't be hashed: binding says what is wrong with it
        return _bind(framework, op, x, dim, backend, dtype, plain=False)(x)
    if call is None:
        generation = REGISTRY.generation
        call = _bind(framework, op, x, dim, backend, dtype, plain=True)
        dispatch.remember(_calls, key, call, generation)
    return call(x)


def _refuse(unknown: Mapping[str, Any]) -> None:
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
    into_temporary: bool = False  # out can't be filled as it lies
    notes: tuple[str, ...] = ()

    def prepare(self, framework: Framework, x: Any) -> Any:
        x = framework.check(x)
        if self.cast:
            return framework.cast(x, self.cast)
        return framework.contiguous(x) if self.copy else x


def _examine(framework: Framework, op: str, x: Any, dim: Any, dtype: Any, out: Any = None) -> _Request:
    if op not in OPS:
        raise ValueError(f"there is no operation {op!r}; there are {', '.join(OPS)}")
    x = framework.check(x)
    given = framework.dtype(x)
    wanted = given if dtype is None else arrays.dtype_name(dtype)
    _check_dtypes(given, wanted, op)
    shape, strides = framework.geometry(x)
    axis = normalize_dim(dim, len(shape))
    if out is not None:
        _check_out(framework, x, shape, wanted, out)
    if 0 in shape:
        return _Request(wanted, None)

    notes = []
    flaw = framework.flaw(x)
    seen = None if flaw else layout.view(shape, strides, axis)
    cast = given != wanted and not (given in HALF_TYPES and wanted == "float32")
    copy = seen is None and not cast
    if cast:
        notes.append(f"The input is cast from {given} to {wanted} first.")
    elif given != wanted:
        notes.append(f"The kernel itself turns {given} into {wanted}.")
    if copy:
        flaw = flaw or f"its strides {strides} aren't outer x cols x inner with one stride each"
        notes.append(f"The input is copied first: {flaw}.")
    if cast or seen is None:
        seen = layout.contiguous_view(shape, axis)
    into_temporary = out is not None and (
        bool(framework.flaw(out)) or not layout.is_contiguous(*framework.geometry(out))
    )
    if into_temporary:
        why = framework.flaw(out) or "it isn't contiguous"
        notes.append(f"The result is written to a temporary array and copied to out: {why}.")
    kind, index = framework.device(x)
    on_device = kind != "cpu" and kind != "meta"
    problem = Problem(
        op,
        kind,
        index,
        wanted if cast else given,
        wanted,
        seen.outer,
        seen.cols,
        seen.inner,
        seen.strides,
        x_offset=framework.address(x) % 16 if on_device and not (cast or copy) else 0,
        out_offset=framework.address(out) % 16 if on_device and out is not None and not into_temporary else 0,
    )
    return _Request(wanted, problem, wanted if cast else None, copy, into_temporary, tuple(notes))


def _check_dtypes(given: str, wanted: str, op: str) -> None:
    castable = given == "bool" or "int" in given or "float" in given
    if given not in ITEMSIZE and (wanted == given or not castable):
        cure = "pass dtype= (for example dtype='float32') to cast it first"
        if not castable:
            cure = f"it takes {', '.join(ITEMSIZE)}, or with dtype= what can be cast to these"
        raise TypeError(f"{op} has no meaning for the dtype {given}: {cure}")
    if wanted not in ITEMSIZE:
        raise TypeError(f"dtype must be one of {', '.join(ITEMSIZE)}, not {wanted}")


def _check_out(framework: Framework, x: Any, shape: tuple[int, ...], dtype: str, out: Any) -> None:
    _check_kind(framework, out)
    framework.check_out(out)
    if framework.dtype(out) != dtype:
        raise TypeError(f"out must have the dtype {dtype}, not {framework.dtype(out)}")
    out_shape, out_strides = framework.geometry(out)
    if out_shape != shape:
        raise ValueError(f"out must have the input's shape {shape}, not {out_shape}")
    if framework.device(out) != framework.device(x):
        raise ValueError(f"out must be on the input's device {_place(framework, x)}, not {_place(framework, out)}")
    if 0 not in shape and not framework.flaw(out) and layout.overlaps_itself(shape, out_strides):
        raise ValueError("out has several elements in one place (it is expanded, say): it can't be filled")


def _check_kind(framework: Framework, out: Any) -> None:
    if arrays.framework_of(out, "out") is not framework:
        kinds = "the same kind of array as the input, NumPy's, PyTorch's or CuPy's"
        raise TypeError(f"out must be {kinds}, not {arrays.type_name(out)}")


def _place(framework: Framework, x: Any) -> str:
    kind, index = framework.device(x)
    return kind if kind in ("cpu", "meta") else f"{kind}:{index}"


def _overlap_guard(framework: Framework, x: Any, out: Any) -> Callable[[Any, Any], None]:
    """A function that refuses arrays laid out as these two if they share memory without being the same."""
    source, target = framework.footprint(x), framework.footprint(out)
    nearest, farthest = source.low - target.high, source.high - target.low
    alike = source == target and all(of(x) == of(out) for of in (framework.dtype, framework.flaw))
    address = framework.address

    def check(x: Any, out: Any) -> None:
        start = address(x)
        distance = address(out) - start
        if (
            nearest < distance < farthest
            and not (alike and distance == 0)
            and layout.overlap(source, start, target, start + distance)
        ):
            raise ValueError(
                "out overlaps the input without being the input: part of it would be read after writing"
            )

    return check


def _executor(
    framework: Framework, decision: Decision, kernel: Kernel, problem: Problem
) -> Callable[[Any, Any], None]:
    """``run(x, out)`` for arrays in the layout of ``problem``."""
    if decision.through is None:
        if problem.device == "cuda":
            return framework.launcher(kernel, problem.index)
        return lambda x, out: arrays.run_on_host(kernel, problem, framework.host(x), framework.host(out))
    target = dispatch.moved(problem, decision.through)
    if problem.device == "cpu":
        launch = arrays.host_launcher(kernel, target.index)
        return lambda x, out: launch(framework.host(x), framework.host(out))

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
    dtype = framework.effective_dtype(x, dtype)
    if framework.is_recorded(x):
        return _bind_recorded(framework, op, x, dim, backend, dtype)
    request = _examine(framework, op, x, dim, dtype)
    if request.problem is None:
        dispatch.requested(backend)  # a wrong name is an error for an empty array too
        return _whole_call(framework, request)
    decision, kernel = dispatch.resolve(request.problem, backend, complete=False)
    call = _whole_call(framework, request, _executor(framework, decision, kernel, request.problem))
    if not plain or request.cast or request.copy or decision.through:
        return call
    return framework.fast_call(x, request.problem, kernel) or call


def _whole_call(
    framework: Framework, request: _Request, execute: Callable[[Any, Any], None] | None = None
) -> Callable[[Any], Any]:
    """From any array to its result, with every step that a request may need; without ``execute`` nothing runs."""

    def call(x: Any) -> Any:
        prepared = request.prepare(framework, x)
        out = framework.empty(prepared, request.out_dtype)
        if execute is not None:
            execute(prepared, out)
        return framework.finish(out, x)

    return call


def _bind_recorded(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any
) -> Callable[[Any], Any]:
    """The same for a tensor that autograd records."""
    from . import torch_ops

    request = _examine(framework, op, x, dim, dtype)
    if request.cast:  # which autograd records by itself
        wanted = request.out_dtype
        return lambda x: _call(op, framework.cast(x, wanted), dim, backend, wanted, None, {})
    run_backward = None
    if request.problem is None:
        dispatch.requested(backend)
        forward = _whole_call(framework, request)
    else:
        recorded = replace(request.problem, recorded=True)
        decision, kernel, run_backward = _resolve_recorded(framework, recorded, backend)
        forward = _whole_call(framework, request, _executor(framework, decision, kernel, request.problem))
        if decision.through is None and not request.copy:
            forward = framework.fast_call(x, request.problem, kernel) or forward
    axis = normalize_dim(dim, len(framework.geometry(x)[0]))
    bound = torch_ops.Bound(op, axis, x.dtype, forward, run_backward)
    record = torch_ops.record
    return lambda x: record(x, bound)


def _resolve_recorded(
    framework: Framework, problem: Problem, backend: str
) -> tuple[Decision, Kernel, Callable[[Any, Any], Any] | None]:
    """A backend that works both ways: a gradient that can't be prepared is found out before it is needed."""
    while True:
        decision, kernel = dispatch.resolve(problem, backend, complete=False)
        if decision.through or decision.backend is None:
            return decision, kernel, None
        try:
            return decision, kernel, _backward(framework, problem, decision.backend)
        except BackendError:
            if not REGISTRY.rejects(decision.backend, problem):  # it isn't that it doesn't work here
                raise


def _backward(framework: Framework, problem: Problem, backend: str) -> Callable[[Any, Any], Any]:
    """``backward(dy, y)`` by a backend's own kernel."""
    target = problem.backward()
    _, kernel = dispatch.resolve(target, backend, complete=False)
    launch = framework.backward_launcher(kernel, target)

    def run(dy: Any, y: Any) -> Any:
        dy, y = framework.aligned(dy), framework.aligned(y)
        dx = framework.empty(y, target.out_dtype)
        launch(y, dy, dx)
        return dx

    return run


def plain(op: str, x: Any, dim: int, backend: str, dtype: Any) -> Any:
    """A call for a tensor that nothing records: what is inside an operator or an ``autograd.Function``."""
    return _call(op, x, dim, backend, dtype, None, {})


def backward_of(op: str, y: Any, dim: int, backend: str, dtype: Any) -> Callable[[Any, Any], Any] | None:
    """``backward(dy, y)`` for outputs like ``y``, ``dtype`` being the input's; None if no kernel can run on it."""
    framework = arrays.framework_of(y)
    key = "backward", op, dim, backend, dtype, dispatch.override.get(), framework.key(y)
    if key[-1] is not None and key in _calls:
        return _calls[key]
    generation = REGISTRY.generation
    request = _examine(framework, op, framework.contiguous(y), dim, None)
    if request.problem is None:
        return None
    problem = replace(request.problem, dtype=arrays.dtype_name(dtype), recorded=True)
    decision = dispatch.choose(problem, backend, complete=False)
    if decision.backend is None or decision.through:
        return None
    run = _backward(framework, problem, decision.backend)
    if key[-1] is not None:
        dispatch.remember(_calls, key, run, generation)
    return run


def backend_for_gradient(op: str, x: Any, dim: int, backend: str, dtype: Any) -> str:
    """The backend that a recorded call would take for ``x``, which requires no grad itself.

    Raises:
        BackendError: None can take the input and its gradient.
    """
    framework = arrays.framework_of(x)
    request = _examine(framework, op, x, dim, dtype)
    if request.problem is None:
        return backend
    decision = dispatch.choose(replace(request.problem, recorded=True), backend, complete=False)
    if decision.backend is None:
        raise BackendError(str(decision))
    return decision.backend


def _call_into(framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any) -> Any:
    _check_kind(framework, out)
    signatures = framework.key(x), framework.key(out)
    if None in signatures or type(dim) is not int:
        _bind_into(framework, op, x, dim, backend, dtype, out)(x, out)
        return out
    key = (op, dim, backend, dtype, dispatch.override.get(), *signatures)
    try:
        fill = _fills.get(key)
    except TypeError:
        fill = _bind_into(framework, op, x, dim, backend, dtype, out)
    if fill is None:
        generation = REGISTRY.generation
        fill = _bind_into(framework, op, x, dim, backend, dtype, out)
        dispatch.remember(_fills, key, fill, generation)
    fill(x, out)
    return out


def _bind_into(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any
) -> Callable[[Any, Any], None]:
    """What a call with these arguments comes to, as a function of the array and its output."""
    if framework.is_recorded(x) or framework.is_transformed(x):
        raise RuntimeError(OUT_IS_NOT_RECORDED)
    request = _examine(framework, op, x, dim, dtype, out)
    if request.problem is None:
        dispatch.requested(backend)
        return lambda x, out: None
    refuse_overlap = _overlap_guard(framework, x, out)
    decision, kernel = dispatch.resolve(request.problem, backend, complete=False)
    execute = _executor(framework, decision, kernel, request.problem)

    def fill(x: Any, out: Any) -> None:
        framework.check_writable(out)
        refuse_overlap(x, out)
        prepared = request.prepare(framework, x)
        if request.into_temporary:
            temporary = framework.empty(prepared, request.out_dtype)
            execute(prepared, temporary)
            framework.copy_into(out, temporary)
        else:
            execute(prepared, out)
        framework.wrote(out)

    return fill
