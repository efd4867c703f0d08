"""Drop-ins for PyTorch models: modules, and a context in which a model's own softmax calls run through minikernel.

Importing it imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from .api import log_softmax, softmax
from .dispatch import check_name
from .problem import ITEMSIZE


class _Module(torch.nn.Module):
    def __init__(self, dim: int = -1, *, backend: str = "auto", dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_name(backend)
        self.dim, self.backend, self.dtype = dim, backend, dtype

    def extra_repr(self) -> str:
        shown = [f"dim={self.dim}"]
        if self.backend != "auto":
            shown.append(f"backend={self.backend!r}")
        if self.dtype is not None:
            shown.append(f"dtype={self.dtype}")
        return ", ".join(shown)


class Softmax(_Module):
    """:func:`minikernel.softmax` as a module, in place of ``torch.nn.Softmax``.

    Args:
        dim: The axis that sums to 1; negative counts from the end.
        backend: As in :func:`minikernel.softmax`.
        dtype: Cast the input to this floating dtype first.

    Shape: any; the output has the input's.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # named as torch.nn's is
        return softmax(input, self.dim, backend=self.backend, dtype=self.dtype)


class LogSoftmax(_Module):
    """:func:`minikernel.log_softmax` as a module, in place of ``torch.nn.LogSoftmax``; see :class:`Softmax`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return log_softmax(input, self.dim, backend=self.backend, dtype=self.dtype)


def _functional(x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> tuple[Any, Any, Any, Any]:
    return x, dim, dtype, None


def _method(x: Any, dim: Any, dtype: Any = None, *, out: Any = None) -> tuple[Any, Any, Any, Any]:
    return x, dim, dtype, out


_Call = Callable[..., Any]
# What is replaced: ours, and how its arguments are read.
_REPLACED: dict[_Call, tuple[_Call, _Call]] = {
    F.softmax: (softmax, _functional),
    F.log_softmax: (log_softmax, _functional),
}
for _function in (torch.softmax, torch.special.softmax, torch.Tensor.softmax):
    _REPLACED[_function] = softmax, _method
for _function in (torch.log_softmax, torch.special.log_softmax, torch.Tensor.log_softmax):
    _REPLACED[_function] = log_softmax, _method


class replace_softmax(TorchFunctionMode):
    """A context in which a model's softmax calls run through minikernel, without a change to the model.

    Every ``F.softmax``, ``torch.softmax``, ``torch.special.softmax``, ``Tensor.softmax`` and ``nn.Softmax``, and
    their log forms, forward and backward. What has no path here (a tensor subclass, a sparse or nested tensor, an
    MPS or meta device, a named or missing ``dim``, a tracer) goes to PyTorch's own. So does a softmax that PyTorch
    calls inside a function of its own: ``nn.MultiheadAttention``, ``F.gumbel_softmax``, ``F.softmin``. Fused
    attention calls none.

    Args:
        backend: As in :func:`minikernel.softmax`.

    Raises:
        ValueError: No backend has that name.
    """

    def __init__(self, backend: str = "auto") -> None:
        super().__init__()
        check_name(backend)
        self._backend = backend

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _REPLACED:
            ours, read = _REPLACED[func]
            x, dim, dtype, out = read(*([named.pop("input")] if "input" in named else []), *args, **named)
            if _takes(x, dim, dtype, out):
                return ours(x, dim, backend=self._backend, dtype=dtype, out=out)
        return func(*args, **(kwargs or {}))


def _takes(x: Any, dim: Any, dtype: Any, out: Any) -> bool:
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or type(dim) is not int:
        return False
    if not torch.compiler.is_dynamo_compiling() and torch._C._is_tracing():
        return False
    wanted = dtype or x.dtype
    return (
        x.device.type in ("cpu", "cuda")
        and x.layout == torch.strided
        and not x.is_nested
        and not x.is_complex()
        and str(wanted).removeprefix("torch.") in ITEMSIZE
        and not (torch.version.hip and x.is_cuda)
        and (out is None or (type(out) is torch.Tensor and (out.shape, out.dtype) == (x.shape, wanted)))
    )
