"""Neighbors of the grid ``cliffs``: which of its points should cost alike, and which don't.

A row is aligned if its bytes are a multiple of 16. Where it isn't, every row begins somewhere else between two
vectors, which costs a little; so neighbors are neighbors among the aligned lengths or among the others, and an
unaligned length is held against the nearest aligned one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from minikernel.problem import ITEMSIZE

from .peers import AUTO
from .rows import Rows
from .shapes import CLIFF_DTYPES, CLIFF_EXTENT, CLIFF_LENGTHS, CLIFF_ROWS

#: Neighbors' times may differ by so much, as a ratio or in microseconds.
STEP, STEP_US = 1.15, 0.3
#: And an unaligned row's may be so many times an aligned one's.
UNALIGNED = 1.15

#: The ratio of two times, or None, and where: dtype and the two cases.
Step = tuple[float | None, tuple[str, str, str]]


def steps(rows: Rows) -> Iterator[Step]:
    """For each two neighbors the longer time over the shorter; 1 where they differ by at most STEP_US."""
    for dtype in CLIFF_DTYPES:
        for one, other in _neighbors(dtype):
            times = _time(rows, dtype, one), _time(rows, dtype, other)
            yield _ratio(*times), (dtype, one, other)


def unaligned(rows: Rows) -> Iterator[Step]:
    """For each unaligned length its time over that of the nearest aligned one."""
    for dtype in CLIFF_DTYPES:
        for lengths in CLIFF_LENGTHS:
            aligned, others = _by_alignment(lengths, dtype)
            for length in others:
                _, nearest = min((abs(candidate - length), candidate) for candidate in aligned)
                one, other = _long(length), _long(nearest)
                time, floor = _time(rows, dtype, one), _time(rows, dtype, other)
                yield time / floor if time and floor else None, (dtype, one, other)


def suspects(rows: Rows) -> list[tuple[str, str]]:
    """The slower of any two that are too far apart, as (dtype, case): what to measure once more."""
    found = []
    for ratio, (dtype, one, other) in steps(rows):
        if ratio and ratio > STEP:
            found.append((dtype, max(one, other, key=lambda case: _time(rows, dtype, case) or 0)))
    found += [(dtype, one) for ratio, (dtype, one, _) in unaligned(rows) if ratio and ratio > UNALIGNED]
    return list(dict.fromkeys(found))


def series() -> dict[str, list[str]]:
    """What the grid's runs of neighbors are called -> their cases, for reports."""
    runs = {f"{CLIFF_EXTENT}x{r.start}..{r.stop - 1}": [_long(n) for n in r] for r in CLIFF_LENGTHS}
    return runs | {f"{CLIFF_ROWS.start}..{CLIFF_ROWS.stop - 1}x{CLIFF_EXTENT}": [_many(n) for n in CLIFF_ROWS]}


def _neighbors(dtype: str) -> Iterator[tuple[str, str]]:
    for lengths in CLIFF_LENGTHS:
        for alike in _by_alignment(lengths, dtype):
            yield from pairwise(map(_long, alike))
    yield from pairwise(map(_many, CLIFF_ROWS))


def _by_alignment(lengths: Sequence[int], dtype: str) -> tuple[list[int], list[int]]:
    def is_aligned(length: int) -> bool:
        return length * ITEMSIZE[dtype] % 16 == 0

    return [n for n in lengths if is_aligned(n)], [n for n in lengths if not is_aligned(n)]


def _long(length: int) -> str:
    return f"{CLIFF_EXTENT}x{length}"


def _many(rows: int) -> str:
    return f"{rows}x{CLIFF_EXTENT}"


def _time(rows: Rows, dtype: str, case: str) -> float | None:
    record = rows.get(("softmax", dtype, "contiguous", case), {}).get(AUTO)
    return record.kernel_us if record else None


def _ratio(one: float | None, other: float | None) -> float | None:
    if not (one and other):
        return None
    return 1.0 if round(abs(one - other), 4) <= STEP_US else max(one, other) / min(one, other)
