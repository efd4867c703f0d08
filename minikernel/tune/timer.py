"""How it is measured: device time from CUDA graphs, with CuPy, which the CUDA backends need anyway."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from .. import driver
from ..problem import ITEMSIZE, Kernel, Problem


class GraphTimer:
    """Device time of kernels on one GPU: CUDA graphs of many launches over buffers that exceed the L2 cache.

    Args:
        index: Ordinal of the GPU, which becomes this thread's current device.
    """

    REPLAY_SECONDS = 2e-3
    #: One round over all buffers is worth so many seconds, for kernels that are far from the memory's speed.
    ROUND_SECONDS = 10e-3
    POINT_SECONDS = 20e-3
    MAX_LAUNCHES, MAX_BUFFERS = 2000, 1024
    #: A backend this many times slower than the fastest isn't timed any closer.
    HOPELESS = 2.0
    CACHE_MULTIPLE = 3
    ALIGNMENT = 512
    #: Random numbers made on the host; device memory is filled with copies.
    TILE_ELEMENTS = 1 << 22

    def __init__(self, index: int) -> None:
        import cupy

        self._cuda: Any = cupy.cuda
        self._cuda.Device(index).use()
        self._stream = self._cuda.Stream(non_blocking=True)
        self._cold_bytes = self.CACHE_MULTIPLE * driver.device(index).l2_bytes
        self._free_bytes = self._cuda.runtime.memGetInfo()[0]
        self._blocks: dict[str, Any] = {}
        self._filled: tuple[str, int] | None = None
        self._random = np.random.default_rng()

    def fits(self, problem: Problem) -> bool:
        """Whether inputs and outputs fit in the GPU's memory."""
        return 2 * sum(self._pitches(problem)) <= 0.8 * self._free_bytes

    def __call__(self, problem: Problem, kernels: Sequence[Kernel]) -> list[float | None]:
        """Device seconds of a call of each kernel; None for one that can't be launched.

        Replays take turns, A B A B, so that a change of the clock is no one's alone.
        """
        places = self._places(problem)
        scratch = self._block("scratch", max(kernel.scratch for kernel in kernels))
        launches = [_launcher(kernel, places, self._stream.ptr, scratch) for kernel in kernels]
        found = [self._estimate(launch) for launch in launches]
        fastest = min((seconds for seconds in found if seconds is not None), default=None)
        if fastest is None:
            return found
        near = [i for i, t in enumerate(found) if t is not None and t <= self.HOPELESS * fastest]
        count = min(math.ceil(self.REPLAY_SECONDS / fastest), self.MAX_LAUNCHES)
        count = max(count, min(len(places), math.ceil(self.ROUND_SECONDS / fastest)), 2)
        graphs = [self._capture(launches[i], count) for i in near]
        rounds = int(min(max(self.POINT_SECONDS / (fastest * count * len(near)), 3), 7))
        for i, seconds in zip(near, self._replay(graphs, rounds), strict=True):
            found[i] = statistics.median(seconds) / count
        return found

    def _estimate(self, launch: Callable[[int], None]) -> float | None:
        """Device seconds, roughly; None if it can't be launched or captured. The first launch loads the kernel."""
        try:
            launch(0)
            start = self._event()
            launch(1)
            alone = self._seconds(start, self._event())
            count = int(min(max(1e-3 / alone, 1), 16))
            graph = self._capture(launch, count)
        except driver.CudaError:
            return None
        return statistics.median(self._replay([graph], 3)[0]) / count

    def _capture(self, launch: Callable[[int], None], count: int) -> Any:
        self._stream.begin_capture()
        try:
            for i in range(count):
                launch(i)
        except BaseException:
            with suppress(Exception):  # its complaint about the failed capture would hide the cause
                self._stream.end_capture()
            raise
        return self._stream.end_capture()

    def _replay(self, graphs: Sequence[Any], rounds: int) -> list[list[float]]:
        """Seconds that each graph takes in each round."""
        # Queued ahead of the device, so that no launch is waited for: its cost would be the first graph's alone.
        for graph in graphs:
            graph.launch(self._stream)
        events = [self._event()]
        for graph in list(graphs) * rounds:
            graph.launch(self._stream)
            events.append(self._event())
        seconds = [self._seconds(a, b) for a, b in pairwise(events)]
        return [seconds[i :: len(graphs)] for i in range(len(graphs))]

    def _event(self) -> Any:
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(self._cuda.get_elapsed_time(start, end)) * 1e-3

    def _places(self, problem: Problem) -> list[tuple[int, int]]:
        """Addresses of inputs and outputs to take in turn."""
        traffic = 2 * problem.rows * problem.cols * ITEMSIZE[problem.dtype]
        number = min(max(math.ceil(self._cold_bytes / traffic), 2), self.MAX_BUFFERS)
        x_pitch, out_pitch = self._pitches(problem)
        x = self._inputs(problem.dtype, number * x_pitch) + problem.x_offset
        out = self._block("out", number * out_pitch) + problem.out_offset
        return [(x + i * x_pitch, out + i * out_pitch) for i in range(number)]

    def _pitches(self, problem: Problem) -> tuple[int, int]:
        """Bytes from one input to the next, and from one output to the next."""
        extents = (problem.outer, problem.cols, problem.inner)
        last = sum((n - 1) * step for n, step in zip(extents, problem.strides, strict=True))
        itemsize = ITEMSIZE[problem.dtype]
        sizes = (
            (last + 1) * itemsize + problem.x_offset,
            problem.rows * problem.cols * itemsize + problem.out_offset,
        )
        x, out = (math.ceil(size / self.ALIGNMENT) * self.ALIGNMENT for size in sizes)
        return x, out

    def _block(self, name: str, size: int) -> int:
        """Address of at least ``size`` bytes, the same until they have to become more."""
        block = self._blocks.get(name)
        if block is None or block.size < size:
            self._blocks[name] = block = None  # freed first
            self._blocks[name] = block = self._cuda.Memory(max(size, self.ALIGNMENT))
        return int(block.ptr)

    def _inputs(self, dtype: str, size: int) -> int:
        """Address of normal deviates; fresh ones with every new dtype and whenever they have to become more."""
        address, block = self._block("x", size), self._blocks["x"]
        if self._filled == (dtype, block.size):
            return address
        whole = self._cuda.MemoryPointer(block, 0)
        tile = normal(self._random, self.TILE_ELEMENTS, dtype)
        filled = min(tile.nbytes, block.size)
        whole.copy_from_host(tile.ctypes.data, filled)
        while filled < block.size:
            more = min(filled, block.size - filled)
            (whole + filled).copy_from_device(whole, more)
            filled += more
        self._cuda.runtime.deviceSynchronize()
        self._filled = dtype, block.size
        return address


def _launcher(
    kernel: Kernel, places: Sequence[tuple[int, int]], stream: int, scratch: int
) -> Callable[[int], None]:
    """``launch(i)``: queue a call on the i-th of the places, taken in turn."""
    run, number = kernel.run, len(places)
    scratch = scratch if kernel.scratch else 0

    def launch(i: int) -> None:
        x, out = places[i % number]
        run(x, out, stream, scratch)

    return launch


def normal(generator: np.random.Generator, count: int, dtype: str) -> np.ndarray:
    """Standard normal deviates in a dtype; bfloat16 as its bit pattern, rounded towards zero."""
    values = generator.standard_normal(count, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)
