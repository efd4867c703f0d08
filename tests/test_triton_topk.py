"""softmax_topk on triton-fused without a GPU: the plan, the compiled code, and numerics in Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isolated import in_the_interpreter

from minikernel import driver
from minikernel.backends import triton_fused, triton_topk
from minikernel.backends.triton_fused import BACKEND, INTERPRETED
from minikernel.backends.triton_topk import TopkPlan, build, plan, reasons, sources
from minikernel.problem import MOST_K, TOPK, Problem

H200 = driver.Device(capability=90, sm_count=132, shared_per_block=232448, shared_per_sm=233472, l2_bytes=60 << 20)
A100 = replace(H200, capability=80, sm_count=108)

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_numerics_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")


def problem(
    outer: int, cols: int, inner: int = 1, *, k: int = 8, dtype: str = "float32", **more: object
) -> Problem:
    given = {"out_dtype": dtype, "strides": (cols * inner, inner, 1)} | more
    return Problem(TOPK, "cuda", 0, dtype, outer=outer, cols=cols, inner=inner, k=k, **given)  # type: ignore[arg-type]


# The plan


def test_few_rows_are_spread_over_the_gpu_and_many_are_not() -> None:
    for rows in (1, 8, 64):
        assert 64 <= plan(problem(rows, 128256), H200).grids[0] <= 32 * 132
    assert plan(problem(4096, 1024), H200).parts == 1


def test_rows_of_one_tile_take_one_launch() -> None:
    for rows, cols in ((32768, 256), (1, 1000), (4096, 64)):
        chosen = plan(problem(rows, cols), H200)
        assert chosen.cols >= cols
        assert chosen.grids == (chosen.blocks,)
    assert plan(problem(65536, 64), H200).rows > 1
    assert plan(problem(64, 128256), H200).grids[1:] == (64,)


def test_accesses_are_wide_wherever_a_row_starts() -> None:
    assert plan(problem(64, 128256), H200).vector == 4
    assert not plan(problem(64, 128256), H200).peel
    assert plan(problem(64, 50257, dtype="bfloat16"), H200).vector == 8
    assert plan(problem(64, 50257, dtype="bfloat16"), H200).peel
    assert plan(problem(64, 50256, x_offset=4), H200).peel
    assert not plan(problem(64, 50257, strides=(100514, 2, 0)), H200).peel


def test_kernels_overlap_only_where_the_gpu_can() -> None:
    assert plan(problem(64, 128256), H200).overlap
    assert not plan(problem(64, 128256), A100).overlap


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_plan_covers_its_problem(dtype: str, device: driver.Device) -> None:
    for outer in (1, 7, 4096):
        for cols in (1, 3, 8, 257, 1024, 2049, 16384, 65537, 2**20 + 1, triton_topk.MAX_COLS):
            for inner in (1, 2, 5, 9, 100):
                for strides in ((cols * inner, inner, 1), (1, outer, outer * cols), (cols * inner, 1, cols)):
                    for k in {1, min(8, cols), min(MOST_K, cols)}:
                        given = problem(outer, cols, inner, k=k, dtype=dtype, strides=strides)
                        check_cover(plan(given, device), given)


def check_cover(chosen: TopkPlan, given: Problem) -> None:
    rows = chosen.blocks * chosen.rows // (given.outer if chosen.within else 1)
    assert rows >= (given.inner if chosen.within else given.rows)
    part = -(-(given.cols + (chosen.vector - 1 if chosen.peel else 0)) // chosen.parts)
    assert chosen.reach * chosen.cols >= part
    assert given.k <= chosen.keep <= chosen.cols
    assert chosen.keep * max(chosen.parts, chosen.reach) <= 8192, "what a program can choose from"
    assert chosen.rows * chosen.cols <= 4096
    sizes = (chosen.rows, chosen.cols, chosen.tiles, chosen.keep, chosen.parts, chosen.reach, chosen.warps)
    for size in (*sizes, chosen.pick_warps):
        assert size & (size - 1) == 0 < size, (given, chosen)


def test_what_it_does_not_take_it_declines() -> None:
    assert reasons(problem(4, triton_topk.MAX_COLS), H200) == []
    assert "elements" in reasons(problem(4, triton_topk.MAX_COLS + 1), H200)[0]
    assert "programs" in reasons(problem(2**31, 300), H200)[0]
    assert TOPK in BACKEND.ops


# The compiled code

PROBLEMS = [
    problem(64, 128256),
    problem(1, 128256, k=64),
    problem(64, 50257, dtype="bfloat16"),
    problem(4096, 1024),
    problem(8192, 256, dtype="float16", out_dtype="float32"),
    problem(300, 1000, k=64),
    problem(65536, 64, k=2, dtype="bfloat16"),
    problem(64, 128256, k=64, dtype="float64"),
    problem(8, 1000, 4096, dtype="float16"),
    problem(1, triton_topk.MAX_COLS, k=64, dtype="float64"),
]


@compiled
@pytest.mark.parametrize(
    ("capability", "given"),
    [(90, given) for given in PROBLEMS]
    + [(capability, given) for capability in (80, 100) for given in PROBLEMS[::3]],
    ids=lambda p: f"{p.dtype}-{p.outer}x{p.cols}x{p.inner}-{p.k}" if isinstance(p, Problem) else str(p),
)
def test_kernels_compile_without_spills(capability: int, given: Problem, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for source in sources(given, plan(given, replace(H200, capability=capability))):
        kernel = source.compile(capability)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])
        report = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
        assert usage, report
        assert int(usage[2]) == 0, report
        assert int(usage[1]) * 32 * source.warps <= 65536, report


@compiled
@pytest.mark.parametrize("given", PROBLEMS[:3], ids=lambda p: f"{p.dtype}-{p.outer}x{p.cols}")
def test_accesses_are_16_bytes_wide_and_parameters_as_the_driver_passes_them(given: Problem) -> None:
    pytest.importorskip("triton")
    scan, pick = sources(given, plan(given, H200))
    ptx = scan.compile(90).asm["ptx"]
    assert re.search(r"ld\.global\S*v4\.b32", ptx)
    for source in (scan, pick):
        names = [name for name, _ in source.types]
        assert names == ["x", "out", "partials", "indices", "outer", "cols", "x_outer", "k"]
        entry = source.compile(90).asm["ptx"].split(".entry")[1].split("{")[0]
        params = ["P" if ".ptr" in line else "i" for line in entry.split("\n") if ".param" in line]
        assert "".join(params).startswith("PPPPiiii")
        assert len(params) <= len(names) + 2  # Triton's own, for which the driver passes null


# The numerics


def test_numerics_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    if INTERPRETED:
        pytest.skip("this is that process")
    assert "passed" in in_the_interpreter(__file__, "interpreted and not (float64 or bfloat16)")


DTYPES = ["float16", "bfloat16", "float32", "float64"]
#: Relative error of a probability. A whole unit for bfloat16, which the interpreter truncates where the GPU rounds.
TOLERANCE = {"float16": 2**-11 + 1e-5, "bfloat16": 2**-7 + 1e-5, "float32": 5e-6, "float64": 1e-13}
#: Devices for which plans differ: one without a launch to spare, and one that wants many programs.
DEVICES = {"small": triton_fused._CPU, "large": replace(triton_fused._CPU, sm_count=132)}
#: Parts of a few tiles, which the plan would not cut short rows into.
PARTS: dict[str, Any] = {"cols": 16, "tiles": 2, "parts": 4, "keep": 8}


def random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return (np.random.default_rng(42).standard_normal(shape) * 4).astype(np.dtype(dtype))


def reference(x: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and indices over axis 1, in float64."""
    x = x.astype(np.float64)
    maximum = x.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        powers = np.exp(x - maximum)
        result = powers / powers.sum(axis=1, keepdims=True)
    indices = np.argsort(-x, axis=1, kind="stable")[:, :k]
    result = np.take_along_axis(result, indices, 1)
    indices = np.where(np.isfinite(maximum), indices, np.arange(k)[None, :, None])
    return np.where(np.isfinite(maximum), result, np.nan), indices


def check(x: np.ndarray, k: int, device: str = "large", *, out_dtype: str = "", **changes: Any) -> TopkPlan:
    """Compare a run in the interpreter with the reference; ``changes`` to the plan, whose reach follows."""
    outer, cols, inner = x.shape
    dtype = out_dtype or x.dtype.name
    out = np.full(outer * k * inner + 16, 7, np.dtype(dtype))
    indices = np.full((outer, k, inner), -7)
    given = Problem(
        TOPK, "cpu", 0, x.dtype.name, dtype, outer, cols, inner,
        tuple(stride // x.itemsize for stride in x.strides), x.ctypes.data % 16, k=k,  # type: ignore[arg-type]
    )  # fmt: skip
    chosen = replace(plan(given, DEVICES[device]), **changes)
    if changes:
        part = -(-(cols + chosen.vector) // chosen.parts)
        chosen = replace(chosen, reach=1 << (-(-part // chosen.cols) - 1).bit_length(), picks=given.rows)
        check_cover(chosen, given)
    before = x.copy()

    def bits(array: np.ndarray) -> np.ndarray:
        return array.view(np.uint16) if array.dtype.name == "bfloat16" else array

    build(given, chosen).run(bits(x), bits(out), 0, 0, indices)
    expected, expected_indices = reference(x, k)
    assert (indices == expected_indices).all()
    found, behind = np.split(out.astype(np.float64), [indices.size])
    assert (behind == 7).all()
    found = found.reshape(indices.shape)
    tiny = {"float16": 6e-8, "float64": 1e-300}.get(dtype, 1e-37)
    assert np.allclose(found, expected, rtol=TOLERANCE[dtype], atol=tiny, equal_nan=True)
    assert bits(x).tobytes() == bits(before).tobytes()
    return chosen


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_values(dtype: str) -> None:
    for shape, k in [
        ((3, 5, 1), 5),
        ((1, 1, 1), 1),
        ((9, 37, 1), 2),
        ((2, 300, 1), 8),
        ((1, 1029, 1), 64),
        ((2, 33, 3), 4),
        ((1, 100, 20), 7),
    ]:
        check(random(shape, dtype), k)
    assert check(random((41, 20, 1), dtype), 3, "small").rows > 1


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7])
def test_interpreted_parts(dtype: str, k: int) -> None:
    for cols in (8, 64, 131, 256):  # 8: parts that have nothing to do
        check(random((2, cols, 1), dtype), k, **PARTS, rows=1, blocks=2)


@interpreted
def test_interpreted_long_rows_are_planned_in_parts() -> None:
    chosen = check(random((1, 5003, 1), "float32"), 8)
    assert chosen.parts > 1
    assert chosen.reach > 1
    assert chosen.peel
    chosen = check(random((1, 9000, 1), "bfloat16"), 33)
    assert chosen.parts > 1
    assert chosen.vector == 8


@interpreted
@pytest.mark.parametrize("route", [{}, PARTS | {"rows": 1, "blocks": 3}], ids=["planned", "parts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_ties_go_to_the_lower_index(dtype: str, route: dict[str, Any]) -> None:
    x = np.zeros((3, 200, 1), random((1,), dtype).dtype)
    check(x, 8, **route)
    x[0, ::2] = -0.0  # equal to 0.0
    x[1] = np.random.default_rng(1).integers(0, 3, (200, 1))
    x[2, 100:] = 1
    x[2, 190] = 2
    check(x, 8, **route)
    x[:, :] = np.random.default_rng(2).integers(0, 50, (3, 200, 1))
    check(x, 7, **route)


@interpreted
@pytest.mark.parametrize("route", [{}, PARTS | {"rows": 1, "blocks": 4}], ids=["planned", "parts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_sorted_rows(dtype: str, route: dict[str, Any]) -> None:
    rising = np.arange(230) / 8 - 20
    rows = [rising, rising[::-1], np.repeat(rising[:23], 10), np.tile(rising[:23], 10)]
    check(np.stack(rows)[:, :, None].astype(random((1,), dtype).dtype), 8, **route)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("route", [{}, PARTS | {"rows": 1, "blocks": 9}], ids=["planned", "parts"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_infinities_and_nan(dtype: str, route: dict[str, Any]) -> None:
    inf, nan = np.inf, np.nan
    special = [{0: -inf}, {0: inf}, {5: nan}, {3: inf, 40: nan}, {2: nan, 9: -inf}, {66: nan}, {50: inf}]
    x = random((len(special) + 2, 67, 1), dtype)
    for row, entries in enumerate(special):
        for col, value in entries.items():
            x[row, col] = value
    x[-2] = -inf
    x[-1] = -inf
    x[-1, [3, 60], 0] = 1, 2  # then -inf by index
    chosen = check(x, 6, **route)
    assert chosen.parts == route.get("parts", 1)


@interpreted
def test_interpreted_order_outlives_the_probabilities() -> None:
    x = np.array([-2000, -1000, 0, -1001, -np.inf, np.finfo(np.float32).min], np.float32)[None, :, None]
    check(x, 6)
    check(np.repeat(x, 40, axis=1), 64, **PARTS | {"rows": 1, "blocks": 1, "keep": 64, "cols": 64, "parts": 2})


@interpreted
@pytest.mark.parametrize("route", [{}, PARTS], ids=["planned", "parts"])
def test_interpreted_strides(route: dict[str, Any]) -> None:
    x = random((2, 60, 9), "float32")
    for view in (
        x.transpose(2, 1, 0),
        x[::-1, ::-1, ::-1],
        x[:, 1:, :1],
        x[::2, ::3, ::5],
        np.broadcast_to(x[:1, :, :1], (2, 60, 3)),
        x[0].T[:, :, None],
        x.transpose(0, 2, 1).copy().transpose(0, 2, 1),
    ):
        check(view, 5, **route)


@interpreted
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_interpreted_any_alignment(dtype: str) -> None:
    for offset in (0, 1, 6):
        memory = np.full(2 * 1031 + 16, 60, dtype)
        x = memory[offset : offset + 2 * 1031]
        x[:] = random((x.size,), dtype)
        x[[0, 1030, 1031, -1]] = 50  # the largest, beside what isn't theirs
        assert check(x.reshape(2, 1031, 1), 8).peel


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_interpreted_half_to_float32(dtype: str) -> None:
    check(random((3, 100, 1), dtype), 8, out_dtype="float32")
