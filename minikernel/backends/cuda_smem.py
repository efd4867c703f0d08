"""``cuda-smem``: one block a row, the row in shared memory, reduced by one thread."""

from __future__ import annotations

from .. import cuda, driver
from ..driver import Launch
from ..problem import DTYPES, ITEMSIZE, Kernel, Problem
from ..registry import Backend

# The kernel's own few variables in shared memory.
_STATIC_BYTES = 32
_MAX_BLOCK = 1024


def plan(problem: Problem) -> Launch:
    """As many threads as the next power of two from the row length, at most 1024."""
    block = min(_MAX_BLOCK, max(32, 1 << (problem.cols - 1).bit_length()))
    row_bytes = problem.cols * ITEMSIZE[problem.dtype]
    # The compiler lets thread 0 read whole 16 bytes, also at the row's end.
    return Launch(min(problem.rows, cuda.MAX_GRID), block, shared=-(-row_bytes // 16) * 16)


def longest_row(dtype: str, device: driver.Device) -> int:
    """The most columns of that dtype that fit in the shared memory of one block."""
    return (device.shared_per_block - _STATIC_BYTES) // 16 * 16 // ITEMSIZE[dtype]


def reasons(problem: Problem) -> list[str]:
    longest = longest_row(problem.dtype, driver.device(problem.index))
    if problem.cols > longest:
        return [
            f"a row of {problem.cols} {problem.dtype} doesn't fit in a block's shared memory: at most {longest}"
        ]
    return []


def prepare(problem: Problem) -> Kernel:
    return cuda.kernel("softmax_smem.cu", problem, cuda.defines(problem), plan(problem))


BACKEND = Backend(
    name="cuda-smem",
    rank=30,
    devices=("cuda",),
    dtypes=DTYPES,
    prepare=prepare,
    requires=cuda.REQUIRES,
    limits={"row": "a row must fit in the shared memory that one block can have (227 KiB on an H200)"},
    obstacles=cuda.obstacles,
    reasons=reasons,
)
