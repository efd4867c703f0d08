"""The move between ``cuda-smem`` and ``cuda-fused``: tree reductions, still three passes.

Not among the built-ins: the lab's record registers it to give that move a figure of its own.
"""

from __future__ import annotations

from .. import cuda
from ..driver import Launch
from ..problem import DTYPES, Kernel, Problem
from ..registry import Backend
from . import cuda_smem


def plan(problem: Problem) -> Launch:
    """The blocks of ``cuda-smem``, without its shared memory."""
    before = cuda_smem.plan(problem)
    return Launch(before.grid, before.block)


def prepare(problem: Problem) -> Kernel:
    return cuda.kernel("softmax_parallel.cu", problem, cuda.defines(problem), plan(problem))


BACKEND = Backend(
    name="cuda-parallel",
    rank=35,
    devices=("cuda",),
    dtypes=DTYPES,
    prepare=prepare,
    requires=cuda.REQUIRES,
    obstacles=cuda.obstacles,
)
