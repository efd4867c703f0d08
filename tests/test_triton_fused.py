"""triton-fused without a GPU: the plan, the compiled code, and real numerics in Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted, so the tests of numerics run in a
process of their own, which ``test_numerics_in_the_interpreter`` starts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isolated import in_the_interpreter

from minikernel import driver
from minikernel.backends import triton_fused
from minikernel.backends.triton_fused import INTERPRETED, TritonPlan, build, plan, sources
from minikernel.problem import BACKWARD, OPS, Mask, Problem

H200 = driver.Device(capability=90, sm_count=132, shared_per_block=232448, shared_per_sm=233472, l2_bytes=60 << 20)
A100 = driver.Device(capability=80, sm_count=108, shared_per_block=166912, shared_per_sm=167936, l2_bytes=40 << 20)

interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_numerics_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")


def problem(
    outer: int,
    cols: int,
    inner: int = 1,
    *,
    dtype: str = "float32",
    out_dtype: str | None = None,
    **more: object,
) -> Problem:
    given = {
        "op": "softmax",
        "device": "cuda",
        "index": 0,
        "dtype": dtype,
        "out_dtype": out_dtype or dtype,
        "strides": (cols * inner, inner, 1),
    }
    return Problem(outer=outer, cols=cols, inner=inner, **(given | more))  # type: ignore[arg-type]


PROBLEMS = [
    *(
        problem(outer, cols, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for outer, cols in [
            (512, 600),
            (262144, 64),
            (32768, 8),
            (4096, 2049),
            (16384, 16384),
            (4096, 32768),
            (512, 50257),
            (1, 128256),
            (8, 1048576),
        ]
    ),
    problem(64, 100001, dtype="float64"),
    problem(4096, 16383, dtype="float64"),
    problem(4096, 16384, dtype="float64", op="log_softmax"),
    problem(4096, 4096, dtype="float16", out_dtype="float32"),
    problem(1, 8192, 8192),
    problem(32, 81, 15130, dtype="bfloat16"),
    problem(8, 1000, 4096, dtype="float16"),
    problem(8192, 1000, 2),
    problem(8192, 8192, strides=(1, 8192, 0)),
    problem(8192, 1024, strides=(1025, 1, 0), x_offset=4),
    problem(8192, 1024, strides=(0, 1, 0)),
    problem(4096, 16384, dtype="bfloat16", op="softmax_backward"),
    problem(4096, 16384, dtype="float16", op="log_softmax_backward"),
]


# The plan


def test_short_rows_share_a_program_and_long_ones_take_one_each() -> None:
    assert plan(problem(262144, 64), H200).rows > 1
    assert plan(problem(32768, 1024), H200).rows == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rows_that_fit_on_chip_are_read_once(dtype: str) -> None:
    for cols in (1, 8, 600, 1023, 4096, 16385, 32768):
        assert not plan(problem(4096, cols, dtype=dtype), H200).long


def test_few_long_rows_are_spread_over_the_gpu() -> None:
    for device in (H200, A100):
        for rows, cols in ((1, 128256), (8, 128256), (8, 1048576)):
            chosen = plan(problem(rows, cols), device)
            assert chosen.parts > 1
            assert chosen.grid <= 1024
    assert plan(problem(2048, 128256), A100).parts == 1


def test_a_cluster_reads_a_long_row_once() -> None:
    for cols in (50257, 65536, 128256, 262144):
        chosen = plan(problem(2048, cols, dtype="bfloat16"), H200)
        assert not chosen.long
        assert 1 < chosen.cluster <= 16
    assert plan(problem(2048, 32768, dtype="bfloat16"), H200).cluster == 1, "a program alone can hold it"
    assert plan(problem(2048, 50257), A100).cluster == 1
    assert plan(problem(2048, 50257), replace(H200, max_cluster=2)).cluster <= 2


def test_odd_rows_are_peeled_if_x_and_out_are_odd_alike() -> None:
    assert plan(problem(4096, 2049), H200).peel
    assert plan(problem(4096, 2048, x_offset=4, out_offset=4), H200).peel
    assert not plan(problem(4096, 2048), H200).peel
    assert not plan(problem(4096, 2049, strides=(2050, 1, 0)), H200).peel
    assert not plan(problem(4096, 2049, x_offset=4), H200).peel
    assert not plan(problem(4096, 2049, dtype="float16", out_dtype="float32"), H200).peel


def test_vectors_are_as_wide_as_every_stride_allows() -> None:
    assert plan(problem(4096, 4096, dtype="bfloat16"), H200).vector == 8
    assert plan(problem(4096, 4096, dtype="float16", out_dtype="float32"), H200).vector == 4
    assert plan(problem(32, 81, 15130), H200).vector == 2
    assert plan(problem(8192, 1024, strides=(1025, 1, 0)), H200).vector == 1
    assert plan(problem(8192, 1024, strides=(0, 1, 0)), H200).vector == 4


def test_kernels_overlap_only_where_the_gpu_can() -> None:
    assert plan(problem(262144, 64), H200).overlap
    assert not plan(problem(262144, 64), A100).overlap


def test_a_row_that_one_warp_cannot_hold_has_a_piece_for_each() -> None:
    assert plan(problem(4096, 600), H200).pieces == 1
    for rows, cols in ((4096, 2049), (64, 50257), (8192, 16384)):
        chosen = plan(problem(rows, cols), H200)
        assert chosen.pieces == chosen.warps > 1
        assert chosen.rows == 1


def test_a_half_type_stays_packed_where_registers_are_short() -> None:
    assert plan(problem(4096, 32768, dtype="bfloat16"), H200).packed
    assert not plan(problem(4096, 32768), H200).packed
    assert not plan(problem(4096, 256, dtype="bfloat16"), H200).packed
    gradients = [problem(4096, cols, dtype="bfloat16", op="softmax_backward") for cols in (8192, 16384)]
    assert [plan(given, H200).packed for given in gradients] == [False, True]


def test_only_small_inputs_are_the_first_to_leave_the_l2_cache() -> None:
    assert plan(problem(512, 600), H200).evicted
    assert not plan(problem(4096, 600), H200).evicted
    assert not plan(problem(512, 600, op="softmax_backward"), H200).evicted


def test_programs_have_more_warps_where_many_follow_one_another() -> None:
    assert [plan(problem(rows, 600, dtype="bfloat16"), H200).warps for rows in (512, 2048, 8192)] == [1, 2, 4]


def test_the_gradient_of_a_short_row_is_one_warps() -> None:
    def of(cols: int) -> TritonPlan:
        return plan(problem(4096, cols, dtype="bfloat16", op="softmax_backward"), H200)

    assert (of(1024).pieces, of(1024).tiles) == (1, 4)
    assert (of(4096).pieces, of(4096).tiles) == (8, 2)


def covered(chosen: TritonPlan, given: Problem) -> bool:
    rows = chosen.blocks * chosen.rows // (given.outer if chosen.within else 1)
    lead = chosen.vector - 1 if chosen.peel else 0
    part = -(-(lead + given.cols) // chosen.parts)
    fits = chosen.long or chosen.pieces * chosen.tiles * chosen.cols >= part
    return rows >= (given.inner if chosen.within else given.rows) and fits


@pytest.mark.parametrize("device", [H200, A100], ids=["H200", "A100"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_every_plan_covers_its_problem(dtype: str, device: driver.Device) -> None:
    for outer in (1, 7, 4096):
        for cols in (1, 3, 8, 257, 1024, 2049, 16384, 65537, 2**20 + 1):
            for inner in (1, 2, 5, 9, 100):
                given = problem(outer, cols, inner, dtype=dtype)
                chosen = plan(given, device)
                assert covered(chosen, given), (given, chosen)
                assert 1 <= chosen.warps <= 32
                assert chosen.pieces in (1, chosen.warps)
                for size in (chosen.rows, chosen.cols, chosen.warps, chosen.parts):  # tiles may be any number
                    assert size & (size - 1) == 0, chosen


def test_columns_are_counted_in_vectors_only_where_they_are_neighbors() -> None:
    """What isn't cut at the row's last element is cut at a multiple of the vector."""
    for op, inner, cols in product(("softmax", "softmax_backward"), range(1, 25), (33, 1025, 2049, 4097, 20001)):
        chosen = plan(problem(64, cols, inner, op=op), H200)
        in_vectors = chosen.long and not (chosen.within or chosen.peel)
        assert not in_vectors or cols % chosen.vector == 0, (op, cols, inner)


def test_grids_stay_within_cuda_limits() -> None:
    assert plan(problem(2**31 + 8, 1, dtype="float16"), H200).grid < 2**31
    assert plan(problem(2**22 + 8, 1024, dtype="float16"), H200).grid < 2**31


def test_the_number_of_kernels_does_not_grow_with_row_lengths() -> None:
    def kernels(lengths: range, dtype: str = "float32") -> set[object]:
        return {
            source
            for cols in lengths
            for given in [problem(4096, cols, dtype=dtype)]
            for source in sources(given, plan(given, H200))
        }

    assert len(kernels(range(1, 70000, 3))) <= 75
    assert len(kernels(range(1, 70000, 3), "bfloat16")) <= 75
    assert len(kernels(range(70000, 2000000, 1111))) <= 20


# The compiled code


def compile_for(given: Problem, capability: int) -> list[object]:
    device = replace(H200, capability=capability)
    return [source.compile(capability) for source in sources(given, plan(given, device))]


@compiled
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("given", PROBLEMS, ids=lambda p: f"{p.dtype}-{p.outer}x{p.cols}x{p.inner}-{p.strides[0]}")
def test_kernels_compile_without_spills(given: Problem, capability: int, tmp_path: Path) -> None:
    check_registers(given, capability, tmp_path)


def check_registers(given: Problem, capability: int, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for kernel in compile_for(given, capability):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(kernel.asm["cubin"])  # type: ignore[attr-defined]
        report = subprocess.run([cuobjdump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
        usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
        assert usage, report
        assert int(usage[2]) == 0, report
        assert int(usage[1]) * 32 * kernel.metadata.num_warps <= 65536, report  # type: ignore[attr-defined]


MASKS = {
    (4096, 4096): Mask(((4096, 4096),), 1, ()),
    (65536, 512): Mask(((4, 1 << 18), (32, 0), (512, 512)), 1, ()),
    (8, 1000, 4096): Mask(((8, 4096000),), 4096, ((4096, 1),)),
    (4096, 2049): Mask(((4096, 0),), 1, ()),
    (512, 50257): Mask(((512, 50257),), 1, ()),
}
FEATURED = [
    problem(*shape, op=op, dtype=dtype, **more)
    for dtype in ("float32", "bfloat16")
    for op in ("softmax", "log_softmax", "softmax_backward", "log_softmax_backward")
    for shape, more in [
        *((shape, {"mask": mask, "scaled": True, "causal": len(shape) == 2}) for shape, mask in MASKS.items()),
        ((65536, 65), {"mask": Mask(((65536, 65),), 1, ())}),
        ((4096, 1024), {"causal": True}),
        ((4096, 32768), {"scaled": True}),
        ((8, 2097152), {"scaled": True, "causal": True}),
    ]
]


@compiled
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("given", FEATURED, ids=lambda p: f"{p.op}-{p.dtype}-{p.outer}x{p.cols}x{p.inner}")
def test_kernels_with_features_compile_without_spills(given: Problem, capability: int, tmp_path: Path) -> None:
    check_registers(given, capability, tmp_path)


@compiled
@pytest.mark.parametrize(("dtype", "access"), [("float32", "b32"), ("bfloat16", "v2.b32")])
def test_a_mask_is_read_in_vectors_as_long_as_those_of_the_input(dtype: str, access: str) -> None:
    pytest.importorskip("triton")
    for shape, mask in list(MASKS.items())[:3]:
        for op in ("softmax", "softmax_backward"):
            (kernel,) = compile_for(problem(*shape, op=op, dtype=dtype, mask=mask), 90)
            found = re.findall(r"ld\.global\S*", kernel.asm["ptx"])  # type: ignore[attr-defined]
            assert not [instruction for instruction in found if instruction.endswith("b8")], found
            assert [instruction for instruction in found if instruction.endswith(access)], found


@compiled
@pytest.mark.parametrize("given", [*PROBLEMS[:3], problem(8, 1048576), problem(1, 128256), problem(1, 1)])
def test_parameters_are_two_or_three_pointers_and_the_run_time_integers(given: Problem) -> None:
    pytest.importorskip("triton")
    chosen = plan(given, H200)
    for source, kernel in zip(sources(given, chosen), compile_for(given, 90), strict=True):
        ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
        entry = ptx[ptx.index(".entry") :].split("{")[0]
        params = [
            "pointer" if ".ptr" in line else line.split()[1] for line in entry.split("\n") if ".param" in line
        ]
        pointers = 3 if chosen.long and chosen.parts > 1 else 2
        integers = len(source.types) - pointers
        assert [name for name, _ in source.types][:pointers] == ["x", "out", "partials"][:pointers]
        assert params[: pointers + integers] == ["pointer"] * pointers + [".u64"] * integers
        assert len(params) <= pointers + integers + 2  # Triton's own, for which the driver passes null


@compiled
@pytest.mark.parametrize(
    "given", [problem(512, 600), problem(8, 128256), problem(4096, 1024, op="softmax_backward")]
)
def test_a_successor_starts_once_all_loads_are_on_their_way(given: Problem) -> None:
    pytest.importorskip("triton")
    (kernel,) = compile_for(given, 90)
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    at = [ptx.index(f"griddepcontrol.{word}") for word in ("wait", "launch_dependents")]
    assert at[0] < ptx.index("ld.global") < ptx.rindex("ld.global") < at[1] < ptx.index("st.global")


@compiled
def test_the_successor_of_short_programs_starts_at_once() -> None:
    pytest.importorskip("triton")
    (kernel,) = compile_for(problem(4096, 32), 90)
    ptx = kernel.asm["ptx"]  # type: ignore[attr-defined]
    assert ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait") < ptx.index("ld.global")


@compiled
@pytest.mark.parametrize(
    ("given", "access"),
    [
        (problem(4096, 4096), "v4.b32"),
        (problem(4096, 4096, dtype="bfloat16"), "v4.b32"),
        (problem(4096, 2049, dtype="bfloat16"), "v4.b32"),
        (problem(1, 8192, 8192), "v4.b32"),
        (problem(4096, 4096, dtype="float64"), "v2.b64"),
        (problem(2048, 128257), "v4.b32"),
    ],
)
def test_accesses_are_16_bytes_wide(given: Problem, access: str) -> None:
    pytest.importorskip("triton")
    (kernel,) = compile_for(given, 90)
    for direction in ("ld", "st"):
        found = re.findall(rf"{direction}\.global\S*", kernel.asm["ptx"])  # type: ignore[attr-defined]
        assert any(instruction.endswith(access) for instruction in found), found


def test_importing_the_backend_imports_no_framework() -> None:
    code = "import sys, minikernel.backends.triton_fused; print({'torch', 'triton'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


# The numerics


@pytest.mark.parametrize("which", ["not features", "features"])
def test_numerics_in_the_interpreter(which: str) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("torch")
    if INTERPRETED:
        pytest.skip("this is that process")
    assert "passed" in in_the_interpreter(__file__, f"interpreted and {which}")


def reference(
    x: np.ndarray, op: str = "softmax", *, scale: float = 1, kept: np.ndarray | bool = True
) -> np.ndarray:
    """Over axis 1, in float64."""
    with np.errstate(all="ignore"):
        x = np.where(kept, x.astype(np.float64) * scale, -np.inf)
        shifted = x - x.max(axis=1, keepdims=True)
        total = np.exp(shifted).sum(axis=1, keepdims=True)
        return shifted - np.log(total) if op == "log_softmax" else np.exp(shifted) / total


def reference_gradient(
    y: np.ndarray, dy: np.ndarray, op: str, *, scale: float = 1, kept: np.ndarray | bool = True
) -> np.ndarray:
    """Of ``op`` over axis 1, in float64."""
    y, dy = y.astype(np.float64), dy.astype(np.float64)
    with np.errstate(all="ignore"):
        if op == "log_softmax":
            dx = dy - np.exp(y) * dy.sum(axis=1, keepdims=True)
        else:
            dx = y * (dy - np.where(kept, dy * y, 0).sum(axis=1, keepdims=True))
    return np.where(kept, scale * dx, 0)


def axes_of(array: np.ndarray, axes: range) -> tuple[tuple[int, int], ...]:
    return tuple((array.shape[i], array.strides[i]) for i in axes if array.shape[i] > 1)


def run(
    x: np.ndarray,
    op: str = "softmax",
    *,
    dy: np.ndarray | None = None,
    out: np.ndarray | None = None,
    out_dtype: str = "",
    scale: float | None = None,
    mask: np.ndarray | None = None,
    outer_axes: int = 1,
    causal: bool = False,
    **changes: object,
) -> np.ndarray:
    """Softmax over axis 1 of an (outer, cols, inner) array in the interpreter; ``changes`` to the plan.

    Or its gradient, where ``x`` is y and there is a ``dy``. A mask has ``outer_axes`` before the columns.
    """

    def bits(array: np.ndarray) -> np.ndarray:
        return array.view(np.uint16) if array.dtype.name == "bfloat16" else array

    if out is None:
        out = np.full(x.shape, 7, dtype=np.dtype(out_dtype or x.dtype))
    layout = None
    if mask is not None:
        outer, inner = range(outer_axes), range(outer_axes + 1, mask.ndim)
        col, start = mask.strides[outer_axes], mask.ctypes.data % 16
        layout = Mask(axes_of(mask, outer), col, axes_of(mask, inner), start)
    given = Problem(
        op if dy is None else BACKWARD[op],
        "cpu",
        0,
        x.dtype.name,
        out.dtype.name,
        *x.shape,
        strides=tuple(stride // x.itemsize for stride in x.strides),  # type: ignore[arg-type]
        x_offset=x.ctypes.data % 16 if dy is None else 0,
        out_offset=out.ctypes.data % 16 if dy is None else 0,
        scaled=scale is not None,
        mask=layout,
        causal=causal,
    )
    chosen = replace(plan(given, triton_fused._CPU), **changes)  # type: ignore[arg-type]
    more = (mask, 1.0 if scale is None else scale) if given.features else ()
    build(given, chosen).run(bits(x), bits(out), 0, 0 if dy is None else bits(dy), *more)
    return out


DTYPES = ["float16", "bfloat16", "float32", "float64"]
#: Absolute error allowed for probabilities: half a unit in the last place and what the arithmetic adds.
#: A whole unit for bfloat16, which the interpreter truncates where the GPU rounds.
TOLERANCE = {"float16": 2**-12 + 1e-6, "bfloat16": 2**-8 + 1e-6, "float32": 5e-7, "float64": 1e-15}
#: Ways to run a row: as planned, in several tiles, and in parts by two launches.
ROUTES = {
    "planned": {},
    "long": {"long": True, "cols": 16},
    "split": {"long": True, "cols": 16, "parts": 4},
}


def random(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    return (np.random.default_rng(42).standard_normal(shape) * 4).astype(np.dtype(dtype))


@interpreted
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_values(dtype: str, op: str, route: str) -> None:
    shapes = [(3, 5, 1), (5, 37, 1), (3, 129, 1), (3, 64, 1), (2, 33, 3), (2, 40, 20), (1, 1, 1), (7, 1, 1)]
    for shape in shapes:
        x = random(shape, dtype)
        before = x.copy()
        found = run(x, op, **ROUTES[route]).astype(np.float64)
        expected = reference(x, op)
        scale = 1 if op == "softmax" else 2 * (1 + np.abs(expected).max())
        assert np.abs(found - expected).max() <= TOLERANCE[dtype] * scale, shape
        assert (x == before).all()


@interpreted
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_clusters(dtype: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_cluster(x: np.ndarray) -> np.ndarray:
        # Programs run one after another: only in a second round does a cluster's first know what the others found.
        pretend_cluster(monkeypatch, programs=12)
        layout = {"rows": 1, "blocks": 3, "cols": 64, "tiles": 3, "pieces": 2, "warps": 2, "parts": 4}
        run(x, op, **layout)
        return run(x, op, **layout).astype(np.float64)

    for cols in (64, 515, 700, 1024):  # 64: parts that have nothing to do; 700 aligned, 515 peeled
        x = random((3, cols, 1), dtype)
        x[0, : cols // 2] = -np.inf
        expected = reference(x, op)
        found = run_cluster(x)
        finite = np.isfinite(expected)
        assert (found[~finite] == -np.inf).all()
        scale = 1 if op == "softmax" else 2 * (1 + np.abs(expected[finite]).max())
        assert np.abs(found[finite] - expected[finite]).max() <= TOLERANCE[dtype] * scale, cols
    x[1, 600] = np.nan
    x[2] = -np.inf
    assert (np.isnan(run_cluster(x)).all(axis=(1, 2)) == [False, True, True]).all()


@interpreted
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_rows_in_pieces(dtype: str, op: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed:
        remember(monkeypatch)
    layout = {"rows": 1, "blocks": 3, "cols": 64, "tiles": 3, "pieces": 4, "warps": 4, "packed": packed}
    for cols in (515, 600, 767 - 8):
        for offset in (0, 3):
            x = random((3 * cols + offset,), dtype)[offset:].reshape(3, cols, 1)
            x[0, : cols // 2] = -np.inf
            x[0, -1] = 9  # beyond the last whole vector
            x[1, 0] = np.nan
            expected = reference(x, op)
            found = run(x, op, out=np.full(x.size + offset, 7, x.dtype)[offset:].reshape(x.shape), **layout)
            assert (np.isnan(found.astype(np.float64)) == np.isnan(expected)).all()
            finite = np.isfinite(expected)
            scale = 1 if op == "softmax" else 2 * (1 + np.abs(expected[finite]).max())
            error = np.abs(found.astype(np.float64)[finite] - expected[finite]).max()
            assert error <= TOLERANCE[dtype] * scale, (cols, offset)


def remember(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do without ``forget``: what the interpreter can't run keeps a compiler from remembering, no more."""
    from minikernel.backends import triton_kernels

    monkeypatch.setattr(triton_kernels, "forget", lambda values, zero, PACKED: values)


def pretend_cluster(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """Replace what the interpreter can't run by a list of what each of the ``programs`` has found."""
    import triton.language as tl

    from minikernel.backends import triton_kernels

    found: list[tuple[np.ndarray, np.ndarray]] = []

    def merge(
        maximum: Any, total: Any, part: Any, PARTS: Any, PIECES: Any, PRECISE: Any, scale: Any = None
    ) -> tuple[Any, Any]:
        block = len(found) % programs // PARTS
        found.append((maximum.handle.data.copy(), total.handle.data.copy()))
        cluster = found[block * PARTS : (block + 1) * PARTS]
        maxima, totals = (np.concatenate(values) for values in zip(*cluster, strict=True))
        row_maximum = np.fmax.reduce(maxima, axis=None)
        factor = 1 if scale is None else float(scale.handle.data[0]) / 2  # it is for differences of halves
        row_total = (totals * np.exp((maxima - row_maximum) * factor)).sum()
        return tuple(tl.full((1,), float(value), maximum.dtype) for value in (row_maximum, row_total))

    monkeypatch.setattr(triton_kernels, "enter_cluster", lambda: None)
    monkeypatch.setattr(triton_kernels, "merge_over_cluster", merge)


@interpreted
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_interpreted_half_to_float32(dtype: str) -> None:
    x = random((3, 100, 1), dtype)
    assert np.abs(run(x, out_dtype="float32") - reference(x)).max() <= TOLERANCE["float32"]


@interpreted
@pytest.mark.parametrize("route", ROUTES)
def test_interpreted_strides(route: str) -> None:
    x = random((6, 48, 10), "float32")
    views = {
        "transposed": x.transpose(2, 1, 0),
        "reversed": x[::-1, ::-1, ::-1],
        "sliced": x[:, 1:, :1],
        "stepped": x[::2, ::3, ::5],
        "expanded": np.broadcast_to(x[:1, :, :1], (4, 48, 3)),
        "rows": x[:, :, 0].T[:, :, None],
        "columns contiguous, rows not": x.transpose(0, 2, 1).copy().transpose(0, 2, 1),
    }
    for name, view in views.items():
        found = run(view, out=np.full(view.shape, 7, np.float32), **ROUTES[route])
        assert np.abs(found - reference(view)).max() <= TOLERANCE["float32"], name


@interpreted
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("offset", range(8))
def test_interpreted_any_alignment(offset: int, route: str) -> None:
    for dtype, cols in (("float32", 67), ("float16", 131)):
        memory = random((3 * cols + 8,), dtype)
        x = memory[offset : offset + 3 * cols].reshape(3, cols, 1)
        room = np.full(3 * cols + 16, 7, dtype)
        out = room[offset : offset + 3 * cols].reshape(3, cols, 1)
        run(x, out=out, **ROUTES[route])
        assert np.abs(out - reference(x)).max() <= TOLERANCE[dtype]
        assert (room[:offset] == 7).all()
        assert (room[offset + 3 * cols :] == 7).all()


@interpreted
@pytest.mark.parametrize("route", ["long", "split"])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_interpreted_long_rows_are_read_to_the_last_element_and_no_further(
    offset: int, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minikernel.backends import triton_kernels

    found: list[np.ndarray] = []
    load = triton_kernels.load

    def record(pointers: Any, there: Any, *more: Any, **named: Any) -> Any:
        addresses = pointers.handle.data
        found.append(addresses[np.broadcast_to(there.handle.data, addresses.shape)])
        return load(pointers, there, *more, **named)

    monkeypatch.setattr(triton_kernels, "load", record)
    x = random((3 * 67 + offset,), "float32")[offset:].reshape(3, 67, 1)
    out = np.full(x.size + offset, 7, np.float32)[offset:].reshape(x.shape)
    assert np.abs(run(x, out=out, **ROUTES[route]) - reference(x)).max() <= TOLERANCE["float32"]
    read = np.unique(np.concatenate(found))
    assert (read == x.ctypes.data + 4 * np.arange(x.size)).all()


@interpreted
@pytest.mark.parametrize("route", ROUTES)
def test_interpreted_in_place(route: str) -> None:
    for shape in ((4, 67, 1), (2, 40, 12), (2, 40, 3)):
        x = random(shape, "float32")
        expected = reference(x)
        assert run(x, out=x, **ROUTES[route]) is x
        assert np.abs(x - expected).max() <= TOLERANCE["float32"]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_infinities_and_nan(dtype: str, route: str) -> None:
    inf, nan = np.inf, np.nan
    special = [{0: -inf}, {0: inf}, {5: nan}, {3: inf, 40: nan}, {2: nan, 9: -inf}, {66: nan}, {50: inf}]
    x = random((len(special) + 3, 67, 1), dtype)
    for row, entries in enumerate(special):
        for col, value in entries.items():
            x[row, col] = value
    x[-3] = -inf
    x[-2, :, 0] = -inf
    x[-2, 5] = nan
    expected = reference(x)
    found = run(x, **ROUTES[route]).astype(np.float64)
    assert (np.isnan(found) == np.isnan(expected)).all()
    assert np.isnan(found[[1, 2, 3, 4, 5, 6, -3, -2]]).all()
    assert np.nanmax(np.abs(found - expected)) <= TOLERANCE[dtype]
    assert found[0, 0, 0] == 0
    assert np.isnan(run(x, "log_softmax", **ROUTES[route])[[1, -3]].astype(np.float64)).all()


@interpreted
@pytest.mark.parametrize("route", [name for name in ROUTES if name != "planned"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_interpreted_parts_that_saw_only_negative_infinity_add_nothing(dtype: str, route: str) -> None:
    for k in (0, 64, 127, 200):
        x = np.full((1, 201, 1), -np.inf).astype(random((1,), dtype).dtype)
        x[0, k] = 10
        found = run(x, **ROUTES[route]).astype(np.float64)
        assert found[0, k, 0] == 1
        assert found.sum() == 1


@interpreted
@pytest.mark.parametrize("route", ROUTES)
def test_interpreted_exact_cases(route: str) -> None:
    half = run(np.zeros((1, 512, 1), np.float16), **ROUTES[route])
    assert (half == 1 / 512).all()
    low = run(np.full((4, 64, 1), -1e3, np.float32), **ROUTES[route])
    assert (low == 1 / 64).all()
    lowest = run(np.full((1, 64, 1), np.finfo(np.float64).min), **ROUTES[route])
    assert (lowest == 1 / 64).all()
    x = np.array([0.0, -88.0, -100.0], np.float32)[None, :, None]
    assert np.allclose(run(x)[0, :, 0], [1, 6.05e-39, 3.8e-44], rtol=0.3, atol=1.2e-38)
    big = np.array([2.0**24, 2.0**24 + 0.5])[None, :, None]
    assert np.allclose(run(big)[0, :, 0], [0.37754067, 0.62245933], rtol=1e-8)


@interpreted
def test_interpreted_bfloat16_of_small_integers() -> None:
    x = random((1, 3, 1), "bfloat16")
    x[0, :, 0] = [0, 1, 2]
    assert np.allclose(run(x)[0, :, 0].astype(np.float64), [0.0898, 0.2441, 0.6641], atol=1e-4)


@interpreted
def test_interpreted_small_probabilities_are_accurate() -> None:
    x = np.linspace(0, -87, 1000, dtype=np.float32)[None, :, None]
    assert (np.abs(run(x) / reference(x) - 1)).max() < 2e-6


@interpreted
def test_interpreted_same_bits_every_time() -> None:
    x = random((3, 201, 1), "float32")
    for changes in ROUTES.values():
        assert (run(x, **changes) == run(x, **changes)).all()


# Scale, mask and causality

FEATURES = {
    "scale": {"scale": 1.7},
    "negative scale": {"scale": -0.3},
    "mask": {"mask": True},
    "causal": {"causal": True},
    "all": {"scale": -2.5, "mask": True, "causal": True},
}
#: test_scores.py has float32, and on a GPU all of them.
FEATURE_DTYPES = ("bfloat16",)
#: Rows in tiles, in a program's pieces, in a cluster's and in parts of two launches.
FEATURE_ROUTES: dict[str, dict[str, object]] = {
    **ROUTES,
    "pieces": {"rows": 1, "tiles": 3, "pieces": 2, "warps": 2},
    "packed": {"rows": 1, "tiles": 3, "pieces": 2, "warps": 2, "packed": True},
}
SHAPES = [(3, 5, 1), (3, 1, 1), (4, 131, 1), (4, 64, 1), (2, 33, 3), (2, 33, 4), (2, 40, 20), (2, 33, 20)]
#: As many rows as columns, and more.
CAUSAL_SHAPES = [(7, 5, 1), (24, 24, 1), (34, 33, 1)]


def feature_cases(
    feature: str, dtype: str, route: str
) -> Iterator[tuple[str, np.ndarray, dict[str, Any], np.ndarray]]:
    """Operations, inputs, arguments, changes to the plan among them, and what they keep."""
    for shape in CAUSAL_SHAPES if "causal" in FEATURES[feature] else SHAPES:
        outer, cols, inner = shape
        given: dict[str, Any] = FEATURES[feature] | FEATURE_ROUTES[route]
        if "pieces" in given:
            if inner > 1:
                continue
            given |= {"blocks": outer, "cols": 32 if cols > 40 else 8}
        if "long" in given and 1 < inner <= 8:
            given["vector"] = 1  # as planned for long rows there
        kept = np.ones(shape, np.bool_)
        if "mask" in given:
            given["mask"] = np.random.default_rng(1).random(shape) < 0.6
            given["mask"][outer // 2] = False
            kept &= given["mask"]
        if "causal" in given:
            kept &= causal(outer, cols)
        for op in OPS:
            yield op, random(shape, dtype), given, kept


def causal(rows: int, cols: int) -> np.ndarray:
    return np.arange(cols)[:, None] <= (np.arange(rows) % cols)[:, None, None]


def check_values(found: np.ndarray, expected: np.ndarray, dtype: str, op: str, case: object) -> None:
    found = found.astype(np.float64)
    assert (np.isnan(found) == np.isnan(expected)).all(), case
    finite = np.isfinite(expected)
    assert (found[expected == -np.inf] == -np.inf).all(), case
    scale = 1 if op == "softmax" else 2 * (1 + np.abs(expected[finite]).max(initial=0))
    assert np.abs(found[finite] - expected[finite]).max(initial=0) <= TOLERANCE[dtype] * scale, case


@interpreted
@pytest.mark.parametrize("route", ["planned", "split", "packed"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_interpreted_features(dtype: str, feature: str, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(monkeypatch)
    for op, x, given, kept in feature_cases(feature, dtype, route):
        expected = reference(x, op, scale=given.get("scale", 1), kept=kept)
        dropped = np.resize(np.array([np.nan, np.inf, -np.inf, 3]), x.shape)
        x = np.where(kept, x, dropped.astype(x.dtype))
        check_values(run(x, op, **given), expected, dtype, op, (op, x.shape))


@interpreted
@pytest.mark.parametrize("route", ["long", "pieces", "packed"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_interpreted_gradients_with_features(
    dtype: str, feature: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(monkeypatch)
    for op, x, given, kept in feature_cases(feature, dtype, route):
        scale = given.get("scale", 1)
        y = reference(x, op, scale=scale, kept=kept).astype(x.dtype)
        dy = random(x.shape, dtype)[::-1].copy()
        dy[0] = np.nan
        if op == "softmax":  # no element that is dropped takes part
            dy[1:][~kept[1:]] = np.nan
        expected = reference_gradient(y, dy, op, scale=scale, kept=kept)
        found = run(y, op, dy=dy, **given).astype(np.float64)
        case = op, x.shape
        assert (np.isnan(found) == np.isnan(expected)).all(), case
        assert (found[~kept] == 0).all(), case
        error = np.nanmax(np.abs(found - expected), initial=0)
        largest = np.nanmax(np.abs(expected), initial=1)
        assert error <= 4 * TOLERANCE[dtype] * largest * x.shape[1] ** 0.5, case


@interpreted
@pytest.mark.parametrize("route", ["planned", "long"])
def test_interpreted_masks_of_any_layout(route: str) -> None:
    for cols, outer, inner in ((37, (2, 3, 2), ()), (40, (2, 3), ()), (37, (2,), (3, 5)), (40, (2, 2), (20,))):
        full = (*outer, cols, *inner)
        shape = (int(np.prod(outer)), cols, int(np.prod(inner)))
        whole = np.random.default_rng(2).random(full) < 0.6
        np.moveaxis(whole, len(outer), 0)[0] = True
        wider = np.zeros((*full[:-1], full[-1] + 3), np.bool_)
        masks = [whole, np.asfortranarray(whole), whole[::-1], np.flip(whole, len(outer)), wider[..., 2:-1]]
        wider[..., 2:-1] = whole
        for axis in range(len(full)):  # broadcast along each, and kept along each alone
            masks.append(whole.take([0], axis))
            masks.append(whole[tuple(slice(None) if i == axis else slice(1) for i in range(len(full)))])
        x = random(shape, "float32")
        for number, mask in enumerate(masks):
            mask = np.broadcast_to(mask, full)
            found = run(x, mask=mask, outer_axes=len(outer), **ROUTES[route])
            check_values(found, reference(x, kept=mask.reshape(shape)), "float32", "softmax", (full, number))


@interpreted
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", FEATURE_DTYPES)
def test_interpreted_clusters_with_features(dtype: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"rows": 1, "blocks": 3, "cols": 64, "tiles": 3, "pieces": 2, "warps": 2, "parts": 4}
    for cols in (64, 515, 700):
        x = random((3, cols, 1), dtype)
        kept = np.random.default_rng(1).random(x.shape) < 0.6
        kept[1] = False
        kept[2, : cols // 2] = False
        pretend_cluster(monkeypatch, programs=12)
        run(x, op, scale=-2.5, mask=kept, **layout)
        found = run(x, op, scale=-2.5, mask=kept, **layout)
        check_values(found, reference(x, op, scale=-2.5, kept=kept), dtype, op, cols)


@interpreted
@pytest.mark.parametrize("offset", [0, 1, 2, 7])
def test_interpreted_masks_of_any_alignment(offset: int) -> None:
    for route in ("planned", "long", "split"):
        for dtype, cols in (("float32", 21), ("float32", 24), ("float16", 67)):
            memory = random((24 * cols + 8,), dtype)
            x = memory[offset : offset + 24 * cols].reshape(24, cols, 1)
            bytes_of_mask = np.random.default_rng(3).random(24 * cols + 8) < 0.7
            mask = bytes_of_mask[3 : 3 + 24 * cols].reshape(24, cols, 1)
            out = np.full(24 * cols + 8, 7, dtype)[offset : offset + 24 * cols].reshape(x.shape)
            kept = mask & causal(24, cols)
            run(x, out=out, mask=mask, causal=True, scale=-1.5, **ROUTES[route])
            check_values(out, reference(x, scale=-1.5, kept=kept), dtype, "softmax", (route, cols))


@interpreted
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_interpreted_scales_of_any_magnitude(dtype: str, route: str) -> None:
    x = random((4, 67, 1), dtype)
    x[0, ::3] = -np.inf
    mask = np.random.default_rng(4).random(x.shape) < 0.5
    for scale in (1.2e-38, 1e-30, 1e-3, 1.0, 3e4, 1e30, 8e37):
        found = run(x, scale=scale, mask=mask, **ROUTES[route]).astype(np.float64)
        with np.errstate(all="ignore"):
            expected = reference(x, scale=scale, kept=mask)
        assert np.abs(found - expected).max() <= TOLERANCE[dtype], scale
        assert (found[~mask] == 0).all(), scale


@interpreted
def test_interpreted_scaled_probabilities_are_accurate_where_they_are_small() -> None:
    x = np.linspace(0, -29, 1000, dtype=np.float32)[None, :, None]
    assert np.abs(run(x, scale=3.0) / reference(x, scale=3.0) - 1).max() < 2e-6
    shifted = x + np.float32(64)  # x - maximum is exact, 3 * x isn't
    assert np.abs(run(shifted, scale=3.0) / reference(shifted, scale=3.0) - 1).max() < 2e-6


@interpreted
@pytest.mark.parametrize("route", ROUTES)
def test_interpreted_columns_are_not_counted_in_vectors_that_lie_along_rows(route: str) -> None:
    x = random((2, 33, 20), "float32")
    assert np.abs(run(x, **ROUTES[route]) - reference(x)).max() <= TOLERANCE["float32"]


def test_masks_that_are_out_of_step_take_no_cluster():
    """Triton spreads a tile over threads by how its loads lie, and the merge of a cluster counts on one way."""
    for dtype in ("float32", "bfloat16", "float64"):
        x = replace(problem(4, 60_000), dtype=dtype, out_dtype=dtype)
        whole = Mask(((4, 60_000),), 1, ())
        assert plan(replace(x, mask=whole), H200).cluster > 1
        for mask in (Mask(((4, 1),), 0, ()), Mask(((4, 120_000),), 2, ()), replace(whole, offset=1)):
            for of in (replace(x, mask=mask), replace(x, mask=mask).backward()):
                assert plan(of, H200).cluster == 1
