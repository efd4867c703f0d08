"""What the NumPy kernels share: work on several threads, and half types by way of float32."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np

from ..problem import Problem
from .numpy_plan import MAX_THREADS

# Elements below which threads cost more than they save.
FEWEST_FOR_THREADS = 1 << 17

Array = np.ndarray[Any, np.dtype[Any]]
Cut = tuple[slice, slice, slice]
Item = TypeVar("Item")
Scratch = TypeVar("Scratch")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="minikernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def share(
    task: Callable[[Item, Scratch], None], items: Iterable[Item], threads: int, new_scratch: Callable[[], Scratch]
) -> None:
    """Do ``task(item, scratch)`` for all items, on this thread and on what helpers there are, scratch for each."""
    pending = deque(items)

    def drain() -> None:
        scratch = new_scratch()
        with np.errstate(all="ignore"):  # a helper has its own error state
            while True:
                try:
                    item = pending.popleft()
                except IndexError:
                    return
                task(item, scratch)

    helpers = []
    if threads > 1:
        try:
            pool = _pool()
            helpers = [pool.submit(drain) for _ in range(min(threads, len(pending)) - 1)]
        except RuntimeError:  # the interpreter is shutting down and starts no more threads
            pass
    try:
        drain()
    finally:
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def row_tiles(problem: Problem, size: int) -> list[Cut]:
    """Cuts of ``(outer, cols, inner)`` into tiles of whole rows, each of about ``size`` elements."""
    cols, inner = problem.cols, problem.inner
    wide = min(inner, max(1, size // cols))
    high = max(1, size // (cols * wide)) if wide == inner else 1
    outer_cuts = [slice(i, i + high) for i in range(0, problem.outer, high)]
    inner_cuts = [slice(i, i + wide) for i in range(0, inner, wide)]
    return [(one, slice(None), other) for one, other in product(outer_cuts, inner_cuts)]


def unpacked(x: Array, dtype: str) -> Array:
    """Values of a dtype, bfloat16 as its bits, as the dtype of the arithmetic."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if dtype == "float16" else x


def pack(work: Array, out: Array, dtype: str) -> None:
    """Round to a dtype, to nearest, ties to even, bfloat16 as its bits; spoils ``work``."""
    if dtype == "bfloat16":
        np.copyto(out, round_to_bfloat16(work, np.empty_like(work)), casting="same_kind")
    else:
        np.copyto(out, work, casting="same_kind")


def round_to_bfloat16(work: Array, spare: Array) -> Array:
    """The bits of bfloat16, in ``work``."""
    nan = np.isnan(work)
    bits, odd = work.view(np.uint32), spare.view(np.uint32)
    np.right_shift(bits, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(bits, odd, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(bits, 0x7FC0, where=nan)  # the carry of a NaN may have run into its sign
    return bits


def round_to_subnormal_half(work: Array, spare: Array) -> None:
    # NumPy raises a status flag for each subnormal half that it rounds, at 20 times the cost of the cast.
    # Spaced 2**-24 apart, they are the spacing of float32 just below 1.
    np.add(work, np.float32(0.75), out=spare)
    np.subtract(spare, np.float32(0.75), out=spare)
    np.copyto(work, spare, where=(work < np.float32(2**-14)) & (work > np.float32(-(2**-14))))
