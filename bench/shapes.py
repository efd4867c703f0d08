"""What is measured: every grid of shapes, the table with its targets, and how shapes are written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

DTYPES = ("float32", "float16", "bfloat16", "float64")
DEFAULT_DTYPES = DTYPES[:3]
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset")
CONTIGUOUS = LAYOUTS[:1]
#: Who is measured, fewest first: ``auto`` and no host time, what works on device memory, everyone.
SCOPES = ("brief", "device", "all")

#: float64 on a named grid stops here: beyond, it says nothing that the narrower dtypes don't.
FLOAT64_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Case:
    """One array shape and the axis that softmax reduces.

    Attributes:
        shape: Extents; empty for a 0-d array.
        dim: The reduced axis, as a caller would pass it.
        dtypes: The dtypes that it is meant for; empty means any.
        label: Name of the array, where it comes from a file.
        layouts: The memory layouts that it is meant for; empty means any, contiguous if none is asked for.
        scope: Who is measured on it, of :data:`SCOPES`.
        cores: How many of the CPU's cores may be used; 0 for all.
    """

    shape: tuple[int, ...]
    dim: int = -1
    dtypes: tuple[str, ...] = ()
    label: str = ""
    layouts: tuple[str, ...] = ()
    scope: str = "all"
    cores: int = 0

    @property
    def cols(self) -> int:
        return self.shape[self.dim] if self.shape else 1

    @property
    def rows(self) -> int:
        return self.elements // self.cols if self.cols else 0

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """How reports write it: ``512x600``, ``8x1000x64x64@1``, ``logits 48x30522``, ``2 cores 512x600``."""
        text = _extents(self.shape) + ("" if self.dim == -1 else f"@{self.dim}")
        text = f"{self.label} {text}" if self.label else text
        cores = f"{self.cores} core{'' if self.cores == 1 else 's'} " if self.cores else ""
        return cores + text


@dataclass(frozen=True)
class Target:
    """A row of the speed table: ``reach`` is the multiple of the copy's device time to get down to."""

    dtype: str
    rows: int
    cols: int
    reach: float


TABLE = (
    Target("float32", 512, 600, 1.10),
    Target("float32", 1, 128256, 1.7),
    Target("float32", 8, 128256, 1.45),
    Target("float32", 64, 151936, 1.15),
    Target("float32", 512, 50257, 1.08),
    Target("float32", 4096, 128, 1.04),
    Target("float32", 65536, 128, 1.00),
    Target("float32", 262144, 64, 1.00),
    Target("float32", 32768, 1024, 1.00),
    Target("float32", 32768, 4096, 1.02),
    Target("float32", 16384, 16384, 1.02),
    Target("float32", 4096, 32768, 1.02),
    Target("float32", 2048, 128256, 1.03),
    Target("float32", 1024, 262144, 1.03),
    Target("float32", 32768, 8, 1.00),
    Target("float32", 4096, 2049, 1.02),
    Target("float32", 8, 1048576, 1.2),
    Target("bfloat16", 512, 600, 1.15),
    Target("bfloat16", 1, 128256, 1.8),
    Target("bfloat16", 64, 151936, 1.17),
    Target("bfloat16", 512, 50257, 1.10),
    Target("bfloat16", 65536, 128, 1.01),
    Target("bfloat16", 262144, 64, 1.00),
    Target("bfloat16", 4096, 1024, 1.00),
    Target("bfloat16", 32768, 4096, 1.01),
    Target("bfloat16", 16384, 16384, 1.02),
    Target("bfloat16", 4096, 32768, 1.02),
    Target("bfloat16", 2048, 128256, 1.04),
    Target("bfloat16", 1024, 262144, 1.05),
    Target("bfloat16", 4096, 2049, 1.03),
    Target("bfloat16", 8, 1048576, 1.25),
    Target("float16", 32768, 4096, 1.00),
)


#: Lengths around which kernels change hands: 1020 to 1030 and so on, for this many rows.
CLIFF_LENGTHS = tuple(range(power - 4, power + 7) for power in (1024, 2048, 4096, 8192, 16384))
CLIFF_EXTENT = 4096
#: Row counts, for rows of that length.
CLIFF_ROWS = range(1, 301)
CLIFF_DTYPES = ("float32", "bfloat16")

#: The grid `host` is for so many of the CPU's cores.
HOST_CORES = 2
HOST_DTYPES = ("float32", "float64")
FEW_DTYPES = ("float32", "bfloat16")
FEW_ROWS = (1, 2, 4, 8, 16, 32, 64)


def _cases(rows: Iterable[int], cols: Iterable[int], **fields: Any) -> tuple[Case, ...]:
    return tuple(Case(shape, **fields) for shape in product(rows, cols))


def last(case: Case) -> Case:
    """As many softmaxes, over as many elements, with neighbors in memory reduced."""
    return Case((case.rows, case.cols), scope=case.scope)


# Other axes than the last.
_OTHER_AXES = tuple(
    Case(shape, dim, scope="device")
    for shape, dim in (((8192, 8192), 0), ((4096, 4096), 0), ((32, 81, 15130), 1), ((8, 1000, 64, 64), 1))
)

GRIDS: dict[str, tuple[Case, ...]] = {
    # The lab's sweep over the batch at V=600.
    "lab": _cases((1, 8, 32, 128, 512, 2048, 8192), (600,)),
    # Logits over the vocabularies of Llama 2, GPT-2, Llama 3, Qwen and Gemma.
    "llm": _cases((1, 8, 64, 512, 2048), (32000, 50257, 128256, 151936, 262144)),
    # Attention scores: a row for each query of each head.
    "attention": tuple(
        Case(shape)
        for shape in (
            (4096, 1024),
            (16384, 2048),
            (32768, 4096),
            (16384, 8192),
            (8192, 16384),
            (16384, 16384),
        )
    ),
    # Mixture-of-experts routers: a short row for each token.
    "routers": _cases((4096, 16384, 65536, 262144), (8, 16, 32, 64, 128, 256)),
    "table": tuple(Case((t.rows, t.cols), dtypes=(t.dtype,)) for t in TABLE),
    # Read where it lies, and for each the same problem over the last axis of a contiguous array.
    "strided": (
        *_OTHER_AXES,
        Case((8192, 8192), layouts=("sliced", "expanded", "transposed"), scope="device"),
        *map(last, _OTHER_AXES),
    ),
    # For gradients, which read two arrays: the rows of attention scores.
    "gradients": _cases((4096,), (1024, 2048, 4096, 8192, 16384, 32768)),
    # The likeliest tokens of few rows of logits.
    "topk": _cases((1, 2, 4, 8, 16, 32, 64), (128256,), scope="device"),
    # Few rows, too long for one multiprocessor each.
    "few": _cases(FEW_ROWS, (32000, 50257, 128256, 262144, 1048576), dtypes=FEW_DTYPES, scope="device"),
    # Neighboring lengths and row counts, whose times should be neighbors too.
    "cliffs": (
        *_cases((CLIFF_EXTENT,), chain(*CLIFF_LENGTHS), dtypes=CLIFF_DTYPES, scope="brief"),
        *_cases(CLIFF_ROWS, (CLIFF_EXTENT,), dtypes=CLIFF_DTYPES, scope="brief"),
    ),
    # For the numpy backend beside SciPy's.
    "host": (
        *(
            Case(shape, dtypes=HOST_DTYPES)
            for shape in (
                (1, 8),
                (512, 600),
                (4096, 64),
                (1, 128256),
                (8, 128256),
                (4096, 1024),
                (8192, 2048),
                (64, 151936),
            )
        ),
        Case((2048, 2048), 0, HOST_DTYPES),
        Case((32, 81, 1513), 1, HOST_DTYPES),
        Case((2048, 2048), dtypes=HOST_DTYPES, layouts=("transposed",)),
    ),
    # Small enough for a CPU, and still one of each kind.
    "quick": tuple(
        Case(shape) for shape in ((512, 600), (1, 128256), (8, 32000), (16, 50257), (1024, 1024), (4096, 64))
    ),
}
#: The grids that stand for what softmax is used for, and those that look for weak spots.
USUAL = ("table", "lab", "llm", "attention", "routers")
PROBES = ("few", "strided", "cliffs")
# What matters most comes first: a run may end with its budget.
GRIDS["all"] = tuple(case for grid in (*USUAL, *PROBES) for case in GRIDS[grid])


@dataclass(frozen=True)
class Task:
    """A case in one dtype and one memory layout."""

    case: Case
    dtype: str
    layout: str = "contiguous"


def parse_shape(text: str, dim: int = -1) -> Case:
    """Read ``512x600``, or ``8x1000x64x64@1`` for another axis than ``dim``.

    Raises:
        ValueError: It isn't a shape, an extent is zero, or the axis is out of range.
    """
    match = re.fullmatch(r"(\d+(?:x\d+)*)(?:@(-?\d+))?", text.strip())
    if not match:
        raise ValueError(f"bad shape {text!r}: write 512x600, or 8x1000x64x64@1 to reduce axis 1")
    shape = tuple(map(int, match[1].split("x")))
    if 0 in shape:
        raise ValueError(f"bad shape {text!r}: every extent must be at least 1")
    dim = int(match[2]) if match[2] else dim
    check_dim(shape, dim)
    return Case(shape, dim)


def check_dim(shape: tuple[int, ...], dim: int) -> None:
    """Raise ValueError unless ``dim`` is an axis of ``shape``."""
    rank = max(len(shape), 1)  # a 0-d array counts as having one axis
    if not -rank <= dim < rank:
        raise ValueError(f"bad dim {dim} for shape {_extents(shape)}: it must be in [{-rank}, {rank - 1}]")


def _extents(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "()"


def grid_tasks(grid: str, dtypes: Sequence[str], layouts: Sequence[str] = ()) -> list[Task]:
    """The tasks of a named grid, each once, for the widest scope that it has there.

    float64 covers the shapes up to :data:`FLOAT64_ELEMENTS`; in ``all``, only those of ``table``.

    Args:
        layouts: Keep to these; by default each case comes in its own, or contiguous.
    """
    cases = [(case, dtype) for case in GRIDS[grid] for dtype in dtypes if not case.dtypes or dtype in case.dtypes]
    if "float64" in dtypes:
        wide = GRIDS["table"] if grid == "all" else GRIDS[grid]
        cases = [(case, dtype) for case, dtype in cases if dtype != "float64"]
        cases += [(case, "float64") for case in wide if case.elements <= FLOAT64_ELEMENTS]
    tasks: dict[tuple[tuple[int, ...], int, str, str], Task] = {}
    for case, dtype in cases:
        for layout in _layouts_of(case, layouts):
            task = Task(Case(case.shape, case.dim, scope=case.scope), dtype, layout)
            key = case.shape, case.dim, dtype, layout
            known = tasks.get(key)
            if known is None or SCOPES.index(known.case.scope) < SCOPES.index(case.scope):
                tasks[key] = task
    return list(tasks.values())


def _layouts_of(case: Case, asked: Sequence[str]) -> Sequence[str]:
    if not asked:
        return case.layouts or CONTIGUOUS
    return [layout for layout in asked if not case.layouts or layout in case.layouts]
