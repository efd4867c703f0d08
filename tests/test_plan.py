"""Choosing a launch is a pure function: what it chooses fits the GPU, and covers every element exactly once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from minikernel import cuda, driver
from minikernel.backends import cuda_fused, cuda_naive, cuda_parallel, cuda_smem
from minikernel.backends.cuda_fused import RowPlan, StridedPlan
from minikernel.backends.fused_columns import ColumnsPlan
from minikernel.driver import Device, Launch
from minikernel.problem import ITEMSIZE, Problem

#: One GPU of each supported compute capability: T4, A100, RTX 3090, L4, H200, B200, RTX 5090.
DEVICES = {
    device.capability: device
    for device in (
        Device(75, 40, 64 * 1024, 64 * 1024, 4 * 2**20),
        Device(80, 108, 163 * 1024, 164 * 1024, 40 * 2**20),
        Device(86, 82, 99 * 1024, 100 * 1024, 6 * 2**20),
        Device(89, 58, 99 * 1024, 100 * 1024, 48 * 2**20),
        Device(90, 132, 227 * 1024, 228 * 1024, 60 * 2**20),
        Device(100, 148, 227 * 1024, 228 * 1024, 126 * 2**20),
        Device(120, 170, 99 * 1024, 100 * 1024, 96 * 2**20),
    )
}
H200 = DEVICES[90]
PAIRS = [
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("float32", "float32"),
    ("float64", "float64"),
]
LENGTHS = [
    *range(1, 301, 7), 2, 3, 4, 5, 31, 32, 33, 64, 128, 255, 256, 257, 300, 511, 512, 513, 600, 1023, 1024, 1025,
    1026, 2047, 2048, 2049, 4095, 4096, 4097, 8191, 8192, 8193, 12287, 12288, 12290, 16384, 16386, 24575, 32767,
    32770, 50257, 65536, 65537, 128256, 131072, 151936, 262144, 2**20, 2**20 + 1, 2**24, 2**24 + 5,
]  # fmt: skip
ROWS = (1, 8, 512, 65537)


def rows_problem(
    cols: int, rows: int = 512, dtype: str = "float32", out_dtype: str | None = None, pad: int = 0,
    x_start: int = 0, out_start: int = 0, op: str = "softmax",
) -> Problem:  # fmt: skip
    """Rows in one piece, ``pad`` elements apart, beginning so many elements after a 16-byte boundary."""
    out_dtype = out_dtype or dtype
    offsets = x_start * ITEMSIZE[dtype] % 16, out_start * ITEMSIZE[out_dtype] % 16
    return Problem(op, "cuda", 0, dtype, out_dtype, rows, cols, 1, (cols + pad, 1, 1), *offsets)


def fused_problems(op: str, dtype: str, out_dtype: str) -> Iterator[Problem]:
    for cols in LENGTHS:
        for rows in ROWS:
            for pad in (0, 1):
                for x_start, out_start in ((0, 0), (1, 0), (1, 1)):
                    yield rows_problem(cols, rows, dtype, out_dtype, pad, x_start, out_start, op)


def peel(plan: RowPlan, problem: Problem) -> int:
    """Elements to whose multiples a row is peeled: to a line of 128 bytes, or to a pack by lanes of a warp."""
    dtype = problem.dtype if plan.congruent else problem.out_dtype
    return plan.wide if plan.team or plan.wide == 1 else 128 // ITEMSIZE[dtype]


def spans(plan: RowPlan, problem: Problem, row: int, base: int = 0) -> tuple[int, int, int]:
    """``Span`` of softmax_fused.cu: elements before the vectors, vectors, elements behind them.

    ``base`` is what the problem doesn't say of both addresses: bytes, a multiple of 16.
    """
    x_start = (base + problem.x_offset) // ITEMSIZE[problem.dtype] + row * problem.strides[0]
    out_start = (base + problem.out_offset) // ITEMSIZE[problem.out_dtype] + row * problem.cols
    head = min(-(x_start if plan.congruent else out_start) % peel(plan, problem), problem.cols)
    vectors, tail = divmod(problem.cols - head, plan.wide)
    return head, vectors, tail


def visits(plan: RowPlan, problem: Problem, row: int, base: int = 0) -> np.ndarray:
    """How often each element of a row is taken, by the index arithmetic of softmax_fused.cu."""
    head, vectors, tail = spans(plan, problem, row, base)
    seen = np.zeros(problem.cols, np.int64)
    of_vector = np.zeros(vectors, np.int64)
    lanes = plan.team or 32
    members = plan.team or plan.threads
    member = np.arange(members)
    held = plan.vectors + plan.shared_vectors
    share = -(-vectors // (plan.parts * 8)) * 8 if plan.parts > 1 else vectors
    for part in range(plan.parts):
        begin = min(part * share, vectors)
        count = min(share, vectors - begin)
        first = (0 if plan.team else member // 32 * held * 32) + member % lanes
        for v in range(held):
            at = (first + v * lanes)[v * lanes < count - first]
            np.add.at(of_vector, begin + at, 1)
        if plan.streamed:
            of_vector[begin + held * members : begin + count] += 1
    seen[head : head + vectors * plan.wide] = np.repeat(of_vector, plan.wide)

    singles = 0 if plan.wide == 1 else -(-2 * (plan.wide - 1) // lanes) if plan.team else 1
    for s in range(singles):
        for i in member + s * lanes:
            if i < head:
                seen[i] += 1
            elif i < head + tail:
                seen[i + vectors * plan.wide] += 1
    return seen


def assert_fits(plan: RowPlan, problem: Problem, device: Device) -> None:
    launch = plan.launch()
    assert launch.block % 32 == 0
    assert 32 <= launch.block <= 1024
    assert launch.block <= int(plan.macros()["THREADS"])
    assert 1 <= launch.grid <= cuda.MAX_GRID
    assert launch.grid % plan.parts == 0
    assert launch.shared + 1024 <= device.shared_per_block
    assert launch.cluster == 1 or (device.capability >= 90 and launch.cluster <= 16)
    if plan.cooperative:
        threads = {75: 1024, 86: 1536, 89: 1536, 120: 1536}.get(device.capability, 2048)  # of a multiprocessor
        # The compiler keeps its registers down to what so many blocks leave each; it doesn't for more.
        assert launch.grid <= device.sm_count * int(plan.macros()["BLOCKS"])
        per_sm = min(threads // launch.block, device.shared_per_sm // (launch.shared + 2048))
        assert launch.grid <= device.sm_count * per_sm, "all blocks must be resident at once"
        assert launch.scratch >= launch.grid * 2 * (8 if problem.dtype == "float64" else 4)
    assert not launch.overlap or device.capability >= 90
    if not plan.team:
        assert plan.threads >= peel(plan, problem) + plan.wide - 2, (
            "each thread takes one of the elements left over"
        )
    rows = plan.grid * plan.threads // plan.team if plan.team else plan.grid // plan.parts
    assert rows >= problem.rows
    assert rows - problem.rows < (plan.threads // plan.team if plan.team else 1), "whole blocks have nothing to do"
    # So many blocks were promised to the compiler, with a register file of 64 Ki words.
    assert int(plan.macros()["BLOCKS"]) * int(plan.macros()["THREADS"]) <= 2048


def assert_aligned(plan: RowPlan, problem: Problem, row: int, base: int) -> None:
    """16-byte accesses are made at multiples of 16 bytes."""
    if plan.wide == 1:
        return
    head, vectors, _ = spans(plan, problem, row, base)
    if not vectors:
        return
    if plan.congruent:
        assert (problem.x_offset + (row * problem.strides[0] + head) * ITEMSIZE[problem.dtype]) % 16 == 0
    assert (problem.out_offset + (row * problem.cols + head) * ITEMSIZE[problem.out_dtype]) % 16 == 0


@pytest.mark.parametrize("capability", DEVICES)
def test_every_element_is_taken_once(capability, failures):
    device = DEVICES[capability]
    for dtype, out_dtype in PAIRS if capability in (75, 90) else PAIRS[1::2]:
        for problem in fused_problems("softmax", dtype, out_dtype):
            with failures.case(problem):
                plan = cuda_fused.plan(problem, device)
                assert isinstance(plan, RowPlan)
                assert_fits(plan, problem, device)
                for row in {0, 1, 3, problem.rows - 1} & set(range(problem.rows)):
                    assert_aligned(plan, problem, row, base=16 * (problem.cols % 8))
                # Counting is slow, so not for each combination of what changes little.
                if problem.cols <= 70_000 and problem.rows in (1, 512) and capability in (75, 90):
                    for row in {0, 3} & set(range(problem.rows)):
                        counts = visits(plan, problem, row, base=16 * (problem.cols % 8))
                        assert counts.min() == counts.max() == 1, f"row {row}: {plan}"


def test_long_rows_are_covered(failures):
    for capability in (75, 90, 120):
        for dtype in ("float16", "float32", "float64"):
            for cols in (128256, 151936, 2**20 + 1):
                for rows, x_start in ((1, 0), (2, 1), (600, 0)):
                    problem = rows_problem(cols, rows, dtype, x_start=x_start)
                    with failures.case(problem):
                        plan = cuda_fused.plan(problem, DEVICES[capability])
                        counts = visits(plan, problem, 0)
                        assert counts.min() == counts.max() == 1, plan


def test_the_count_of_visits_can_say_no():
    """Take something away from a good plan, and elements are missed; add, and some are taken twice."""
    problem = rows_problem(50257)
    plan = cuda_fused.plan(problem, H200)
    assert visits(plan, problem, 0).min() == 1
    assert visits(replace(plan, vectors=plan.vectors // 2), problem, 0).min() == 0
    assert visits(replace(plan, streamed=True, vectors=plan.vectors // 2), problem, 0).max() == 1
    short = rows_problem(100)
    plan = cuda_fused.plan(short, H200)
    assert visits(replace(plan, vectors=1, team=8), short, 0).min() == 0


def test_a_plan_is_a_pure_function():
    for problem in fused_problems("softmax", "bfloat16", "float32"):
        first = cuda_fused.plan(problem, H200)
        assert first == cuda_fused.plan(problem, H200)
        assert hash(first) == hash(cuda_fused.plan(replace(problem), replace(H200)))


def test_a_grid_may_have_any_number_of_rows():
    for rows in (2**31 - 1, 2**31 + 8, 2**33):
        for cols in (1, 3, 8):
            plan = cuda_fused.plan(rows_problem(cols, rows, "float16"), H200)
            assert plan.grid <= cuda.MAX_GRID
            assert plan.grid * plan.threads // plan.team >= rows
        # These go around a grid that isn't large enough.
        assert cuda_naive.plan(rows_problem(1, rows)).grid <= cuda.MAX_GRID
        assert cuda_smem.plan(rows_problem(1, rows)).grid <= cuda.MAX_GRID
        strided = replace(rows_problem(3, rows), strides=(1, rows, 1))
        assert cuda_fused.plan(strided, H200).grid <= cuda.MAX_GRID


def test_rows_that_are_not_in_one_piece(failures):
    """Side by side they have a kernel of their own, as long as a block or a cluster can hold them."""
    for dtype, size in ITEMSIZE.items():
        for outer, cols, inner, strides, side_by_side in (
            (1, 8192, 8192, (0, 8192, 1), True),
            (5, 67, 301, (67 * 301, 301, 1), True),
            (32, 32, 1, (1, 32, 1), True),
            (1, 1000, 3, (0, 3, 1), True),
            (1, 2**23, 8, (0, 8, 1), False),
            (7, 600, 1, (-600, -1, 1), False),
            (1, 2**31 - 1, 1, (0, 0, 1), False),
            (4, 9, 1, (0, 2, 1), False),
            (3, 5, 7, (35, 1, 5), False),
        ):
            problem = Problem("softmax", "cuda", 0, dtype, dtype, outer, cols, inner, strides)
            for device in DEVICES.values():
                with failures.case(problem):
                    plan = cuda_fused.plan(problem, device)
                    if side_by_side and (cols <= 1000 or device.capability >= 90):
                        assert isinstance(plan, ColumnsPlan)
                        continue
                    assert isinstance(plan, StridedPlan)
                    assert plan.lanes in (1, 2, 4, 8, 16, 32)
                    assert plan.launch().block == 256
                    assert plan.grid * plan.lanes >= problem.rows
                    # Its tiles are in shared memory that needs no opting in.
                    acc = max(4, size)
                    tile = 256 // plan.lanes * 8 * (plan.lanes + 1) * acc + 256 * 2 * acc
                    assert tile <= 48 * 1024


def test_one_column_is_in_one_piece_whatever_its_stride():
    for stride in (0, 5, -3):
        problem = Problem("softmax", "cuda", 0, "float32", "float32", 100, 1, 1, (7, stride, 1))
        assert isinstance(cuda_fused.plan(problem, H200), RowPlan)


def test_a_launch_that_does_not_fit_is_made_smaller():
    """As on a slice of a GPU: first without a cooperative grid, then with ever smaller clusters."""
    seen = []

    def prepare(device):
        launch = Launch(1, 32, cluster=device.max_cluster, cooperative=device.cooperative)
        seen.append((launch.cooperative, launch.cluster))
        if launch.cooperative or launch.cluster > 4:
            raise driver.DoesNotFit("too much", launch)
        return "a kernel"

    assert driver.prepare_fitting(H200, lambda device: device, prepare) == "a kernel"
    assert seen == [(True, 16), (False, 16), (False, 8), (False, 4)]


@pytest.mark.parametrize("capability", DEVICES)
def test_shared_memory_holds_the_longest_declared_row(capability):
    device = DEVICES[capability]
    for dtype, size in ITEMSIZE.items():
        longest = cuda_smem.longest_row(dtype, device)
        assert (longest + 1) * size > device.shared_per_block - 1024
        launch = cuda_smem.plan(rows_problem(longest, dtype=dtype))
        assert launch.shared + 16 <= device.shared_per_block


def test_blocks_of_the_lower_rungs():
    for cols, block in ((1, 32), (32, 32), (33, 64), (600, 1024), (1024, 1024), (5000, 1024)):
        assert cuda_smem.plan(rows_problem(cols)).block == block
        assert cuda_smem.plan(rows_problem(cols)).shared == -(-cols // 4) * 16, "whole accesses of 16 bytes"
        assert (cuda_parallel.plan(rows_problem(cols)).block, cuda_parallel.plan(rows_problem(cols)).shared) == (
            block,
            0,
        )
    assert cuda_naive.plan(rows_problem(600, 1000)).grid == 4


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_neighboring_lengths_share_kernels(dtype, out_dtype):
    """More lengths don't make more kernels: each is compiled once, when it is first needed."""

    def kernels(lengths):
        problems = (rows_problem(cols, rows, dtype, out_dtype) for cols in lengths for rows in (8, 512, 65536))
        return {tuple(cuda_fused.plan(problem, H200).macros().items()) for problem in problems}

    some = [*range(1, 600), *range(600, 20_000, 13), *(2**power for power in range(10, 15))]
    few, many = kernels(some), kernels(range(1, 20_000))
    assert few == many
    assert len(many) <= 64
