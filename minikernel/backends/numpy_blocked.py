"""The ``numpy`` backend: softmax on the CPU, tile by tile in the cache, on several threads for large inputs.

The middle axis of ``outer x cols x inner`` is reduced. A tile that holds whole rows is finished in one visit.
Rows longer than a tile are split: each piece is exponentiated by its own peak, the (peak, sum) pairs merge as
in the online softmax, and a second visit scales. NumPy's loops release the GIL, so tiles run in parallel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from itertools import product
from math import copysign, prod

import numpy as np

from minikernel.problem import ALL_OPS, DTYPES, FEATURES, TOPK, Kernel, Problem
from minikernel.registry import Backend

from .numpy_backward import Backward
from .numpy_plan import BLOCK_BYTES, LANES, MAX_THREADS, MERGED, SHORT, Plan, plan
from .numpy_scores import Scores, dropped_of
from .numpy_tiles import Array, Item, round_to_bfloat16, round_to_subnormal_half, share
from .numpy_topk import TopK

BLOCKED_SIZE = 1 << 14  # elements from which it pays to transpose in blocks
GAP = 16  # elements between runs in scratch memory


def build(problem: Problem, cpus: int) -> Callable[..., None]:
    """What :class:`Kernel` runs for ``problem`` on ``cpus`` processors."""
    planned = plan(problem, cpus)
    simple = planned.strips == planned.pieces == planned.max_fold == planned.sum_fold == 1
    if simple and planned.in_output and not planned.staged and not problem.features:
        return _simple_log_softmax if problem.is_log else _simple_softmax  # for a tiny input the calls are the cost
    return Softmax(problem, planned)


def _simple_softmax(x: Array, out: Array, stream: int = 0, scratch: int = 0) -> None:
    with np.errstate(all="ignore"):
        np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out)
        np.exp(out, out)
        np.divide(out, np.add.reduce(out, axis=1, keepdims=True), out)


def _simple_log_softmax(x: Array, out: Array, stream: int = 0, scratch: int = 0) -> None:
    with np.errstate(all="ignore"):
        np.subtract(x, np.maximum.reduce(x, axis=1, keepdims=True), out)
        np.subtract(out, np.log(np.add.reduce(np.exp(out), axis=1, keepdims=True)), out)


class Softmax:
    """Softmax or log-softmax of one problem, by its plan."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.log = problem.is_log
        self.dtype, self.out_dtype = problem.dtype, problem.out_dtype
        self.axis = plan.order.index(1)
        # Whether arithmetic can write to the output: in runs, or across runs so short that a copy is no faster.
        ready = plan.out_axis == plan.fast or plan.tile[plan.out_axis] <= SHORT
        self.straight = ready and self.out_dtype == plan.work_dtype
        extents = [(problem.outer, problem.cols, problem.inner)[axis] for axis in plan.order]
        cuts = [_cuts(extent, step) for extent, step in zip(extents, plan.tile, strict=True)]
        self.pieces = [(slice(None),) * self.axis + (cut,) for cut in cuts[self.axis]]
        self.cuts = [*cuts[: self.axis], [slice(None)], *cuts[self.axis + 1 :]]
        # Whether a thread works on a strip alone, whose peaks and sums it keeps.
        kept = plan.pieces * (prod(plan.tile) // plan.tile[self.axis])
        self.in_turn = plan.strips >= 2 * plan.threads and kept * MAX_THREADS <= MERGED

    def __call__(
        self,
        values: Array,
        out: Array,
        stream: int = 0,
        scratch: int = 0,
        mask: Array | None = None,
        scale: float = 1.0,
    ) -> None:
        plan = self.plan
        drop = dropped_of(self.problem, mask, plan.order)
        x = Scores(values.transpose(plan.order), drop, scale)
        out = out.transpose(plan.order)
        with np.errstate(all="ignore"):
            if plan.strips == plan.pieces == 1:
                self.whole_rows(x, out, self.new_scratch())
            elif plan.pieces == 1:
                self.share(lambda cut, scratch: self.whole_rows(x[cut], out[cut], scratch), product(*self.cuts))
            elif self.in_turn:
                self.share(
                    lambda cut, scratch: self.split_rows(x[cut], out[cut], _in_turn(scratch)), product(*self.cuts)
                )
            else:
                for cut in product(*self.cuts):
                    self.split_rows(x[cut], out[cut], self.share)

    def new_scratch(self) -> Array:
        first, second, last = self.plan.tile
        # Transposing reads across runs, and those a power of 2 apart compete for the same lines of the cache.
        gap = GAP if self.plan.out_axis != self.plan.fast and last % 64 == 0 else 0
        return np.empty((self.plan.scratch_tiles, first, second, last + gap), self.plan.work_dtype)

    def share(self, task: Callable[[Item, Array], None], items: Iterable[Item]) -> None:
        """Do ``task(item, scratch)`` for all items, on this thread and on what helpers there are."""
        share(task, items, self.plan.threads, self.new_scratch)

    def whole_rows(self, x: Scores, out: Array, scratch: Array) -> None:
        work, spare = self.tiles(out, scratch)
        values = self.scores(x, work, spare)
        x.subtract(values, self.reduce(x.highest, values, self.plan.max_fold), work)
        powers = np.exp(work, out=spare if self.log else work)
        total = self.reduce(np.add, powers, self.plan.sum_fold)
        if self.straight:
            self.normalize(work, total, out)
        else:
            self.normalize(work, total, work)
            self.store(work, spare, out)

    def split_rows(self, x: Scores, out: Array, for_all: Callable[..., None]) -> None:
        """The online softmax over pieces of rows; ``for_all(task, items)`` does the work, threaded or not."""
        pieces = self.pieces
        lowest = copysign(float(np.finfo(self.plan.work_dtype).max), x.lowest)
        rows = tuple(1 if axis == self.axis else n for axis, n in enumerate(out.shape))
        peaks, sums = np.empty((2, len(pieces), *rows))
        keeps = self.out_dtype == self.plan.work_dtype

        def exponentiate(k: int, scratch: Array) -> None:
            piece = out[pieces[k]]
            work, spare = self.tiles(piece, scratch)
            values = self.scores(x[pieces[k]], work, spare)
            peak = self.reduce(x.highest, values, self.plan.max_fold)
            x.highest(peak, lowest, out=peak)  # so that the powers of nothing but -inf are 0
            x.subtract(values, peak, work)
            powers = np.exp(work, out=spare if self.log else work)
            peaks[k], sums[k] = peak, self.reduce(np.add, powers, self.plan.sum_fold)
            if keeps:
                self.store(work, spare, piece)

        def scale(k: int, scratch: Array) -> None:
            piece = out[pieces[k]]
            if self.log:
                np.add(piece, shifts[k].astype(piece.dtype), out=piece)
            else:
                np.multiply(piece, scales[k].astype(piece.dtype), out=piece)

        def recompute(k: int, scratch: Array) -> None:
            piece = out[pieces[k]]
            work, spare = self.tiles(piece, scratch)
            x.subtract(self.scores(x[pieces[k]], work, spare), peak, work)
            if not self.log:
                np.exp(work, out=work)
            self.normalize(work, total, work)
            self.store(work, spare, piece)

        for_all(exponentiate, range(len(pieces)))
        peak = x.highest.reduce(peaks)
        shifts = x.subtract(peaks, peak, peaks)
        scales = np.exp(shifts)
        total = np.add.reduce(np.multiply(sums, scales, out=sums))
        if keeps:
            np.divide(scales, total, out=scales)
            np.subtract(shifts, np.log(total), out=shifts)
            for_all(scale, range(len(pieces)))
        else:
            peak, total = peak.astype(self.plan.work_dtype), total.astype(self.plan.work_dtype)
            for_all(recompute, range(len(pieces)))

    def tiles(self, out: Array, scratch: Array) -> tuple[Array, Array]:
        """The tile to work in, and a spare of the same shape where the plan has one."""
        first, second, last = out.shape
        tiles = [out] if self.plan.in_output else []
        tiles += [part[:first, :second, :last] for part in scratch]
        return tiles[0], tiles[-1]

    def scores(self, x: Scores, work: Array, spare: Array) -> Array:
        """The input as :meth:`load` gives it, with the lowest score where an element doesn't count."""
        values = self.load(x.x, work)
        return values if x.dropped is None else x.dropped.fill(values, x.lowest, work, spare)

    def load(self, x: Array, work: Array) -> Array:
        """``x`` as ``work_dtype``: itself if it can be read as it lies, else in ``work``."""
        if not self.plan.staged:
            return x
        target = work.view(np.uint32) if self.dtype == "bfloat16" else work
        if self.plan.x_axis == self.plan.fast or x.shape[self.plan.x_axis] <= SHORT or x.size < BLOCKED_SIZE:
            np.copyto(target, x)
        else:
            _transpose(target, x, self.plan.x_axis, self.plan.fast)
        if self.dtype == "bfloat16":
            np.left_shift(target, 16, out=target)
        return work

    def reduce(self, ufunc: np.ufunc, values: Array, fold: int) -> Array:
        """Reduce cols, keeping the axis."""
        first, cols, last = values.shape
        if cols > fold > 1:
            even = cols // fold * fold
            parts = ufunc.reduce(values[:, :even].reshape(first, -1, fold, last), axis=1)
            values = np.concatenate((parts, values[:, even:]), axis=1) if even < cols else parts
        reduced: Array = ufunc.reduce(values, axis=self.axis, keepdims=True)
        return reduced

    def normalize(self, work: Array, total: Array, target: Array) -> None:
        if self.log:
            np.subtract(work, np.log(total), out=target)
        else:
            np.divide(work, total, out=target)

    def store(self, work: Array, spare: Array, out: Array) -> None:
        """Copy to the output, rounded to its dtype: to nearest, ties to even."""
        if self.out_dtype == "bfloat16":
            work = round_to_bfloat16(work, spare)
        elif self.out_dtype == "float16":
            round_to_subnormal_half(work, spare)
        if self.straight and work is not out:
            np.positive(work, out=out)
        elif work is not out:
            np.copyto(out, work, casting="same_kind")


def _transpose(target: Array, source: Array, near: int, far: int) -> None:
    """Copy and cast, block by block: neighbors lie along ``near`` in ``source`` and along ``far`` in ``target``."""
    rest = 3 - near - far
    size = BLOCK_BYTES // target.itemsize
    block = [0, 0, 0]
    block[near] = _evenly(target.shape[near], LANES[1])
    block[far] = _evenly(target.shape[far], max(1, size // block[near]))
    block[rest] = max(1, size // (block[near] * block[far]))
    # Runs a power of 2 apart would compete for the same lines of the cache.
    cells = np.empty((block[rest], block[far], block[near] + GAP), target.dtype)
    cells = cells.transpose(np.argsort((rest, far, near)))
    for corner in product(*(range(0, n, step) for n, step in zip(target.shape, block, strict=True))):
        box = tuple(slice(start, start + step) for start, step in zip(corner, block, strict=True))
        part = target[box]
        cell = cells[tuple(slice(n) for n in part.shape)]
        np.copyto(cell, source[box])
        np.copyto(part, cell)


def _evenly(extent: int, most: int) -> int:
    """The largest of the parts, each ``most`` at most, if ``extent`` is cut into as few as can be."""
    return -(-extent // -(-extent // most))


def _cuts(extent: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, extent, step)]


def _in_turn(scratch: Array) -> Callable[[Callable[[Item, Array], None], Iterable[Item]], None]:
    def for_all(task: Callable[[Item, Array], None], items: Iterable[Item]) -> None:
        for item in items:
            task(item, scratch)

    return for_all


def _cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(problem: Problem) -> Kernel:
    """The kernel for ``problem``, whose ``run`` returns when the work is done."""
    if problem.op == TOPK:
        return Kernel(TopK(problem, min(_cpus(), MAX_THREADS)))
    if problem.is_backward:
        return Kernel(Backward(problem, min(_cpus(), MAX_THREADS)))
    return Kernel(build(problem, _cpus()))


BACKEND = Backend(
    name="numpy",
    rank=50,
    devices=("cpu",),
    dtypes=DTYPES,
    ops=ALL_OPS,
    features=FEATURES,
    prepare=prepare,
)
