"""softmax, log_softmax and softmax_topk: check, choose, run, return the caller's kind of array."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from . import arrays, dispatch, layout, scores
from .arrays import HALF_TYPES, Framework
from .dispatch import Decision
from .layout import normalize_dim, type_name
from .problem import ITEMSIZE, MOST_K, MOST_MASK_AXES, OPS, TOPK, Kernel, Mask, Problem
from .registry import REGISTRY, BackendError
from .scores import Scores

Array = TypeVar("Array")
Bound = TypeVar("Bound", bound=Callable[..., Any])

OUT_IS_NOT_RECORDED = "out= can't be recorded by autograd, and the input requires grad or is being transformed"

_calls: dict[tuple[Any, ...], Callable[..., Any]] = {}
_fills: dict[tuple[Any, ...], Callable[..., None]] = {}
REGISTRY.on_change(_calls.clear)
REGISTRY.on_change(_fills.clear)


class TopK(NamedTuple):
    """What :func:`softmax_topk` returns: two arrays of one shape, the second of int64."""

    probabilities: Any
    indices: Any


def softmax(
    x: Array,
    dim: int = -1,
    *,
    backend: str = "auto",
    dtype: Any = None,
    out: Array | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    **unknown: NoReturn,
) -> Array:
    """Softmax along one axis: ``exp(x - max) / sum(exp(x - max))``, as ``torch.nn.functional.softmax``.

    With ``scale``, ``mask`` or ``causal`` it is softmax of attention's scores, in the same pass over memory.

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
        scale: Softmax of ``scale * x``: 1 / temperature, or 1 / sqrt(d). Its magnitude is from 2**-126 to 2**126.
            The product isn't rounded to a half type, and can't overflow float32.
        mask: Boolean array of the same kind and device that broadcasts to the shape of ``x``, and isn't expanded in
            memory: True keeps an element, and what is False is never looked at. Its result is 0, or -inf in
            :func:`log_softmax`; a row of which nothing is kept is NaN.
        causal: Keep the columns up to a row's own number, of square matrices: ``x`` has the shape ``(..., n, n)``
            and ``dim`` is the last axis. A mask holds besides.

    Returns:
        A new contiguous array of the same kind, shape and device as ``x``, ordered on the current stream
        of its framework. A row with NaN or +inf, or of nothing but -inf, is NaN. The kind of an array with
        ``__dlpack__`` is kept through ``__array_namespace__``, or ``from_dlpack`` in its package; where it
        has neither, a NumPy array is returned.

    Raises:
        TypeError: ``x`` isn't an array of a kind or dtype that has a path here, ``dim`` or ``dtype`` isn't
            an axis or a floating dtype, ``out`` is of another kind or dtype than the result, ``scale`` isn't a
            number, or ``mask`` not a boolean array of the kind of ``x``.
        IndexError: ``dim`` is out of range.
        ValueError: ``backend`` isn't a backend's name; ``out`` has another shape or device, can't be
            written, overlaps the input without being it, or requires grad; ``scale`` is too small or large;
            ``mask`` doesn't broadcast or is on another device; or ``causal`` is asked for where rows and columns
            differ.
        BackendError: No backend can take the input; lists every backend with its reasons.
        RuntimeError: ``out`` is given, and the input requires grad or carries a tangent, which would be lost.
    """
    # What _call does where an earlier call was alike: one call less, a tenth of a microsecond, on the busiest path.
    framework = arrays.by_type.get(type(x))
    common = type(dim) is int and type(backend) is str and dtype is None and out is None and not unknown
    common = common and scale is None and mask is None and causal is False
    if common and framework is not None and not framework.is_compiling():
        signature = framework.key(x)
        if call := _calls.get(("softmax", dim, backend, None, dispatch.override.get(), signature)):
            return call(x)
    asked = None if common else scores.given(scale, mask, causal)
    return _call("softmax", x, dim, backend, dtype, out, unknown, asked)


def log_softmax(
    x: Array,
    dim: int = -1,
    *,
    backend: str = "auto",
    dtype: Any = None,
    out: Array | None = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    **unknown: NoReturn,
) -> Array:
    """Logarithm of softmax along one axis: ``x - max - log(sum(exp(x - max)))``.

    Takes, returns and raises what :func:`softmax` does.
    """
    return _call("log_softmax", x, dim, backend, dtype, out, unknown, scores.given(scale, mask, causal))


def softmax_topk(
    x: Any, k: int, dim: int = -1, *, backend: str = "auto", dtype: Any = None, **unknown: NoReturn
) -> TopK:
    """The k largest of softmax's results and their indices, in one pass over the input.

    What ``torch.topk(torch.softmax(x, dim), k, dim)`` gives, by the online softmax fused with the selection:
    Milakov & Gimelshein 2018, arXiv:1805.02867, section 4.

    Args:
        x, dim, backend, dtype: As in :func:`softmax`.
        k: How many: 1 to 64, and no more than there are elements along ``dim``.

    Returns:
        ``probabilities``, which PyTorch differentiates as it does softmax's, and ``indices`` (int64; int32 in JAX
        unless it has 64 bits), of the shape of ``x`` but for ``k`` elements along ``dim``, which are sorted by the
        values of ``x``, the largest first, equal ones by their indices. A row with NaN or +inf, or of nothing but
        -inf, has k NaN and the indices 0 to k - 1.

    Raises:
        ValueError: ``k`` is too small or too large; TypeError: it isn't an integer. Otherwise as :func:`softmax`.
    """
    return _call_topk(x, k, dim, backend, dtype, unknown)


def explain(
    x: Any,
    dim: int = -1,
    *,
    op: str = "softmax",
    backend: str = "auto",
    dtype: Any = None,
    out: Any = None,
    scale: float | None = None,
    mask: Any = None,
    causal: bool = False,
    k: int | None = None,
    **unknown: NoReturn,
) -> Decision:
    """Which backend :func:`softmax` would run for these arguments, why, and why none of the others.

    Nothing is computed, but the kernel is prepared: only compiling it tells whether it builds here.

    Args:
        op: ``"softmax"``, ``"log_softmax"`` or, with ``k``, ``"softmax_topk"``; the rest as in :func:`softmax`.

    Returns:
        The :class:`~minikernel.Decision`. Its ``reason`` names every copy and cast that is made. Its
        ``backend`` is None where :func:`softmax` would raise :class:`~minikernel.BackendError`, and for an
        empty input, for which nothing runs.

    Raises:
        TypeError, IndexError, ValueError, NotImplementedError: As :func:`softmax` would for these arguments.
    """
    if unknown:
        _refuse(unknown, "dim, op, backend, dtype, out, scale, mask, causal, k")
    framework = arrays.framework_of(x)
    asked = scores.given(scale, mask, causal)
    asked = asked and asked.checked()
    if op == TOPK and k is None:
        raise TypeError(f"op={TOPK!r} takes k: how many of the largest")
    if op != TOPK and k is not None:
        raise TypeError(f"k is for op={TOPK!r}")
    if op == TOPK and (asked or out is not None):
        raise TypeError(f"op={TOPK!r} takes neither out nor scale, mask or causal")
    request = _examine(framework, op, x, dim, framework.effective_dtype(x, dtype), out, asked, k)
    if request.problem is None:
        dispatch.requested(backend)
        return Decision(None, "The input is empty: nothing runs.")
    if out is not None:
        _check_recording(framework, x, asked)
        _overlap_guard(framework, x, out)(x, out)
        if asked and asked.mask is not None:
            _overlap_guard(framework, framework.check(asked.mask), out, "mask")(asked.mask, out)
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


for _function in (softmax, log_softmax, softmax_topk, explain):
    _show_named(_function)
_PUBLIC: dict[str, Callable[..., Any]] = {"softmax": softmax, "log_softmax": log_softmax}


def _call(
    op: str,
    x: Any,
    dim: int,
    backend: str,
    dtype: Any,
    out: Any,
    unknown: Mapping[str, Any],
    asked: Scores | None = None,
) -> Any:
    if unknown:
        _refuse(unknown, "dim, backend, dtype, out, scale, mask, causal")
    if arrays.is_traced(x):
        from . import torch_ops

        return torch_ops.traced(op, x, dim, backend, dtype, out, asked)
    if arrays.is_proxy(x):
        named = asked._asdict() if asked else {}
        return arrays.record_call(_PUBLIC[op], x, dim, backend=backend, dtype=dtype, out=out, **named)
    framework = arrays.by_type.get(type(x)) or arrays.framework_of(x)
    if framework.is_symbolic(x):
        from . import torch_ops

        return torch_ops.traced(op, x, dim, backend, dtype, out, asked)
    if asked is not None:
        return _call_with_scores(framework, op, x, dim, backend, dtype, out, asked.checked())
    if out is not None:
        return _call_into(framework, op, x, dim, backend, framework.effective_dtype(x, dtype), out, None)
    signature = framework.key(x)
    if signature is None and framework.is_transformed(x):
        from . import torch_ops

        return torch_ops.transformed(op, x, dim, backend, dtype)
    if signature is None or type(dim) is not int:
        return _bind(framework, op, x, dim, backend, dtype, None, plain=False)(x)
    key = (op, dim, backend, dtype, dispatch.override.get(), signature)
    try:  # _remembered, without its calls
        call = _calls.get(key)
    except TypeError:  # backend or dtype can't be hashed: binding says what is wrong with it
        return _bind(framework, op, x, dim, backend, dtype, None, plain=False)(x)
    if call is None:
        generation = REGISTRY.generation
        call = _bind(framework, op, x, dim, backend, dtype, None, plain=True)
        dispatch.remember(_calls, key, call, generation)
    return call(x)


def _call_with_scores(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any, asked: Scores
) -> Any:
    """A call with a scale, a mask or causality."""
    mask = asked.mask
    if mask is not None:
        _check_kind(framework, mask, "mask", or_base=True)
    if out is not None:
        return _call_into(framework, op, x, dim, backend, framework.effective_dtype(x, dtype), out, asked)
    signature = framework.key(x)
    x_is_transformed = signature is None and framework.is_transformed(x)
    if x_is_transformed or (mask is not None and framework.is_transformed(mask)):
        from . import torch_ops

        return torch_ops.transformed(op, x, dim, backend, dtype, asked)

    def bind(plain: bool = True) -> Callable[..., Any]:
        return _bind(framework, op, x, dim, backend, dtype, asked, plain=plain)

    features = _features_key(framework, asked)
    if signature is None or features is None or type(dim) is not int:
        call = bind(plain=False)
    else:
        call = _remembered(_calls, (op, dim, backend, dtype, dispatch.override.get(), signature, *features), bind)
    return call(x, mask, asked.factor)


def _remembered(cache: dict[tuple[Any, ...], Bound], key: tuple[Any, ...], bind: Callable[[], Bound]) -> Bound:
    """What binding gives, from the cache if it is there."""
    try:
        bound = cache.get(key)
    except TypeError:  # backend or dtype can't be hashed: binding says what is wrong with it
        return bind()
    if bound is None:
        generation = REGISTRY.generation
        bound = bind()
        dispatch.remember(cache, key, bound, generation)
    return bound


def _features_key(framework: Framework, asked: Scores | None) -> tuple[Any, ...] | None:
    """All that a choice may depend on of scale, mask and causality, or None where every mask must be looked at."""
    if asked is None:
        return ()
    mask = () if asked.mask is None else framework.key(asked.mask)
    return None if mask is None else (asked.scale is not None, asked.causal, mask)


def _call_topk(x: Any, k: Any, dim: Any, backend: str, dtype: Any, unknown: Mapping[str, Any]) -> TopK:
    if unknown:
        _refuse(unknown, "k, dim, backend, dtype")
    if arrays.is_proxy(x):
        found: TopK = arrays.record_call(softmax_topk, x, k, dim, backend=backend, dtype=dtype)
        return found
    if not arrays.is_traced(x):
        framework = arrays.framework_of(x)
        if not framework.is_symbolic(x):
            signature = framework.key(x)
            if signature is None and framework.is_transformed(x):
                from . import torch_ops

                return TopK(*torch_ops.transformed_topk(x, k, dim, backend, dtype))
            bind = partial(_bind_topk, framework, x, k, dim, backend, dtype)
            if signature is None or type(dim) is not int or type(k) is not int:
                return bind()(x)
            return _remembered(_calls, (TOPK, k, dim, backend, dtype, dispatch.override.get(), signature), bind)(x)
    from . import torch_ops

    return TopK(*torch_ops.traced_topk(x, k, dim, backend, dtype))


def _bind_topk(framework: Framework, x: Any, k: Any, dim: Any, backend: str, dtype: Any) -> Callable[[Any], TopK]:
    """What a call with these arguments comes to, as a function of the array alone."""
    dtype = framework.effective_dtype(x, dtype)
    request = _examine(framework, TOPK, x, dim, dtype, k=k)
    if framework.is_recorded(x):
        return _bind_recorded_topk(request, k, dim, backend, dtype)
    execute = None
    if request.problem is None:
        dispatch.requested(backend)
    else:
        decision, kernel = dispatch.resolve(request.problem, backend, complete=False)
        execute = _executor(framework, decision, kernel, request.problem)
    shape = [*framework.geometry(framework.check(x))[0]]
    if shape:
        shape[normalize_dim(dim, len(shape))] = k

    def call(x: Any) -> TopK:
        prepared = request.prepare(framework, x)
        probabilities = framework.empty(prepared, request.out_dtype, shape)
        indices = framework.empty(prepared, "int64", shape)
        if execute is not None:
            execute(prepared, probabilities, indices)
        return TopK(framework.finish(probabilities, x), framework.finish(indices, x))

    return call


def _bind_recorded_topk(request: _Request, k: int, dim: int, backend: str, dtype: Any) -> Callable[[Any], TopK]:
    """The same for a tensor that autograd records: by the operator, on a backend that has what backward takes."""
    from . import torch_ops

    name = dispatch.requested(backend)[0]
    if request.problem is not None:
        decision = dispatch.choose(replace(request.problem, recorded=True), backend, complete=False)
        if decision.backend is None:
            raise BackendError(str(decision))
        name = decision.backend  # autograd's own thread sees no use_backend
    return lambda x: TopK(*torch_ops.traced_topk(x, k, dim, name, dtype))


def _refuse(unknown: Mapping[str, Any], known: str) -> None:
    for name in unknown:
        if name == "axis":
            raise TypeError("there is no argument 'axis': the axis is called 'dim', as in PyTorch")
        raise TypeError(f"there is no argument {name!r}; there are {known}")


@dataclass(frozen=True)
class _Request:
    """An input after checking: what there is to compute, and what must be done to the input first."""

    out_dtype: str
    problem: Problem | None  # None: there is nothing to compute
    cast: str | None = None
    copy: bool = False
    into_temporary: bool = False  # out can't be filled as it lies
    expand_mask: bool = False
    notes: tuple[str, ...] = ()

    def prepare(self, framework: Framework, x: Any) -> Any:
        x = framework.check(x)
        if self.cast:
            return framework.cast(x, self.cast)
        return framework.contiguous(x) if self.copy else x

    def prepare_more(self, framework: Framework, prepared: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
        """The mask and the scale, for an input that is prepared."""
        if not more or more[0] is None:
            return more
        mask, scale = framework.check(more[0]), more[1]
        return framework.expanded(mask, prepared.shape) if self.expand_mask else mask, scale


def _examine(
    framework: Framework,
    op: str,
    x: Any,
    dim: Any,
    dtype: Any,
    out: Any = None,
    asked: Scores | None = None,
    k: Any = None,
) -> _Request:
    if op not in (*OPS, TOPK):
        raise ValueError(f"there is no operation {op!r}; there are {', '.join((*OPS, TOPK))}")
    x = framework.check(x)
    given = framework.dtype(x)
    wanted = given if dtype is None else arrays.dtype_name(dtype)
    _check_dtypes(given, wanted, op)
    shape, strides = framework.geometry(x)
    axis = normalize_dim(dim, len(shape))
    if out is not None:
        _check_out(framework, x, shape, wanted, out)
    if op == TOPK:
        k = check_k(k, shape[axis] if shape else 1)
    mask = _examine_mask(framework, x, asked.mask, shape, axis) if asked and asked.mask is not None else None
    if asked and asked.causal:
        scores.check_causal(shape, axis)
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
    many_axes = mask is not None and len(shape) > arrays.MOST_AXES
    expand_mask = many_axes or (mask is not None and len(mask.rows) > MOST_MASK_AXES)
    if expand_mask:
        why = f"more than {MOST_MASK_AXES} of its axes have a stride of their own"
        notes.append(f"The mask is expanded first: {'it has too many axes' if many_axes else why}.")
        mask = Mask.contiguous(seen.outer, seen.cols, seen.inner)
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
        scaled=asked is not None and asked.scale is not None,
        mask=mask,
        causal=asked is not None and asked.causal,
        k=k or 0,
    )
    return _Request(wanted, problem, wanted if cast else None, copy, into_temporary, expand_mask, tuple(notes))


def check_k(k: Any, cols: int) -> int:
    """``k`` as an int; TypeError if it isn't one, ValueError if it is out of range for so many columns."""
    if isinstance(k, bool) or not hasattr(k, "__index__"):
        raise TypeError(f"k must be an integer, not {type(k).__name__}")
    k = int(k.__index__())
    if not 1 <= k <= min(MOST_K, cols):
        raise ValueError(
            f"k must be at least 1 and at most {MOST_K}, and at most the {cols} elements there are; got {k}"
        )
    return k


def _examine_mask(framework: Framework, x: Any, mask: Any, shape: tuple[int, ...], axis: int) -> Mask:
    _check_kind(framework, mask, "mask", or_base=True)
    mask = framework.check(mask)
    scores.check_boolean(framework.dtype(mask))
    if framework.device(mask) != framework.device(x):
        raise ValueError(
            f"mask must be on the input's device {_place(framework, x)}, not {_place(framework, mask)}"
        )
    address = framework.address(mask) if framework.device(x)[0] != "cpu" else 0
    return scores.mask_layout(*framework.geometry(mask), shape, axis, address)


def check_dtypes(x: Any, dtype: Any, op: str) -> None:
    """Raise the TypeError that an operation on a PyTorch tensor would for its dtype."""
    given = arrays.dtype_name(x.dtype)
    _check_dtypes(given, given if dtype is None else arrays.dtype_name(dtype), op)


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
    _check_kind(framework, out, "out")
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


def _check_kind(framework: Framework, other: Any, role: str, or_base: bool = False) -> None:
    """Raise a TypeError unless a second array is of the input's kind.

    With ``or_base`` it may be of the kind that the input is read through: NumPy's or CuPy's for DLPack.
    """
    found = arrays.framework_of(other, role)
    if found is not framework and not (or_base and isinstance(framework, type(found))):
        kind = f" ({framework.name})" if framework.name in ("numpy", "torch", "cupy") else ""
        raise TypeError(f"{role} must be the same kind of array as the input{kind}, not {type_name(other)}")


def _place(framework: Framework, x: Any) -> str:
    kind, index = framework.device(x)
    return kind if kind in ("cpu", "meta") else f"{kind}:{index}"


def _overlap_guard(framework: Framework, x: Any, out: Any, role: str = "input") -> Callable[[Any, Any], None]:
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
                f"out overlaps the {role} without being the {role}: part of it would be read after writing"
            )

    return check


def _executor(framework: Framework, decision: Decision, kernel: Kernel, problem: Problem) -> Callable[..., None]:
    """``run(x, out, *more)`` for arrays in the layout of ``problem``."""
    if decision.through is None:
        if problem.device == "cuda":
            return framework.launcher(kernel, problem.index)

        def run_here(x: Any, out: Any, *more: Any) -> None:
            arrays.run_on_host(kernel, problem, framework.host(x), framework.host(out), *framework.hosts(more))

        return run_here
    target = dispatch.moved(problem, decision.through)

    def expanded(x: Any, more: tuple[Any, ...]) -> tuple[Any, ...]:
        return (framework.expanded(more[0], x.shape), more[1]) if problem.mask else more

    if problem.device == "cpu":
        launch = arrays.host_launcher(kernel, target)
        return lambda x, out, *more: launch(
            framework.host(x), framework.host(out), *framework.hosts(expanded(x, more))
        )

    def run_on_host(x: Any, out: Any, *more: Any) -> None:
        values = framework.to_host(x)
        result = np.empty(out.shape, arrays.storage_dtype(problem.out_dtype))
        if problem.k:
            indices = np.empty(out.shape, np.int64)
            arrays.run_on_host(kernel, target, values, result, indices)
            framework.from_host(more[0], indices)
        else:
            mask, scale = expanded(x, more) if more else (None, 1.0)
            extra = (mask if mask is None else framework.to_host(mask), scale) if more else ()
            arrays.run_on_host(kernel, target, values, result, *extra)
        framework.from_host(out, result)

    return run_on_host


def _bind(
    framework: Framework,
    op: str,
    x: Any,
    dim: Any,
    backend: str,
    dtype: Any,
    asked: Scores | None = None,
    *,
    plain: bool,
) -> Callable[..., Any]:
    """What a call with these arguments comes to, as a function of the array, and of mask and scale if it has these.

    ``plain`` says that ``framework.check`` would return every array with this key as it is.
    """
    dtype = framework.effective_dtype(x, dtype)
    if framework.is_recorded(x):
        return _bind_recorded(framework, op, x, dim, backend, dtype, asked)
    request = _examine(framework, op, x, dim, dtype, asked=asked)
    if request.problem is None:
        dispatch.requested(backend)  # a wrong name is an error for an empty array too
        return _whole_call(framework, request)
    decision, kernel = dispatch.resolve(request.problem, backend, complete=False)
    call = _whole_call(framework, request, _executor(framework, decision, kernel, request.problem))
    if not plain or request.cast or request.copy or request.expand_mask or decision.through:
        return call
    return framework.fast_call(x, request.problem, kernel) or call


def _whole_call(
    framework: Framework, request: _Request, execute: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """From any array to its result, with every step that a request may need; without ``execute`` nothing runs."""

    def call(x: Any, *more: Any) -> Any:
        prepared = request.prepare(framework, x)
        out = framework.empty(prepared, request.out_dtype)
        if execute is not None:
            execute(prepared, out, *request.prepare_more(framework, prepared, more))
        return framework.finish(out, x)

    return call


def _bind_recorded(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, asked: Scores | None
) -> Callable[..., Any]:
    """The same for a tensor that autograd records."""
    from . import torch_ops

    request = _examine(framework, op, x, dim, dtype, asked=asked)
    if request.cast:  # which autograd records by itself
        wanted = request.out_dtype
        # Not the mask itself: what is remembered would keep it alive.
        said, scaled = asked and asked._replace(mask=None), asked is not None and asked.scale is not None

        def cast_first(x: Any, mask: Any = None, scale: float | None = None) -> Any:
            again = said and said._replace(mask=mask, scale=scale if scaled else None)
            return _call(op, framework.cast(x, wanted), dim, backend, wanted, None, {}, again)

        return cast_first
    run_backward = None
    if request.problem is None:
        dispatch.requested(backend)
        forward = _whole_call(framework, request)
    else:
        recorded = replace(request.problem, recorded=True)
        decision, kernel, run_backward = _resolve_recorded(framework, recorded, backend, request.expand_mask)
        forward = _whole_call(framework, request, _executor(framework, decision, kernel, request.problem))
        if decision.through is None and not request.copy and not request.expand_mask:
            forward = framework.fast_call(x, request.problem, kernel) or forward
    axis = normalize_dim(dim, len(framework.geometry(x)[0]))
    mask_key = None if asked is None or asked.mask is None else framework.key(asked.mask)
    bound = torch_ops.Bound(op, axis, x.dtype, forward, run_backward, asked is not None and asked.causal, mask_key)
    record = torch_ops.record
    return (lambda x, *more: record(x, bound, *more)) if asked else (lambda x: record(x, bound))


def _resolve_recorded(
    framework: Framework, problem: Problem, backend: str, expand_mask: bool
) -> tuple[Decision, Kernel, Callable[..., Any] | None]:
    """A backend that works both ways: a gradient that can't be prepared is found out before it is needed."""
    while True:
        decision, kernel = dispatch.resolve(problem, backend, complete=False)
        if decision.through or decision.backend is None:
            return decision, kernel, None
        try:
            return decision, kernel, _backward(framework, problem, decision.backend, expand_mask)
        except BackendError:
            if not REGISTRY.rejects(decision.backend, problem):  # it isn't that it doesn't work here
                raise


def _backward(framework: Framework, problem: Problem, backend: str, expand_mask: bool) -> Callable[..., Any]:
    """``backward(dy, y, *more)`` by a backend's own kernel."""
    target = problem.backward()
    _, kernel = dispatch.resolve(target, backend, complete=False)
    launch = framework.backward_launcher(kernel, target)

    def run(dy: Any, y: Any, *more: Any) -> Any:
        dy, y = framework.aligned(dy), framework.aligned(y)
        dx = framework.empty(y, target.out_dtype)
        if expand_mask:
            more = framework.expanded(more[0], y.shape), more[1]
        launch(y, dy, dx, *more)
        return dx

    return run


def plain(op: str, x: Any, dim: int, backend: str, dtype: Any, asked: Scores | None = None) -> Any:
    """A call for a tensor that nothing records: what is inside an operator or an ``autograd.Function``."""
    return _call(op, x, dim, backend, dtype, None, {}, asked)


def plain_topk(x: Any, k: int, dim: int, backend: str, dtype: Any) -> TopK:
    """The same for :func:`softmax_topk`."""
    return _call_topk(x, k, dim, backend, dtype, {})


def backward_of(
    op: str, y: Any, dim: int, backend: str, dtype: Any, asked: Scores | None = None
) -> Callable[..., Any] | None:
    """``backward(dy, y, *more)`` for outputs like ``y``; None if no kernel can run on it.

    Args:
        dtype: The input's.
        asked: What was fused with the operation; then ``more`` is a mask like that one or None, and a scale.
    """
    framework = arrays.framework_of(y)
    extra = _features_key(framework, asked)
    key = "backward", op, dim, backend, dtype, dispatch.override.get(), framework.key(y), extra
    keep = key[-2] is not None and extra is not None
    if keep and key in _calls:
        return _calls[key]
    generation = REGISTRY.generation
    request = _examine(framework, op, framework.contiguous(y), dim, None, asked=asked)
    if request.problem is None:
        return None
    problem = replace(request.problem, dtype=arrays.dtype_name(dtype), recorded=True)
    decision = dispatch.choose(problem, backend, complete=False)
    if decision.backend is None or decision.through:
        return None
    run = _backward(framework, problem, decision.backend, request.expand_mask)
    if keep:
        dispatch.remember(_calls, key, run, generation)
    return run


def backend_for_gradient(op: str, x: Any, dim: int, backend: str, dtype: Any, asked: Scores | None = None) -> str:
    """The backend that a recorded call would take for ``x``, which requires no grad itself.

    Raises:
        BackendError: None can take the input and its gradient.
    """
    framework = arrays.framework_of(x)
    request = _examine(framework, op, x, dim, dtype, asked=asked)
    if request.problem is None:
        return backend
    decision = dispatch.choose(replace(request.problem, recorded=True), backend, complete=False)
    if decision.backend is None:
        raise BackendError(str(decision))
    return decision.backend


def _call_into(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any, asked: Scores | None
) -> Any:
    _check_kind(framework, out, "out")
    signatures = framework.key(x), framework.key(out), _features_key(framework, asked)
    bind = partial(_bind_into, framework, op, x, dim, backend, dtype, out, asked)
    if None in signatures or type(dim) is not int:
        fill = bind()
    else:
        fill = _remembered(_fills, (op, dim, backend, dtype, dispatch.override.get(), *signatures), bind)
    if asked is None:
        fill(x, out)
    else:
        fill(x, out, asked.mask, asked.factor)
    return out


def _check_recording(framework: Framework, x: Any, asked: Scores | None) -> None:
    """Raise a RuntimeError where a gradient or tangent would be lost in an output that is given."""
    given = [x] if asked is None or asked.mask is None else [x, asked.mask]
    if framework.is_recorded(x) or any(map(framework.is_transformed, given)):
        raise RuntimeError(OUT_IS_NOT_RECORDED)


def _bind_into(
    framework: Framework, op: str, x: Any, dim: Any, backend: str, dtype: Any, out: Any, asked: Scores | None
) -> Callable[..., None]:
    """What a call with these arguments comes to, as a function of the array and its output, of mask and scale."""
    _check_recording(framework, x, asked)
    request = _examine(framework, op, x, dim, dtype, out, asked)
    if request.problem is None:
        dispatch.requested(backend)
        return lambda x, out, *more: None
    refuse_overlap = _overlap_guard(framework, x, out)
    mask = asked.mask if asked else None
    refuse_mask = None if mask is None else _overlap_guard(framework, framework.check(mask), out, "mask")
    decision, kernel = dispatch.resolve(request.problem, backend, complete=False)
    execute = _executor(framework, decision, kernel, request.problem)

    def fill(x: Any, out: Any, *more: Any) -> None:
        framework.check_writable(out)
        refuse_overlap(x, out)
        prepared = request.prepare(framework, x)
        prepared_more = request.prepare_more(framework, prepared, more)
        if refuse_mask is not None:
            refuse_mask(more[0], out)
        if request.into_temporary:
            temporary = framework.empty(prepared, request.out_dtype)
            execute(prepared, temporary, *prepared_more)
            framework.copy_into(out, temporary)
        else:
            execute(prepared, out, *prepared_more)
        framework.wrote(out)

    return fill
