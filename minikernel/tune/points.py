"""What is measured: shapes in every dtype, and the ways that an array can lie in memory."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path

from .. import layout
from ..problem import DTYPES, ITEMSIZE, Problem
from ..tuned import kind_of

MAX_ELEMENTS = 1 << 28
_QUICK_ELEMENTS = 1 << 24


def problem_of(
    dtype: str, shape: tuple[int, ...], dim: int = -1, memory: str = "contiguous", index: int = 0
) -> Problem | None:
    """The problem of an array, or None for one whose layout no kernel reads where it lies.

    Args:
        memory: How the array lies in memory, in the words of ``bench/shapes.py``: ``contiguous``, ``offset``,
            ``sliced``, ``transposed`` or ``expanded``.
        index: Ordinal of the GPU.
    """
    strides, offset = _strides(shape), 0
    if memory == "offset":  # one element past an aligned address
        offset = 1
    elif memory == "sliced":  # all but the first of one column more
        strides, offset = _strides((*shape[:-1], shape[-1] + 1)), 1
    elif memory == "transposed" and len(shape) > 1:
        *outer, rows, cols = shape
        *steps, col_step, row_step = _strides((*outer, cols, rows))
        strides = (*steps, row_step, col_step)
    elif memory == "expanded":
        strides = (0, *strides[1:])
    elif memory != "contiguous":
        return None
    if (seen := layout.view(shape, strides, dim % len(shape))) is None:
        return None
    x_offset = offset * ITEMSIZE[dtype] % 16
    return Problem(
        "softmax", "cuda", index, dtype, dtype, seen.outer, seen.cols, seen.inner, seen.strides, x_offset
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of an array in C order."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _powers(first: int, last: int, step: int) -> list[int]:
    """Powers of two from 2**first to 2**last."""
    return [1 << power for power in range(first, last + 1, step)]


def grid(dtype: str, step: int = 1, index: int = 0) -> list[Problem]:
    """Shapes of all kinds, 1 to 262144 rows of 8 to 262144 columns.

    Args:
        step: Powers of two from one number of rows or columns to the next; with 1, widths of models as well.
        index: Ordinal of the GPU.
    """
    cols = _powers(3, 18, step)
    typical = [600, 1000, 32000, 128256, 151936] if step == 1 else []
    odd = [n + 1 for n in cols] + ([50257] if step == 1 else [])
    few = _powers(4, 13, 3 * step)
    arrays: list[tuple[tuple[int, ...], int, str]] = [
        *((shape, -1, "contiguous") for shape in product(_powers(0, 18, step), cols + typical)),
        *((shape, -1, "contiguous") for shape in product(_powers(0, 18, 2 * step), odd)),
        *((shape, -1, "offset") for shape in product(_powers(0, 18, 4 * step), _powers(3, 18, 2 * step))),
        *((shape, -1, memory) for memory in ("transposed", "expanded") for shape in product(few, few)),
        *(((n, n), 0, "contiguous") for n in _powers(8, 13, step)),
        *(((8, *shape), 1, "contiguous") for shape in product(few, _powers(4, 12, 4 * step))),
    ]
    found = (problem_of(dtype, *array, index) for array in arrays)
    most = MAX_ELEMENTS if step == 1 else _QUICK_ELEMENTS
    return [problem for problem in found if problem and problem.rows * problem.cols <= most]


def points_from(path: Path, names: Collection[str], index: int = 0) -> list[Problem]:
    """The shapes that a result of ``bench/run.py`` compares backends on, each once.

    Args:
        path: The JSON file.
        names: The backends whose records count.
        index: Ordinal of the GPU.

    Raises:
        OSError: It can't be read.
        ValueError: It is no such file.
    """
    found: dict[Problem, None] = {}
    try:
        for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
            case = re.search(r"(\d+(?:x\d+)*)(?:@-?\d+)?$", record["case"])
            if not case or record["impl"] not in names or record["dtype"] not in DTYPES:
                continue
            shape = tuple(map(int, case[1].split("x")))
            problem = problem_of(record["dtype"], shape, record["dim"], record["layout"], index)
            if problem and problem.rows and problem.cols:
                found[problem] = None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of bench/run.py: {error}") from error
    return list(found)


def in_order(wanted: Iterable[Problem], others: Iterable[Problem]) -> list[Problem]:
    """Each place in the table once, a dtype after the other: those wanted first, then the others.

    The others come in random order, so that wherever the time ends they cover the grid evenly.
    """
    others = list(others)
    random.Random(42).shuffle(others)
    found: dict[tuple[str, str, int, int], Problem] = {}
    for problem in (*wanted, *others):
        found.setdefault((problem.dtype, kind_of(problem), problem.rows, problem.cols), problem)
    dtypes = list(dict.fromkeys(dtype for dtype, *_ in found))
    return sorted(found.values(), key=lambda problem: dtypes.index(problem.dtype))


def within(budget: float, problems: Sequence[Problem], clock: Callable[[], float]) -> Iterator[Problem]:
    """The problems until the time is over, a fair share of it for each dtype.

    Args:
        budget: Seconds from the first on.
        clock: Gives the time in seconds.
    """
    end, left = clock() + budget, len(problems)
    for _, same_dtype in groupby(problems, key=lambda problem: problem.dtype):
        group = list(same_dtype)
        until = clock() + (end - clock()) * len(group) / left
        left -= len(group)
        for problem in group:
            if clock() >= until:
                break
            yield problem
