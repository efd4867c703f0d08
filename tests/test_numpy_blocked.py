"""The ``numpy`` backend: what its tiles, threads and roundings could get wrong."""

import dataclasses
import os
import threading
import tracemalloc
import warnings

import numpy as np
import pytest

from minikernel.backends import numpy_blocked, numpy_plan, numpy_tiles
from minikernel.backends.numpy_blocked import Softmax, build
from minikernel.backends.numpy_plan import plan
from minikernel.problem import Problem

EPS = {"float16": 2**-10, "bfloat16": 2**-7, "float32": 2**-23, "float64": 2**-52}
CPUS = (1, 2, 5)


def make_problem(x, op="softmax", dtype=None, out_dtype=None):
    dtype = dtype or x.dtype.name
    strides = tuple(stride // x.itemsize for stride in x.strides)
    return Problem(op, "cpu", 0, dtype, out_dtype or dtype, *x.shape, strides)


def run(x, op="softmax", *, dtype=None, out_dtype=None, out=None, cpus=2):
    problem = make_problem(x, op, dtype, out_dtype)
    if out is None:
        storage = "uint16" if problem.out_dtype == "bfloat16" else problem.out_dtype
        out = np.full(x.shape, 7, storage)
    build(problem, cpus)(x, out)
    return out


def reference(x, op="softmax"):
    shifted = x.astype(np.longdouble)
    shifted = shifted - shifted.max(axis=1, keepdims=True)
    powers = np.exp(shifted)
    total = powers.sum(axis=1, keepdims=True)
    return powers / total if op == "softmax" else shifted - np.log(total)


def normal(shape, dtype="float32", scale=3.0):
    return (np.random.default_rng(42).standard_normal(shape) * scale).astype(dtype)


def check(result, x, op, dtype):
    """Compare with the reference."""
    # The rounding of x - max costs half an ulp of it, so up to |x - max| / 2 ulps of the exponential.
    # Some hundred numbers added one by one cost a few ulps of the sum.
    finite = x[np.isfinite(x)].astype(np.float64)
    rtol, atol = EPS[dtype] * (5 + (finite.max() - finite.min()) / 2), 0
    if dtype in ("float16", "bfloat16"):
        rtol, atol = EPS[dtype], 2**-24 if dtype == "float16" else 0
    if op == "log_softmax":
        atol = 2 * EPS[dtype] * np.log(x.shape[1] + 1) + EPS[dtype]
    np.testing.assert_allclose(result.astype(np.longdouble), reference(x, op), rtol=rtol, atol=atol)


def bfloat16_bits(x):
    """Round float32 to bfloat16 one value at a time, by comparing the two neighbors."""
    low = x.view(np.uint32) >> 16
    high = low + 1
    below = np.abs(x.astype(np.float64) - (low << 16).view(np.float32))
    above = np.abs((high << 16).view(np.float32).astype(np.float64) - x)
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return np.where(up, high, low).astype(np.uint16)


def as_float32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# One shape a path: a single tile, uneven tiles of rows, rows split into pieces, few columns, inner axes
# of every width, and each boundary one short and one past.
SHAPES = [
    (1, 1, 1), (1, 8, 1), (513, 600, 1), (70000, 5, 1), (9000, 31, 1), (9000, 33, 1), (3, 70001, 1),
    (1, 262143, 1), (1, 262145, 1), (1, 1100003, 1), (40, 100, 70), (3, 1000, 64), (5, 1000, 3),
    (1, 200003, 5), (2, 9001, 130), (1, 70, 5001), (1, 4097, 300), (7, 3, 9001), (3000, 7, 3),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_every_path_agrees_with_the_reference(shape, op, dtype):
    x = normal(shape, dtype)
    check(run(x, op), x, op, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_threads_change_no_bit(shape, op):
    x = normal(shape)
    one, *more = (run(x, op, cpus=cpus).tobytes() for cpus in CPUS)
    assert all(other == one for other in more)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_in_place(shape, op, dtype):
    x = bfloat16_bits(normal(shape)) if dtype == "bfloat16" else normal(shape, dtype)
    expected = run(x, op, dtype=dtype)
    np.testing.assert_array_equal(run(x, op, dtype=dtype, out=x), expected)


@pytest.mark.parametrize(
    "shape",
    [
        (6, 50, 1),
        (600, 700, 1),
        (90, 9001, 1),
        (5, 900, 100),
        (40, 300, 100),
        (17, 70001, 1),
        (3, 300, 40),
        (2, 5000, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["transposed", "rows inside", "reversed", "sliced", "expanded", "read-only"])
def test_layouts(shape, layout):
    x = normal(shape)
    view = {
        "transposed": lambda: np.ascontiguousarray(x.T).T,
        "rows inside": lambda: np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1),
        "reversed": lambda: x[::-1, ::-1, ::-1],
        "sliced": lambda: np.repeat(x, 2, axis=1)[:, ::2],
        "expanded": lambda: np.broadcast_to(x[:1], shape),
        "read-only": x.view,
    }[layout]()
    view.flags.writeable = False
    before = view.tobytes()
    np.testing.assert_allclose(run(view), reference(view).astype(np.float64), rtol=30 * EPS["float32"])
    assert view.tobytes() == before


def permuted(x, axes):
    """The same values, in memory in the order of ``axes``."""
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


# Few, many and in-between neighbors; rows that fit a tile and rows that don't; distances that crowd the cache.
TRANSPOSED = [
    *(((*shape, 1), (1, 0, 2)) for shape in [
        (8, 9000), (9000, 8), (130, 140), (256, 128), (300, 300), (2000, 100), (512, 512), (1100, 1000),
        (70, 20000), (3, 300000),
    ]),
    *((shape, axes) for shape in [(4, 500, 90), (3, 50, 1500), (40, 300, 100), (2, 9000, 70)]
      for axes in [(2, 1, 0), (0, 2, 1), (1, 2, 0)]),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axes"), TRANSPOSED, ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_transposed(shape, axes, op, dtype):
    values = normal(shape, "float32" if dtype == "bfloat16" else dtype)
    x = bfloat16_bits(values) if dtype == "bfloat16" else values
    view = permuted(x, axes)
    result, *more = (run(view, op, dtype=dtype, cpus=cpus) for cpus in CPUS)
    assert all(other.tobytes() == result.tobytes() for other in more)
    assert view.tobytes() == x.tobytes()
    if dtype == "bfloat16":
        values, result = as_float32(x), as_float32(result)
    check(result, values, op, dtype)


@pytest.mark.parametrize("cpus", CPUS)
@pytest.mark.parametrize("shape", [(4, 9, 1), (4, 300000, 1), (4, 9000, 70), (4, 2000, 3), (20000, 20, 1)], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_special_values_stay_in_their_row(shape, op, dtype, cpus):
    x = normal(shape, dtype)
    clean = run(x, op, cpus=cpus)
    x[0, 3, 0], x[1, -1, -1], x[2, :, 0] = np.nan, np.inf, -np.inf
    x[3, :, 0], x[3, 5, 0] = -np.inf, -1000
    result = run(x, op, cpus=cpus)
    for row in ((0, 0), (1, -1), (2, 0)):
        assert np.isnan(result[row[0], :, row[1]]).all()
        clean[row[0], :, row[1]] = result[row[0], :, row[1]]
    clean[3, :, 0] = 0 if op == "softmax" else -np.inf
    clean[3, 5, 0] = 1 if op == "softmax" else 0
    np.testing.assert_array_equal(result, clean)


@pytest.mark.parametrize("shape", [(5, 9000, 1), (300, 70, 1), (4, 300, 50), (3, 2000, 4), (2, 1000, 90)], ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_many_small_tiles(shape, axes, op, dtype, monkeypatch):
    """Rows in pieces, strips in turn and shared, blocks with ragged ends, without the size that takes them."""
    monkeypatch.setattr(numpy_plan, "TILE_BYTES", 1 << 14)
    monkeypatch.setattr(numpy_plan, "SMALL_SIZE", 1 << 10)
    monkeypatch.setattr(numpy_plan, "SHARE", 1 << 9)
    monkeypatch.setattr(numpy_blocked, "BLOCK_BYTES", 1 << 11)
    monkeypatch.setattr(numpy_blocked, "BLOCKED_SIZE", 1 << 9)
    values = normal(shape, "float32" if dtype == "bfloat16" else dtype)
    nan, infinity = np.nan, np.inf
    if dtype == "bfloat16":
        values, nan, infinity = bfloat16_bits(values), 0x7FC0, 0x7F80
    values[-2, 7:, -1] = values[-1, :, 0] = infinity | 0x8000 if dtype == "bfloat16" else -infinity
    values[0, 3, 0], values[1, -1, -1] = nan, infinity
    x = permuted(values, axes)
    result, *more = (run(x, op, dtype=dtype, cpus=cpus) for cpus in CPUS)
    assert all(other.tobytes() == result.tobytes() for other in more)
    if dtype == "bfloat16":
        values, result = as_float32(np.ascontiguousarray(x)), as_float32(result)
    if axes == (0, 1, 2):
        target = x.copy()
        np.testing.assert_array_equal(run(target, op, dtype=dtype, out=target), more[0])
    for row in ((0, 0), (1, -1), (-1, 0)):
        assert np.isnan(result[row[0], :, row[1]]).all()
        result[row[0], :, row[1]] = values[row[0], :, row[1]] = 0
        result[row[0], :, row[1]] = 1 / shape[1] if op == "softmax" else -np.log(shape[1])
    check(result, values, op, dtype)


@pytest.mark.parametrize("cpus", CPUS)
@pytest.mark.parametrize("shape", [(4, 9, 1), (1, 400000, 1), (2, 9000, 70), (20000, 20, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nothing_warns_and_the_error_state_is_left_alone(shape, dtype, cpus):
    values = normal(shape, "float32", scale=1000)
    values[0, 0, 0], values[-1, :, -1] = np.inf, -np.inf
    x = bfloat16_bits(np.nan_to_num(values)) if dtype == "bfloat16" else np.clip(values, -6e4, 6e4).astype(dtype)
    x.flat[0], x[-1, :, -1] = (0x7F80, 0xFF80) if dtype == "bfloat16" else (np.inf, -np.inf)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        state = np.geterr()
        for op in ("softmax", "log_softmax"):
            run(x, op, dtype=dtype, cpus=cpus)
        assert np.geterr() == state


@pytest.mark.parametrize("shape", [(1, 2**17, 1), (1, 2**20, 1), (1, 2**14, 64), (64, 512, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_equal_entries_are_exact(shape, dtype):
    assert (run(np.zeros(shape, dtype)) == 1 / shape[1]).all()


@pytest.mark.parametrize("shape", [(1, 10**6, 1), (1, 10**6, 3), (1, 10**5, 64)], ids=str)
def test_the_error_of_a_sum_does_not_grow_with_its_length(shape):
    x = np.random.default_rng(7).uniform(-1, 0, shape).astype(np.float32)
    np.testing.assert_allclose(run(x), reference(x).astype(np.float64), rtol=5 * EPS["float32"])


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("shape", [(8, 200, 1), (40000, 9, 1), (1, 300000, 1), (2, 5000, 64)], ids=str)
def test_bfloat16_is_float32_rounded_to_nearest_even(op, shape):
    bits = bfloat16_bits(normal(shape))
    single = run(bits, op, dtype="bfloat16", out_dtype="float32")
    expected = reference(as_float32(bits), op).astype(np.float64)
    np.testing.assert_allclose(single, expected, rtol=1e-6, atol=1e-6 if op == "log_softmax" else 0)
    rounded = as_float32(run(bits, op, dtype="bfloat16"))
    np.testing.assert_allclose(rounded, expected, rtol=2**-8 + 1e-5, atol=1e-6 if op == "log_softmax" else 0)


def test_rounding_to_bfloat16_is_that_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    bits = np.random.default_rng(1).integers(0, 2**32, 1 << 16, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate((bits, ties)).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    out = numpy_tiles.round_to_bfloat16(values.copy(), np.empty_like(values)).astype(np.uint16)
    nan = np.isnan(values)
    np.testing.assert_array_equal(out[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(out[nan].view(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_subnormal_halves_are_rounded_once_to_nearest_even():
    bits = np.arange(0, 0x3A000000, 4099, dtype=np.uint32)
    steps = np.arange(0, 1024.5, 0.5, dtype=np.float32) * np.float32(2**-24)  # all subnormals and all ties
    values = np.concatenate((bits.view(np.float32), steps, [np.float32(2**-14), np.float32(1)]))
    for sign in (1, -1):
        work = sign * values
        with np.errstate(under="ignore"):
            expected = work.astype(np.float16)
        numpy_tiles.round_to_subnormal_half(work, np.empty_like(work))
        np.testing.assert_array_equal(work.astype(np.float16), expected)


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((2000, 2000, 1), (0, 1, 2)),
        ((1, 4000000, 1), (0, 1, 2)),
        ((500000, 8, 1), (0, 1, 2)),
        ((64, 1000, 64), (0, 1, 2)),
        ((1, 1000, 4000), (0, 1, 2)),
        ((1, 500000, 8), (0, 1, 2)),
        ((2000, 2000, 1), (1, 0, 2)),
        ((100, 40000, 1), (1, 0, 2)),
        ((500000, 8, 1), (1, 0, 2)),
        ((40, 1000, 100), (0, 2, 1)),
        ((40, 1000, 100), (2, 1, 0)),
        ((2, 20000, 100), (0, 2, 1)),
    ],
    ids=str,
)
def test_peak_memory(shape, axes, dtype, op):
    x = np.zeros(shape, np.uint16 if dtype == "bfloat16" else dtype)
    x, out = permuted(x, axes), np.empty_like(x)
    tracemalloc.start()
    try:
        run(x, op, dtype=dtype, out=out, cpus=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 16 * 2**20


def test_a_tiny_input_starts_no_thread():
    assert plan(make_problem(normal((64, 512, 1))), cpus=64).threads == 1
    assert plan(make_problem(normal((1, 4_000_000, 1))), cpus=64).threads == numpy_plan.MAX_THREADS


def test_few_long_rows_use_all_threads(monkeypatch):
    names = set()
    together = threading.Barrier(2, timeout=30)
    load = Softmax.load

    def note(self, x, work):
        if threading.current_thread().name not in names:
            names.add(threading.current_thread().name)
            together.wait()  # passes only if two threads are at work at once
        return load(self, x, work)

    monkeypatch.setattr(Softmax, "load", note)
    run(normal((1, 3_000_000, 1)), cpus=2)
    assert len(names) == 2


def test_an_error_on_a_helper_reaches_the_caller(monkeypatch):
    main = threading.current_thread()
    helper_failed = threading.Event()
    load = Softmax.load

    def fail(self, x, work):
        if threading.current_thread() is not main:
            helper_failed.set()
            raise MemoryError("on a helper")
        helper_failed.wait(30)
        return load(self, x, work)

    monkeypatch.setattr(Softmax, "load", fail)
    with pytest.raises(MemoryError, match="on a helper"):
        run(normal((1, 3_000_000, 1)), cpus=2)


def test_works_without_helpers(monkeypatch):
    class ShutDown:
        def submit(self, task):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    x = normal((3, 300000, 1))
    expected = run(x)
    monkeypatch.setattr(numpy_tiles, "_pool", ShutDown)
    np.testing.assert_array_equal(run(x), expected)


def test_many_callers_at_once():
    x = normal((2, 300000, 1))
    expected = run(x)
    results = []
    threads = [threading.Thread(target=lambda: results.append(run(x, cpus=8))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 12
    assert all((result == expected).all() for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_fork_after_threads_ran():
    x = normal((1, 3_000_000, 1))
    expected = run(x)
    assert numpy_tiles._pool.cache_info().currsize == 1
    child = os.fork()
    if child == 0:
        same = False
        try:
            same = numpy_tiles._pool.cache_info().currsize == 0 and (run(x) == expected).all()
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


HUGE = [(10**9, 3, 1), (1, 10**9, 1), (1, 10**5, 10**5), (3, 5, 10**9), (100, 10**5, 1000), (10**5, 10**5, 1)]


@pytest.mark.parametrize("shape", [*SHAPES, *HUGE], ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0), (0, 2, 1)], ids=["contiguous", "reversed", "rows inside"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_plan_covers_the_problem_within_bounds(shape, axes, op, dtype):
    strides, step = [0, 0, 0], 1
    for axis in reversed(axes):
        strides[axis], step = step, step * shape[axis]
    problem = Problem(op, "cpu", 0, dtype, dtype, *shape, tuple(strides))
    planned = plan(problem, cpus=64)
    assert sorted(planned.order) == [0, 1, 2]
    height, length, width = (planned.tile[planned.order.index(axis)] for axis in range(3))
    assert -(-shape[0] // height) * -(-shape[2] // width) == planned.strips
    assert -(-shape[1] // length) == planned.pieces
    tile_bytes = height * length * width * np.dtype(planned.work_dtype).itemsize
    if planned.threads > 1:
        scratch = planned.scratch_tiles
        assert tile_bytes <= (2 * numpy_plan.TILE_BYTES // scratch if scratch else 4 * numpy_plan.TILE_BYTES)
        assert tile_bytes * scratch * planned.threads <= numpy_plan.SCRATCH_BYTES
    if planned.pieces > 1:
        assert height * width * planned.pieces <= 4 * numpy_plan.MERGED
    assert planned.in_output == (planned.fast == planned.out_axis and dtype != "float16")
    one = plan(problem, cpus=1)
    assert one == dataclasses.replace(planned, threads=1)


def test_the_fast_axis_is_the_one_with_long_runs():
    def fast(shape, axes=(0, 1, 2)):
        planned = plan(make_problem(permuted(np.empty(shape, np.float32), axes)), cpus=2)
        return planned.order[planned.fast]

    assert fast((4096, 1000, 1)) == 1
    assert fast((100000, 8, 1)) == 0
    assert fast((8, 1000, 256)) == 2
    assert fast((1, 100000, 3)) == 1
    assert fast((100000, 8, 1), (1, 0, 2)) == 0
    assert fast((1000, 3000, 1), (1, 0, 2)) == 1
