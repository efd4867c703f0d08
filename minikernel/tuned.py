"""Which backend is the fastest where: measured tables, one for each GPU model, that auto goes by.

``python -m minikernel tune`` writes one (see ``tune/``). Here they are found, read and looked up. Nothing is
read before the first CUDA array comes, and nothing at all where there is no GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import driver, user_cache
from .problem import DTYPES, ITEMSIZE, Problem

SCHEMA = 1
SHIPPED = Path(__file__).resolve().parent / "tables"
COMMAND = "python -m minikernel tune"

#: Another backend than the first by rank must be this many times as fast: less is within the noise.
MARGIN = 1.03
# Nothing has more rows, columns or microseconds.
_MOST = 2**63

#: Ways for an array to lie in memory that make a difference to the kernels, in words; see :func:`kind_of`.
KINDS = {
    "aligned": "",
    "unaligned": "with unaligned rows",
    "shifted": "with rows out of step with the output's",
    "axis": "over another axis than the last",
    "transposed": "with rows whose elements lie apart",
    "expanded": "with one row seen as many",
}

_ACCESS_BYTES = 16


def kind_of(problem: Problem) -> str:
    """How a problem's array lies in memory, as one of :data:`KINDS`.

    ``aligned``, ``unaligned`` and ``shifted`` have the elements of a row side by side. ``aligned`` rows are whole
    numbers of 16 bytes and start at a multiple of that. Where ``unaligned`` rows start, an element of the input
    is as far from such a multiple as its result; not so in ``shifted`` ones.
    """
    if problem.inner > 1:
        return "axis"
    if problem.strides[1] != 1 and problem.cols > 1:
        return "transposed"
    if problem.strides[0] == 0 and problem.outer > 1:
        return "expanded"
    itemsize = ITEMSIZE[problem.dtype]
    pitch = problem.strides[0] if problem.outer > 1 else problem.cols
    if problem.x_offset != problem.out_offset or (pitch - problem.cols) * itemsize % _ACCESS_BYTES:
        return "shifted"
    whole = problem.x_offset == 0 and problem.cols * itemsize % _ACCESS_BYTES == 0
    return "aligned" if whole else "unaligned"


class Point(NamedTuple):
    """What was measured in one place.

    Attributes:
        rows, cols: How many softmaxes, over how many elements.
        microseconds: Device time of a call for each of the table's backends; None where one wasn't measured.
    """

    rows: int
    cols: int
    microseconds: tuple[float | None, ...]


@dataclass(frozen=True)
class Table:
    """What ``python -m minikernel tune`` measured on one GPU model.

    Attributes:
        gpu: The model, as the driver names it.
        date: When, in ISO 8601.
        command: What was run.
        versions: Package -> version.
        source_hash: What :func:`minikernel.sources.source_hash` was.
        backends: Names of those measured, best rank first.
        points: (dtype, kind) -> what was measured, each place once.
    """

    gpu: str
    date: str
    command: str
    versions: Mapping[str, str]
    source_hash: str
    backends: tuple[str, ...]
    points: Mapping[tuple[str, str], Sequence[Point]]

    @cached_property
    def _places(self) -> dict[tuple[str, str], np.ndarray]:
        """(log2 rows, log2 cols) of the points of those (dtype, kind) that were asked for so far."""
        return {}

    def nearest(self, dtype: str, kind: str, rows: int, cols: int) -> Point | None:
        """The measured point nearest in (log2 rows, log2 cols), distance 0 included; None if there is none."""
        if not (points := self.points.get((dtype, kind))):
            return None
        if (places := self._places.get((dtype, kind))) is None:
            places = np.log2([(point.rows, point.cols) for point in points])
            self._places[dtype, kind] = places
        distances = ((places - np.log2((rows, cols))) ** 2).sum(axis=1)
        return points[int(distances.argmin())]

    def times(self, point: Point) -> dict[str, float]:
        """Backend -> microseconds at one of the points, of those measured there, best rank first."""
        pairs = zip(self.backends, point.microseconds, strict=True)
        return {name: time for name, time in pairs if time is not None}

    def dumps(self) -> str:
        """The JSON text: a point a line."""
        import json  # here, so that importing the library doesn't pay for it

        header = {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "date": self.date,
            "command": self.command,
            "versions": dict(self.versions),
            "source_hash": self.source_hash,
            "columns": ["rows", "cols", *(f"{name} us" for name in self.backends)],
        }
        groups = []
        for (dtype, kind), points in self.points.items():
            lines = ",\n".join(f"   {json.dumps([p.rows, p.cols, *p.microseconds])}" for p in sorted(points))
            groups.append(f'  "{dtype} {kind}": [\n{lines}\n  ]')
        return json.dumps(header, indent=1)[:-2] + ',\n "points": {\n' + ",\n".join(groups) + "\n }\n}\n"


def loads(text: str) -> Table:
    """Read what :meth:`Table.dumps` wrote.

    Raises:
        ValueError: It is no such table, or of another version of the format; says what is wrong.
    """
    import json

    try:
        found = json.loads(text)
        if not isinstance(found, dict) or found.get("schema") != SCHEMA:
            raise ValueError(f"it isn't a table of schema {SCHEMA}")
        rows, cols, *columns = found["columns"]
        if (rows, cols) != ("rows", "cols") or not columns:
            raise ValueError(f"its columns are {found['columns']}")
        backends = tuple(column.removesuffix(" us") for column in columns)
        points: dict[tuple[str, str], list[Point]] = {}
        for key, lines in found["points"].items():
            dtype, kind = key.split(" ")
            if dtype not in DTYPES or kind not in KINDS:
                raise ValueError(f"there is no {key!r}")
            points[dtype, kind] = [_point(line, len(backends)) for line in lines]
        texts = [found[name] for name in ("gpu", "date", "command", "source_hash")]
        if not all(isinstance(value, str) for value in (*texts, *backends)):
            raise ValueError("a name isn't a string")
        gpu, date, command, source_hash = texts
        return Table(gpu, date, command, dict(found["versions"]), source_hash, backends, points)
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no such table: {error}") from error


def _point(line: Any, backends: int) -> Point:
    rows, cols, *microseconds = line
    extents = all(type(n) is int and 0 < n < _MOST for n in (rows, cols))
    times = all(t is None or (isinstance(t, int | float) and 0 < t < _MOST) for t in microseconds)
    if not extents or not times or len(microseconds) != backends:
        raise ValueError(f"bad point {line}")
    return Point(rows, cols, tuple(microseconds))


@dataclass(frozen=True)
class Preference:
    """The backend that a table puts first, and what was measured.

    Attributes:
        backend: Its name.
        place: Where the table was looked up, in words.
        microseconds: Backend -> device time there, of all that were measured, best rank first.
    """

    backend: str
    place: str
    microseconds: Mapping[str, float]

    @property
    def reason(self) -> str:
        """Why it is put first, as a sentence."""
        time = self.microseconds[self.backend]
        if time > min(self.microseconds.values()):
            why = f"first under auto, and none was measured more than {MARGIN - 1:.0%} faster"
        else:
            why = "the fastest measured"
        return f"{self.backend} is {why} {self.place}: {_microseconds(time)}."

    def against(self, other: str) -> str:
        """Why another backend isn't put first, or ``""`` if that one wasn't measured."""
        if (time := self.microseconds.get(other)) is None:
            return ""
        return f"it was measured to take {_microseconds(time)} {self.place}, and {self.backend} comes first"


def _microseconds(time: float) -> str:
    return f"{time:.4g} µs"


def pick(times: Mapping[str, float]) -> str:
    """The fastest backend, or the first unless that is slower by more than the margin.

    Args:
        times: Backend -> time of at least one, best rank first.
    """
    first, fastest = next(iter(times)), min(times, key=times.__getitem__)
    return fastest if times[first] > MARGIN * times[fastest] else first


def prefer(table: Table, problem: Problem, names: Sequence[str]) -> Preference | None:
    """The backend that a table puts first for a problem; None if the table has nothing to say.

    The op doesn't matter: softmax and log_softmax differ by less than the margin.

    Args:
        names: Who may be chosen, best rank first.
    """
    if problem.out_dtype != problem.dtype:  # not measured: one side has twice the bytes
        return None
    kind = kind_of(problem)
    if (point := table.nearest(problem.dtype, kind, problem.rows, problem.cols)) is None:
        return None
    measured = table.times(point)
    times = {name: measured[name] for name in names if name in measured}
    if not times:
        return None
    exact = (point.rows, point.cols) == (problem.rows, problem.cols)
    words = f" {KINDS[kind]}" if KINDS[kind] else ""
    where = f"{'at' if exact else 'near'} {point.rows} x {point.cols} {problem.dtype}{words}"
    return Preference(pick(times), f"on {table.gpu} {where}", times)


@dataclass(frozen=True)
class Found:
    """The table for a GPU, and what is wrong with those that were passed over.

    Attributes:
        table: None if there is none that can be used.
        path: Where it is.
        own: Whether it was measured by this user, rather than shipped with the library.
        faults: Sentences about tables that are there and can't be used.
    """

    table: Table | None = None
    path: Path | None = None
    own: bool = False
    faults: tuple[str, ...] = field(default=())


def file_name(model: str) -> str:
    """``nvidia-h200.json`` for ``NVIDIA H200``."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") + ".json"


def own_path(model: str) -> Path:
    """Where the user's own table for a GPU model lies.

    Raises:
        RuntimeError: The user has no home.
    """
    return user_cache.folder("tables") / file_name(model)


def search(model: str) -> Found:
    """The user's own table for a GPU model, else the one that is shipped. Reads files; raises nothing."""
    candidates = [(SHIPPED / file_name(model), False)]
    with suppress(RuntimeError):
        candidates.insert(0, (own_path(model), True))
    faults: list[str] = []
    for path, own in candidates:
        try:
            table = loads(path.read_text(encoding="utf-8"))
            if table.gpu != model:
                raise ValueError(f"it was measured on {table.gpu}")
            # A shipped table belongs to the code that it comes with; the user's own may be older than that.
            if own and not is_current(table):
                raise ValueError(f"it was measured with other kernels than these: run {COMMAND} again")
        except FileNotFoundError:
            continue
        except OSError as error:
            faults.append(f"{path} can't be read: {error.strerror or error}")
        except ValueError as error:
            faults.append(f"{path} can't be used: {error}")
        else:
            return Found(table, path, own, tuple(faults))
    return Found(faults=tuple(faults))


def is_current(table: Table) -> bool:
    """Whether a table was measured with the kernels and launch plans that are here."""
    from .sources import source_hash

    return table.source_hash == source_hash()


@cache
def find(index: int) -> Found:
    """The table for the GPU of that ordinal; looked for once in a process."""
    if driver.obstacles():
        return Found()
    try:
        model = driver.name(index)
    except driver.CudaError:  # no such device: running the problem will say so
        return Found()
    return search(model)


def preferred(problem: Problem, names: Sequence[str]) -> Preference | None:
    """The backend that the table of a problem's GPU puts first; None if there is none.

    Args:
        names: Who may be chosen, best rank first.
    """
    table = find(problem.index).table
    return prefer(table, problem, names) if table else None
