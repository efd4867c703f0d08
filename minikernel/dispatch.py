"""Choosing a backend, saying why, and remembering what it made of a problem."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Mapping
from contextlib import ContextDecorator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from .problem import Kernel, Mask, Problem
from .registry import REGISTRY, Backend, BackendError, BackendUnavailable

if TYPE_CHECKING:
    from .tuned import Preference

ENVIRONMENT_VARIABLE = "MINIKERNEL_BACKEND"

#: Entries kept in each cache here and in api.py; a full one is emptied, which costs a few slow calls.
CACHE_SIZE = 4096

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

override: ContextVar[str | None] = ContextVar("minikernel_backend", default=None)
_outer: ContextVar[tuple[str | None, ...]] = ContextVar("minikernel_outer_backends", default=())


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
        passed_over: Names of those that auto would rather have chosen and that work in the input's memory.

    ``print`` shows it in a few lines; backends with the same reasons share one.
    """

    backend: str | None
    reason: str
    rejected: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    through: str | None = None
    fallback: bool = False
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (f"{self.backend}: " if self.backend else "") + self.reason + describe_rejections(self)


class use_backend(ContextDecorator):
    """Let every call inside the block that names no backend use this one.

    It nests, can be entered again and decorates functions (not coroutine functions: write the block
    inside them). It holds for the current thread and asyncio task; tasks created inside the block inherit
    it, new threads don't. A call with ``backend="auto"`` names none, so it uses this one too; inside
    ``use_backend("auto")`` such calls choose freely, whatever an outer block or MINIKERNEL_BACKEND says.

    Args:
        name: A backend's name, or ``"auto"``.

    Raises:
        ValueError: No backend has that name; the message lists those there are.
    """

    def __init__(self, name: str) -> None:
        check_name(name)
        self._name = name

    def __enter__(self) -> None:
        _outer.set((*_outer.get(), override.get()))
        override.set(self._name)

    def __exit__(self, *error: object) -> None:
        *outer, previous = _outer.get()
        override.set(previous)
        _outer.set(tuple(outer))


def check_name(name: str) -> None:
    """Raise the ValueError that lists the names, unless there is a backend of that name."""
    if not isinstance(name, str) or name != "auto":
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
    """The name that has authority for a call, and what gave it: "" if nothing did."""
    if not isinstance(backend, str) or backend != "auto":
        check_name(backend)
        return backend, f"backend={backend!r}"
    if (inner := override.get()) is not None:
        return inner, f"use_backend({inner!r})"
    name = environment_backend()
    return name, f"{ENVIRONMENT_VARIABLE}={name}" if name != "auto" else ""


def choose(problem: Problem, backend: str = "auto", *, complete: bool = True) -> Decision:
    """Choose a backend by the order of authority: call, ``use_backend``, environment, auto.

    Never raises for a problem that nothing can take: the decision's ``backend`` is None then.

    Args:
        complete: Whether to ask the backends after the chosen one too, for ``rejected`` to hold them all.

    Raises:
        ValueError: ``backend``, or the environment, names no backend.
    """
    return _choose(REGISTRY.backends(), problem, backend, complete)


def _choose(backends: Mapping[str, Backend], problem: Problem, backend: str, complete: bool) -> Decision:
    name, source = requested(backend)
    if name == "auto":
        return _choose_auto(backends, problem, complete)
    if name not in backends:  # unregistered meanwhile
        raise REGISTRY.unknown(name)
    return _choose_named(backends, problem, name, source)


def _choose_named(backends: Mapping[str, Backend], problem: Problem, name: str, source: str) -> Decision:
    devices = backends[name].devices
    through = devices[0] if problem.device in ("cpu", "cuda") and problem.device not in devices else None
    target = moved(problem, through) if through else problem
    if not (reasons := REGISTRY.rejects(backends[name], target)):
        reason = f"It was asked for by {source}."
        if through:
            reason += f" The input is copied from {problem.device} to {through} memory and the output back."
        return Decision(name, reason, {other: ("not asked for",) for other in backends if other != name}, through)

    rejected = {name: tuple(reasons)}
    for other, candidate in backends.items():
        if other != name:
            elsewhere = problem.device not in candidate.devices and through in candidate.devices
            rejected[other] = tuple(REGISTRY.rejects(candidate, target if elsewhere else problem)) or (
                "it could take this input",
            )
    cannot = "run here" if reasons == REGISTRY.lacks(backends[name], target) else "take this input"
    reason = f"{name} (asked for by {source}) can't {cannot}: {'; '.join(reasons)}."
    auto = _choose_auto(backends, problem, complete=False)
    if auto.backend:
        cure = 'backend="auto"' if source.startswith("backend=") else 'use_backend("auto")'
        reason += f" With {cure} it would run on {auto.backend}{', through the host' if auto.through else ''}."
    return Decision(None, reason, rejected)


def _choose_auto(backends: Mapping[str, Backend], problem: Problem, complete: bool) -> Decision:
    rejected: dict[str, tuple[str, ...]] = {}
    passed_over: list[str] = []
    chosen: str | None = None
    preference = _preference(backends, problem)
    for name in _in_order(backends, preference):
        backend = backends[name]
        if reasons := REGISTRY.rejects(backend, problem):
            rejected[name] = tuple(reasons)
            if chosen is None and problem.device in backend.devices:
                passed_over.append(name)
        elif chosen is not None:
            rejected[name] = (_why_later(name, chosen, preference),)
        else:
            chosen = name
            reason = _why_first(name, problem, passed_over, bool(rejected), preference)
            if not complete:
                break
    if chosen is not None:
        return Decision(chosen, reason, rejected, passed_over=tuple(passed_over))
    if problem.device == "cuda":
        on_host = moved(problem, "cpu")
        for name, backend in backends.items():
            if "cpu" in backend.devices and not REGISTRY.rejects(backend, on_host):
                reason = "No backend takes it in cuda memory: the input is copied to the host and the output back."
                del rejected[name]
                return Decision(name, reason, rejected, "cpu", True, tuple(passed_over))
    return Decision(None, "No backend can take this input.", rejected)


def _preference(backends: Mapping[str, Backend], problem: Problem) -> Preference | None:
    """What was measured on the problem's GPU, if anything; warns once of a table that can't be used."""
    if problem.device != "cuda":
        return None
    from . import tuned  # here, so that importing the library doesn't pay for it

    if faults := tuned.find(problem.index).faults:
        message = f"auto doesn't go by a table of measurements as it should: {'; '.join(faults)}"
        _warn_once((problem.device, problem.index, "", faults), message)
    return tuned.preferred(problem, tuple(backends))


def _in_order(backends: Mapping[str, Backend], preference: Preference | None) -> list[str]:
    """Names in the order in which auto asks: by rank, the preferred one in the place of the first measured."""
    names = list(backends)
    if preference:
        first = next(name for name in names if name in preference.microseconds)
        names.remove(preference.backend)
        names.insert(list(backends).index(first), preference.backend)
    return names


def _why_later(name: str, chosen: str, preference: Preference | None) -> str:
    measured = preference.against(name) if preference and preference.backend == chosen else ""
    return measured or f"{chosen} comes first under auto"


def _why_first(
    name: str, problem: Problem, passed_over: list[str], others: bool, preference: Preference | None
) -> str:
    measured = preference.reason if preference and preference.backend == name else ""
    if passed_over:
        first = f"{name} comes first under auto among those that can take it, and not {', '.join(passed_over)}."
        return f"{first} {measured}".rstrip()
    if measured:
        return measured
    if others:
        return f"The input is in {problem.device} memory; {name} comes first among the backends that work there."
    return f"{name} comes first under auto, and takes it."


def moved(problem: Problem, device: str) -> Problem:
    """The same problem after the input and its mask were copied, contiguous, to another kind of device."""
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    return replace(
        problem,
        device=device,
        index=0,
        strides=(cols * inner, inner, 1),
        x_offset=0,
        out_offset=0,
        mask=Mask.contiguous(outer, cols, inner) if problem.mask else None,
    )


def _grouped(reasons: Mapping[str, tuple[str, ...]]) -> list[tuple[list[str], str]]:
    """Names that share their reasons, and those reasons."""
    groups: dict[str, list[str]] = {}
    for name, why in reasons.items():
        groups.setdefault("; ".join(why), []).append(name)
    return [(names, why) for why, names in groups.items()]


def describe_rejections(decision: Decision) -> str:
    return "".join(f"\n  {', '.join(names)}: {why}" for names, why in _grouped(decision.rejected))


_kernels: dict[tuple[Backend, Problem], Kernel] = {}
_warned: set[tuple[str, int, str, tuple[str, ...]]] = set()
_lock = threading.Lock()
REGISTRY.on_change(_kernels.clear)


def resolve(problem: Problem, backend: str = "auto", *, complete: bool = True) -> tuple[Decision, Kernel]:
    """Choose a backend and have it prepare its kernel, moving on under auto if that fails.

    Args:
        complete: As for :func:`choose`.

    Raises:
        BackendError: Nothing can take the problem, and the message lists every backend with its reasons; or
            the chosen one failed to prepare.
    """
    while True:
        generation = REGISTRY.generation
        backends = REGISTRY.backends()
        decision = _choose(backends, problem, backend, complete)
        if decision.backend is None:
            raise BackendError(str(decision))
        chosen = backends[decision.backend]
        target = moved(problem, decision.through) if decision.through else problem
        if (kernel := _kernels.get((chosen, target))) is None:
            try:
                kernel = _prepare(chosen, target)
            except BackendUnavailable as error:
                REGISTRY.mark_unavailable(
                    chosen, target.index, str(error) or "it doesn't work here, and doesn't say why"
                )
                continue
            remember(_kernels, (chosen, target), kernel, generation)
        _warn_of_fallback(backends, problem, decision)
        return decision, kernel


def _prepare(backend: Backend, problem: Problem) -> Kernel:
    try:
        kernel = backend.prepare(problem)
    except BackendUnavailable:
        raise
    except Exception as error:
        raise BackendError(f"prepare of {backend.name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(kernel, Kernel):
        raise TypeError(f"prepare of {backend.name!r} must return a minikernel.Kernel, not {type(kernel).__name__}")
    return kernel


def remember(cache: dict[_Key, _Value], key: _Key, value: _Value, generation: int | None = None) -> None:
    """Add to a cache that may not grow without bound.

    Args:
        generation: ``REGISTRY.generation`` from before the value was chosen: after a change it isn't kept.
    """
    if len(cache) >= CACHE_SIZE:
        cache.clear()
    cache[key] = value
    # Looked at after storing: a change from here on empties the cache itself.
    if generation is not None and generation != REGISTRY.generation:
        cache.pop(key, None)


def _warn_of_fallback(backends: Mapping[str, Backend], problem: Problem, decision: Decision) -> None:
    where = problem.device, problem.index, decision.backend or ""
    if decision.fallback:
        message = f"{problem.op} runs on the host instead of the GPU:{describe_rejections(decision)}"
        _warn_once((*where, decision.passed_over), message)
        return
    faults = {name: tuple(REGISTRY.fault(backends[name], problem)) for name in decision.passed_over}
    if faults := {name: why for name, why in faults.items() if why}:
        causes = [
            f"{', '.join(names)} {'do' if len(names) > 1 else 'does'}n't work here: {why}"
            for names, why in _grouped(faults)
        ]
        message = f"{decision.backend} is used because {', and '.join(causes)}"
        _warn_once((*where, tuple(faults)), message)


def _warn_once(key: tuple[str, int, str, tuple[str, ...]], message: str) -> None:
    """Warn, unless the same was said of a device, the backend used there, and those it was used instead of."""
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
