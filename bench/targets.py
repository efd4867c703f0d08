"""The speed targets as data: what each promises, and which values of a result show it.

Values are ratios of times unless a unit says otherwise. ``check.py`` judges them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from minikernel.dispatch import CACHE_SIZE
from minikernel.problem import BACKWARD, OPS, TOPK

from . import cliffs, figures
from .peers import AUTO, COPY, OPTIONAL_NAMES, SCIPY, TORCH
from .records import OK, Figure, Record
from .rows import Row, Rows
from .shapes import (
    DEFAULT_DTYPES,
    FEW_DTYPES,
    FEW_ROWS,
    HOST_CORES,
    HOST_DTYPES,
    TABLE,
    Case,
    Task,
    grid_tasks,
    last,
)

FUSED, TRITON, NUMPY = "cuda-fused", "triton-fused", "numpy"

#: Where the copy itself was slow when `reach` was set, another shape of as many bytes is the floor too.
FLOORS = {("bfloat16", "4096x32768"): "32768x4096"}
#: From here up ``numpy`` is to be twice as fast as SciPy, on as many cores.
LARGE_ELEMENTS = 4_000_000


@dataclass(frozen=True)
class Evidence:
    """What a run measured: its records by task, and its figures."""

    rows: Rows
    figures: Sequence[Figure] = ()


#: Each with where it was found; None where it should have been and wasn't.
Values = Iterator[tuple[float | None, str]]


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        number: As the project numbers its targets.
        text: What is promised.
        values: What to judge.
        limit: Every value is at most this, or with ``at_least`` at least this; with ``mean``, their geometric
            mean is.
        unit: Of the values and the limit.
    """

    number: str
    text: str
    values: Callable[[Evidence], Values]
    limit: float = 1.0
    at_least: bool = False
    mean: bool = False
    unit: str = ""

    def holds(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


def _time(record: Record | None, host: bool = False) -> float | None:
    """Microseconds of a record that was measured on a device."""
    if record is None or record.kernel_us is None:
        return None
    return record.host_us if host else record.kernel_us


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def _where(dtype: str, layout: str, case: str) -> str:
    return f"{dtype} {case}" + ("" if layout == "contiguous" else f" {layout}")


def _contiguous(dtype: str, case: str) -> tuple[str, str, str, str]:
    return "softmax", dtype, "contiguous", case


def _key(task: Task) -> tuple[str, str, str, str]:
    return "softmax", task.dtype, task.layout, task.case.name


def reach(impl: str) -> Callable[[Evidence], Values]:
    """Time over the copy's, over what the table says can be reached; for each of its rows."""

    def values(found: Evidence) -> Values:
        for target in TABLE:
            case = f"{target.rows}x{target.cols}"
            names = {case, FLOORS.get((target.dtype, case), case)}
            floors = [_time(found.rows.get(_contiguous(target.dtype, name), {}).get(COPY)) for name in names]
            floor = min((floor for floor in floors if floor), default=None)
            time = _time(found.rows.get(_contiguous(target.dtype, case), {}).get(impl))
            times = _over(time, floor)
            yield times and times / target.reach, f"{target.dtype} {case}"

    return values


def gain(found: Evidence) -> Values:
    """F.softmax's time over auto's, for each row of the table."""
    for target in TABLE:
        case = f"{target.rows}x{target.cols}"
        row = found.rows.get(_contiguous(target.dtype, case), {})
        yield _over(_time(row.get(TORCH)), _time(row.get(AUTO))), f"{target.dtype} {case}"


def against(
    impl: str, other: str, wanted: Callable[[Record], bool], host: bool = False
) -> Callable[[Evidence], Values]:
    """One implementation's time over another's, wherever both were measured on an input that is wanted."""

    def values(found: Evidence) -> Values:
        for (op, dtype, layout, case), row in found.rows.items():
            one, two = row.get(impl), row.get(other)
            if op in OPS and one and two and wanted(one) and one.kernel_us and two.kernel_us:
                yield _over(_time(one, host), _time(two, host)), f"{op} {_where(dtype, layout, case)}"

    return values


def against_best(host: bool) -> Callable[[Evidence], Values]:
    """auto's time over the best single backend's, everywhere."""

    def values(found: Evidence) -> Values:
        for (op, dtype, layout, case), row in found.rows.items():
            if op in OPS and (ratio := _over_best(row, host)):
                yield ratio, f"{op} {_where(dtype, layout, case)}"

    return values


def _over_best(row: Row, host: bool) -> float | None:
    others = {AUTO, COPY, TORCH, *OPTIONAL_NAMES}
    times = [time for name in row if name not in others and (time := _time(row[name], host))]
    return _over(_time(row.get(AUTO), host), min(times, default=None))


def _named(steps: Callable[[Rows], Iterator[cliffs.Step]]) -> Callable[[Evidence], Values]:
    def values(found: Evidence) -> Values:
        for ratio, (dtype, one, other) in steps(found.rows):
            yield ratio, f"{dtype} {one} / {other}"

    return values


def strided(wanted: Callable[[Task], bool]) -> Callable[[Evidence], Values]:
    """auto's time over its own for as many rows of as many elements, contiguous; on the grid ``strided``."""

    def values(found: Evidence) -> Values:
        for task in grid_tasks("strided", DEFAULT_DTYPES):
            if (task.layout, task.case.dim) != ("contiguous", -1) and wanted(task):
                time = _time(found.rows.get(_key(task), {}).get(AUTO))
                floor = _time(found.rows.get(_contiguous(task.dtype, last(task.case).name), {}).get(AUTO))
                yield _over(time, floor), _where(task.dtype, task.layout, task.case.name)

    return values


def few_rows_reach(dtype: str, elements: int) -> float:
    """The multiple of the copy's time to get down to for few, long rows of so many elements in all.

    The table says it for some; between them it is drawn straight over logarithms, and beyond them it is the last.
    """
    least = min(case.cols for case in _few_cases())
    known = sorted(
        (target.rows * target.cols, target.reach)
        for target in TABLE
        if target.dtype == dtype and target.rows <= max(FEW_ROWS) and target.cols >= least
    )
    sizes, reaches = zip(*known, strict=True)
    return math.exp(float(np.interp(math.log(elements), np.log(sizes), np.log(reaches))))


def _few_cases() -> list[Case]:
    return [task.case for task in grid_tasks("few", FEW_DTYPES)]


def few_rows(found: Evidence) -> Values:
    """auto's time over the copy's, over :func:`few_rows_reach`; on the grid ``few``."""
    for task in grid_tasks("few", FEW_DTYPES):
        row = found.rows.get(_key(task), {})
        times = _over(_time(row.get(AUTO)), _time(row.get(COPY)))
        bound = few_rows_reach(task.dtype, task.case.elements)
        yield times and times / bound, _where(task.dtype, task.layout, task.case.name)


def few_rows_failing(found: Evidence) -> Values:
    """1 for a point of the grid ``few`` at which auto isn't right, eager or replayed from a CUDA graph; else 0."""
    for task in grid_tasks("few", FEW_DTYPES):
        record = found.rows.get(_key(task), {}).get(AUTO)
        known = record and (record.kernel_us or record.status.startswith(("wrong", "unsupported")))
        failing = None if not (record and known) else float(record.status != OK)
        yield failing, _where(task.dtype, task.layout, task.case.name)


def over_scipy(from_elements: int) -> Callable[[Evidence], Values]:
    """numpy's time over SciPy's on two cores; on the grid ``host``, from so many elements up."""

    def values(found: Evidence) -> Values:
        for task in grid_tasks("host", HOST_DTYPES):
            if task.case.elements >= from_elements:
                limited = replace(task, case=replace(task.case, cores=HOST_CORES))
                row = found.rows.get(_key(limited), {})
                times = [record.us if (record := row.get(impl)) else None for impl in (NUMPY, SCIPY)]
                yield _over(*times), _where(task.dtype, task.layout, task.case.name)

    return values


def gradient(impl: str) -> Callable[[Evidence], Values]:
    """The gradients' time over that of a copy of as many bytes; on the grid ``gradients``."""
    return _grid_ratio("gradients", BACKWARD.values(), impl, COPY)


def topk(impl: str) -> Callable[[Evidence], Values]:
    """How much longer ``torch.topk`` of ``F.softmax`` takes; on the grid ``topk``."""
    return _grid_ratio("topk", [TOPK], TORCH, impl)


def _grid_ratio(grid: str, ops: Collection[str], impl: str, base: str) -> Callable[[Evidence], Values]:
    """The time of ``impl`` over that of ``base``, at every task of a grid."""

    def values(found: Evidence) -> Values:
        for op, task in product(ops, grid_tasks(grid, DEFAULT_DTYPES)):
            row = found.rows.get((op, *_key(task)[1:]), {})
            where = _where(task.dtype, task.layout, task.case.name)
            ratio = _over(_time(row.get(impl)), _time(row.get(base)))
            yield ratio, f"{op} {where}" if len(ops) > 1 else where

    return values


def figure(name: str) -> Callable[[Evidence], Values]:
    """What the figures of that name say."""

    def values(found: Evidence) -> Values:
        known = [figure for figure in found.figures if figure.name == name]
        yield from ((figure.value, figure.where) for figure in known)
        if not known:
            yield None, name

    return values


def warm_call(found: Evidence) -> Values:
    """Milliseconds that auto's first call takes longer than F.softmax's."""
    times = {figure.where: figure.value for figure in found.figures if figure.name == figures.WARM}
    one, other = times.get(AUTO), times.get(TORCH)
    yield one - other if one is not None and other is not None else None, "float32 512x600"


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


def _is_transposed(task: Task) -> bool:
    return task.layout == "transposed"


def _is_half(task: Task) -> bool:
    return task.dtype in ("float16", "bfloat16") and not _is_transposed(task)


def _is_wide(task: Task) -> bool:
    return task.dtype == "float32" and not _is_transposed(task)


#: How much longer than the best backend auto may take.
BEST = 1.05

TARGETS = (
    Target("1", "auto: the table's reach, within 3%", reach(AUTO), 1.03),
    Target("1", "F.softmax / auto over the table: geometric mean", gain, 2.5, at_least=True, mean=True),
    Target("1", "F.softmax / auto over the table: every row", gain, 1.0, at_least=True),
    Target("2", "cuda-fused: the table's reach, within 3%", reach(FUSED), 1.03),
    Target("2", "triton-fused / cuda-fused, 132 rows up, to 16384", against(TRITON, FUSED, _many_short), 1.10),
    Target("2", "triton-fused / cuda-fused, elsewhere to 65536", against(TRITON, FUSED, _other_rows), 1.5),
    Target("3", "no cliffs: a length or row count / its neighbor", _named(cliffs.steps), cliffs.STEP),
    Target("3", "an unaligned length / the nearest aligned one", _named(cliffs.unaligned), cliffs.UNALIGNED),
    Target("4", "strided / contiguous: float32", strided(_is_wide), 1.3),
    Target("4", "strided / contiguous: half types", strided(_is_half), 1.5),
    Target("4", "strided / contiguous: transposed", strided(_is_transposed), 1.6),
    Target("4", "strided: memory beyond the output / input", figure(figures.DEVICE_MEMORY), 0.1),
    Target("4", "strided input: auto / F.softmax", against(AUTO, TORCH, _strided), 1.0),
    Target("5", "few long rows: reach between the table's, within 3%", few_rows, 1.03),
    Target("5", "few long rows: wrong or refused in a CUDA graph", few_rows_failing, 0),
    Target("6", "host time at 512x600: auto / F.softmax", against(AUTO, TORCH, _lab, host=True), 1.2),
    Target("6", "host time at 512x600: cuda-fused / F.softmax", against(FUSED, TORCH, _lab, host=True), 1.2),
    Target("6", "host time at 512x600: triton-fused / F.softmax", against(TRITON, TORCH, _lab, host=True), 1.6),
    Target("6", "host time after ten thousand shapes / before", figure(figures.FLAT), 1.1),
    Target("6", "entries in the fullest cache after them", figure(figures.CACHED), CACHE_SIZE),
    Target("7", "first call, disk cache warm, beyond F.softmax's", warm_call, 60, unit="ms"),
    Target("7", "first call, disk cache cold", figure(figures.COLD), 1.5, unit="s"),
    Target("7", "GPU packages that a first call imports", figure(figures.PACKAGES), 1),
    Target("7", "kernels for all row lengths of a dtype", figure(figures.KERNELS), 100),
    Target("7", "import minikernel, beyond import numpy", figure(figures.IMPORT), 30, unit="ms"),
    Target("8", "auto / the best backend, device time", against_best(host=False), BEST),
    Target("8", "auto / the best backend, host time", against_best(host=True), BEST),
    Target("9", "numpy / scipy.special.softmax", over_scipy(0), 1.0),
    Target("9", "numpy / SciPy from 4 million elements, 2 cores", over_scipy(LARGE_ELEMENTS), 0.5),
    Target("9", "numpy: peak memory beyond the output", figure(figures.HOST_MEMORY), 16, unit="MiB"),
    Target("10", "gradient of 1K to 32K columns: auto / copy", gradient(AUTO), 1.08),
    Target("10", "gradient of 1K to 32K columns: cuda-fused / copy", gradient(FUSED), 1.08),
    Target("10", "gradient of 1K to 32K columns: triton-fused / copy", gradient(TRITON), 1.08),
    Target("10", "host time with requires_grad: auto / F.softmax", figure(figures.TRAINING), 1.7),
    Target("11", "scale, mask, causality: time / without, a byte", figure(figures.SCORES), 1.15),
    Target("11", "PyTorch's scale, mask and softmax / auto", figure(figures.UNFUSED), 2.0, at_least=True),
    Target("12", "torch.topk of F.softmax, k = 8 / auto", topk(AUTO), 3.0, at_least=True),
    Target("12", "torch.topk of F.softmax, k = 8 / cuda-fused", topk(FUSED), 3.0, at_least=True),
    Target("12", "torch.topk of F.softmax, k = 8 / triton-fused", topk(TRITON), 3.0, at_least=True),
)


def suspects(rows: Rows) -> list[tuple[str, str, str, str]]:
    """Tasks whose times stand out against their neighbors', or auto's against the best backend's."""
    found = [_contiguous(dtype, case) for dtype, case in cliffs.suspects(rows)]
    for task, row in rows.items():
        ratios = [ratio for host in (False, True) if (ratio := _over_best(row, host))]
        if any(ratio > BEST for ratio in ratios):
            found.append(task)
    return found
