"""The command: backends prepare, take turns, and what was measured becomes a table.

Device time is what counts: the backends share a launcher, so their host times hardly differ.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import driver, tuned
from ..console import print_table, track
from ..problem import DTYPES, Kernel, Problem
from ..registry import REGISTRY, Backend
from ..sources import source_hash
from ..tuned import KINDS, Point, Table, kind_of
from .points import grid, in_order, points_from, within
from .timer import GraphTimer

#: From this rank on the ladder's first rungs are there to be read, not to be fast.
LADDER_RANK = 30

#: Device seconds of each of several backends on a problem; None for one that can't be launched.
Timer = Callable[[Problem, Sequence[Kernel]], "list[float | None]"]


def candidates() -> list[Backend]:
    """The built-in GPU backends that could be the fastest somewhere, best rank first."""
    backends = list(REGISTRY)
    return [b for b in backends if REGISTRY.is_builtin(b.name) and "cuda" in b.devices and b.rank < LADDER_RANK]


def prepare_all(
    backends: Sequence[Backend], problems: Sequence[Problem]
) -> tuple[dict[Problem, dict[str, Kernel]], dict[str, str]]:
    """Have each backend compile what it needs, so that nothing is compiled while others are timed.

    Returns:
        Problem -> backend's name -> kernel; and backend's name -> an example of what it failed with.
    """
    failed: dict[str, str] = {}

    def prepare(backend: Backend, problem: Problem) -> Kernel | None:
        if REGISTRY.rejects(backend, problem):
            return None
        try:
            return backend.prepare(problem)
        except Exception as error:  # whatever it is, there is nothing to time
            failed[backend.name] = f"{type(error).__name__}: {error}"
            return None

    # A backend may compile one kernel at a time: each has threads of its own, so that none waits for another's.
    threads = max(1, (os.cpu_count() or 1) // len(backends))
    pools = [(backend, ThreadPoolExecutor(threads)) for backend in backends]
    jobs = [(p, b.name, pool.submit(prepare, b, p)) for p in problems for b, pool in pools]
    kernels: dict[Problem, dict[str, Kernel]] = {problem: {} for problem in problems}
    for problem, name, job in track(jobs, "Compiling", len(jobs)):
        if kernel := job.result():
            kernels[problem][name] = kernel
    for _, pool in pools:
        pool.shutdown()
    return kernels, failed


def measure(
    problems: Iterable[Problem], kernels: Mapping[Problem, Mapping[str, Kernel]], timer: Timer
) -> Iterator[tuple[Problem, dict[str, float]]]:
    """Problem, and backend -> device seconds, for each problem that any backend can run."""
    for problem in problems:
        given = kernels[problem]
        seconds = timer(problem, list(given.values())) if given else []
        if found := {name: time for name, time in zip(given, seconds, strict=True) if time is not None}:
            yield problem, found


def tabulate(
    measured: Iterable[tuple[Problem, Mapping[str, float]]], backends: Sequence[str], **header: Any
) -> Table:
    """The table of what was measured.

    Args:
        backends: Names in the order of their ranks.
        header: The table's other fields.
    """
    points: dict[tuple[str, str], list[Point]] = {(d, k): [] for d in DTYPES for k in KINDS}
    for problem, seconds in measured:
        times = tuple(float(f"{seconds[name] * 1e6:.4g}") if name in seconds else None for name in backends)
        points[problem.dtype, kind_of(problem)].append(Point(problem.rows, problem.cols, times))
    kept = {key: sorted(found, key=lambda point: point[:2]) for key, found in points.items() if found}
    return Table(backends=tuple(backends), points=kept, **header)


def summary(table: Table) -> list[tuple[str, ...]]:
    """A line for each dtype and kind: how many points, and where another than the first by rank wins most."""
    lines: list[tuple[str, ...]] = []
    for (dtype, kind), points in table.points.items():
        wins = []
        for point in points:
            times = table.times(point)
            first, chosen = next(iter(times)), tuned.pick(times)
            if chosen != first:
                wins.append((times[first] / times[chosen], f"{chosen}, {point.rows} x {point.cols}"))
        gain, where = max(wins, default=(1.0, ""))
        lines.append((dtype, kind, str(len(points)), str(len(wins)), f"{gain:.2f}" if wins else "", where))
    return lines


def write(table: Table, path: Path) -> None:
    """Write a table where it is looked for or wanted; the file is replaced as a whole.

    Raises:
        OSError: It can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(table.dumps(), encoding="utf-8")
    os.replace(partial, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``python -m minikernel tune``."""
    parser.add_argument("--output", type=Path, help="the file to write (default: in the user's cache folder)")
    parser.add_argument("--device", type=int, default=0, help="the GPU's ordinal (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a coarse grid, in seconds")
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds of measuring, compiling not counted"
    )
    parser.add_argument("--points-from", type=Path, metavar="JSON", help="a result of bench/run.py: its shapes too")


class Refusal(Exception):
    """There is nothing to measure, or nowhere to write it; the message says why."""


def main(options: argparse.Namespace, versions: Mapping[str, str]) -> int:
    """Measure, write the table, and print what came of it.

    Args:
        options: What :func:`add_arguments` defines.
        versions: Package -> version, for the table to keep.

    Returns:
        The exit status: 0, or 1 if there is no table.
    """
    try:
        backends = choosable(options.device)
        path = options.output or tuned.own_path(driver.name(options.device))
        table = _tune(options, backends, versions)
        write(table, path)
    except (Refusal, OSError, ValueError, RuntimeError) as error:
        print(f"{tuned.COMMAND}: {error}", file=sys.stderr)
        return 1
    tuned.find.cache_clear()
    first = backends[0].name
    print_table(("dtype", "kind", "points", f"{first} isn't the fastest", "by at most", "where"), summary(table))
    print(f"{sum(map(len, table.points.values()))} points on {table.gpu}: {path}")
    return 0


def choosable(index: int) -> list[Backend]:
    """The candidates that work on the GPU of that ordinal, two at least, best rank first.

    Raises:
        Refusal: There is no such GPU, or no choice on it.
    """
    if reasons := driver.obstacles():
        raise Refusal("; ".join(reasons))
    if not 0 <= index < driver.count():
        raise Refusal(f"there is no GPU {index}: this process sees {driver.count()}")
    missing = {backend: "; ".join(REGISTRY.missing(backend)) for backend in candidates()}
    if len(usable := [backend for backend, why in missing.items() if not why]) < 2:
        reasons = [f"\n  {backend.name}: {why}" for backend, why in missing.items() if why]
        raise Refusal(f"nothing to choose between, with fewer than two fast backends here:{''.join(reasons)}")
    return usable


def _tune(options: argparse.Namespace, backends: Sequence[Backend], versions: Mapping[str, str]) -> Table:
    names = [backend.name for backend in backends]
    wanted = points_from(options.points_from, names, options.device) if options.points_from else []
    timer = GraphTimer(options.device)
    steps = dict.fromkeys(DTYPES, 6) if options.quick else dict.fromkeys(DTYPES, 1) | {"float64": 3}
    others = (problem for dtype, step in steps.items() for problem in grid(dtype, step, options.device))
    problems = [problem for problem in in_order(wanted, others) if timer.fits(problem)]
    kernels, failed = prepare_all(backends, problems)
    for name, why in failed.items():
        print(f"{name} is left out where it fails: {why}", file=sys.stderr)
    in_time = within(options.budget, problems, time.monotonic)
    table = tabulate(
        measure(track(in_time, "Measuring", len(problems)), kernels, timer),
        names,
        gpu=driver.name(options.device),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=_command(options),
        versions=versions,
        source_hash=source_hash(),
    )
    if not table.points:
        raise Refusal("nothing could be measured")
    return table


def _command(options: argparse.Namespace) -> str:
    """The command, as far as it decides what is in the table."""
    quick = ["--quick"] if options.quick else []
    points = ["--points-from", options.points_from.as_posix()] if options.points_from else []
    return " ".join([tuned.COMMAND, *quick, *points])
