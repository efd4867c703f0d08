"""Who is measured: backends, and the peers beside them, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import minikernel
from minikernel import api
from minikernel.problem import BACKWARD, TOPK

#: Every run times these beside the backends.
COPY, TORCH = "copy", "F.softmax"
#: What a call that names no backend runs.
AUTO = "auto"
#: How many of the largest ``softmax_topk`` gives, unless a run says otherwise.
K = 8
# Gradient -> whose it is.
_FORWARD = {backward: op for op, backward in BACKWARD.items()}


@dataclass(frozen=True)
class Impl:
    """One implementation.

    Attributes:
        name: As records have it.
        into: ``into(op, x, dim, out)``: softmax or log_softmax of ``x`` along ``dim``, into ``out`` if the
            implementation can; returns the result. Of their gradients ``x`` is the pair (y, dy). Raises ValueError,
            BackendError or NotImplementedError for an input that it doesn't take. Of ``softmax_topk`` the result is
            a pair, probabilities and indices, and ``out`` isn't filled.
        eager: ``eager(op, dim)`` returns the call that a user makes, of ``x`` alone; its host time is taken.
    """

    name: str
    into: Callable[[str, Any, int, Any], Any]
    eager: Callable[[str, int], Callable[[Any], Any]]


def backend(name: str, k: int = K) -> Impl:
    """A registered backend, or ``"auto"``, through the public functions; ``k`` is for ``softmax_topk``."""
    ops = {"softmax": minikernel.softmax, "log_softmax": minikernel.log_softmax}
    gradients: dict[tuple[Any, ...], Callable[[Any, Any], Any] | None] = {}

    def gradient(op: str, pair: Any, dim: int) -> Any:
        y, dy = pair
        key = op, dim, y.shape, y.dtype
        if key not in gradients:
            gradients[key] = api.backward_of(_FORWARD[op], y, dim, name, y.dtype)
        if (run := gradients[key]) is None:
            raise NotImplementedError(f"{name} has no gradient for this input")
        return run(dy, y)

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        if op == TOPK:
            return minikernel.softmax_topk(x, k, dim, backend=name)
        return gradient(op, x, dim) if op in _FORWARD else ops[op](x, dim, backend=name, out=out)

    def eager(op: str, dim: int) -> Callable[[Any], Any]:
        if op in _FORWARD:
            return lambda pair: gradient(op, pair, dim)
        if op == TOPK:
            return partial(minikernel.softmax_topk, k=k, dim=dim, backend=name)
        return partial(ops[op], dim=dim, backend=name)

    return Impl(name, into, eager)


def unavailable(name: str, reason: str) -> Impl:
    """A backend that was asked for by name and can't run here: unsupported, whatever the input."""

    def into(op: str, x: Any, dim: int, out: Any) -> NoReturn:
        raise NotImplementedError(reason)

    return Impl(name, into, lambda op, dim: partial(into, op, dim=dim, out=None))


def torch_softmax(k: int = K) -> Impl:
    """``torch.nn.functional.softmax``, eager; into ``out`` by ``torch.softmax``, the same kernel.

    Of ``softmax_topk``, ``torch.topk`` of it.
    """
    import torch
    import torch.nn.functional as F

    eager: dict[str, Callable[..., Any]] = {"softmax": F.softmax, "log_softmax": F.log_softmax}
    filling: dict[str, Callable[..., Any]] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}

    def gradient(op: str, pair: Any, dim: int, out: Any = None) -> Any:
        y, dy = pair
        if op == BACKWARD["softmax"]:
            return torch._softmax_backward_data(dy, y, dim, y.dtype, **({} if out is None else {"grad_input": out}))
        return torch._log_softmax_backward_data(dy, y, dim, y.dtype, **({} if out is None else {"out": out}))

    def topk(x: Any, dim: int) -> Any:
        return torch.topk(F.softmax(x, dim), k, dim)

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        if op == TOPK:
            return topk(x, dim)
        return gradient(op, x, dim, out) if op in _FORWARD else filling[op](x, dim, out=out)

    def call(op: str, dim: int) -> Callable[[Any], Any]:
        if op == TOPK:
            return partial(topk, dim=dim)
        return (lambda pair: gradient(op, pair, dim)) if op in _FORWARD else partial(eager[op], dim=dim)

    return Impl(TORCH, into, call)


def copy(xp: Any) -> Impl:
    """The floor: an elementwise kernel that reads and writes the same bytes, in PyTorch or NumPy."""

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        return xp.add(*x, out=out) if op in _FORWARD else xp.negative(x, out=out)

    return Impl(COPY, into, lambda op, dim: (lambda pair: xp.add(*pair)) if op in _FORWARD else xp.negative)


def _refuse_others(op: str) -> None:
    """What has softmax and its logarithm alone."""
    if op in _FORWARD or op == TOPK:
        raise NotImplementedError(f"its {op} isn't measured")


def torch_compile() -> Impl:
    """``F.softmax`` under ``torch.compile``; it has no ``out``."""
    import torch
    import torch.nn.functional as F

    eager: dict[str, Callable[..., Any]] = {"softmax": F.softmax, "log_softmax": F.log_softmax}
    compiled = {op: torch.compile(function, fullgraph=True, dynamic=False) for op, function in eager.items()}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        _refuse_others(op)
        return compiled[op](x, dim=dim)

    return Impl("torch.compile", into, lambda op, dim: partial(compiled[op], dim=dim))


def scipy_softmax() -> Impl:
    """``scipy.special.softmax``, of NumPy arrays; it has no ``out``."""
    from scipy import special

    functions = {"softmax": special.softmax, "log_softmax": special.log_softmax}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        _refuse_others(op)
        return functions[op](x, axis=dim)

    return Impl(SCIPY, into, lambda op, dim: partial(functions[op], axis=dim))


@dataclass(frozen=True)
class Peer:
    """Someone whom ``--peers`` adds.

    Attributes:
        name: As records have it.
        package: What must be installed.
        framework: Whose arrays it takes, ``"torch"`` or ``"numpy"``; the whole run is on such.
        make: Makes it.
    """

    name: str
    package: str
    framework: str
    make: Callable[[], Impl]


SCIPY = "scipy.special.softmax"
OPTIONAL = {
    "compile": Peer("torch.compile", "torch", "torch", torch_compile),
    "scipy": Peer(SCIPY, "scipy", "numpy", scipy_softmax),
}
#: As records have them.
OPTIONAL_NAMES = tuple(peer.name for peer in OPTIONAL.values())
