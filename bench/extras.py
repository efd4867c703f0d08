"""What ``--targets`` adds to a run: figures, gradients, numpy beside SciPy, and a second look at outliers."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import minikernel
from minikernel.problem import BACKWARD, TOPK

from . import figures, peers, targets
from .measure import Bench, one_line
from .records import Record, Results, load
from .rows import rows_of
from .shapes import DEFAULT_DTYPES, HOST_CORES, HOST_DTYPES, Task, grid_tasks

RUN = Path(__file__).resolve().parent / "run.py"
#: What ``--targets`` runs in a process of its own, whose threads all keep to as few cores.
HOST_RUN = (
    *("--grid", "host", "--dtypes", ",".join(HOST_DTYPES), "--device", "cpu", "--cores", str(HOST_CORES)),
    *("--backends", "numpy", "--peers", "scipy", "--slow", "2"),
)
#: How long points that stand out are measured once more, in all.
_SECOND_LOOK_SECONDS = 10


def steps(
    bench: Bench, tasks: Sequence[Task], results: Results, deadline: float, absent: dict[str, str]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What to do in the midst of a run, and when the device's records are complete.

    Args:
        bench: Measures on the device; its space and peers are used.
        tasks: Of the run.
        results: Get what is taken.
        deadline: Value of ``time.monotonic()`` after which nothing more is begun.
        absent: Gets what couldn't be taken, with the reason.
    """
    return partial(take_figures, bench, results, deadline, absent), partial(second_look, bench, tasks, results)


def second_look(bench: Bench, tasks: Sequence[Task], results: Results) -> None:
    """Measure what stands out once more, on a GPU, and keep the lower times.

    Of a thousand medians some are disturbed, and one is enough to make a target look short; a kernel or a rule
    that is slow stays so.
    """
    if bench.space.device != "cuda":
        return
    known = {("softmax", task.dtype, task.layout, task.case.name): task for task in tasks}
    until = time.monotonic() + _SECOND_LOOK_SECONDS
    for key in targets.suspects(rows_of(results.records)):
        if key in known and time.monotonic() < until:
            for record in bench.run([known[key]]):
                results.improve(record)


def take_figures(bench: Bench, results: Results, deadline: float, absent: dict[str, str]) -> None:
    """Add every figure that this machine can take, and numpy's records beside SciPy's.

    Args:
        bench: Has measured in full; its space and peers are used.
        absent: Gets what couldn't be taken, with the reason.
    """
    if bench.space.device == "cuda":
        bench.space.xp.cuda.empty_cache()  # other processes have a turn on the GPU
    peer = next((impl for impl in bench.impls if impl.name == peers.TORCH), None)
    for name, collect in figures.collectors(bench.space, peer, deadline).items():
        if time.monotonic() > deadline:
            absent[name] = "skipped: budget"
            continue
        try:
            for figure in collect():
                results.add_figure(figure)
        except Exception as error:
            absent[name] = one_line(error)
    for op, grid in (dict.fromkeys(BACKWARD.values(), "gradients") | {TOPK: "topk"}).items():
        for record in records_of(op, grid, bench, deadline):
            results.add(record)
    try:
        for record in host_records(deadline, results.header["seed"]):
            results.add(record)
    except Exception as error:
        absent[f"numpy beside {peers.SCIPY}"] = one_line(error)


def records_of(op: str, grid: str, bench: Bench, deadline: float) -> Iterator[Record]:
    """Another operation by those who have it, on a GPU."""
    if bench.space.device != "cuda":
        return
    able = {name for name, info in minikernel.list_backends().items() if op in info.ops}
    impls = [impl for impl in bench.impls if impl.name in {peers.COPY, peers.TORCH, peers.AUTO} | able]
    of_op = Bench(bench.space, impls, [op], cache_bytes=bench.cache_bytes, deadline=deadline)
    yield from of_op.run(grid_tasks(grid, DEFAULT_DTYPES))


def host_records(deadline: float, seed: int) -> list[Record]:
    """What :data:`HOST_RUN` measures, by the deadline.

    Raises:
        RuntimeError: It couldn't; with its own words.
    """
    left = max(deadline - time.monotonic(), 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "host.json")
        command = [sys.executable, str(RUN), *HOST_RUN, f"--seed={seed}", f"--json={path}"]
        if math.isfinite(left):
            command.append(f"--budget={left:.0f}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        return load(path).records
