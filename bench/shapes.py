"""What is measured: every grid of shapes, the table with its targets, and how shapes are written."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

DTYPES = ("float32", "float16", "bfloat16", "float64")
DEFAULT_DTYPES = DTYPES[:3]
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded", "offset")

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
    """

    shape: tuple[int, ...]
    dim: int = -1
    dtypes: tuple[str, ...] = ()
    label: str = ""

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
        """How reports write it: ``512x600``, ``8x1000x64x64@1``, ``logits 48x30522``."""
        text = _extents(self.shape) + ("" if self.dim == -1 else f"@{self.dim}")
        return f"{self.label} {text}" if self.label else text


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


def _cases(rows: Sequence[int], cols: Sequence[int]) -> tuple[Case, ...]:
    return tuple(Case(shape) for shape in product(rows, cols))


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
    # Small enough for a CPU, and still one of each kind.
    "quick": tuple(
        Case(shape) for shape in ((512, 600), (1, 128256), (8, 32000), (16, 50257), (1024, 1024), (4096, 64))
    ),
}
GRIDS["all"] = tuple(case for grid in ("lab", "llm", "attention", "routers", "table") for case in GRIDS[grid])


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


def grid_tasks(grid: str, dtypes: Sequence[str], layouts: Sequence[str] = ("contiguous",)) -> list[Task]:
    """The tasks of a named grid, each once.

    float64 covers the shapes up to :data:`FLOAT64_ELEMENTS`; in ``all``, only those of ``table``.
    """
    cases = []
    for case in GRIDS[grid]:
        cases += [(case, dtype) for dtype in dtypes if not case.dtypes or dtype in case.dtypes]
    if "float64" in dtypes:
        wide = GRIDS["table"] if grid == "all" else GRIDS[grid]
        cases = [(case, dtype) for case, dtype in cases if dtype != "float64"]
        cases += [(case, "float64") for case in wide if case.elements <= FLOAT64_ELEMENTS]
    tasks = [Task(Case(case.shape, case.dim), dtype, layout) for case, dtype in cases for layout in layouts]
    return list(dict.fromkeys(tasks))
