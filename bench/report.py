"""From records to what people read: the terminal's table, Markdown and plots.

``python bench/report.py bench/results/h200.json`` prints the README's table as Markdown.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # as a script, bench/ is on the path and the root isn't
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import cliffs
from bench.peers import AUTO, COPY, TORCH
from bench.records import OK, Figure, Record, Results, load
from bench.rows import Row, Rows, in_full, is_of_the_host, rows_of, usual
from bench.shapes import DEFAULT_DTYPES, DTYPES, TABLE, grid_tasks, last
from minikernel.problem import ALL_OPS, TOPK

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of the Markdown tables, in this order; others follow in the order of the records.
_ORDER = (COPY, TORCH, AUTO, "cuda-fused", "triton-fused", "cuda-smem", "cuda-naive")


def names_of(rows: Iterable[Row]) -> list[str]:
    """Every implementation in the rows, in reading order."""
    seen = list(dict.fromkeys(name for row in rows for name in row))
    return [n for n in _ORDER if n in seen] + [n for n in seen if n not in _ORDER]


def ratio(row: Row, name: str, other: str) -> float | None:
    """An implementation's time over another's, like with like; None where either is missing."""
    one, two = row.get(name), row.get(other)
    if one is None or two is None or (one.kernel_us is None) != (two.kernel_us is None):
        return None
    return one.us / two.us if one.us is not None and two.us else None


def multiple(row: Row, name: str) -> float | None:
    """An implementation's time over the copy's."""
    return ratio(row, name, COPY)


def short_status(status: str) -> str:
    """A status in a table's cell: ``wrong``, ``–`` for unsupported, or why it was skipped."""
    kind, _, why = status.partition(": ")
    return {"wrong": "wrong", "unsupported": "–"}.get(kind, why if len(why) <= 8 else "skipped")


def significant(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def label(impl: str, op: str) -> str:
    """How tables write an implementation: PyTorch's by the function that was called."""
    if impl == TORCH:
        return "torch.topk(F.softmax)" if op == TOPK else f"F.{op}"
    return impl


def machine_line(header: dict[str, Any]) -> str:
    """The machine, its threads where they matter, the versions and the day."""
    gpu, cpu, versions = header.get("gpu"), header.get("cpu") or {}, header.get("versions", {})
    if gpu:
        where = f"{gpu['model']} (copy at {gpu['copy_gbs'] / 1000:.2f} TB/s)"
        shown = ["torch", "triton", "cupy", "driver"]
    else:
        where = f"{cpu.get('model', 'CPU')}, {_count(cpu.get('cores', 1), 'core')}"
        where += f", {_count(cpu['threads'], 'PyTorch thread')}" if cpu.get("threads") else ""
        shown = ["python", "numpy", "torch"]
    software = [f"{name} {versions[name]}" for name in shown if name in versions]
    return ", ".join([where, *software, header["date"][:10]])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


#: A copy that takes this many times as long as a softmax of the same bytes was disturbed.
_DISTURBED = 2


def disturbance(rows: Rows) -> str | None:
    """The sentence about the row whose copy was slowest beside something that moves the same bytes, if any was."""
    found = []
    for (_, dtype, layout, case), row in rows.items():
        ratios = {name: times for name in row if (times := ratio(row, COPY, name))}
        if ratios and layout != "expanded":  # whose input is smaller than the copy's
            name = max(ratios, key=ratios.__getitem__)
            found.append((ratios[name], f"{case} {dtype} the copy took {ratios[name]:.1f} times {name}'s"))
    times, what = max(found, default=(0.0, ""))
    if times <= _DISTURBED:
        return None
    return f"Don't trust these figures: at {what} time. Something else was running; measure again when it isn't."


def brief_lines(rows: Rows) -> list[str]:
    """A line for each run of neighbors of which only the device time was asked for: its shortest and longest."""
    lines = []
    full = in_full(rows)
    brief = {task: row for task, row in rows.items() if task not in full}
    for op, dtype in dict.fromkeys((op, dtype) for op, dtype, _, _ in brief):
        for name, cases in cliffs.series().items():
            found = [brief.get((op, dtype, "contiguous", case), {}) for case in cases]
            for impl in names_of(found):
                times = [us for row in found if impl in row and (us := row[impl].kernel_us)]
                if times:
                    span = f"{significant(min(times))} to {significant(max(times))} µs"
                    lines.append(f"{label(impl, op)}, {dtype}, {name}: {span} ({len(times)} points)")
    return lines


def figure_lines(figures: Iterable[Figure]) -> list[str]:
    """A line for each name: its largest value, and where that is."""
    largest: dict[str, Figure] = {}
    for figure in figures:
        if figure.name not in largest or figure.value > largest[figure.name].value:
            largest[figure.name] = figure
    return [
        f"{name}: {figure.value:,.4g}" + "".join(f" {text}" for text in (figure.unit, _aside(figure.where)) if text)
        for name, figure in largest.items()
    ]


def _aside(text: str) -> str:
    return f"({text})" if text else ""


def reading_order(dtype: str) -> tuple[int, str]:
    """Sorts dtypes as :data:`shapes.DTYPES` has them, others last."""
    return (DTYPES.index(dtype) if dtype in DTYPES else len(DTYPES)), dtype


def _cell(row: Row, name: str, on_gpu: bool) -> str:
    record = row.get(name)
    if record is None:
        return ""
    if record.status != OK or record.us is None:
        return short_status(record.status)
    text = significant(record.us)
    if on_gpu and record.kernel_us is None:
        return f"{text} host"
    times = None if name == COPY else multiple(row, name)
    return text if times is None else f"{text} ×{significant(times)}"


_COLORS: tuple[tuple[str, str], ...] = (("wrong", "bold red"), ("–", "dim"), ("s", "yellow"), ("b", "yellow"))


def print_tables(results: Results, console: Console, absent: Mapping[str, str]) -> None:
    """A table for each op, dtype and layout, and who was measured; then the reasons for what is missing in them.

    Args:
        absent: Who wasn't measured at all -> why not.
    """
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    on_gpu = bool(results.header.get("gpu"))
    console.print(Text(machine_line(results.header)), soft_wrap=True)
    groups: dict[tuple[str, str, str, frozenset[str]], list[tuple[str, Row]]] = {}
    for (op, dtype, layout, case), row in in_full(rows_of(results.records)).items():
        groups.setdefault((op, dtype, layout, frozenset(row)), []).append((case, row))
    threads = (results.header.get("cpu") or {}).get("threads")
    unit = "device time in µs" if on_gpu else "host time in µs"
    unit += f", {_count(threads, 'thread')}" if threads and not on_gpu else ""
    for (op, dtype, layout, _), rows in groups.items():
        names = names_of(row for _, row in rows)
        title = f"{op}, {dtype}" + ("" if layout == "contiguous" else f", {layout}")
        table = Table(
            title=Text(title, "bold"),
            title_justify="left",
            caption=unit + ("; × the copy" if COPY in names else ""),
            caption_justify="left",
            min_width=44,  # title and caption on one line each
        )
        head = ["shape", *(label(name, op) for name in names)]
        body = [[case, *(_cell(row, name, on_gpu) for name in names)] for case, row in rows]
        for heading, *below in zip(head, *body, strict=True):
            longest = max(len(word) for text in (heading, *below) for word in text.split())
            # A narrow terminal may break lines, but cuts no word.
            table.add_column(escape(heading), justify="left" if heading == "shape" else "right", min_width=longest)
        for cells in body:
            styles = (next((style for start, style in _COLORS if text.startswith(start)), "") for text in cells[1:])
            table.add_row(Text(cells[0]), *(Text(*cell) for cell in zip(cells[1:], styles, strict=True)))
        console.print(table, crop=False)
    for line in [*brief_lines(rows_of(results.records)), *figure_lines(results.figures)]:
        console.print(Text(line), soft_wrap=True)
    for line in remarks(record for record in results.records if record.impl not in absent):
        console.print(Text(line, "bold red" if ": wrong: " in line else ""), soft_wrap=True)
    if warning := disturbance(rows_of(results.records)):
        console.print(Text(warning, "yellow"), soft_wrap=True)
    for reason in dict.fromkeys(absent.values()):
        who = ", ".join(name for name in absent if absent[name] == reason)
        console.print(Text.assemble(("not measured: ", "yellow"), (who, "bold"), f": {reason}"), soft_wrap=True)


def remarks(records: Iterable[Record]) -> list[str]:
    """A line for each kind of failure: who met it, and in which case first."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        if record.status != OK:
            # Reasons that differ in nothing but a number are one kind.
            kinds.setdefault(re.sub(r"\d[\d.e+-]*", "#", record.status), []).append(record)
    lines = []
    for met in kinds.values():
        names = ", ".join(dict.fromkeys(label(record.impl, record.op) for record in met))
        cases = list(dict.fromkeys(f"{record.case} {record.dtype}" for record in met))
        more = f" and {len(cases) - 1} more" if len(cases) > 1 else ""
        lines.append(f"{names}: {met[0].status} ({cases[0]}{more})")
    return lines


def _markdown_table(head: Sequence[str], body: Iterable[Sequence[str]], text_columns: int) -> str:
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *body])


def markdown(results: Results, op: str = "softmax", table_only: bool = False) -> str:
    """A Markdown table of multiples of the copy's time, with the machine above and host times below.

    Args:
        results: Of a run.
        op: The operation to show.
        table_only: Keep to the rows of :data:`shapes.TABLE`, if there are any.
    """
    wanted = {(t.dtype, f"{t.rows}x{t.cols}"): i for i, t in enumerate(TABLE)}
    table_only = table_only and any((r.dtype, r.case) in wanted for r in results.records)
    gpu = results.header.get("gpu")
    measured = {task: row for task, row in rows_of(results.records).items() if task[0] == op}
    rows: Rows = {
        (of, dtype, layout, case): row
        for (of, dtype, layout, case), row in in_full(measured).items()
        if not (gpu and is_of_the_host(row))
        and (not table_only or (layout == "contiguous" and (dtype, case) in wanted))
    }
    if table_only:
        rows = dict(sorted(rows.items(), key=lambda item: wanted[item[0][1], item[0][3]]))
    else:
        rows = dict(sorted(rows.items(), key=lambda item: (item[0][2], *reading_order(item[0][1]))))
    if not rows:
        return f"No records of {op}.\n"
    # Host backends have no place in a table of device times.
    on_host = {r.impl for row in rows.values() for r in row.values() if r.status == OK and not r.kernel_us}
    shown = [name for name in names_of(rows.values()) if not gpu or name not in on_host]
    head = ["dtype", "shape", *("copy µs" if n == COPY else label(n, op) for n in shown)]
    body = []
    for (_, dtype, layout, case), row in rows.items():
        name = case if layout == "contiguous" else f"{case} {layout}"
        body.append([dtype, name, *(_markdown_cell(row, n) for n in shown)])
    what = f"{'Device' if gpu else 'Host'} time as a multiple of an elementwise copy of the same bytes"
    parts = [f"{what}; {machine_line(results.header)}.", _markdown_table(head, body, 2)]
    if warning := disturbance(rows):
        parts.append(warning)
    elif gpu and (line := _geometric_mean(usual(rows).values(), op)):
        parts.append(line)
    parts += _host_lines(rows.values()) if gpu else []
    if table_only:
        parts += _strided_table(measured, op)
    return "\n\n".join(parts) + "\n"


def _strided_table(rows: Rows, op: str) -> list[str]:
    """Strided input against the same rows contiguous, where both were measured: a sentence and a table."""
    found: dict[tuple[str, str], tuple[float, Row]] = {}
    for task in grid_tasks("strided", DEFAULT_DTYPES):
        row = rows.get((op, task.dtype, task.layout, task.case.name), {})
        floor = rows.get((op, task.dtype, "contiguous", last(task.case).name), {}).get(AUTO)
        if (task.layout, task.case.dim) != ("contiguous", -1) and row and floor and floor.kernel_us:
            name = task.case.name if task.layout == "contiguous" else f"{task.case.name} {task.layout}"
            found[task.dtype, name] = floor.kernel_us, row
    if not found:
        return []
    names = [name for name in names_of(row for _, row in found.values()) if name != COPY]
    head = ["dtype", "shape", "contiguous µs", *(label(name, op) for name in names)]
    body = [
        [dtype, case, significant(floor), *(_over_floor(row.get(name), floor) for name in names)]
        for (dtype, case), (floor, row) in found.items()
    ]
    what = "Strided input: device time as a multiple of what `auto` takes for as many rows, contiguous."
    return [what, _markdown_table(head, body, 2)]


def _over_floor(record: Record | None, floor: float) -> str:
    if record is None:
        return ""
    return significant(record.kernel_us / floor) if record.kernel_us else short_status(record.status)


def _markdown_cell(row: Row, name: str) -> str:
    record = row.get(name)
    if record is None:
        return ""
    if record.status != OK or record.us is None:
        return short_status(record.status)
    times = multiple(row, name)
    return significant(record.us if name == COPY or times is None else times)


def _geometric_mean(rows: Iterable[Row], op: str) -> str | None:
    gains = [gain for row in rows if (gain := ratio(row, TORCH, "auto"))]
    if not gains:
        return None
    mean = statistics.geometric_mean(gains)
    least = min(gains)
    return f"`{label(TORCH, op)}` takes {mean:.2f} times as long as `auto` (geometric mean; at least {least:.2f})."


def _host_lines(rows: Iterable[Row]) -> list[str]:
    """Host time per eager call at the lab's B=512, V=600, where it was measured."""
    for row in rows:
        one = next(iter(row.values()))
        if (one.rows, one.cols, one.dtype) == (512, 600, "float32"):
            timed = [row[n] for n in names_of([row]) if row[n].kernel_us is not None]
            times = ", ".join(f"`{label(r.impl, r.op)}` {r.host_us:.1f} µs" for r in timed)
            return [f"Host time per eager call at 512x600, float32: {times}."]
    return []


def plots(results: Results, folder: Path) -> list[Path]:
    """Time as a multiple of the copy's against the number of columns: a file for each op and dtype.

    Each case is a point; the line runs through the geometric mean of the cases with as many columns.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(exist_ok=True)
    groups: dict[tuple[str, str], list[Row]] = {}
    for (op, dtype, layout, _), row in usual(in_full(rows_of(results.records))).items():
        if layout == "contiguous":
            groups.setdefault((op, dtype), []).append(row)
    written = []
    for (op, dtype), rows in groups.items():
        figure, axes = plt.subplots(figsize=(9, 5.5))
        for name in [n for n in names_of(rows) if n != COPY]:
            points = [(row[name].cols, times) for row in rows if (times := multiple(row, name)) is not None]
            if points:
                _draw(axes.plot, axes.scatter, label(name, op), points)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("columns")
        axes.set_ylabel(("device" if results.header.get("gpu") else "host") + " time / copy")
        axes.set_title(f"{op}, {dtype}")
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        axes.grid(alpha=0.3)
        path = folder / f"{op}-{dtype}.png"
        figure.savefig(path, dpi=130, bbox_inches="tight")
        plt.close(figure)
        written.append(path)
    return written


def _draw(
    plot: Callable[..., Any], scatter: Callable[..., Any], name: str, points: Sequence[tuple[int, float]]
) -> None:
    by_cols: dict[int, list[float]] = {}
    for cols, ratio in points:
        by_cols.setdefault(cols, []).append(ratio)
    means = {cols: statistics.geometric_mean(by_cols[cols]) for cols in sorted(by_cols)}
    (line,) = plot(list(means), list(means.values()), label=name)
    scatter(*zip(*points, strict=True), s=10, alpha=0.5, color=line.get_color())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="report.py", description="Print a result of run.py as Markdown.")
    parser.add_argument("json", type=Path, help="what bench/run.py --json wrote")
    parser.add_argument("--op", default="softmax", choices=ALL_OPS)
    parser.add_argument("--all", action="store_true", help="every record, not only the rows of the table")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw plots there")
    options = parser.parse_args(argv)
    try:
        results = load(options.json)
    except (OSError, ValueError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    if options.plots and not options.plots.parent.is_dir():
        print(
            f"report.py: cannot write {options.plots}: there is no folder {options.plots.parent}", file=sys.stderr
        )
        return 2
    sys.stdout.write(markdown(results, options.op, table_only=not options.all))
    if options.plots:
        plots(results, options.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
