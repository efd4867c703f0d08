"""Are the speed targets met? ``python bench/check.py bench/results/h200.json``.

Each target is a line of :data:`TARGETS`; what a result can't tell is listed as not measured. Exit status: 1 if a
target is short, or the code has moved on since it was measured; 2 if the file can't be read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script, bench/ is on the path and the root isn't
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import peers
from bench.peers import COPY, TORCH
from bench.records import Record, Results, load
from bench.report import Row, rows_of
from bench.shapes import TABLE
from bench.sources import source_hash

DEFAULT = Path(__file__).resolve().parent / "results" / "h200.json"
AUTO, FUSED, TRITON = "auto", "cuda-fused", "triton-fused"

#: Where the copy itself was slow when `reach` was set, another shape of as many bytes is the floor too.
FLOORS = {("bfloat16", "4096x32768"): "32768x4096"}

#: A figure and where it was found; None where it should have been and wasn't.
Figures = Iterator[tuple[float | None, str]]
Rows = dict[tuple[str, str, str, str], Row]


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        number: As the project numbers its targets.
        text: What is promised, with its limit.
        figures: The figures to judge; None if a result can't hold them.
        limit: Every figure is at most this, or with ``at_least`` at least this; with ``mean``, their geometric
            mean is.
    """

    number: str
    text: str
    figures: Callable[[Rows], Figures] | None = None
    limit: float = 1.0
    at_least: bool = False
    mean: bool = False


@dataclass(frozen=True)
class Finding:
    """What a result says of a target: ``met``, ``short`` or ``not measured``, with the figure and where it was."""

    target: Target
    status: str
    figure: float | None = None
    where: str = ""


def _time(record: Record | None, host: bool = False) -> float | None:
    """Microseconds of a record that was measured on a device."""
    if record is None or record.kernel_us is None:
        return None
    return record.host_us if host else record.kernel_us


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def reach(impl: str) -> Callable[[Rows], Figures]:
    """Time over the copy's, over what the table says can be reached; for each of its rows."""

    def figures(rows: Rows) -> Figures:
        for target in TABLE:
            case = f"{target.rows}x{target.cols}"
            names = {case, FLOORS.get((target.dtype, case), case)}
            floors = [_time(rows.get(_contiguous(target.dtype, name), {}).get(COPY)) for name in names]
            floor = min((floor for floor in floors if floor), default=None)
            time = _time(rows.get(_contiguous(target.dtype, case), {}).get(impl))
            times = _over(time, floor)
            yield times and times / target.reach, f"{target.dtype} {case}"

    return figures


def _contiguous(dtype: str, case: str) -> tuple[str, str, str, str]:
    return "softmax", dtype, "contiguous", case


def gain(rows: Rows) -> Figures:
    """F.softmax's time over auto's, for each row of the table."""
    for target in TABLE:
        case = f"{target.rows}x{target.cols}"
        row = rows.get(_contiguous(target.dtype, case), {})
        yield _over(_time(row.get(TORCH)), _time(row.get(AUTO))), f"{target.dtype} {case}"


def against(
    impl: str, other: str, wanted: Callable[[Record], bool], host: bool = False
) -> Callable[[Rows], Figures]:
    """One implementation's time over another's, wherever both were measured on an input that is wanted."""

    def figures(rows: Rows) -> Figures:
        for (op, dtype, layout, case), row in rows.items():
            one, two = row.get(impl), row.get(other)
            if one and two and wanted(one) and one.kernel_us and two.kernel_us:
                where = f"{op} {dtype} {case}" + ("" if layout == "contiguous" else f" {layout}")
                yield _over(_time(one, host), _time(two, host)), where

    return figures


def against_best(host: bool) -> Callable[[Rows], Figures]:
    """auto's time over the best single backend's, everywhere."""
    others = {AUTO, COPY, TORCH, *peers.OPTIONAL_NAMES}

    def figures(rows: Rows) -> Figures:
        for (op, dtype, layout, case), row in rows.items():
            times = [time for name in row if name not in others and (time := _time(row[name], host))]
            if times and (mine := _time(row.get(AUTO), host)):
                yield mine / min(times), f"{op} {dtype} {case}" + ("" if layout == "contiguous" else f" {layout}")

    return figures


def _many_short(record: Record) -> bool:
    return _last(record) and record.cols <= 16384 and record.rows >= 132


def _other_rows(record: Record) -> bool:
    return _last(record) and record.cols <= 65536 and not _many_short(record)


def _last(record: Record) -> bool:
    """Whether neighbors in memory are reduced."""
    return record.layout == "contiguous" and "@" not in record.case


def _strided(record: Record) -> bool:
    return not _last(record)


def _lab(record: Record) -> bool:
    return (record.op, record.case, record.layout) == ("softmax", "512x600", "contiguous")


TARGETS = (
    Target("1", "auto: the table's reach, within 3%", reach(AUTO), 1.03),
    Target("1", "F.softmax / auto over the table: geometric mean", gain, 2.5, at_least=True, mean=True),
    Target("1", "F.softmax / auto over the table: every row", gain, 1.0, at_least=True),
    Target("2", "cuda-fused: the table's reach, within 3%", reach(FUSED), 1.03),
    Target("2", "triton-fused / cuda-fused, 132 rows up, to 16384", against(TRITON, FUSED, _many_short), 1.10),
    Target("2", "triton-fused / cuda-fused, elsewhere to 65536", against(TRITON, FUSED, _other_rows), 1.5),
    Target("3", "no cliffs between neighboring lengths"),
    Target("4", "strided input: auto / the same bytes contiguous"),
    Target("4", "strided input: auto / F.softmax", against(AUTO, TORCH, _strided), 1.0),
    Target("5", "few long rows: workspace a call, capturable"),
    Target("6", "host time at 512x600: auto / F.softmax", against(AUTO, TORCH, _lab, host=True), 1.2),
    Target("6", "host time at 512x600: cuda-fused / F.softmax", against(FUSED, TORCH, _lab, host=True), 1.2),
    Target("6", "host time at 512x600: triton-fused / F.softmax", against(TRITON, TORCH, _lab, host=True), 1.6),
    Target("6", "host time after ten thousand shapes"),
    Target("7", "first calls, warm and cold, and import"),
    Target("8", "auto / the best backend, device time", against_best(host=False), 1.05),
    Target("8", "auto / the best backend, host time", against_best(host=True), 1.05),
    Target("9", "numpy / scipy.special.softmax, and its memory"),
)


def judge(target: Target, rows: Rows) -> Finding:
    """Compare a target with a result's rows. A figure that is short decides, even where others are missing."""
    figures = list(target.figures(rows)) if target.figures else []
    found = [(figure, where) for figure, where in figures if figure is not None]
    missing = [where for figure, where in figures if figure is None]
    if not found:
        return Finding(target, "not measured")
    if target.mean:
        figure, where = statistics.geometric_mean(figure for figure, _ in found), f"{len(found)} rows"
    else:
        figure, where = (min if target.at_least else max)(found)
    met = figure >= target.limit if target.at_least else figure <= target.limit
    if missing and (met or target.mean):
        where = f"{missing[0]} and {len(missing) - 1} more" if len(missing) > 1 else missing[0]
        return Finding(target, "not measured", None, f"missing: {where}")
    return Finding(target, "met" if met else "short", figure, where)


def check(results: Results) -> list[Finding]:
    """A finding for each target, in order."""
    rows = rows_of(results.records)
    return [judge(target, rows) for target in TARGETS]


def print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    table = Table("", "target", "limit", "figure", "", "where")
    styles = {"met": "green", "short": "bold red", "not measured": "dim"}
    for finding in findings:
        target = finding.target
        limit = f"{'≥' if target.at_least else '≤'} {target.limit:.2f}" if target.figures else ""
        figure = "" if finding.figure is None else f"{finding.figure:.3f}"
        status = Text(finding.status, styles[finding.status])
        table.add_row(target.number, target.text, limit, figure, status, finding.where)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check.py", description="Which speed targets does a result meet?")
    parser.add_argument("json", type=Path, nargs="?", default=DEFAULT, help="what bench/run.py --json wrote")
    options = parser.parse_args(argv)
    try:
        results = load(options.json)
    except OSError as error:
        print(f"check.py: cannot read {options.json}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    findings = check(results)
    print_findings(findings)
    moved_on = results.header.get("source_hash") != source_hash()
    if moved_on:
        print(f"The code has moved on since {options.json} was measured: run bench/run.py again.")
    return int(moved_on or any(finding.status == "short" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
