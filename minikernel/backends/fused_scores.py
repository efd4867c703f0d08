"""How ``cuda-fused`` takes a scale, a mask and causality: what fused_scores.cuh needs to know of them."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

from .. import cuda
from ..driver import Launch
from ..problem import MOST_MASK_AXES, Kernel, Problem


class MaskLayout(ctypes.Structure):
    """``struct MaskLayout`` of kernels/fused_scores.cuh."""

    _fields_ = [
        ("extents", ctypes.c_longlong * MOST_MASK_AXES),
        ("strides", ctypes.c_longlong * MOST_MASK_AXES),
        ("col", ctypes.c_longlong),
    ]


def _layout(problem: Problem) -> list[MaskLayout]:
    """The kernel's parameter before the layout of the input, if it has one."""
    if not problem.features:
        return []
    rows = problem.mask.rows if problem.mask else ()
    padded = ((1, 0),) * (MOST_MASK_AXES - len(rows)) + rows
    extents, strides = zip(*padded, strict=True)
    numbers = ctypes.c_longlong * MOST_MASK_AXES
    return [MaskLayout(numbers(*extents), numbers(*strides), problem.mask.col if problem.mask else 0)]


def macros(problem: Problem, wide: int, *, across: bool = False, anywhere: bool = False) -> dict[str, object]:
    """The macros of fused_scores.cuh.

    Args:
        wide: Elements a pack.
        across: Whether they are of neighboring rows, rather than of one.
        anywhere: Whether packs may begin at other columns (with ``across`` rows) than multiples of ``wide``.
    """
    if not problem.features:
        return {}
    return {"SCORES": 1, "MASK": _mask(problem, wide, across, anywhere), "CAUSAL": problem.causal}


def _mask(problem: Problem, wide: int, across: bool, anywhere: bool) -> int:
    if (mask := problem.mask) is None:
        return 0
    strides = [stride for _, stride in mask.rows]
    between, *apart = [*reversed(strides), mask.col] if across else [mask.col, *strides]
    aligned = not any(n % wide for n in (mask.offset, *apart))
    return 2 if wide > 1 and between == 1 and aligned and not anywhere else 1


def kernel(
    file: str,
    problem: Problem,
    launch: Launch,
    scores: dict[str, object],
    macros: dict[str, object],
    *constants: Any,
) -> Kernel:
    """Compile a kernel that takes scores, and make it callable.

    Args:
        scores: What :func:`macros` gives.
        macros: The rest of them.
    """
    per_call = ("Pd" if problem.dtype == "float64" else "Pf") if problem.features else ""
    defined = cuda.defines(problem, **macros, **scores)
    return cuda.kernel(
        file, problem, defined, replace(launch, per_call=per_call), *constants, leading=_layout(problem)
    )
