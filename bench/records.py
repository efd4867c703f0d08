"""What a run leaves: records, figures, and the JSON file that holds them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SCHEMA = 1
OK = "ok"


@dataclass(frozen=True)
class Record:
    """One implementation on one task.

    Attributes:
        op: ``"softmax"``, ``"log_softmax"``, the gradient of one, or ``"softmax_topk"``.
        impl: A backend's name, ``"auto"``, ``"F.softmax"``, ``"copy"`` or a peer's.
        dtype: Of the input and the output.
        rows, cols: How many softmaxes, over how many elements.
        dim: The reduced axis.
        layout: How the input lies in memory; see :data:`shapes.LAYOUTS`.
        kernel_us: Device time of a call in microseconds; None on a CPU.
        host_us: Host time of an eager call in microseconds; on a CPU that is all of it. None where only the
            device time was asked for.
        gbs: Bytes read and written, each once, over that time, in 1e9 a second.
        max_rel_error, max_abs_error: Against float64 rounded to ``dtype``.
        status: ``ok``, ``unsupported: why``, ``wrong: how`` or ``skipped: why`` (``slow``, ``budget``).
        case: The shape as given, with the axis and an input array's name: rows and cols don't tell
            8x1000x64x64@1 from 32768x1000.
    """

    op: str
    impl: str
    dtype: str
    rows: int
    cols: int
    dim: int
    layout: str
    kernel_us: float | None = None
    host_us: float | None = None
    gbs: float | None = None
    max_rel_error: float | None = None
    max_abs_error: float | None = None
    status: str = OK
    case: str = ""

    @property
    def us(self) -> float | None:
        """The time that reports compare: on the device where there is one."""
        return self.kernel_us if self.kernel_us is not None else self.host_us

    @property
    def task(self) -> tuple[str, str, str, str]:
        """What was computed, whoever did it."""
        return self.op, self.dtype, self.layout, self.case


@dataclass(frozen=True)
class Figure:
    """A measurement that isn't of one implementation on one task; figures.py lists them.

    Attributes:
        name: What was measured.
        value: How much, in ``unit``.
        unit: ``"s"``, ``"ms"``, ``"MiB"``, or ``""`` for a ratio or a count.
        where: Of which shape or implementation, if of one among several.
    """

    name: str
    value: float
    unit: str = ""
    where: str = ""


class Results:
    """A run's header, figures and records, written to a file as it goes.

    Args:
        header: The keys of the JSON object other than ``figures`` and ``records``.
        path: The file, replaced atomically; None keeps everything in memory.
    """

    def __init__(self, header: dict[str, Any], path: Path | None = None) -> None:
        self.header = {"schema": SCHEMA, **header}
        self.figures: list[Figure] = []
        self.records: list[Record] = []
        self._path = path
        self._written = 0.0

    def add(self, record: Record) -> None:
        self.records.append(record)
        self._write_now_and_then()

    def add_figure(self, figure: Figure) -> None:
        self.figures.append(figure)
        self._write_now_and_then()

    def improve(self, again: Record) -> None:
        """Let a second record of the same lower the times of the first, or take its place if it is wrong."""
        for i, known in enumerate(self.records):
            if (known.task, known.impl) != (again.task, again.impl):
                continue
            if again.status.startswith("wrong"):
                self.records[i] = again
            elif known.status == again.status == OK:
                host = known.host_us and again.host_us and min(known.host_us, again.host_us)
                faster = min(known, again, key=lambda record: record.us or 0)
                self.records[i] = replace(faster, host_us=host)

    def _write_now_and_then(self) -> None:
        if time.monotonic() - self._written > 2:
            self.write()

    def write(self) -> None:
        if self._path is None:
            return
        partial = self._path.with_name(self._path.name + ".partial")
        try:
            partial.write_text(self.dumps(), encoding="utf-8")
            os.replace(partial, self._path)
        except OSError as error:  # nobody asked for the partial one
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._written = time.monotonic()

    def dumps(self) -> str:
        """The JSON text: a figure or record a line, so that runs can be compared with diff."""
        header = json.dumps(self.header, indent=1)[:-2]
        return f'{header},\n "figures": [{_lines(self.figures)}],\n "records": [{_lines(self.records)}]\n}}\n'


def _lines(items: Sequence[Figure | Record]) -> str:
    return ",".join("\n  " + json.dumps(vars(item), allow_nan=False) for item in items) + "\n "


def load(path: Path) -> Results:
    """Read a file that :class:`Results` wrote.

    Raises:
        OSError: It can't be read.
        ValueError: It isn't such a file.
    """
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        if header.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        records = [Record(**record) for record in header.pop("records")]
        figures = [Figure(**figure) for figure in header.pop("figures", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of bench/run.py: {error}") from error
    results = Results(header)
    results.figures, results.records = figures, records
    return results
