"""What PyTorch needs to know of softmax beyond its values: gradients, ``torch.func`` and ``torch.compile``.

Imported with the first tensor that needs any of it, so that eager inference pays for none. There are three ways in
for softmax and log-softmax:

* an ordinary tensor that requires grad: :class:`Recorded`, a plain ``autograd.Function`` over kernels that are
  prepared once for each shape;
* inside ``torch.func`` transforms, and for forward-mode duals: :class:`Transformed`, whose derivatives are written
  in PyTorch's own differentiable operations, so that transforms nest. It costs tens of microseconds;
* under ``torch.compile``: the operators ``torch.ops.minikernel.*``, which the compiler records as they are.

The gradient of y = softmax(x) is dx = y * (dy - sum(dy * y)), that of log-softmax dx = dy - exp(y) * sum(dy). Both
need the output alone, which is what is saved. With a scale they are multiplied by it; where an element is masked
out, they are 0. softmax_topk is recorded by its operator, eager or not: it saves its input, and computes softmax
again for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import api, arrays
from .layout import normalize_dim
from .problem import BACKWARD, OPS, TOPK
from .scores import Scores, check_boolean, check_broadcast, check_causal, given

_HALF_DTYPES = (torch.float16, torch.bfloat16)


def gradient(
    op: str, dy: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, asked: Scores | None = None
) -> torch.Tensor:
    """dx in PyTorch's operations, which can be differentiated again; half types are computed in float32."""
    if y.dtype in _HALF_DTYPES:
        y, dy = y.float(), dy.float()
    if y.dim() == 0:
        return gradient(op, dy.reshape(1), y.reshape(1), -1, dtype, asked).reshape(())
    if op == "softmax":
        dy = _kept(dy, asked)  # whatever it is where nothing was looked at
        dx = y * (dy - (dy * y).sum(dim, keepdim=True))
    else:
        dx = dy - y.exp() * dy.sum(dim, keepdim=True)
    return _scaled(dx, asked).to(dtype)


def _kept(values: torch.Tensor, asked: Scores | None, instead: float = 0.0) -> torch.Tensor:
    """The values, but for those that a mask or causality keeps out."""
    if asked and asked.mask is not None:
        values = values.masked_fill(~asked.mask, instead)
    if asked and asked.causal:
        values = values.masked_fill(~torch.ones_like(values, dtype=torch.bool).tril(), instead)
    return values


def _scaled(dx: torch.Tensor, asked: Scores | None) -> torch.Tensor:
    """A gradient or tangent of what the softmax sees, as one of the input."""
    return _kept(dx if asked is None or asked.scale is None else dx * asked.scale, asked)


def tangent(op: str, dx: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """The directional derivative of the output: softmax's Jacobian is symmetric, log-softmax's is its transpose."""
    given = y.dtype
    if given in _HALF_DTYPES:
        y, dx = y.float(), dx.float()
    if y.dim() == 0:
        return (dx * 0).to(given)
    if op == "softmax":
        return (y * (dx - (y * dx).sum(dim, keepdim=True))).to(given)
    return (dx - (y.exp() * dx).sum(dim, keepdim=True)).to(given)


@dataclass(frozen=True)
class Bound:
    """A recorded call, bound to the shape, strides and dtypes of its tensors.

    Attributes:
        op: As the caller gave it.
        dim: The axis, counted from the first.
        dtype: Of the input, and so of its gradient.
        forward: Runs the kernel, on a tensor that requires no grad.
        backward: ``backward(dy, y)`` runs the backend's own gradient kernel; None where there is none to run: the
            input was copied to another device, or is empty.
        causal: As the caller gave it.
        mask_key: What ``backward`` is prepared for, of a mask: a hook may give back another one than was saved.

    With a mask or a scale, both functions take the two besides.
    """

    op: str
    dim: int
    dtype: torch.dtype
    forward: Callable[..., torch.Tensor]
    backward: Callable[..., torch.Tensor] | None
    causal: bool = False
    mask_key: Any = None


class Recorded(torch.autograd.Function):
    """Ordinary training; ``more`` is a mask or None and a scale, if the call has such or is causal."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bound: Bound, *more: Any) -> torch.Tensor:
        y = bound.forward(x, *more)
        ctx.bound = bound
        if more:
            mask, ctx.scale = more
            # One that was made in inference mode can't be saved.
            ctx.save_for_backward(y, mask if mask is None or not mask.is_inference() else mask.clone())
        else:
            ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        y, *masks = ctx.saved_tensors
        bound = ctx.bound
        more = (*masks, ctx.scale) if masks else ()
        none = (None,) * (1 + len(more))
        # With create_graph=True grad mode is on: then the gradient is to be differentiated itself.
        is_plain = not torch.is_grad_enabled() and _is_plain(dy) and _is_plain(y)
        if is_plain and masks and masks[0] is not None:
            is_plain = arrays.framework_of(masks[0]).key(masks[0]) == bound.mask_key
        if bound.backward is None or not is_plain:
            asked = Scores(more[1], more[0], bound.causal) if more else None
            return gradient(bound.op, dy, y, bound.dim, bound.dtype, asked), *none
        return bound.backward(dy, y, *more), *none


#: ``Recorded.apply`` without its search for functorch's wrappers, a third of its time: whoever calls it has seen
#: that there are none.
record: Callable[..., torch.Tensor] = super(torch.autograd.Function, Recorded).apply


def _is_plain(x: torch.Tensor) -> bool:
    """Whether its memory is all there is to it.

    Not so in a batched backward (is_grads_batched=True), inside a transform, or where it may carry a tangent.
    """
    if type(x) is not torch.Tensor or x.is_neg() or x.layout != torch.strided:
        return False
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        return False
    try:
        return torch._C._len_torch_dispatch_stack() == 0 and (x.numel() == 0 or x.data_ptr() != 0)
    except RuntimeError:  # it is wrapped
        return False


class Transformed(torch.autograd.Function):
    """The same inside ``torch.func`` transforms: forward sees plain tensors, all else nests."""

    @staticmethod
    def forward(x: torch.Tensor, op: str, dim: int, backend: str, dtype: torch.dtype | None) -> torch.Tensor:
        if torch.autograd.forward_ad._current_level >= 0:
            x = torch.autograd.forward_ad.unpack_dual(x).primal
        return api.plain(op, x.detach(), dim, backend, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.op, ctx.dim, _, _ = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (y,) = ctx.saved_tensors
        return gradient(ctx.op, dy, y, ctx.dim, ctx.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, *_: None) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return tangent(ctx.op, dx.to(y.dtype), y, ctx.dim)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: torch.Tensor, op: str, dim: int, backend: str, dtype: Any
    ) -> tuple[torch.Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        if x.dim() == 1:  # each is a single number
            return _transform(x.unsqueeze(1), op, 1, backend, dtype).squeeze(1), 0
        return _transform(x, op, dim + 1 if dim >= 0 else dim, backend, dtype), 0


def _transform(x: torch.Tensor, op: str, dim: int, backend: str, dtype: torch.dtype | None) -> torch.Tensor:
    result: torch.Tensor = Transformed.apply(x, op, dim, backend, dtype)  # type: ignore[no-untyped-call]
    return result


def transformed(
    op: str, x: torch.Tensor, dim: Any, backend: str, dtype: Any, asked: Scores | None = None
) -> torch.Tensor:
    """A call inside a transform, or of a dual tensor."""
    dim = normalize_dim(dim, x.dim())
    wanted = _torch_dtype(x, dtype)
    api.check_dtypes(x, wanted, op)
    if _forward_levels() > 1:  # an autograd.Function has no derivative of its jvp
        return _by_pytorch(op, x, dim, wanted, asked)
    if asked is None:
        return _transform(x, op, dim, backend, wanted)
    result = _transform(_screened(x, asked, dim, wanted), op, dim, backend, None)
    return result.to(wanted or x.dtype)


def _forward_levels() -> int:
    """How many ``jvp`` are around this call, one in another."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    return sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack)


def _by_pytorch(
    op: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None, asked: Scores | None
) -> torch.Tensor:
    """The same by PyTorch's own softmax."""
    seen = x if asked is None else _screened(x, asked, dim % max(1, x.dim()), dtype)
    own: torch.Tensor = getattr(torch, op)(seen, dim, dtype=dtype)
    return own if asked is None else own.to(dtype or x.dtype)


def _screened(x: torch.Tensor, asked: Scores, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    """The scores as the softmax is to see them, in PyTorch's operations: half types in float32."""
    asked = asked.checked()
    _check_scores(x, dim, asked)
    if dtype is not None:
        x = x.to(dtype)
    if x.dtype in _HALF_DTYPES:
        x = x.float()
    if asked.scale is None:
        return _kept(x, asked, -torch.inf)
    x = _kept(x if asked.scale > 0 else -x, asked, -torch.inf)
    # Relative to the largest, which changes no softmax; the difference of halves can't overflow.
    peak = x.detach().amax(dim, keepdim=True)
    peak = torch.where(peak.isfinite(), peak, 0)
    return (0.5 * x - 0.5 * peak) * (2 * abs(asked.scale))


def transformed_topk(
    x: torch.Tensor, k: int, dim: Any, backend: str, dtype: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`minikernel.softmax_topk` inside a transform, or of a dual tensor: softmax, and then a stable sort."""
    dim = normalize_dim(dim, x.dim())
    wanted = _torch_dtype(x, dtype)
    api.check_dtypes(x, wanted, TOPK)
    return _sorted_topk(x, transformed("softmax", x, dim, backend, wanted), k, dim, wanted)


def _sorted_topk(
    x: torch.Tensor, y: torch.Tensor, k: int, dim: int, dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of y, which is softmax of x."""
    k = api.check_k(k, x.shape[dim] if x.dim() else 1)
    if y.dim() == 0:
        return y, torch.zeros_like(y, dtype=torch.int64)
    # In rows of NaN the first come first.
    ordered = torch.where(y.isnan(), 0, x.detach() if dtype is None else x.detach().to(dtype))
    order = torch.sort(ordered, dim=dim, descending=True, stable=True).indices.narrow(dim, 0, k)
    return y.gather(dim, order), order


def _torch_dtype(x: torch.Tensor, dtype: Any) -> torch.dtype | None:
    """``dtype``, or what autocast makes of None."""
    found: torch.dtype | None
    if dtype is None:
        found = arrays.autocast_dtype(torch, x)
    elif isinstance(dtype, torch.dtype):
        found = dtype
    else:
        found = getattr(torch, arrays.dtype_name(dtype))
    return found


# torch.compile: operators that it records as they are.

_library = torch.library.Library("minikernel", "DEF")


#: What the operators of softmax and log-softmax take behind their tensors, axis, dtype and backend.
_SCORES = "float? scale=None, Tensor? mask=None, bool causal=False"


def _define(op: str) -> None:
    backward = BACKWARD[op]
    _library.define(f"{op}(Tensor x, int dim, ScalarType? dtype=None, str backend='auto', {_SCORES}) -> Tensor")
    _library.define(
        f"{backward}(Tensor dy, Tensor y, int dim, ScalarType dtype, str backend='auto', {_SCORES}) -> Tensor"
    )

    def forward(
        x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, backend: str = "auto", *scores: Any
    ) -> torch.Tensor:
        wanted = dtype or x.dtype  # said, so that autocast has no say
        asked = _asked(scores)
        _refuse_tangents(x)
        if x.requires_grad:
            backend = api.backend_for_gradient(op, x.detach(), dim, backend, wanted, asked)
        result: torch.Tensor = api.plain(op, x.detach(), dim, backend, wanted, asked)
        return result

    def forward_fake(
        x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, backend: str = "auto", *scores: Any
    ) -> torch.Tensor:
        _check_arguments(op, x, dim, dtype, _asked(scores))
        return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)

    def gradient_of(
        dy: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, backend: str = "auto", *scores: Any
    ) -> torch.Tensor:
        _refuse_tangents(dy, y)
        with torch.no_grad():
            dy, y, asked = dy.detach(), y.detach(), _asked(scores)
            if (run := api.backward_of(op, y, dim, backend, dtype, asked)) is None:
                return gradient(op, dy, y, dim, dtype, asked).contiguous()
            result: torch.Tensor = run(dy, y, *((asked.mask, asked.factor) if asked else ()))
        return result

    def gradient_fake(
        dy: torch.Tensor, y: torch.Tensor, dim: int, dtype: torch.dtype, backend: str = "auto", *scores: Any
    ) -> torch.Tensor:
        return torch.empty(y.shape, dtype=dtype, device=y.device)

    def save_output(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, ctx.dim, _, ctx.backend, ctx.scale, mask, ctx.causal = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output, mask)

    def backward_of_op(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        y, mask = ctx.saved_tensors
        run = getattr(torch.ops.minikernel, backward)
        return run(dy, y, ctx.dim, ctx.dtype, ctx.backend, ctx.scale, mask, ctx.causal), *(None,) * 6

    def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        dy, y, ctx.dim, _, _, ctx.scale, mask, ctx.causal = inputs
        ctx.save_for_backward(dy, y, mask)

    def backward_of_gradient(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dy, y, mask = ctx.saved_tensors
        return *double_backward(op, g, dy, y, ctx.dim, given(ctx.scale, mask, ctx.causal)), *(None,) * 6

    for name, function, fake, save, derivative in (
        (op, forward, forward_fake, save_output, backward_of_op),
        (backward, gradient_of, gradient_fake, save_inputs, backward_of_gradient),
    ):
        _implement(name, function, fake, save, derivative)


def _refuse_tangents(*tensors: torch.Tensor) -> None:
    """Raise rather than lose a tangent; the public functions never get here with one."""
    if torch.autograd.forward_ad._current_level >= 0 and any(
        torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise NotImplementedError("the operators torch.ops.minikernel.* carry no tangents: call minikernel.softmax")


def _implement(name: str, function: Any, fake: Any, save: Any, derivative: Any) -> None:
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"minikernel::{name}", fake, lib=_library)
    torch.library.register_autograd(f"minikernel::{name}", derivative, setup_context=save, lib=_library)


def _check_arguments(op: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None, asked: Scores | None) -> int:
    """What a call that is recorded would refuse only once it runs; returns the axis."""
    axis = normalize_dim(dim, x.dim())
    api.check_dtypes(x, dtype, op)
    if asked is not None:
        _check_scores(x, axis, asked)
    return axis


def _check_scores(x: torch.Tensor, axis: int, asked: Scores) -> None:
    """What an eager call checks of mask and causality, in its order."""
    if asked.mask is not None:
        check_boolean(str(asked.mask.dtype).removeprefix("torch."))
        check_broadcast(asked.mask.shape, x.shape)
    if asked.causal:
        check_causal(x.shape, axis)


def _asked(scores: tuple[Any, ...]) -> Scores | None:
    """What an operator was given of scale, mask and causality; trailing ones may be missing."""
    return given(*Scores(*scores))


def double_backward(
    op: str, g: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dim: int, asked: Scores | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``g``, the gradient of dx, comes to for dy and for y."""
    if y.dim() == 0:
        of_dy, of_y = double_backward(op, g.reshape(1), dy.reshape(1), y.reshape(1), -1, asked)
        return of_dy.reshape(()), of_y.reshape(())
    g = _scaled(g, asked)
    of_dy = tangent(op, g, y, dim)  # dx is linear in dy, and a tangent takes the transposed way
    dtype = y.dtype
    if dtype in _HALF_DTYPES:
        g, dy, y = g.float(), dy.float(), y.float()
    if op == "softmax":
        of_dy, dy = _kept(of_dy, asked), _kept(dy, asked)
        of_y = g * (dy - (dy * y).sum(dim, keepdim=True)) - dy * (g * y).sum(dim, keepdim=True)
    else:
        of_y = -g * y.exp() * dy.sum(dim, keepdim=True)
    return of_dy, of_y.to(dtype)


for _op in OPS:
    _define(_op)


def _define_topk() -> None:
    _library.define(
        f"{TOPK}(Tensor x, int k, int dim, ScalarType? dtype=None, str backend='auto') -> (Tensor, Tensor)"
    )

    def forward(
        x: torch.Tensor, k: int, dim: int, dtype: torch.dtype | None = None, backend: str = "auto"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _refuse_tangents(x)
        return api.plain_topk(x.detach(), k, dim, backend, dtype or x.dtype)

    def fake(
        x: torch.Tensor, k: int, dim: int, dtype: torch.dtype | None = None, backend: str = "auto"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axis = _check_arguments(TOPK, x, dim, dtype, None)
        shape = [*x.shape]
        api.check_k(k, shape[axis] if shape else 1)
        if shape:
            shape[axis] = k
        like = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
        return like, torch.empty_like(like, dtype=torch.int64)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        x, _, ctx.dim, ctx.wanted, ctx.backend = inputs
        ctx.save_for_backward(x, output[1])

    def backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
        x, indices = ctx.saved_tensors
        if torch.autograd.forward_ad._current_level >= 0:  # which the operators know nothing of
            y = torch.softmax(x, ctx.dim, dtype=ctx.wanted)
            whole = torch.zeros_like(y).scatter(ctx.dim, indices, dy)
            return gradient("softmax", whole, y, ctx.dim, x.dtype), None, None, None, None
        y = torch.ops.minikernel.softmax(x, ctx.dim, ctx.wanted, ctx.backend)
        whole = torch.zeros_like(y).scatter(ctx.dim, indices, dy)
        dx = torch.ops.minikernel.softmax_backward(whole, y, ctx.dim, x.dtype, ctx.backend)
        return dx, None, None, None, None

    _implement(TOPK, forward, fake, save, backward)


_define_topk()


def traced_topk(x: torch.Tensor, k: int, dim: int, backend: str, dtype: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`minikernel.softmax_topk` as its operator: what programs record, and autograd."""
    wanted = _torch_dtype(x, dtype)
    if _is_inside(x):
        return _sorted_topk(x, torch.softmax(x, dim, dtype=wanted), k, dim, wanted)
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.minikernel.softmax_topk(x, k, dim, wanted, backend)
    return found


def _is_inside(x: torch.Tensor) -> bool:
    """Whether what is recorded is inside a transform: then PyTorch's own softmax is."""
    if torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.is_batchedtensor(x):
        return True
    # For torch.func.grad; torch.compile can't answer yes, and leaves the call to eager mode.
    return torch._C._functorch.maybe_current_level() is not None


def traced(
    op: str, x: torch.Tensor, dim: int, backend: str, dtype: Any, out: Any, asked: Scores | None = None
) -> torch.Tensor:
    """A call that is recorded in a program: as the operator, or inside transforms as PyTorch's own softmax."""
    wanted = _torch_dtype(x, dtype)
    if _is_inside(x):
        return _by_pytorch(op, x, dim, wanted, asked)
    if asked is not None and (isinstance(asked.scale, torch.Tensor | bool) or not isinstance(asked.causal, bool)):
        asked.checked()  # which says what is wrong
    result: torch.Tensor = getattr(torch.ops.minikernel, op)(x, dim, wanted, backend, *(asked or ()))
    if out is None:
        return result
    if out.shape != result.shape or out.device != result.device:
        raise ValueError("out must have the input's shape and device")
    if out.dtype != result.dtype:
        raise TypeError(f"out must have the dtype {result.dtype}")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise RuntimeError(api.OUT_IS_NOT_RECORDED)
    return out.copy_(result)
