"""Are the speed targets met? ``python bench/check.py bench/results/h200.json``.

Each target is a few lines of :data:`targets.TARGETS`; what a result can't tell is listed as not measured. Exit
status: 1 if a target is short, or the code has moved on since it was measured; 2 if the file can't be read.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script, bench/ is on the path and the root isn't
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench.records import Results, load
from bench.rows import rows_of
from bench.targets import TARGETS, Evidence, Target
from minikernel.sources import source_hash

DEFAULT = Path(__file__).resolve().parent / "results" / "h200.json"


@dataclass(frozen=True)
class Finding:
    """What a result says of a target.

    Attributes:
        target: What was promised.
        status: ``met``, ``short`` or ``not measured``.
        value: The worst value, or their mean where that is promised.
        where: Where it was found, or what is missing.
        short: Every value that is short and where, the worst first.
    """

    target: Target
    status: str
    value: float | None = None
    where: str = ""
    short: tuple[tuple[float, str], ...] = ()


def judge(target: Target, evidence: Evidence) -> Finding:
    """Compare a target with what was measured. A value that is short decides, even where others are missing."""
    values = list(target.values(evidence))
    found = [(value, where) for value, where in values if value is not None]
    missing = [where for value, where in values if value is None]
    if not found:
        return Finding(target, "not measured")
    if target.mean:
        value, where = statistics.geometric_mean(value for value, _ in found), f"{len(found)} rows"
        short = []
    else:
        value, where = (min if target.at_least else max)(found)
        short = sorted((pair for pair in found if not target.holds(pair[0])), reverse=not target.at_least)
    met = target.holds(value)
    if missing and (met or target.mean):
        return Finding(target, "not measured", None, f"missing: {missing[0]}{_more(missing)}")
    return Finding(target, "met" if met else "short", value, where, tuple(short))


def _more(places: Sequence[object]) -> str:
    return f" and {len(places) - 1} more" if len(places) > 1 else ""


def check(results: Results) -> list[Finding]:
    """A finding for each target, in order."""
    evidence = Evidence(rows_of(results.records), results.figures)
    return [judge(target, evidence) for target in TARGETS]


def print_findings(findings: Sequence[Finding], every: bool = False) -> None:
    """A table with a line for each finding, and with ``every`` one for each place where it is short."""
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
        limit = f"{'≥' if target.at_least else '≤'} {_shown(target.limit, target.unit)}"
        value = "" if finding.value is None else _shown(finding.value, target.unit)
        status = Text(finding.status, styles[finding.status])
        others = "" if every else _more(finding.short)
        table.add_row(target.number, target.text, limit, value, status, finding.where + others)
        for value_, where in finding.short[1:] if every else ():
            table.add_row("", "", "", _shown(value_, target.unit), "", where)
    console.print(table)


def _shown(value: float, unit: str) -> str:
    """Three decimals for a ratio, fewer for what is larger."""
    text = f"{value:.3f}" if 0 < value < 10 else f"{value:.1f}" if value < 100 and value % 1 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="check.py", description="Which speed targets does a result meet?")
    parser.add_argument("json", type=Path, nargs="?", default=DEFAULT, help="what bench/run.py --json wrote")
    parser.add_argument("--all", action="store_true", help="every place that is short, not only the worst")
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
    print_findings(findings, options.all)
    moved_on = results.header.get("source_hash") != source_hash()
    if moved_on:
        print(f"The code has moved on since {options.json} was measured: run bench/run.py again.")
    return int(moved_on or any(finding.status == "short" for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
