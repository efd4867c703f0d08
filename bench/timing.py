"""The instrument: device time from replayed CUDA graphs, and host time per eager call."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

REPLAY_SECONDS = 2.5e-3
#: Enough for a point of which there are hundreds.
BRIEF_REPLAY_SECONDS = 1e-3
MAX_LAUNCHES = 2000
#: What a synchronized launch costs beside its device time, at least; and no kernel is faster than the other.
_LAUNCH_SECONDS, _FASTEST_SECONDS = 12e-6, 1.5e-6
#: Calls queued between two synchronizations: far fewer than fill the launch queue.
_BATCH, _MAX_CALLS = 64, 400
_LONG_SECONDS = 0.02

Launch = Callable[[int], Any]


def once(launch: Launch, synchronize: Callable[[], None], limit: float = _LONG_SECONDS) -> float:
    """Seconds from a launch to its end on host and device: the lowest of three, or one far over ``limit``."""
    lowest = math.inf
    for _ in range(3):
        synchronize()
        start = time.perf_counter()
        launch(0)
        synchronize()
        lowest = min(lowest, time.perf_counter() - start)
        if lowest > 10 * limit:  # no other program's doing
            break
    return lowest


@dataclass(frozen=True)
class Turn:
    """One implementation's part in :func:`host_seconds`.

    Attributes:
        call: Takes one of the inputs; its result is dropped.
        inputs: Passed in turn.
        first: What :func:`once` gave; it decides how many calls a batch has.
    """

    call: Callable[[Any], Any]
    inputs: Sequence[Any]
    first: float


def host_seconds(
    turns: Sequence[Turn], synchronize: Callable[[], None], limit: float = 0.04
) -> list[float | Exception]:
    """Host seconds of an eager call of each, or what it raised: the lowest of several batches' medians.

    Batches take turns, A B C A B C, so that a burst of other work is no one's alone. On a CPU that is the
    time of the whole work; on a GPU the host only queues it.

    Args:
        limit: About how many seconds each may take in all.
    """
    medians: list[list[float]] = [[] for _ in turns]
    spent = [0.0] * len(turns)
    failed: dict[int, Exception] = {}
    batches = [int(min(max(limit / 5 / turn.first, 3), _BATCH)) for turn in turns]
    left = list(range(len(turns)))
    synchronize()
    while left:
        for i in left:
            start = time.perf_counter()
            try:
                medians[i].append(_median_seconds(turns[i], batches[i]))
                synchronize()
            except Exception as error:
                failed[i] = error
            spent[i] += time.perf_counter() - start
        left = [
            i for i in left if i not in failed and spent[i] < limit and len(medians[i]) * batches[i] < _MAX_CALLS
        ]
    return [failed[i] if i in failed else min(medians[i]) for i in range(len(turns))]


def _median_seconds(turn: Turn, calls: int) -> float:
    times = []
    for i in range(calls):
        x = turn.inputs[i % len(turn.inputs)]
        start = time.perf_counter()
        turn.call(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class GraphTimer:
    """A CUDA graph of many launches over rotating buffers; build it, check what it writes, then time it.

    Args:
        launch: Takes the number of a buffer.
        buffers: How many there are.
        first: What :func:`once` gave.
        replay: About how many seconds one replay is to take.
    """

    def __init__(self, launch: Launch, buffers: int, first: float, replay: float = REPLAY_SECONDS) -> None:
        import torch

        self._cuda: Any = torch.cuda
        estimate = max(first - _LAUNCH_SECONDS, _FASTEST_SECONDS)
        # One round over all buffers keeps the data cold; slow kernels get as many as 30 ms hold.
        wanted = math.ceil(replay / estimate)
        whole_round = min(buffers, math.ceil(0.03 / estimate))
        self.launches = max(min(wanted, MAX_LAUNCHES), whole_round, 2)
        self._graph = self._cuda.CUDAGraph()
        # An implementation without `out` must not write all its results to one hot place.
        self.results: list[Any] = [None] * min(buffers, self.launches)
        stream = self._cuda.Stream()
        stream.wait_stream(self._cuda.current_stream())
        with self._cuda.stream(stream):
            # torch.cuda.graph would collect garbage and empty the allocator's cache each time.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(self.launches):
                    self.results[i % len(self.results)] = launch(i % buffers)
            except BaseException:
                with suppress(RuntimeError):  # its complaint about the failed capture would hide the cause
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        self._cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()

    def seconds(self, limit: float = 0.04) -> float:
        """Device seconds of one launch: the median of replays, within about ``limit`` seconds."""
        first = self._timed(1)[0]
        replays = int(min(max(limit / first, 3), 11))
        return statistics.median(self._timed(replays)) / self.launches

    def _timed(self, replays: int) -> list[float]:
        events = [self._cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        events[0].record()
        for after in events[1:]:
            self._graph.replay()
            after.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]
