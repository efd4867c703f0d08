"""Measure every softmax on this machine: ``python bench/run.py``.

With no option and no GPU it takes well under a minute. See ``--help``, and shapes.py for the grids. With
``--targets`` it also takes what check.py judges beside them, for a result to be committed:
``python bench/run.py --targets --json bench/results/h200.json``.

Exit status: 0 if a softmax was measured, whatever else couldn't be: a backend asked for by name that can't run
here is in the records as unsupported, with the reason, and said last. 1 if none could. 2 for a bad request.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":  # as a script, bench/ is on the path and the root isn't
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

import minikernel
from bench import extras, inputs, machine, peers, report
from bench.measure import Bench
from bench.peers import Impl
from bench.records import Record, Results
from bench.shapes import CONTIGUOUS, DEFAULT_DTYPES, DTYPES, GRIDS, LAYOUTS, Task, grid_tasks, parse_shape
from bench.spaces import NumPySpace, Space, TorchSpace
from minikernel.problem import ALL_OPS, MOST_K, TOPK
from minikernel.sources import source_hash

#: On a GPU, host backends are a side show: large arrays are left out sooner.
_HOST_TURN_SLOW = 0.02


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit 2; argparse would print the usage too."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def parser() -> Parser:
    new = Parser(
        prog="run.py",
        description="Measure softmax: backends, F.softmax and the copy.",
        epilog="Exit status: 0 if a softmax was measured, 1 if none could be, 2 for a bad request.",
    )
    new.add_argument("--backends", default="all", help="all (with auto), or names separated by commas")
    new.add_argument("--op", default="softmax", help=f"of {', '.join(ALL_OPS)}; several separated by commas")
    what = new.add_mutually_exclusive_group()
    what.add_argument("--shapes", help="512x600,8x128256; 8x1000x64x64@1 reduces axis 1")
    what.add_argument("--grid", help=f"{', '.join(GRIDS)} (default: all on a GPU, quick without)")
    what.add_argument("--input", type=Path, metavar="FILE", help="your own arrays, .npy or .npz")
    new.add_argument(
        "--k", type=int, default=peers.K, help=f"for softmax_topk: how many of the largest (1 to {MOST_K})"
    )
    new.add_argument("--dim", type=int, default=-1, help="axis to reduce, for --shapes and --input")
    new.add_argument("--dtypes", help=f"of {', '.join(DTYPES)} (default: the first three; --input: its own)")
    new.add_argument("--layouts", help=f"of {', '.join(LAYOUTS)} (default: contiguous; a grid's own)")
    new.add_argument("--peers", default="", help=f"more to compare with: {', '.join(peers.OPTIONAL)}")
    new.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="where the arrays are")
    new.add_argument("--cores", type=int, default=0, metavar="N", help="use so many of the CPU's cores")
    new.add_argument("--targets", action="store_true", help="also take the other figures that check.py judges")
    new.add_argument("--seed", type=int, default=42)
    new.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="stop measuring after")
    new.add_argument("--slow", type=float, metavar="SECONDS", help="a call that takes longer isn't timed")
    new.add_argument("--json", type=Path, metavar="PATH", help="write the results, as the run goes")
    new.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables")
    new.add_argument("--plots", type=Path, metavar="DIR", help="draw time against columns, into that folder")
    return new


@dataclass(frozen=True)
class Plan:
    """What was asked for, checked.

    ``named`` says whether the backends were, rather than all that there are; ``framework`` whose arrays are used,
    ``"torch"`` or ``"numpy"``.
    """

    device: str
    framework: str
    tasks: list[Task]
    ops: list[str]
    backends: list[str]
    named: bool
    arrays: dict[str, np.ndarray]


def choose(text: str, known: Sequence[str], what: str) -> list[str]:
    """Names separated by commas, each known; ValueError says which there are."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    if not names:
        raise ValueError(f"no {what} given; there are {', '.join(known)}")
    return names


def plan(options: argparse.Namespace) -> Plan:
    """Check the options and say what to measure.

    Raises:
        ValueError: One of them can't be met; the message is one line.
    """
    registered = list(minikernel.list_backends())
    everything = ["auto", *registered]
    backends = choose(options.backends, ["all", *everything], "backend")
    ops = choose(options.op, ALL_OPS, "op")
    if not 1 <= options.k <= MOST_K:
        raise ValueError(f"--k {options.k}: it must be 1 to {MOST_K}")
    layouts = choose(options.layouts, LAYOUTS, "layout") if options.layouts is not None else []
    if options.device == "cuda" and not machine.has_gpu():
        raise ValueError("--device cuda: PyTorch sees no NVIDIA GPU here")
    device = "cuda" if options.device != "cpu" and machine.has_gpu() else "cpu"
    framework = _framework(options, device)
    if options.cores and (why := machine.can_limit(options.cores)):
        raise ValueError(f"--cores {options.cores}: {why}")
    if options.cores and device != "cpu":
        raise ValueError(f"--cores {options.cores}: it is for measuring on the CPU (--device cpu)")
    given = choose(options.dtypes, DTYPES, "dtype") if options.dtypes else []
    dtypes = given or list(DEFAULT_DTYPES)

    arrays: dict[str, np.ndarray] = {}
    if options.input:
        arrays = {name: inputs.native(array) for name, array in inputs.read(options.input).items()}
        tasks = inputs.tasks(arrays, options.dim, given, layouts or CONTIGUOUS)
    elif options.shapes is not None:
        cases = [parse_shape(text, options.dim) for text in options.shapes.split(",")]
        tasks = [
            Task(case, dtype, layout) for case in cases for dtype in dtypes for layout in layouts or CONTIGUOUS
        ]
    else:
        grid = options.grid if options.grid is not None else "all" if device == "cuda" else "quick"
        choose(grid, list(GRIDS), "grid")
        tasks = grid_tasks(grid, dtypes, layouts)
    if not tasks:
        raise ValueError(f"the grid {options.grid} has no such case in {', '.join(dtypes)}")
    tasks = [replace(task, case=replace(task.case, cores=options.cores)) for task in tasks]
    if TOPK in ops and (short := [task.case.name for task in tasks if 0 < task.case.cols < options.k]):
        raise ValueError(f"--k {options.k}: rows of {short[0]} have no {options.k} elements")
    for path in (options.json, options.markdown, options.plots):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    for path in (options.json, options.markdown):
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")
    named = "all" not in backends
    return Plan(device, framework, tasks, ops, backends if named else everything, named, arrays)


def _framework(options: argparse.Namespace, device: str) -> str:
    """Whose arrays are measured: PyTorch's where it is, unless a peer takes only NumPy's."""
    chosen = choose(options.peers, list(peers.OPTIONAL), "peer") if options.peers else []
    for peer in map(peers.OPTIONAL.__getitem__, chosen):
        if find_spec(peer.package) is None:
            why = f"{peer.package} is not installed (pip install {peer.package})"
            raise ValueError(f"--peers {options.peers}: {why}")
        if peer.framework == "numpy" and device != "cpu":
            raise ValueError(f"--peers {options.peers}: {peer.name} takes NumPy arrays (--device cpu)")
    wanted = {peers.OPTIONAL[name].framework for name in chosen}
    if len(wanted) > 1:
        raise ValueError(f"--peers {options.peers}: they don't take arrays of the same framework")
    return wanted.pop() if wanted else "torch" if machine.has_torch() else "numpy"


def space_for(device: str, framework: str, seed: int) -> Space:
    return TorchSpace(device, seed) if framework == "torch" else NumPySpace(seed)


def benches(asked: Plan, options: argparse.Namespace, deadline: float) -> tuple[list[Bench], dict[str, str]]:
    """The benches to run, and who isn't measured, with the reason.

    On a GPU a second bench gives backends that work on host memory a turn, on host arrays.
    """
    info = minikernel.list_backends()
    absent: dict[str, str] = {}
    here, on_host = [], []
    for name in asked.backends:
        if name == "auto":
            here.append(peers.backend(name, options.k))
        elif not info[name].available:
            absent[name] = "; ".join(info[name].reasons)
            if asked.named:
                here.append(peers.unavailable(name, absent[name]))
        elif asked.device in info[name].devices:
            here.append(peers.backend(name, options.k))
        elif "cpu" in info[name].devices:
            on_host.append(peers.backend(name, options.k))
        else:
            absent[name] = f"it works on {', '.join(info[name].devices)} memory"
            if asked.named:
                here.append(peers.unavailable(name, absent[name]))

    seed = options.seed
    space = space_for(asked.device, asked.framework, seed)
    others: list[Impl] = [peers.copy(space.xp)]
    if asked.framework == "torch":
        others.append(peers.torch_softmax(options.k))
    else:
        why = "the arrays are NumPy's" if options.peers else "torch is not installed (pip install torch)"
        absent[peers.TORCH] = why
    others += [peers.OPTIONAL[name].make() for name in options.peers.split(",") if name]
    shared: dict[str, Any] = {"deadline": deadline, "sources": asked.arrays}
    cache = machine.cache_bytes() if asked.device == "cuda" else 0
    found = [Bench(space, [*others, *here], asked.ops, cache_bytes=cache, slow=options.slow, **shared)]
    if on_host:
        host_space = space_for("cpu", asked.framework, seed)
        found.append(Bench(host_space, on_host, asked.ops, slow=options.slow or _HOST_TURN_SLOW, **shared))
    return found, absent


def measure(
    asked: Plan,
    found: Sequence[Bench],
    results: Results,
    others: Callable[[], None] = lambda: None,
    again: Callable[[], None] = lambda: None,
) -> None:
    """Run the benches, with a progress bar on a terminal; results are written even when interrupted.

    Args:
        others: What else to take: after the records in full, which matter more, and before the hundreds of brief
            ones, with which a budget may end.
        again: Looks at all records on the device.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    first, *on_host = found
    brief = [task for task in asked.tasks if task.case.scope == "brief"]
    full = [task for task in asked.tasks if task.case.scope != "brief"]
    everyone = [task for task in full if task.case.scope == "all"]
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    terminal = Console(stderr=True)
    total = len(full) * len(first.impls) + len(brief) + len(everyone) * sum(len(bench.impls) for bench in on_host)
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        bar = progress.add_task("", total=total * len(asked.ops))

        def keep(records: Iterable[Record]) -> None:
            for record in records:
                results.add(record)
                progress.update(bar, advance=1, description=f"{record.impl} {record.case} {record.dtype}")

        try:
            keep(first.run(full))
            others()
            keep(first.run(brief))
            again()
            for bench in on_host:
                keep(bench.run(everyone))
        finally:
            results.write()


def header(asked: Plan, seed: int, command: str) -> dict[str, Any]:
    """Everything of a result but its figures and records."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seed": seed,
        "source_hash": source_hash(),
        "command": command,
        "gpu": machine.gpu() if asked.device == "cuda" else None,
        "cpu": machine.cpu(asked.framework),
        "versions": machine.versions(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit status that ``--help`` speaks of, or 130 where it was interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)
    command = parser()
    options = command.parse_args(argv)
    try:
        import rich.console

        if options.plots:
            import matplotlib  # noqa: F401
    except ImportError as error:
        command.error(f"{error.name} is not installed (pip install 'minikernel[bench]')")
    try:
        asked = plan(options)
    except ValueError as error:
        command.error(str(error))

    console = rich.console.Console()
    if not console.is_terminal:  # a file or a pipe has no width to fit tables into
        console = rich.console.Console(width=200)
    deadline = time.monotonic() + options.budget
    found, absent = benches(asked, options, deadline)
    interrupted = False
    invocation = shlex.join(["python", "bench/run.py", *argv])
    try:
        settled = machine.settled_threads() if asked.framework == "torch" else nullcontext()
        with machine.limited_to(options.cores), settled as note:
            results = Results(header(asked, options.seed, invocation), options.json)
            results.write()  # what can't be written is said before anything is measured
            more = extras.steps(found[0], asked.tasks, results, deadline, absent) if options.targets else ()
            try:
                measure(asked, found, results, *more)
            except KeyboardInterrupt:
                interrupted = True
        if note and asked.device == "cpu":
            console.print(note, style="yellow", soft_wrap=True)
        report.print_tables(results, console, absent)
        if options.markdown:
            text = "\n".join(report.markdown(results, op) for op in asked.ops)
            options.markdown.write_text(text, encoding="utf-8")
        if options.plots:
            report.plots(results, options.plots)
    except OSError as error:
        command.error(f"cannot write {error.filename}: {error.strerror}")
    if interrupted:
        return 130
    if nothing_measured(results):
        print("run.py: no softmax could be measured here", file=sys.stderr)
        return 1
    return 0


def nothing_measured(results: Results) -> bool:
    """Whether everything but the copy was refused, the copy being no softmax."""
    softmaxes = [record for record in results.records if record.impl != peers.COPY]
    return all(record.status.startswith("unsupported") for record in softmaxes)


if __name__ == "__main__":
    sys.exit(main())
