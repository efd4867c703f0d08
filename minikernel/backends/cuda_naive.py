"""``cuda-naive``: one thread a row. The baseline of the ladder."""

from __future__ import annotations

from .. import cuda
from ..driver import Launch
from ..problem import DTYPES, Kernel, Problem
from ..registry import Backend

_BLOCK = 256


def plan(problem: Problem) -> Launch:
    """A thread a row; past the largest grid, threads take several."""
    return Launch(grid=min(-(-problem.rows // _BLOCK), cuda.MAX_GRID), block=_BLOCK)


def prepare(problem: Problem) -> Kernel:
    return cuda.kernel("softmax_naive.cu", problem, cuda.defines(problem), plan(problem))


BACKEND = Backend(
    name="cuda-naive",
    rank=40,
    devices=("cuda",),
    dtypes=DTYPES,
    prepare=prepare,
    requires=cuda.REQUIRES,
    obstacles=cuda.obstacles,
)
