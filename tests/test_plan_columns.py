"""The launches of softmax_fused_columns.cu: what is chosen fits the GPU, and takes every element exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from test_plan import DEVICES, H200, PAIRS

from minikernel.backends import fused_columns
from minikernel.backends.fused_columns import ColumnsPlan, plan_columns
from minikernel.driver import Device
from minikernel.problem import ITEMSIZE, Problem

#: planes, columns, rows side by side.
SHAPES = (
    (1, 1, 2), (1, 2, 65536), (1, 3, 4096), (2, 4, 4096), (1, 11, 8192), (3, 4, 5), (5, 67, 301), (1, 300, 33),
    (7, 21, 4096), (2, 81, 15130), (1, 64, 1000), (1, 513, 8), (1, 1000, 4096), (3, 700, 129), (1, 4096, 512),
    (1, 4097, 136), (1, 8192, 264), (1, 20_000, 16),
)  # fmt: skip
#: columns, rows of a transposed input.
TURNED = ((3, 1000), (1, 40), (70, 90), (300, 257), (512, 1032), (1000, 96), (4096, 144), (4097, 80), (8192, 128))


def columns_problem(
    planes: int, cols: int, side: int, dtype: str = "float32", out_dtype: str | None = None,
    x_start: int = 0, out_start: int = 0, pad: int = 0, op: str = "softmax",
) -> Problem:  # fmt: skip
    """Softmax over the middle axis; ``pad`` elements between columns, so many from a 16-byte boundary."""
    out_dtype = out_dtype or dtype
    offsets = x_start * ITEMSIZE[dtype] % 16, out_start * ITEMSIZE[out_dtype] % 16
    apart = side + pad
    return Problem(op, "cuda", 0, dtype, out_dtype, planes, cols, side, (cols * apart, apart, 1), *offsets)


def turned_problem(
    cols: int, rows: int, dtype: str = "float32", out_dtype: str | None = None,
    x_start: int = 0, out_start: int = 0, pad: int = 0, op: str = "softmax",
) -> Problem:  # fmt: skip
    """Softmax over the last axis of a transposed input."""
    out_dtype = out_dtype or dtype
    offsets = x_start * ITEMSIZE[dtype] % 16, out_start * ITEMSIZE[out_dtype] % 16
    return Problem(op, "cuda", 0, dtype, out_dtype, rows, cols, 1, (1, rows + pad, 1), *offsets)


def problems(op: str, dtype: str, out_dtype: str) -> Iterator[Problem]:
    for x_start, out_start, pad in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (2, 2, 0), (0, 0, 1), (4, 0, 4)):
        for planes, cols, side in SHAPES:
            yield columns_problem(planes, cols, side, dtype, out_dtype, x_start, out_start, pad, op)
        for cols, rows in TURNED:
            yield turned_problem(cols, rows, dtype, out_dtype, x_start, out_start, pad, op)


def forced(problem: Problem, device: Device = H200) -> Iterator[ColumnsPlan]:
    """Launches of all kinds that have room for a problem, most of which wouldn't be chosen for it."""
    turn = problem.inner == 1
    widest = fused_columns.widest(problem)
    for wide in {1, widest}:
        for across, groups in (
            (1, 64), (2, 32), (4, 8), (8, 4), (8, 12), (8, 64), (16, 8),
            (32, 1), (32, 4), (64, 2), (64, 8), (128, 1),
        ):  # fmt: skip
            if turn and (groups not in (4, 8, 32, 64) or across < 4):
                continue
            for parts in (1, 2, 8, 16):
                for vectors in (2, 4):
                    if plan := fused_columns.build(problem, device, wide, across, groups, vectors, parts):
                        yield plan


def taken_columns(plan: ColumnsPlan, part: int, group: int) -> list[int]:
    """The columns that a group takes of its block's, in order: ``column`` in the kernel."""
    begin = part * plan.share
    count = max(0, min(plan.share, plan.cols - begin))
    turn = plan.groups * plan.run
    left = max(count - group * plan.run, 0)
    mine = left // turn * plan.run + min(left % turn, plan.run)
    first = begin + group * plan.run
    return [first + v // plan.run * turn + v % plan.run for v in range(mine)]


def reads(plan: ColumnsPlan) -> np.ndarray:
    """How often each element of a plane is read, (cols, side)."""
    of_column = np.zeros(plan.cols, np.int64)
    for part in range(plan.parts):
        for group in range(plan.groups):
            cols = taken_columns(plan, part, group)
            assert len(cols) <= plan.vectors + plan.shared_vectors, "a thread has no room for so many packs"
            np.add.at(of_column, cols, 1)
    rows = np.arange(plan.tiles * plan.across) * plan.wide
    rows = (rows[rows < plan.side, None] + np.arange(plan.wide)).ravel()
    of_row = np.zeros(plan.side, np.int64)
    np.add.at(of_row, rows, 1)
    return of_column[:, None] * of_row


def swizzle(plan: ColumnsPlan, lane: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Where in its stage row a thread's byte ``at`` lies, as in the kernel."""
    pitch = plan.groups * plan.run * plan.out_itemsize
    written = 32 // min(plan.across, 32) * plan.run * plan.out_itemsize
    return at ^ (lane * max(written, 16) * min(pitch, 128) // 128 & (pitch - 1) & ~15)


def staged_elements(plan: ColumnsPlan) -> np.ndarray:
    """What a stage holds once all threads have written a turn: row * columns + column of each element."""
    lane, group, i, r = np.meshgrid(*map(np.arange, (plan.across, plan.groups, plan.wide, plan.run)), indexing="ij")
    columns = plan.groups * plan.run
    size = plan.out_itemsize
    row_at = (i * plan.across + lane) * columns * size
    place = (row_at + swizzle(plan, lane, group * plan.run * size)) // size + r
    held = np.full(plan.across * plan.wide * columns, -1)
    held[place.ravel()] = ((lane * plan.wide + i) * columns + group * plan.run + r).ravel()
    assert held.min() == 0, "two threads write one place"
    return held


def turned_writes(plan: ColumnsPlan) -> np.ndarray:
    """How often each element of a tile is written by way of the stages, (rows of a tile, cols)."""
    unit = 16 // plan.out_itemsize if plan.aligned else 1
    turn = plan.groups * plan.run
    units = turn // unit
    tile_rows = plan.across * plan.wide
    seen = np.zeros((tile_rows, plan.cols), np.int64)
    held = staged_elements(plan)
    thread = np.arange(plan.threads)
    for n in range(-(-plan.wide * plan.run // unit)):
        staged = thread // units + n * (plan.threads // units)
        mine = thread % units * unit
        mine, staged = mine[staged < tile_rows], staged[staged < tile_rows]
        row = staged % plan.across * plan.wide + staged // plan.across
        at = staged * turn + swizzle(plan, staged % plan.across, mine * plan.out_itemsize) // plan.out_itemsize
        found = held[at[:, None] + np.arange(unit)]
        assert (found == (row * turn + mine)[:, None] + np.arange(unit)).all(), "not what was written there"
        for part in range(plan.parts):
            begin = part * plan.share
            count = max(0, min(plan.share, plan.cols - begin))
            for t in range(-(-count // turn)):
                writing = t * turn + mine < count
                column = begin + t * turn + mine[writing]
                np.add.at(seen, (row[writing, None], column[:, None] + np.arange(unit)), 1)
    return seen


def assert_fits(plan: ColumnsPlan, problem: Problem, device: Device) -> None:
    launch = plan.launch()
    assert 32 <= launch.block <= int(plan.macros()["THREADS"])
    assert launch.block % 32 == 0
    assert launch.shared + 1024 <= device.shared_per_block + 1024
    assert launch.cluster == 1 or (device.capability >= 90 and launch.cluster <= device.max_cluster)
    assert launch.grid == plan.planes * plan.tiles * plan.parts
    assert plan.tiles * plan.across * plan.wide >= plan.side
    assert plan.across == plan.macros()["LANES"] or plan.across % 32 == 0
    assert not launch.overlap or device.capability >= 90
    assert int(plan.macros()["BLOCKS"]) * int(plan.macros()["THREADS"]) <= 1024, "64 registers a thread"
    if plan.turn:
        assert plan.groups >= 4, "a turn is a multiple of 16 bytes"
        assert plan.across >= plan.run, "there are threads for all of its elements"
        assert plan.groups & (plan.groups - 1) == 0, "what a swizzled stage needs"
    if plan.in_place:
        stage = plan.across * plan.wide * plan.groups * plan.run * plan.out_itemsize
        slots_of_a_turn = plan.run * plan.threads * max(4, plan.wide * plan.itemsize)
        assert stage <= slots_of_a_turn
        assert plan.shared_vectors >= 2 * plan.run, "two stages"


def assert_aligned(plan: ColumnsPlan, problem: Problem) -> None:
    """Each access is made at a multiple of its width."""
    x_outer, x_col, _ = problem.strides
    size, out_size = problem_sizes(problem)
    pack = plan.wide * size
    for stride in (x_col, *([] if plan.turn or plan.planes == 1 else [x_outer])):
        assert stride * size % pack == 0
    assert problem.x_offset % pack == 0
    assert plan.side % plan.wide == 0
    if plan.turn:
        unit = 16 if plan.aligned else out_size
        assert problem.out_offset % unit == 0
        assert plan.cols * out_size % unit == 0
        assert plan.parts == 1 or plan.share * out_size % unit == 0
    else:
        assert problem.out_offset % min(16, plan.wide * out_size) == 0


def problem_sizes(problem: Problem) -> tuple[int, int]:
    return ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]


@pytest.mark.parametrize("capability", DEVICES)
def test_what_is_chosen_takes_every_element_once(capability, failures):
    device = DEVICES[capability]
    for dtype, out_dtype in PAIRS if capability in (75, 90) else PAIRS[1::2]:
        for problem in problems("softmax", dtype, out_dtype):
            with failures.case(problem):
                plan = plan_columns(problem, device)
                if plan is None:
                    small = problem.outer > 1 and problem.cols * problem.inner * ITEMSIZE[dtype] < 1024
                    assert small or problem.cols > 300
                    continue
                assert_fits(plan, problem, device)
                assert_aligned(plan, problem)
                if capability in (75, 90) and problem.cols * plan.side < 2**20:
                    assert (reads(plan) == 1).all(), plan
                    assert not plan.turn or (turned_writes(plan) == 1).all(), plan


def test_other_launches_do_too(failures):
    """Clusters of every size, tiles of every width, in registers and in shared memory."""
    for dtype, out_dtype in PAIRS[::2]:
        for problem in (
            columns_problem(1, 67, 301, dtype, out_dtype),
            columns_problem(1, 1000, 144, dtype, out_dtype),
            turned_problem(259, 272, dtype, out_dtype),
            turned_problem(512, 144, dtype, out_dtype),
        ):
            for plan in forced(problem):
                with failures.case(plan):
                    assert_aligned(plan, problem)
                    assert (reads(plan) == 1).all()
                    if plan.turn:
                        assert (turned_writes(plan) == 1).all()


def test_the_count_can_say_no(monkeypatch):
    """Take something away from a good plan, and elements are missed or find no room."""
    plan = plan_columns(columns_problem(1, 2000, 4096), H200)
    assert plan is not None
    assert plan.parts == 2
    assert (reads(plan) == 1).all()
    with pytest.raises(AssertionError, match="no room"):
        reads(replace(plan, vectors=1))
    assert reads(replace(plan, groups=plan.groups * 2, across=plan.across // 2)).max() == 1
    monkeypatch.setattr(ColumnsPlan, "share", property(lambda plan: 999))
    assert reads(plan).min() == 0
    monkeypatch.setattr(ColumnsPlan, "share", property(lambda plan: 1001))
    assert (reads(plan) == 1).all()
    turned = plan_columns(turned_problem(70, 90), H200)
    assert turned is not None
    monkeypatch.setattr(ColumnsPlan, "share", property(lambda plan: 70))
    assert (turned_writes(turned) == 1).all()
    with pytest.raises(IndexError):
        turned_writes(replace(turned, aligned=True))


def test_a_cluster_holds_what_a_block_cannot():
    for dtype in ITEMSIZE:
        plan = plan_columns(columns_problem(1, 8192, 8192, dtype), H200)
        assert plan is not None
        assert plan.parts > 1
        assert plan_columns(columns_problem(1, 8192, 8192, dtype), DEVICES[80]) is None


def test_what_is_left_to_the_general_kernel():
    for strides in ((1, 64, 64), (64, 1, 8), (0, 0, 1), (64, 8, 2)):
        assert plan_columns(Problem("softmax", "cuda", 0, "float32", "float32", 4, 8, 8, strides), H200) is None
    for strides in ((64, 1, 1), (2, 64, 1), (1, 0, 1)):
        assert plan_columns(Problem("softmax", "cuda", 0, "float32", "float32", 8, 8, 1, strides), H200) is None
    assert plan_columns(columns_problem(1, 2**21, 64), H200) is None
    assert plan_columns(columns_problem(2**18, 2, 2**20), H200) is not None
    assert plan_columns(columns_problem(1000, 9, 7), H200) is None, "planes too small for a block each"
    assert plan_columns(columns_problem(2**31, 2, 2**10), H200) is None


def test_a_plan_is_a_pure_function():
    for problem in problems("softmax", "bfloat16", "float32"):
        first = plan_columns(problem, H200)
        assert first == plan_columns(problem, H200)
        assert hash(first) == hash(plan_columns(replace(problem), replace(H200)))


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_more_shapes_are_not_more_kernels(dtype, out_dtype):
    """Each is compiled when it is first needed."""

    def kernels(lengths: list[int]) -> set[tuple[tuple[str, object], ...]]:
        found = set()
        for cols in lengths:
            for side in (2, 7, 64, 1000, 4096, 4098, 15130, 2**18):
                for problem in (
                    columns_problem(1, cols, side, dtype, out_dtype),
                    columns_problem(64, cols, side, dtype, out_dtype),
                    turned_problem(cols, side, dtype, out_dtype),
                ):
                    if plan := plan_columns(problem, H200):
                        found.add(tuple(plan.macros().items()))
        return found

    assert len(kernels([*range(1, 300), *range(300, 20_000, 97)])) <= 44
