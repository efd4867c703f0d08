"""Choosing a backend, saying why, and remembering what it made of a problem."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

from .problem import Kernel, Problem
from .registry import REGISTRY, BackendError, BackendUnavailable

ENVIRONMENT_VARIABLE = "MINIKERNEL_BACKEND"
HOST_BACKEND = "numpy"

#: Entries kept in each cache here and in api.py; a full one is emptied, which costs a few slow calls.
CACHE_SIZE = 4096

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

override: ContextVar[str | None] = ContextVar("minikernel_backend", default=None)


class FallbackWarning(UserWarning):
    """Something slower than expected was used; given once per device and reason."""


@dataclass(frozen=True)
class Decision:
    """Which backend takes an input, and why the others don't.

    Attributes:
        backend: The backend's name, or None if there is none that can.
        reason: Why it was chosen, and what is done around it (a copy to another device, say), in sentences.
        rejected: Every other backend's name -> the reasons why it wasn't chosen.
        through: The kind of device whose memory the backend works in, when it isn't the input's own:
            the input is copied there and the output back.
        fallback: Whether that copy is made because no backend works where the input is.
        passed_over: Names of those that auto would rather have chosen.
    """

    backend: str | None
    reason: str
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    through: str | None = None
    fallback: bool = False
    passed_over: tuple[str, ...] = ()


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Let every call inside the block that names no backend use this one.

    It holds for the current thread and asyncio task, and nests.

    Args:
        name: A backend's name, or ``"auto"``.

    Raises:
        ValueError: No backend has that name; the message lists those there are.
    """
    check_name(name)
    token = override.set(name)
    try:
        yield
    finally:
        override.reset(token)


def check_name(name: str) -> None:
    """Raise the ValueError that lists the names, unless there is a backend of that name."""
    if name != "auto":
        REGISTRY.get(name)


@cache
def environment_backend() -> str:
    """The backend that MINIKERNEL_BACKEND names, or ``"auto"``; read once, at the first dispatch."""
    name = os.environ.get(ENVIRONMENT_VARIABLE) or "auto"
    try:
        check_name(name)
    except ValueError as error:
        raise ValueError(f"the environment variable {ENVIRONMENT_VARIABLE} is wrong: {error}") from None
    return name


def requested(backend: str) -> tuple[str, str]:
    """The name that has authority for a call, and where it came from."""
    if backend != "auto":
        check_name(backend)
        return backend, f"backend={backend!r} was asked for by the call"
    if (inner := override.get()) is not None:
        return inner, f"use_backend({inner!r}) is in force"
    name = environment_backend()
    return name, f"{ENVIRONMENT_VARIABLE}={name} is set" if name != "auto" else ""


def choose(problem: Problem, backend: str = "auto") -> Decision:
    """Choose a backend by the order of authority: call, ``use_backend``, environment, auto.

    Never raises for a problem that nothing can take: the decision's ``backend`` is None then.

    Raises:
        ValueError: ``backend``, or the environment, names no backend.
    """
    name, why = requested(backend)
    return _choose_auto(problem) if name == "auto" else _choose_named(problem, name, why)


def _choose_named(problem: Problem, name: str, why: str) -> Decision:
    others = {n: (f"not asked for: {why}",) for n in REGISTRY.names() if n != name}
    through = None
    devices = REGISTRY.get(name).devices
    if problem.device in ("cpu", "cuda") and problem.device not in devices:
        through = devices[0]
        why += f"; the input is copied from {problem.device} to {through} memory and the output back"
        problem = moved(problem, through)
    if reasons := REGISTRY.rejects(name, problem):
        return Decision(None, f"{why}, but it can't take this input", {name: tuple(reasons), **others})
    return Decision(name, f"{why}.", others, through)


def _choose_auto(problem: Problem) -> Decision:
    rejected: dict[str, tuple[str, ...]] = {}
    passed_over: list[str] = []
    chosen: str | None = None
    for name in REGISTRY.names():
        if chosen is not None:  # only the declaration is asked: probing would import what isn't going to run
            reasons = REGISTRY.get(name).rejects(problem)
            rejected[name] = tuple(reasons) or (f"{chosen} comes first under auto",)
        elif reasons := REGISTRY.rejects(name, problem):
            rejected[name] = tuple(reasons)
            passed_over.append(name)
        else:
            chosen = name
    if chosen is not None:
        reason = f"{chosen} comes first under auto among those that can take it."
        return Decision(chosen, reason, rejected, passed_over=tuple(passed_over))
    if problem.device == "cuda" and not REGISTRY.rejects(HOST_BACKEND, moved(problem, "cpu")):
        reason = "no GPU backend can take it: the input is copied to the host and the output back."
        rejected.pop(HOST_BACKEND)
        return Decision(HOST_BACKEND, reason, rejected, through="cpu", fallback=True)
    return Decision(None, "no backend can take this input", rejected)


def moved(problem: Problem, device: str) -> Problem:
    """The same problem after the input was copied, contiguous, to another kind of device."""
    return Problem(
        op=problem.op,
        device=device,
        index=0,
        dtype=problem.dtype,
        out_dtype=problem.out_dtype,
        outer=problem.outer,
        cols=problem.cols,
        inner=problem.inner,
        strides=(problem.cols * problem.inner, problem.inner, 1),
    )


def describe_rejections(decision: Decision) -> str:
    return "".join(f"\n  {name}: {'; '.join(reasons)}" for name, reasons in decision.rejected.items())


_kernels: dict[tuple[str, Problem], Kernel] = {}
_warned: set[tuple[str, int, str]] = set()
_lock = threading.Lock()
REGISTRY.on_change(_kernels.clear)


def resolve(problem: Problem, backend: str = "auto") -> tuple[Decision, Kernel]:
    """Choose a backend and have it prepare its kernel, moving on under auto if that fails.

    Raises:
        BackendError: Nothing can take the problem; the message lists every backend with its reasons.
    """
    while True:
        decision = choose(problem, backend)
        if decision.backend is None:
            raise BackendError(f"{decision.reason}:{describe_rejections(decision)}")
        _warn_of_fallback(problem, decision)
        target = moved(problem, decision.through) if decision.through else problem
        key = decision.backend, target
        try:
            if (kernel := _kernels.get(key)) is None:
                kernel = REGISTRY.get(decision.backend).prepare(target)
                remember(_kernels, key, kernel)
            return decision, kernel
        except BackendUnavailable as error:
            REGISTRY.mark_unavailable(decision.backend, target.index, str(error))


def remember(cache: dict[_Key, _Value], key: _Key, value: _Value) -> None:
    """Add to a cache that may not grow without bound."""
    if len(cache) >= CACHE_SIZE:
        cache.clear()
    cache[key] = value


def _warn_of_fallback(problem: Problem, decision: Decision) -> None:
    if decision.fallback:
        _warn_once("", problem, f"{problem.op} runs on the host instead of the GPU:{describe_rejections(decision)}")
        return
    for name in decision.passed_over:
        declined = REGISTRY.get(name).rejects(problem)
        if not declined and (reason := REGISTRY.fault(name, problem.index)):
            _warn_once(name, problem, f"{decision.backend} is used because {name} doesn't work here: {reason}")


def _warn_once(about: str, problem: Problem, message: str) -> None:
    key = (about, problem.index, message)
    with _lock:
        if key in _warned:
            return
        _warned.add(key)
    warnings.warn(message, FallbackWarning, stacklevel=_frames_to_caller())


def _frames_to_caller() -> int:
    """``stacklevel`` that lets a warning point at the line that called the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        level, frame = level + 1, frame.f_back
    return level
