"""Who is measured: backends, and the peers beside them, behind one interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import minikernel

#: Every run times these beside the backends.
COPY, TORCH = "copy", "F.softmax"
#: What a call that names no backend runs.
AUTO = "auto"


@dataclass(frozen=True)
class Impl:
    """One implementation.

    Attributes:
        name: As records have it.
        into: ``into(op, x, dim, out)``: softmax or log_softmax of ``x`` along ``dim``, into ``out`` if the
            implementation can; returns the result. Raises ValueError, BackendError or
            NotImplementedError for an input that it doesn't take.
        eager: ``eager(op, dim)`` returns the call that a user makes, of ``x`` alone; its host time is taken.
    """

    name: str
    into: Callable[[str, Any, int, Any], Any]
    eager: Callable[[str, int], Callable[[Any], Any]]


def backend(name: str) -> Impl:
    """A registered backend, or ``"auto"``, through the public functions."""
    ops = {"softmax": minikernel.softmax, "log_softmax": minikernel.log_softmax}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        return ops[op](x, dim, backend=name, out=out)

    return Impl(name, into, lambda op, dim: partial(ops[op], dim=dim, backend=name))


def unavailable(name: str, reason: str) -> Impl:
    """A backend that was asked for by name and can't run here: unsupported, whatever the input."""

    def into(op: str, x: Any, dim: int, out: Any) -> NoReturn:
        raise NotImplementedError(reason)

    return Impl(name, into, lambda op, dim: partial(into, op, dim=dim, out=None))


def torch_softmax() -> Impl:
    """``torch.nn.functional.softmax``, eager; into ``out`` by ``torch.softmax``, the same kernel."""
    import torch
    import torch.nn.functional as F

    eager: dict[str, Callable[..., Any]] = {"softmax": F.softmax, "log_softmax": F.log_softmax}
    filling: dict[str, Callable[..., Any]] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        return filling[op](x, dim, out=out)

    return Impl(TORCH, into, lambda op, dim: partial(eager[op], dim=dim))


def copy(xp: Any) -> Impl:
    """The floor: an elementwise kernel that reads and writes the same bytes, in PyTorch or NumPy."""

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        return xp.negative(x, out=out)

    return Impl(COPY, into, lambda op, dim: xp.negative)


def torch_compile() -> Impl:
    """``F.softmax`` under ``torch.compile``; it has no ``out``."""
    import torch
    import torch.nn.functional as F

    eager: dict[str, Callable[..., Any]] = {"softmax": F.softmax, "log_softmax": F.log_softmax}
    compiled = {op: torch.compile(function, fullgraph=True, dynamic=False) for op, function in eager.items()}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
        return compiled[op](x, dim=dim)

    return Impl("torch.compile", into, lambda op, dim: partial(compiled[op], dim=dim))


def scipy_softmax() -> Impl:
    """``scipy.special.softmax``, of NumPy arrays; it has no ``out``."""
    from scipy import special

    functions = {"softmax": special.softmax, "log_softmax": special.log_softmax}

    def into(op: str, x: Any, dim: int, out: Any) -> Any:
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
