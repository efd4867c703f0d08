"""From tasks to records: each result is checked against float64 first, and timed only if it is right."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from minikernel import BackendError
from minikernel.problem import ITEMSIZE, TOPK

from .buffers import PLACEMENTS, Buffers
from .peers import AUTO, COPY, TORCH, Impl
from .records import OK, Record
from .reference import Reference, Verdict, is_gradient
from .shapes import DTYPES, Case, Task
from .spaces import Space
from .timing import BRIEF_REPLAY_SECONDS, REPLAY_SECONDS, GraphTimer, Launch, Turn, host_seconds, once

#: A single call longer than this isn't worth timing.
SLOW_SECONDS = {"cuda": 0.05, "cpu": 0.1}
#: How long host time is measured; on a CPU it is all there is.
_HOST_SECONDS = {"cuda": 0.03, "cpu": 0.1}
#: How long the replays of a graph are measured, and where there are hundreds of points.
_DEVICE_SECONDS, _BRIEF_SECONDS = 0.04, 0.012
#: From this many elements up, a CPU's time per element predicts that of larger arrays.
_PREDICTIVE_ELEMENTS = 1 << 16

_REFUSALS = (ValueError, BackendError, NotImplementedError)


class _Subject:
    """A task with its arrays, made when first needed and shared by all implementations."""

    def __init__(self, task: Task, space: Space, cache_bytes: int, source: np.ndarray | None) -> None:
        self.task, self._space, self._cache_bytes, self._source = task, space, cache_bytes, source
        # By whether it reads one array or, for a gradient, two.
        self.copy_kernels: dict[bool, float] = {}

    @cached_property
    def buffers(self) -> Buffers:
        return Buffers(self.task, self._space, self._cache_bytes, self._source)

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.buffers.inputs[0], self.task.case.dim, self.task.dtype, self._space)

    @cached_property
    def gradient_reference(self) -> Reference:
        y, dy = self.pairs[0]
        return Reference(y, self.task.case.dim, self.task.dtype, self._space, dy)

    @cached_property
    def pairs(self) -> list[tuple[Any, Any]]:
        """(y, dy) for gradients: any values will do for y."""
        plain = self.buffers.plain
        return list(zip(plain, plain[1:] + plain[:1], strict=True))

    def inputs_of(self, op: str) -> Sequence[Any]:
        return self.pairs if is_gradient(op) else self.buffers.inputs

    def reference_of(self, op: str) -> Reference:
        return self.gradient_reference if is_gradient(op) else self.reference


@dataclass(frozen=True)
class _Trial:
    """An implementation that gave a right result, before its host time is taken."""

    impl: Impl
    kernel: float | None
    turn: Turn
    verdict: Verdict | None = None


class Bench:
    """Measures implementations on tasks, in one space.

    Args:
        space: Where the arrays live.
        impls: Who is measured, in order; the copy, if there, first, since it chooses where outputs lie.
        ops: ``"softmax"``, ``"log_softmax"``, their gradients and ``"softmax_topk"``, or some of them.
        cache_bytes: Size of the device's last cache; 0 for a CPU.
        deadline: Value of ``time.monotonic()`` after which nothing more is measured.
        sources: Values for the cases that have a label; the others are random.
        slow: Seconds; a call that takes longer isn't timed.
    """

    def __init__(
        self,
        space: Space,
        impls: Sequence[Impl],
        ops: Sequence[str],
        *,
        cache_bytes: int = 0,
        deadline: float = math.inf,
        sources: dict[str, np.ndarray] | None = None,
        slow: float | None = None,
    ) -> None:
        self.space, self.impls, self.ops = space, impls, ops
        self.cache_bytes, self._deadline, self._sources = cache_bytes, deadline, sources or {}
        self._slow = SLOW_SECONDS[space.device] if slow is None else slow
        self._seconds_per_element: dict[tuple[str, str, str], float] = {}

    def run(self, tasks: Iterable[Task]) -> Iterator[Record]:
        """A record for each task, op and implementation, as each is ready."""
        for task in tasks:
            subject = _Subject(task, self.space, self.cache_bytes, self._sources.get(task.case.label))
            for op in self.ops:
                yield from self._measure(op, subject)

    def _measure(self, op: str, subject: _Subject) -> Iterator[Record]:
        """A record for each implementation; those whose results are right take turns for their host times."""
        task = subject.task
        tried = [self._try(impl, op, subject) for impl in self._taking_part(task.case)]
        trials = [trial for trial in tried if isinstance(trial, _Trial)]
        hosts: list[float | Exception | None] = [None] * len(trials)
        if task.case.scope != "brief" or self.space.device == "cpu":
            turns = [trial.turn for trial in trials]
            hosts = [*host_seconds(turns, self.space.synchronize, _HOST_SECONDS[self.space.device])]
        found = dict(zip(map(id, trials), hosts, strict=True))
        for trial in tried:
            yield trial if isinstance(trial, Record) else self._timed(trial, op, task, found[id(trial)])

    def _taking_part(self, case: Case) -> Sequence[Impl]:
        """Everyone, or for a brief look auto; without it, those that were named."""
        if case.scope != "brief":
            return self.impls
        autos = [impl for impl in self.impls if impl.name == AUTO]
        return autos or [impl for impl in self.impls if impl.name not in (COPY, TORCH)]

    def _try(self, impl: Impl, op: str, subject: _Subject) -> _Trial | Record:
        task = subject.task
        if status := self._not_worth_trying(impl, op, task):
            return record(impl.name, op, task, status=status)
        try:
            return self._copy(impl, op, subject) if impl.name == COPY else self._softmax(impl, op, subject)
        except Exception as error:
            return record(impl.name, op, task, status=status_of(error))

    def _timed(self, trial: _Trial, op: str, task: Task, host: float | Exception | None) -> Record:
        if isinstance(host, Exception):
            return record(trial.impl.name, op, task, status=status_of(host))
        if host is not None:
            self._remember_pace(trial.impl, op, task, host)
        return record(trial.impl.name, op, task, trial.kernel, host, trial.verdict)

    def _not_worth_trying(self, impl: Impl, op: str, task: Task) -> str | None:
        if status := unmeasurable(task.case, task.dtype):
            return status
        if time.monotonic() > self._deadline:
            return "skipped: budget"
        if impl.name == COPY:  # alone, it compares with nothing
            others = [self._not_worth_trying(other, op, task) for other in self.impls if other.name != COPY]
            return "skipped: slow" if others and all(others) else None
        pace = self._seconds_per_element.get((impl.name, op, task.dtype), 0.0)
        return "skipped: slow" if pace * task.case.elements > self._slow else None

    def _softmax(self, impl: Impl, op: str, subject: _Subject) -> _Trial | Record:
        task, buffers = subject.task, subject.buffers
        dim = task.case.dim
        if is_gradient(op) and task.layout != "contiguous":
            return record(impl.name, op, task, status="unsupported: a gradient's arrays are contiguous")
        inputs, reference = subject.inputs_of(op), subject.reference_of(op)

        def into(i: int) -> Any:
            return impl.into(op, inputs[i], dim, buffers.outputs[i])

        def failed(verdict: Verdict, status: str) -> Record:
            return record(impl.name, op, task, verdict=verdict, status=status)

        buffers.poison()
        verdict = reference.check(op, into(0))
        if verdict.fault:
            return failed(verdict, f"wrong: {verdict.fault}")
        first = once(into, self.space.synchronize, self._slow)
        if first > self._slow:
            self._remember_pace(impl, op, task, first)
            return failed(verdict, "skipped: slow")

        kernel = None
        if self.space.device == "cuda":
            brief = task.case.scope == "brief"
            timer = GraphTimer(into, len(buffers), first, BRIEF_REPLAY_SECONDS if brief else REPLAY_SECONDS)
            buffers.poison()
            timer.replay()
            replayed = reference.check(op, timer.results[0])
            if replayed.fault:
                return failed(replayed, f"wrong: {replayed.fault} in a CUDA graph")
            kernel = timer.seconds(_BRIEF_SECONDS if brief else _DEVICE_SECONDS)
            del timer
        return _Trial(impl, kernel, Turn(impl.eager(op, dim), inputs, first), verdict)

    def _copy(self, impl: Impl, op: str, subject: _Subject) -> _Trial:
        buffers, gradient = subject.buffers, is_gradient(op)
        inputs: Sequence[Any] = subject.pairs if gradient else buffers.plain

        def into(i: int) -> Any:
            return impl.into(op, inputs[i], -1, buffers.outputs[i])

        into(0)
        first = once(into, self.space.synchronize)
        if self.space.device == "cuda" and gradient not in subject.copy_kernels:
            subject.copy_kernels[gradient] = self._time_copy(into, buffers, first)
        return _Trial(impl, subject.copy_kernels.get(gradient), Turn(impl.eager(op, -1), inputs, first))

    def _time_copy(self, into: Launch, buffers: Buffers, first: float) -> float:
        """Device seconds of the copy; leaves the outputs where the copy was fastest."""
        found = {}
        for placement in PLACEMENTS:
            buffers.place(placement)
            timer = GraphTimer(into, len(buffers), first)
            timer.replay()
            found[placement] = timer.seconds()
            del timer
        best = min(found, key=found.__getitem__)
        buffers.place(best)
        return found[best]

    def _remember_pace(self, impl: Impl, op: str, task: Task, seconds: float) -> None:
        if self.space.device == "cpu" and task.case.elements >= _PREDICTIVE_ELEMENTS:
            key, pace = (impl.name, op, task.dtype), seconds / task.case.elements
            self._seconds_per_element[key] = min(pace, self._seconds_per_element.get(key, math.inf))


def record(
    impl: str,
    op: str,
    task: Task,
    kernel: float | None = None,
    host: float | None = None,
    verdict: Verdict | None = None,
    status: str = OK,
) -> Record:
    """A record from seconds; the bandwidth follows from the device time, or else the host's."""
    seconds = kernel if kernel is not None else host
    case = task.case
    relative, absolute = (verdict.max_rel_error, verdict.max_abs_error) if verdict else (None, None)
    return Record(
        op=op,
        impl=impl,
        dtype=task.dtype,
        rows=case.rows,
        cols=case.cols,
        dim=case.dim,
        layout=task.layout,
        kernel_us=kernel and _five_digits(kernel * 1e6),
        host_us=host and _five_digits(host * 1e6),
        gbs=seconds and _five_digits(_arrays(op, impl) * case.elements * ITEMSIZE[task.dtype] / seconds * 1e-9),
        max_rel_error=relative and _five_digits(relative),
        max_abs_error=_five_digits(absolute) if absolute is not None and math.isfinite(absolute) else None,
        status=status,
        case=case.name,
    )


def _arrays(op: str, impl: str) -> int:
    """How many arrays of the input's size are read and written."""
    return 3 if is_gradient(op) else 1 if op == TOPK and impl != COPY else 2


def status_of(error: Exception) -> str:
    """A record's status for what an implementation raised."""
    if isinstance(error, _REFUSALS):
        return f"unsupported: {one_line(error)}"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
        return "skipped: memory"
    return f"wrong: raised {type(error).__name__}: {one_line(error)}"


def _five_digits(value: float) -> float:
    return float(f"{value:.5g}")


def unmeasurable(case: Case, dtype: str) -> str | None:
    """The status of an input array that can't be measured at all, or None."""
    if dtype not in DTYPES:
        return f"skipped: {dtype} is not a floating-point dtype that softmax takes; cast it with --dtypes"
    if not case.shape:
        return "unsupported: a 0-d array, whose softmax is 1; the bench measures arrays of one axis or more"
    return "skipped: empty array" if case.elements == 0 else None


def one_line(error: BaseException, limit: int = 240) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
