"""The ``numpy`` backend: softmax on the CPU, tile by tile in the cache, on several threads for large inputs.

The middle axis of ``outer x cols x inner`` is reduced. A tile that holds whole rows is finished in one visit.
Rows longer than a tile are split: each piece is exponentiated by its own peak, the (peak, sum) pairs merge as
in the online softmax, and a second visit scales. NumPy's loops release the GIL, so tiles run in parallel.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeVar

import numpy as np

from minikernel.problem import DTYPES, ITEMSIZE, Kernel, Problem
from minikernel.registry import Backend

Array = np.ndarray[Any, np.dtype[Any]]
Item = TypeVar("Item")

TILE_BYTES = 512 * 1024  # half a core's L2: smaller tiles cost more in calls than they save in misses
WIDE_TILE_BYTES = 4 * TILE_BYTES  # with inner > 1 long runs matter more than the L2
WIDTH = 4096  # elements of a tile along inner
SHORT_RUN = 32  # contiguous elements below which NumPy's cost per inner loop outweighs the arithmetic
LONG_RUN = 1024  # and from which it no longer shows
ADDENDS = 128  # float32 numbers added one by one, at most, where neighbors are contiguous
LANES = 32  # elements of a transposed input read together, as they are neighbors in memory
PARALLEL_SIZE = 1 << 18  # elements below which starting a thread costs more than it saves
MAX_THREADS = 8  # bounds the scratch of all threads together, two tiles each


@dataclass(frozen=True)
class Plan:
    """How a problem is cut up. Only ``threads`` depends on the machine, and no bit of the result on it.

    Attributes:
        tile: Extents of a tile over outer, cols and inner.
        order: The axes of a tile in scratch memory, slowest first.
        work_dtype: What exponentials are computed in: float32, or float64 for float64.
        fold: How many neighbors along cols are reduced side by side, where NumPy would go one by one.
        in_output: Whether the output itself serves as the working tile.
        long_sum: Whether NumPy adds so many numbers one by one that it must do so in float64.
        strips: How many groups of rows there are that can be worked on independently.
        pieces: How many tiles a row is split into.
        threads: How many threads work on it.
    """

    tile: tuple[int, int, int]
    order: tuple[int, int, int]
    work_dtype: str
    fold: int
    in_output: bool
    long_sum: bool
    strips: int
    pieces: int
    threads: int


def _even_share(extent: int, most: int) -> int:
    """The largest part, ``most`` at most, if ``extent`` is cut evenly and for two or four threads alike."""
    parts = -(-extent // most)
    return extent if parts == 1 else -(-extent // (-(-parts // 4) * 4))


def plan(problem: Problem, cpus: int) -> Plan:
    """Choose a :class:`Plan` for ``problem`` on ``cpus`` processors."""
    shape = outer, cols, inner = problem.outer, problem.cols, problem.inner
    work_dtype = "float64" if problem.dtype == "float64" else "float32"
    last = 2 if inner > 1 else 1
    runs = [axis for axis in range(3) if shape[axis] >= LANES and problem.strides[axis]]
    # The axis whose elements are neighbors in memory; not the last one if the input is transposed.
    lead = min(runs, key=lambda axis: abs(problem.strides[axis]), default=last)
    in_output = problem.out_dtype == work_dtype and lead == last
    wide = inner >= SHORT_RUN and in_output and problem.op == "softmax"  # needs no scratch
    size = (WIDE_TILE_BYTES if wide else TILE_BYTES) // ITEMSIZE[work_dtype]
    size = min(size, max(outer * cols * inner, PARALLEL_SIZE) // 4)

    height = LANES if lead == 0 else 1
    if lead == 2:
        width = _even_share(inner, WIDTH if cols <= WIDTH else LONG_RUN)
    else:
        width = _even_share(inner, max(LANES, size // (cols * height)))
    length = _even_share(cols, size // (width * height))
    if length == cols:
        height = _even_share(outer, size // (cols * width))
    tile = (height, length, width)

    if lead == last and tile[last] < SHORT_RUN and max(tile) >= 2 * SHORT_RUN:
        lead = max(range(3), key=tile.__getitem__)
    order = ((1, 2, 0), (0, 2, 1), (0, 1, 2))[lead if lead != last else 2]
    fold = max(1, LONG_RUN // width, length // ADDENDS)
    return Plan(
        tile=tile,
        order=order,
        work_dtype=work_dtype,
        fold=fold if order == (0, 1, 2) and width == inner and length >= 8 * fold else 1,
        in_output=in_output and order == (0, 1, 2),
        long_sum=order == (1, 2, 0) and length > ADDENDS,
        strips=-(-outer // height) * -(-inner // width),
        pieces=-(-cols // length),
        threads=min(cpus, MAX_THREADS) if outer * cols * inner >= PARALLEL_SIZE else 1,
    )


class Softmax:
    """What :class:`Kernel` runs: softmax or log-softmax of one problem, by its plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.plan = plan
        self.log = problem.op == "log_softmax"
        self.bfloat16_in = problem.dtype == "bfloat16"
        self.out_dtype = problem.out_dtype
        self.staged = problem.dtype != plan.work_dtype or plan.order != (0, 1, 2)
        self.plain = plan.in_output and not self.staged and not self.log and plan.fold == 1
        self.axes = np.argsort(plan.order)
        mergeable = self.staged or problem.strides[1] == problem.strides[2] * problem.inner
        self.fold_values = plan.fold if problem.inner > 1 and mergeable else 1
        self.scratch_size = int(np.prod(plan.tile)) if self.log or not plan.in_output else 0

    def __call__(self, x: Array, out: Array, stream: int = 0, scratch: int = 0) -> None:
        with np.errstate(all="ignore"):
            if self.plan.strips > 1 or self.plan.pieces > 1:
                self.tiled(x, out)
            elif self.plain:
                _plain_softmax(x, out)
            else:
                self.whole_rows((x, out), self.new_scratch())

    def tiled(self, x: Array, out: Array) -> None:
        plan = self.plan
        height, _, width = plan.tile
        corners = product(range(0, x.shape[0], height), range(0, x.shape[2], width))
        boxes = [np.s_[o : o + height, :, i : i + width] for o, i in corners]
        strips = [(x[box], out[box]) for box in boxes]
        if plan.pieces == 1:
            self.share(self.whole_rows, strips)
        elif plan.strips >= 2 * plan.threads:
            self.share(lambda strip, scratch: self.split_rows(*strip, _in_turn(scratch)), strips)
        else:
            for strip in strips:
                self.split_rows(*strip, self.share)

    def new_scratch(self) -> Array:
        return np.empty((2, self.scratch_size), self.plan.work_dtype)

    def share(self, task: Callable[[Item, Array], None], items: Iterable[Item]) -> None:
        """Do ``task(item, scratch)`` for all items, on this thread and on what helpers there are."""
        pending = deque(items)

        def drain() -> None:
            scratch = self.new_scratch()
            with np.errstate(all="ignore"):  # a helper has its own error state
                while True:
                    try:
                        item = pending.popleft()
                    except IndexError:
                        return
                    task(item, scratch)

        helpers = []
        if self.plan.threads > 1:
            try:
                pool = _pool()
                helpers = [pool.submit(drain) for _ in range(min(self.plan.threads, len(pending)) - 1)]
            except RuntimeError:  # the interpreter is shutting down and starts no more threads
                pass
        try:
            drain()
        finally:
            for helper in helpers:
                if not helper.cancel():
                    helper.result()

    def whole_rows(self, strip: tuple[Array, Array], scratch: Array) -> None:
        x, out = strip
        work, spare = self.tiles(out, scratch)
        values = self.load(x, work)
        np.subtract(values, _reduce(np.maximum, values, self.fold_values), out=work)
        powers = np.exp(work, out=spare if self.log else work)
        self.normalize(work, self.sum(powers))
        self.store(work, spare, out)

    def split_rows(self, x: Array, out: Array, for_all: Callable[..., None]) -> None:
        """The online softmax over pieces of rows; ``for_all(task, items)`` does the work, threaded or not."""
        length = self.plan.tile[1]
        pieces = [np.s_[:, c : c + length] for c in range(0, x.shape[1], length)]
        keep = self.plan.in_output and not self.log
        peaks, sums = np.empty((2, len(pieces), x.shape[0], 1, x.shape[2]), np.float64)

        def exponentiate(k: int, scratch: Array) -> None:
            work, spare = self.tiles(out[pieces[k]], scratch)
            values = self.load(x[pieces[k]], work)
            peaks[k] = peak = _reduce(np.maximum, values, self.fold_values)
            powers = spare if self.log else work
            np.subtract(values, np.where(peak == -np.inf, peak.dtype.type(0), peak), out=powers)
            np.exp(powers, out=powers)
            sums[k] = self.sum(powers)

        def finish(k: int, scratch: Array) -> None:
            piece = out[pieces[k]]
            work, spare = self.tiles(piece, scratch)
            if keep:
                np.multiply(work, scales[k].astype(work.dtype), out=work)
                return
            np.subtract(self.load(x[pieces[k]], work), peak, out=work)
            if not self.log:
                np.exp(work, out=work)
            self.normalize(work, total)
            self.store(work, spare, piece)

        for_all(exponentiate, range(len(pieces)))
        peak = np.maximum.reduce(peaks)
        scales = np.exp(np.subtract(peaks, peak, out=peaks), out=peaks)
        total = np.add.reduce(np.multiply(sums, scales, out=sums))
        np.divide(scales, total, out=scales)
        peak, total = peak.astype(self.plan.work_dtype), total.astype(self.plan.work_dtype)
        for_all(finish, range(len(pieces)))

    def tiles(self, out: Array, scratch: Array) -> tuple[Array, Array]:
        """The tile to work in and, where there is scratch memory, a spare of the same shape."""
        if not self.scratch_size:
            return out, out
        shape = [out.shape[axis] for axis in self.plan.order]
        first, second = (half[: out.size].reshape(shape).transpose(self.axes) for half in scratch)
        return (out, second) if self.plan.in_output else (first, second)

    def load(self, x: Array, work: Array) -> Array:
        """``x`` as ``work_dtype``: itself if it is that already, else in ``work``."""
        if not self.staged:
            return x
        if self.bfloat16_in:
            bits = work.view(np.uint32)
            np.copyto(bits, x)
            np.left_shift(bits, 16, out=bits)
        else:
            np.copyto(work, x)
        return work

    def sum(self, powers: Array) -> Array:
        if self.plan.long_sum:
            return np.add.reduce(powers, axis=1, keepdims=True, dtype=np.float64).astype(powers.dtype)
        return _reduce(np.add, powers, self.plan.fold)

    def normalize(self, work: Array, total: Array) -> None:
        if self.log:
            np.subtract(work, np.log(total), out=work)
        else:
            np.divide(work, total, out=work)

    def store(self, work: Array, spare: Array, out: Array) -> None:
        """Round ``work`` to the output's dtype, to nearest, ties to even."""
        if work is out:
            return
        if self.out_dtype == "bfloat16":
            _round_to_bfloat16(work, spare, out)
            return
        if self.out_dtype == "float16":
            _round_to_subnormal_half(work, spare)
        np.copyto(out, work, casting="same_kind")


def _plain_softmax(x: Array, out: Array) -> None:
    # For a tiny input the calls are the cost.
    np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out=out)
    np.exp(out, out=out)
    np.divide(out, np.add.reduce(out, axis=1, keepdims=True), out=out)


def _reduce(ufunc: np.ufunc, values: Array, fold: int) -> Array:
    """Reduce axis 1, keeping it; ``fold`` > 1 wants axes 1 and 2 of ``values`` to be contiguous together."""
    if fold > 1:
        outer, cols, inner = values.shape
        even = cols // fold * fold
        parts = ufunc.reduce(values[:, :even].reshape(outer, -1, fold * inner), axis=1)
        values = np.concatenate((parts.reshape(outer, fold, inner), values[:, even:]), axis=1)
    reduced: Array = ufunc.reduce(values, axis=1, keepdims=True)
    return reduced


def _round_to_bfloat16(work: Array, spare: Array, out: Array) -> None:
    nan = np.isnan(work)
    bits, odd = work.view(np.uint32), spare.view(np.uint32)
    np.right_shift(bits, 16, out=odd)
    np.bitwise_and(odd, 1, out=odd)
    np.add(bits, odd, out=bits)
    np.add(bits, 0x7FFF, out=bits)
    np.right_shift(bits, 16, out=bits)
    np.copyto(bits, 0x7FC0, where=nan)  # the carry of a NaN may have run into its sign
    np.copyto(out, bits, casting="same_kind")


def _round_to_subnormal_half(work: Array, spare: Array) -> None:
    # NumPy raises a status flag for each subnormal half that it rounds, at 20 times the cost of the cast.
    # Spaced 2**-24 apart, they are the spacing of float32 just below 1.
    np.add(work, np.float32(0.75), out=spare)
    np.subtract(spare, np.float32(0.75), out=spare)
    np.copyto(work, spare, where=(work < np.float32(2**-14)) & (work > np.float32(-(2**-14))))


def _in_turn(scratch: Array) -> Callable[[Callable[[Item, Array], None], Iterable[Item]], None]:
    def for_all(task: Callable[[Item, Array], None], items: Iterable[Item]) -> None:
        for item in items:
            task(item, scratch)

    return for_all


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="minikernel")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(problem: Problem) -> Kernel:
    """The kernel for ``problem``, whose ``run`` returns when the work is done."""
    return Kernel(Softmax(problem, plan(problem, _cpus())))


BACKEND = Backend(name="numpy", rank=50, devices=("cpu",), dtypes=DTYPES, prepare=prepare)
