"""Records by task, a row each, and which rows a table or a mean is about."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from .peers import COPY
from .records import OK, Record
from .shapes import DTYPES, PROBES, USUAL, grid_tasks

#: One task's records by implementation.
Row = dict[str, Record]
#: By (op, dtype, layout, case).
Rows = dict[tuple[str, str, str, str], Row]


def rows_of(records: Iterable[Record]) -> Rows:
    """Records by task, then by implementation, in the order in which they came."""
    rows: Rows = {}
    for record in records:
        rows.setdefault(record.task, {})[record.impl] = record
    return rows


def usual(rows: Rows) -> Rows:
    """The rows that a mean or a curve is about: all but those of the probing grids, unless there are no others."""
    return {task: row for task, row in rows.items() if task[1:] not in _only_probes()} or rows


@cache
def _only_probes() -> frozenset[tuple[str, str, str]]:
    """(dtype, layout, case) of what the probing grids have and the usual ones haven't."""

    def names(grids: Iterable[str]) -> set[tuple[str, str, str]]:
        tasks = [task for grid in grids for task in grid_tasks(grid, DTYPES)]
        return {(task.dtype, task.layout, task.case.name) for task in tasks}

    return frozenset(names(PROBES) - names(USUAL))


def in_full(rows: Rows) -> Rows:
    """The rows that a table has room for: not the hundreds of which only the device time was asked for."""
    return {task: row for task, row in rows.items() if COPY in row or any(r.host_us for r in row.values())}


def is_of_the_host(row: Row) -> bool:
    """Whether everything in it ran on host arrays."""
    timed = [record for record in row.values() if record.status == OK]
    return bool(timed) and not any(record.kernel_us for record in timed)
