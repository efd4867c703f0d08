"""Figures that no record holds: start-up, caches, memory. ``python bench/run.py --targets`` takes them.

Each function here measures one thing and gives its figures; :func:`collectors` says which a machine can take.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import minikernel
from minikernel import api, dispatch
from minikernel.driver import Device
from minikernel.problem import ITEMSIZE, Problem

from .buffers import lay_out
from .peers import AUTO, Impl, backend
from .records import Figure
from .shapes import DEFAULT_DTYPES, HOST_DTYPES, Task, grid_tasks
from .spaces import Space
from .timing import GraphTimer, Turn, host_seconds, once

ROOT = Path(__file__).resolve().parents[1]
MANY_SHAPES = 10_000

FLAT = f"host time at 512x600 after {MANY_SHAPES:,} shapes / before"
TRAINING = "host time at 512x600 with requires_grad, over F.softmax's"
SCORES = "device time with scale, mask or causality / without, a byte"
UNFUSED = "PyTorch's scale, mask and softmax / auto"
CACHED = f"entries in the fullest cache after {MANY_SHAPES:,} shapes"
IMPORT = "import minikernel, beyond import numpy"
WARM = "first call, warm disk cache"
COLD = "first call, cold disk cache"
PACKAGES = "GPU packages that a first call imports"
KERNELS = "kernels for all row lengths"
DEVICE_MEMORY = "strided input: memory beyond the output / the input's"
HOST_MEMORY = "numpy: peak memory beyond the output"

_IMPORT_ROUNDS = 9
_HOST_SECONDS = 0.2


def imports(rounds: int = _IMPORT_ROUNDS) -> Iterator[Figure]:
    """Milliseconds that ``import minikernel`` takes once NumPy is there: the median of fresh interpreters.

    The first is left out: it compiles to bytecode, which an installed package comes with.
    """
    program = (
        "import time, numpy; start = time.perf_counter(); import minikernel; print(time.perf_counter() - start)"
    )
    with TemporaryDirectory() as folder:
        bytecode = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        times = [float(_python("-c", program, environment=bytecode)) for _ in range(rounds + 1)][1:]
    yield Figure(IMPORT, round(statistics.median(times) * 1e3, 2), "ms")


def first_calls(timeout: float | None = None) -> Iterator[Figure]:
    """First calls in fresh processes, on the GPU; see first_calls.py."""
    for line in _python(str(ROOT / "bench" / "first_calls.py"), timeout=timeout).splitlines():
        yield Figure(**json.loads(line))


def _python(*arguments: str, timeout: float | None = None, environment: Mapping[str, str] = {}) -> str:
    """What a fresh interpreter prints; RuntimeError with the last it said where it fails."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, *arguments]
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=timeout)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return done.stdout


def flatness(space: Space, peer: Impl, count: int = MANY_SHAPES) -> Iterator[Figure]:
    """Whether ``auto``'s host time over a peer's at 512x600 grows with the shapes seen, and the caches with it."""
    x = _normal(space, (512, 600))
    auto = backend(AUTO).eager("softmax", -1)
    turns = [Turn(auto, [x], 1e-5), Turn(peer.eager("softmax", -1), [x], 1e-5)]
    before = _host_ratio(turns, space)
    flat = _normal(space, (100 * 400,))
    # Multiples of 4: aligned rows need fewer kernels to be compiled, and that isn't the question.
    for rows, cols in islice(product(range(1, 101), range(4, 401, 4)), count):
        auto(flat[: rows * cols].reshape(rows, cols))
    space.synchronize()
    yield Figure(CACHED, max(len(api._calls), len(api._fills), len(dispatch._kernels)))
    yield Figure(FLAT, round(_host_ratio(turns, space) / before, 4))


def training(space: Space, peer: Impl) -> Iterator[Figure]:
    """``auto``'s host time over a peer's for an input that autograd records."""
    x = _normal(space, (512, 600)).requires_grad_()
    turns = [Turn(impl.eager("softmax", -1), [x], 1e-5) for impl in (backend(AUTO), peer)]
    yield Figure(TRAINING, round(_host_ratio(turns, space), 4))


#: Matrices of attention's scores, more than the L2 cache holds.
_SCORES_SHAPE = (4, 4096, 4096)


def scores(space: Space) -> Iterator[Figure]:
    """What a scale, a mask and causality cost, in device time over the plain call's for as many bytes.

    A mask of the input's own shape is read besides; one that is broadcast stays in the cache. Beside ``auto``,
    PyTorch's way: multiply, ``masked_fill``, softmax.
    """
    xp = space.xp
    shape = _SCORES_SHAPE
    whole = _normal(space, shape) > 0
    asked: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.125},
        "broadcast mask": {"mask": whole[:1, :1]},
        "whole mask": {"mask": whole},
        "causal": {"causal": True},
        "all": {"scale": 0.125, "mask": whole[:, :1], "causal": True},
    }
    for dtype in DEFAULT_DTYPES:
        x, out = _normal(space, shape, dtype), space.empty(int(np.prod(shape)), dtype).reshape(shape)
        for name in (AUTO, "cuda-fused", "triton-fused"):
            call = partial(minikernel.softmax, x, backend=name, out=out)
            plain = _device_seconds(space, call)
            for what, given in asked.items():
                took = _device_seconds(space, partial(call, **given))
                # Bytes read and written; half of the input isn't read where that is causal.
                relative = {"whole mask": 1 + 0.5 / ITEMSIZE[dtype], "causal": 0.75, "all": 0.75}.get(what, 1.0)
                yield Figure(SCORES, round(took / plain / relative, 4), "", f"{name} {dtype} {what}")
        ours = _device_seconds(space, partial(minikernel.softmax, x, scale=0.125, mask=whole))
        theirs = _device_seconds(space, partial(_unfused, xp, x, ~whole))
        yield Figure(UNFUSED, round(theirs / ours, 4), "", f"{dtype}, scale and whole mask")


def _unfused(xp: Any, x: Any, dropped: Any) -> Any:
    return xp.softmax((x * 0.125).masked_fill(dropped, -math.inf), -1)


def _device_seconds(space: Space, call: Callable[[], Any]) -> float:
    def launch(i: int) -> Any:
        return call()

    launch(0)
    timer = GraphTimer(launch, 1, once(launch, space.synchronize))
    timer.replay()
    return timer.seconds()


def _host_ratio(turns: list[Turn], space: Space) -> float:
    for turn in turns:
        turn.call(turn.inputs[0])  # what it keeps may have been dropped meanwhile
    one, other = host_seconds(turns, space.synchronize, _HOST_SECONDS)
    if isinstance(one, Exception):
        raise one
    if isinstance(other, Exception):
        raise other
    return one / other


def _normal(space: Space, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    flat = space.empty(int(np.prod(shape)), dtype)
    space.fill_normal(flat)
    return flat.reshape(shape)


def kernels(device: Device, dtypes: Iterable[str] = ("float32", "bfloat16")) -> Iterator[Figure]:
    """How many kernels ``cuda-fused`` would ever compile for a dtype, whatever the length of the rows."""
    from minikernel.backends import cuda_fused  # first_calls.py imports this file, and no backend before its time

    lengths = [*range(1, 20_001), *(int(20_000 * 1.1**k) for k in range(1, 72))]  # up to 17 million
    for dtype in dtypes:
        contiguous = product((1, 64, 4096), lengths, (1,))
        strided = product((1, 64), lengths[::50], (2, 64, 4096))
        found = {
            tuple(sorted(cuda_fused.plan(_problem(dtype, *extents), device).macros().items()))
            for extents in chain(contiguous, strided)
        }
        yield Figure(KERNELS, len(found), "", dtype)


def _problem(dtype: str, outer: int, cols: int, inner: int) -> Problem:
    return Problem("softmax", "cuda", 0, dtype, dtype, outer, cols, inner, (cols * inner, inner, 1))


def host_memory(tasks: Iterable[Task] | None = None) -> Iterator[Figure]:
    """MiB that ``numpy`` takes beside its output, at its peak, on each shape of the grid ``host``."""
    minikernel.softmax(np.zeros((2, 3)), backend="numpy")  # what is imported once isn't the question
    tracemalloc.start()  # NumPy reports its arrays to it
    try:
        for task in grid_tasks("host", HOST_DTYPES) if tasks is None else tasks:
            x = lay_out(np.zeros(_room(task), task.dtype), task.case.shape, task.layout, np)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            y = minikernel.softmax(x, task.case.dim, backend="numpy")
            _, peak = tracemalloc.get_traced_memory()
            yield Figure(HOST_MEMORY, round((peak - before - y.nbytes) / 2**20, 3), "MiB", _where(task))
            del x, y
    finally:
        tracemalloc.stop()


def device_memory(space: Space) -> Iterator[Figure]:
    """Device memory beside the output that a call takes, over the input's size: 1 where the input is copied."""
    cuda = space.xp.cuda
    for task in grid_tasks("strided", DEFAULT_DTYPES):
        if task.layout == "contiguous" and task.case.dim == -1:
            continue
        flat = _normal(space, (_room(task),), task.dtype)
        x = lay_out(flat, task.case.shape, task.layout, space.xp)
        minikernel.softmax(x, task.case.dim)  # compiles, which may take memory once
        space.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        y = minikernel.softmax(x, task.case.dim)
        extra = cuda.max_memory_allocated() - before - y.nbytes
        size = task.case.elements * ITEMSIZE[task.dtype]
        yield Figure(DEVICE_MEMORY, round(max(extra, 0) / size, 4), "", _where(task))
        del flat, x, y


def _room(task: Task) -> int:
    """Elements that any layout of a task's shape fits into."""
    return task.case.elements + task.case.elements // task.case.shape[-1] + 1


def _where(task: Task) -> str:
    return f"{task.dtype} {task.case.name}" + ("" if task.layout == "contiguous" else f" {task.layout}")


def collectors(space: Space, peer: Impl | None, deadline: float) -> dict[str, Callable[[], Iterator[Figure]]]:
    """What to take on this machine, by a name for it: on a GPU everything, else what needs none.

    Args:
        space: Where the arrays of the run live.
        peer: Whose host time is the measure of auto's.
        deadline: Value of ``time.monotonic()`` by which first calls must be done.
    """
    found: dict[str, Callable[[], Iterator[Figure]]] = {"import": imports, "numpy's memory": host_memory}
    if space.device == "cuda" and peer is not None:
        from minikernel import driver

        left = deadline - time.monotonic()
        found["first calls"] = partial(first_calls, left if math.isfinite(left) else None)
        found["scale, mask and causality"] = partial(scores, space)
        found["host time in training"] = partial(training, space, peer)
        found["host time after many shapes"] = partial(flatness, space, peer)
        found["memory of strided inputs"] = partial(device_memory, space)
        found["kernels"] = partial(kernels, driver.device(space.xp.cuda.current_device()))
    return found
