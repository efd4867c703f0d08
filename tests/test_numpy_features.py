"""The ``numpy`` backend's scale, mask and causality, and their gradients, however tiles cut them."""

import tracemalloc
from itertools import product

import numpy as np
import pytest
from test_numpy_blocked import CPUS, EPS, as_float32, bfloat16_bits, normal, permuted

from minikernel.backends import numpy_backward, numpy_blocked, numpy_plan
from minikernel.backends.numpy_backward import Backward
from minikernel.backends.numpy_blocked import build
from minikernel.problem import FEATURES, Mask, Problem

OPS = ["softmax", "log_softmax"]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def merged(extents, strides):
    axes = []
    for extent, stride in zip(extents, strides, strict=True):
        if extent == 1:
            continue
        if axes and axes[-1][1] == extent * stride:
            axes[-1] = (axes[-1][0] * extent, stride)
        else:
            axes.append((extent, stride))
    return tuple(axes)


def as_mask(keep, axis):
    """The record of a mask of the input's shape, and the view that goes with it, as a call brings them."""
    keep = keep.view()
    keep.flags.writeable = False
    outer = merged(keep.shape[:axis], keep.strides[:axis])
    inner = merged(keep.shape[axis + 1 :], keep.strides[axis + 1 :])
    extents, strides = zip(*outer, (keep.shape[axis], keep.strides[axis]), *inner, strict=True)
    view = np.lib.stride_tricks.as_strided(keep, extents, strides, writeable=False)
    return Mask(outer, keep.strides[axis], inner), view


class Case:
    """A problem and its arrays; ``keep``, the mask, may have more axes than ``x``, of which ``axis`` is reduced."""

    def __init__(self, x, op="softmax", *, dtype=None, keep=None, axis=1, scale=None, causal=False):
        self.x, self.op, self.dtype = x, op, dtype or x.dtype.name
        self.mask, self.view, self.keep = None, None, np.ones(x.shape, bool)
        if keep is not None:
            self.mask, self.view = as_mask(keep, axis)
            self.keep = keep.reshape(x.shape).view(np.uint8) != 0
        if causal:
            self.keep = self.keep & (np.arange(x.shape[1]) <= np.arange(len(x))[:, None] % x.shape[1])[..., None]
        self.scale = 1.0 if scale is None else scale
        strides = tuple(stride // x.itemsize for stride in x.strides)
        self.problem = Problem(
            op, "cpu", 0, self.dtype, self.dtype, *x.shape, strides,
            scaled=scale is not None, mask=self.mask, causal=causal,
        )  # fmt: skip

    def run(self, *, out=None, cpus=2):
        out = np.full(self.x.shape, 7, self.x.dtype) if out is None else out
        build(self.problem, cpus)(self.x, out, 0, 0, self.view, self.scale)
        return out

    def backward(self, y, dy, *, cpus=2):
        dx = np.full(y.shape, 7, y.dtype)
        Backward(self.problem.backward(), cpus)(y, dx, 0, dy, self.view, self.scale)
        return dx

    @property
    def values(self):
        return as_float32(np.ascontiguousarray(self.x)) if self.dtype == "bfloat16" else self.x

    def exact(self, values):
        return values.astype(np.longdouble if self.dtype == "float64" else np.float64)

    def shifted(self):
        scores = np.copysign(1, self.scale) * self.exact(self.values)
        scores[~self.keep] = -np.inf
        return (scores - scores.max(axis=1, keepdims=True)) * abs(self.scale)

    def check(self, result):
        if self.dtype == "bfloat16":
            result = as_float32(result)
        with np.errstate(invalid="ignore", divide="ignore"):
            shifted = self.shifted()
            total = np.exp(shifted).sum(axis=1, keepdims=True)
            expected = np.exp(shifted) / total if self.op == "softmax" else shifted - np.log(total)
        single = EPS["float64" if self.dtype == "float64" else "float32"]
        # Rounding x - max costs up to an ulp of it, and so does the scale.
        size = np.where(np.isfinite(shifted), np.abs(shifted), 0)
        size = np.minimum(size, 1000)
        rtol = EPS[self.dtype] / 2 * (self.dtype in ("float16", "bfloat16")) + single * (8 + 2 * size)
        atol = 2**-24 if self.dtype == "float16" else np.finfo(np.float32).tiny
        if self.op == "log_softmax":
            atol = single * (8 + 2 * np.log(self.x.shape[1]))
        np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
        np.testing.assert_array_equal(np.isneginf(result), np.isneginf(expected))
        finite = np.isfinite(expected)
        error = np.abs(self.exact(result[finite]) - expected[finite])
        bound = atol + rtol * np.abs(expected)
        assert (error <= bound[finite]).all(), (error / bound[finite]).max()

    def check_gradient(self, dx, y, dy):
        if self.dtype == "bfloat16":
            dx, y, dy = as_float32(dx), as_float32(y), as_float32(dy)
        y, dy = self.exact(y), self.exact(dy)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.op == "softmax":
                terms = np.where(self.keep, y * dy, 0)
                factor = y
            else:
                terms, factor = dy, np.exp(y)
            total = terms.sum(axis=1, keepdims=True)
            expected = factor * (dy - total) if self.op == "softmax" else dy - factor * total
            expected = np.where(self.keep, self.scale * expected, 0)
            size = abs(self.scale) * np.abs(factor) * np.abs(terms).sum(axis=1, keepdims=True) + np.abs(expected)
        single = EPS["float64" if self.dtype == "float64" else "float32"]
        size = np.nan_to_num(size)  # an empty row's results are 0
        bound = 16 * single * size + EPS[self.dtype] * np.abs(expected) + (2**-24 if self.dtype == "float16" else 0)
        np.testing.assert_array_equal(np.isnan(dx), np.isnan(expected))
        finite = ~np.isnan(expected)
        assert (np.abs(dx - expected)[finite] <= bound[finite]).all()
        assert (np.ascontiguousarray(dx[~self.keep]).view(f"u{dx.itemsize}") == 0).all()


def stored(values, dtype):
    """In a dtype, bfloat16 as its bits."""
    with np.errstate(invalid="ignore"):
        return bfloat16_bits(values.astype(np.float32)) if dtype == "bfloat16" else values.astype(dtype)


def random_mask(shape, kept=0.6, seed=3):
    return np.random.default_rng(seed).random(shape) < kept


@pytest.fixture
def small_tiles(monkeypatch):
    """Rows in pieces, strips in turn and shared, without the size that takes them."""
    monkeypatch.setattr(numpy_plan, "TILE_BYTES", 1 << 12)
    monkeypatch.setattr(numpy_plan, "SMALL_SIZE", 1 << 8)
    monkeypatch.setattr(numpy_plan, "SHARE", 1 << 7)
    monkeypatch.setattr(numpy_blocked, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(numpy_blocked, "BLOCKED_SIZE", 1 << 8)
    monkeypatch.setattr(numpy_backward, "_TILE", 1 << 8)


# A single tile, tiles of rows, rows in pieces, and inner axes.
SHAPES = [(1, 1, 1), (6, 50, 1), (90, 60, 1), (900, 7, 1), (3, 3001, 1), (3, 400, 16), (2, 2001, 3)]
LARGE = [(700, 600, 1), (9000, 31, 1), (1, 1100003, 1), (2, 9001, 70), (2, 70, 3001)]
FUSED = [used for used in product((False, True), repeat=3) if any(used)]


def names(used):
    return "+".join(name for name, is_used in zip(FEATURES, used, strict=True) if is_used)


def check_all(x, op, dtype, used):
    scaled, masked, causal = used
    keep = random_mask(x.shape) if masked else None
    case = Case(x, op, dtype=dtype, keep=keep, scale=-0.7 if scaled else None, causal=causal)
    assert names(used) == "+".join(case.problem.features)
    result = case.run()
    case.check(result)
    dy = stored(normal(x.shape)[::-1], dtype)
    case.check_gradient(case.backward(np.ascontiguousarray(result), dy), result, dy)


@pytest.mark.parametrize("used", FUSED, ids=names)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_small_tiles_agree_with_the_reference(used, op, dtype, small_tiles):
    for shape, axes in product(SHAPES, [(0, 1, 2), (1, 0, 2), (2, 1, 0)]):
        if shape[2] == 1 or not used[2]:  # causality has no inner axis
            check_all(permuted(stored(normal(shape), dtype), axes), op, dtype, used)


@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_large_tiles_agree_with_the_reference(shape, op, dtype):
    check_all(stored(normal(shape), dtype), op, dtype, (True, True, shape[2] == 1))


FULL = (2, 3, 40, 5, 2)


@pytest.mark.parametrize("axis", range(len(FULL)))
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)], ids=str)
def test_masks_broadcast_along_any_axes(axis, op, axes, small_tiles):
    outer, inner = int(np.prod(FULL[:axis])), int(np.prod(FULL[axis + 1 :]))
    x = permuted(normal((outer, FULL[axis], inner)), axes)
    dy = normal(x.shape)[::-1].copy()
    for along in product((False, True), repeat=len(FULL)):
        shape = [1 if one else n for one, n in zip(along, FULL, strict=True)]
        keep = np.broadcast_to(random_mask(shape, 0.8), FULL)
        case = Case(x, op, keep=keep, axis=axis, scale=0.5)
        result = case.run()
        case.check(result)
        case.check_gradient(case.backward(result, dy), result, dy)


@pytest.mark.parametrize("axis", range(len(FULL)))
def test_masks_lie_in_any_way(axis, small_tiles):
    x = normal((int(np.prod(FULL[:axis])), FULL[axis], int(np.prod(FULL[axis + 1 :]))))
    keep = random_mask([2 * n for n in FULL], 0.8)
    corner = tuple(slice(n) for n in FULL)
    backward, every_other = (slice(None, None, -1),) * len(FULL), (slice(None, None, 2),) * len(FULL)
    for view in (keep[corner], keep[backward][corner], keep[every_other], permuted(keep[corner], range(4, -1, -1))):
        result, expected = (Case(x, keep=mask, axis=axis).run() for mask in (view, np.ascontiguousarray(view)))
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_any_byte_but_0_keeps(causal, small_tiles):
    x, keep = normal((30, 40, 1)), random_mask((30, 40, 1))
    other = (keep * np.random.default_rng(1).integers(1, 256, keep.shape)).astype(np.uint8).view(bool)
    case, expected = (Case(x, keep=mask, causal=causal) for mask in (other, keep))
    result = case.run()
    np.testing.assert_array_equal(result, expected.run())
    np.testing.assert_array_equal(case.backward(result, x), expected.backward(result, x))


@pytest.mark.parametrize("shape", [(5, 40, 1), (5, 2000, 1), (90, 70, 1), (4, 300, 20)], ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 1, 0)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, -2.0])
def test_what_is_masked_out_is_never_looked_at(shape, axes, op, dtype, scale, small_tiles):
    values, keep = normal(shape, scale=1), random_mask(shape)
    keep[:, 1] = True
    keep[1] = False  # whole rows
    keep[-1, : shape[1] // 2] = False  # whole pieces of a row
    x = permuted(stored(values, dtype), axes)
    case = Case(x, op, dtype=dtype, keep=keep, scale=scale)
    expected = case.run()
    case.check(expected)
    empty = ~keep.any(axis=1, keepdims=True)
    assert empty.any()
    for bad in (np.nan, np.inf, -np.inf, 6e4):
        dirty = Case(permuted(stored(np.where(keep, values, np.float32(bad)), dtype), axes), op, dtype=dtype,
                     keep=keep, scale=scale)  # fmt: skip
        for cpus in CPUS:
            np.testing.assert_array_equal(dirty.run(cpus=cpus), expected)
    # What counts may still spoil its row.
    for bad in (np.nan, np.copysign(np.inf, scale or 1)):
        spoiled = values.copy()
        spoiled[0, 1, 0] = bad
        result = Case(permuted(stored(spoiled, dtype), axes), op, dtype=dtype, keep=keep, scale=scale).run()
        result = as_float32(result) if dtype == "bfloat16" else result
        assert np.isnan(result[0, :, 0]).all()
        others = as_float32(expected) if dtype == "bfloat16" else expected.copy()
        others[0, :, 0] = result[0, :, 0]
        np.testing.assert_array_equal(result, others)


@pytest.mark.parametrize("shape", [(7, 60, 1), (3, 3000, 1), (20, 64, 9)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_0_where_masked_out(shape, op, dtype, small_tiles):
    keep = random_mask(shape)
    keep[1] = False
    case = Case(stored(normal(shape), dtype), op, dtype=dtype, keep=keep, scale=-3.0)
    y, dy = case.run(), normal(shape)[::-1].copy()
    expected = case.backward(y, stored(dy, dtype))
    case.check_gradient(expected, y, stored(dy, dtype))
    dirty = stored(np.where(keep, dy, np.float32(np.nan)), dtype)
    result = case.backward(y, dirty)
    case.check_gradient(result, y, dirty)
    if op == "softmax":
        np.testing.assert_array_equal(result, expected)
    else:  # its sum takes in all of dy, as in PyTorch
        result = as_float32(result) if dtype == "bfloat16" else result
        assert np.isnan(result[0][keep[0]]).all()


@pytest.mark.parametrize("shape", [(50, 40, 1), (120, 40, 1), (7, 3000, 1), (20, 1, 1)], ids=str)
@pytest.mark.parametrize("axes", [(0, 1, 2), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_causality_is_the_mask_of_a_triangle(shape, axes, op, small_tiles):
    x = permuted(normal(shape), axes)
    triangle = (np.arange(shape[1]) <= np.arange(shape[0])[:, None] % shape[1])[..., None]
    other = random_mask(shape)
    for keep, both in ((None, triangle), (other, other & triangle)):
        causal, masked = Case(x, op, keep=keep, causal=True), Case(x, op, keep=both)
        result = causal.run()
        np.testing.assert_array_equal(result, masked.run())
        np.testing.assert_array_equal(
            causal.backward(result, normal(shape)), masked.backward(result, normal(shape))
        )
        causal.check(result)


@pytest.mark.parametrize("shape", [(6, 50, 1), (9, 3000, 1), (3, 300, 20)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_scale_is_a_positive_one_of_the_opposite(shape, op, dtype, small_tiles):
    values, keep = normal(shape), random_mask(shape)
    values[0, 3], values[1, 4], values[2, 5] = -np.inf, np.inf, np.nan
    for mask in (None, keep):
        flipped = Case(stored(-values, dtype), op, dtype=dtype, keep=mask, scale=1.7).run()
        result = Case(stored(values, dtype), op, dtype=dtype, keep=mask, scale=-1.7).run()
        np.testing.assert_array_equal(result, flipped)


@pytest.mark.parametrize("shape", [(6, 50, 1), (2, 9000, 1), (3, 2000, 4)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("size", "scale"), [
    (1e30, 10.0), (1e30, -10.0), (3e38, 1.2e-38), (1e-30, 1e30), (1e-38, -8e37),
])  # fmt: skip
def test_no_magnitude_overflows(shape, op, masked, size, scale, small_tiles):
    x = (np.random.default_rng(5).random(shape) * size).astype(np.float32)
    case = Case(x, op, keep=random_mask(shape) if masked else None, scale=scale)
    result = case.run()
    assert not np.isnan(result).any()
    if abs(scale) < 1e40:
        limit = np.finfo(np.float32).max
        expected = case.shifted()
        np.testing.assert_array_equal(
            np.isneginf(result), ~case.keep | (expected < -limit) if op == "log_softmax" else False
        )
    if op == "softmax":
        case.check(result)


@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_threads_change_no_bit(shape, op):
    x, keep = normal(shape), random_mask(shape)
    case = Case(x, op, keep=keep, scale=-0.5, causal=shape[2] == 1)
    one, *more = (case.run(cpus=cpus) for cpus in CPUS)
    assert all(other.tobytes() == one.tobytes() for other in more)
    dx, *more = (case.backward(one, x, cpus=cpus) for cpus in CPUS)
    assert all(other.tobytes() == dx.tobytes() for other in more)


@pytest.mark.parametrize("shape", [(6, 50, 1), (700, 600, 1), (2, 600000, 1), (2, 9001, 70), (9000, 7, 9)], ids=str)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(shape, op, dtype):
    x, keep = stored(normal(shape), dtype), random_mask(shape)
    expected = Case(x, op, dtype=dtype, keep=keep, scale=-0.5).run()
    np.testing.assert_array_equal(Case(x, op, dtype=dtype, keep=keep, scale=-0.5).run(out=x), expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("dtype", "fill"), [("float16", 0.5), ("float32", 0.5), ("float32", 0.0), ("float32", 1.0), ("float64", 0.5)]
)
def test_long_rows(op, dtype, fill):
    x = normal((1, 3_000_000, 1), dtype)
    keep = random_mask(x.shape, fill)
    case = Case(x, op, keep=keep, scale=-0.5)
    case.check(case.run())


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("full", "mask_shape", "axis"),
    [
        ((2000, 2000), (1, 2000), 1),
        ((1, 4000000), (1, 4000000), 1),
        ((10, 500, 100, 8), (10, 1, 100, 8), 3),
        ((10, 100, 64, 8, 8), (10, 1, 64, 1, 8), 2),
        ((2, 1000, 20, 100), (2, 1000, 20, 1), 1),
        ((2, 1000, 20, 100), (1, 1000, 1, 100), 1),
    ],
    ids=str,
)
def test_peak_memory(full, mask_shape, axis, dtype, op):
    keep = np.broadcast_to(random_mask(mask_shape), full)
    shape = int(np.prod(full[:axis])), full[axis], int(np.prod(full[axis + 1 :]))
    x = np.zeros(shape, "uint16" if dtype == "bfloat16" else dtype)
    out = np.empty_like(x)
    mask, view = as_mask(keep, axis)
    strides = shape[1] * shape[2], shape[2], 1
    problem = Problem(op, "cpu", 0, dtype, dtype, *shape, strides, scaled=True, mask=mask, causal=shape[2] == 1)
    run, backward = build(problem, 64), Backward(problem.backward(), 8)
    calls = [lambda: run(x, out, 0, 0, view, 0.5)]
    if shape[1] <= 2000:  # a gradient's rows are in one piece
        calls.append(lambda: backward(x, out, 0, x, view, 0.5))
    for call in calls:
        tracemalloc.start()
        try:
            call()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= 16 * 2**20
