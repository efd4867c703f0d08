"""The speed targets: what a result must hold to show each of them, and what makes it short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_plan import H200

import minikernel

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "bench" / "run.py").exists():
    pytest.skip("the bench is part of the checkout, not of the package", allow_module_level=True)
pytest.importorskip("rich")

from bench import check, cliffs, figures, first_calls, machine, peers, shapes, targets  # noqa: E402
from bench.records import Figure, Record, Results  # noqa: E402
from bench.rows import rows_of  # noqa: E402
from bench.shapes import Case, Task, grid_tasks  # noqa: E402
from bench.spaces import NumPySpace, TorchSpace  # noqa: E402
from minikernel.problem import BACKWARD, TOPK  # noqa: E402
from minikernel.sources import source_hash  # noqa: E402

AUTO, COPY, TORCH, SCIPY = peers.AUTO, peers.COPY, peers.TORCH, peers.SCIPY
FUSED, TRITON, NUMPY = targets.FUSED, targets.TRITON, targets.NUMPY
ALL_FIGURES = (
    Figure(figures.FLAT, 1.02),
    Figure(figures.CACHED, 4000),
    Figure(figures.WARM, 55.0, "ms", AUTO),
    Figure(figures.WARM, 15.0, "ms", TORCH),
    Figure(figures.COLD, 0.9, "s", "float32 512x600"),
    Figure(figures.COLD, 1.1, "s", "float32 8x1048576"),
    Figure(figures.PACKAGES, 1),
    Figure(figures.KERNELS, 60, "", "float32"),
    Figure(figures.IMPORT, 20.0, "ms"),
    Figure(figures.TRAINING, 1.6),
    Figure(figures.SCORES, 1.05, "", "auto float32 causal"),
    Figure(figures.UNFUSED, 3.0, "", "float32 whole mask"),
    Figure(figures.DEVICE_MEMORY, 0.0, "", "float32 8192x8192@0"),
    Figure(figures.HOST_MEMORY, 8.0, "MiB", "float32 4096x1024"),
)


def recorded(task: Task, impl: str, kernel: float | None, host: float | None = 7.0) -> Record:
    case = task.case
    return Record(
        *("softmax", impl, task.dtype, case.rows, case.cols, case.dim, task.layout),
        *(kernel, host, 1.0, 0.0, 0.0, "ok", case.name),
    )


def table_results() -> Results:
    """A GPU run of the table's rows that meets every target that they can show."""
    results = Results({"gpu": {"model": "A GPU"}, "source_hash": source_hash()})
    for target in shapes.TABLE:
        best = 10 * target.reach
        times = {COPY: 10.0, TORCH: 3 * best, AUTO: best, FUSED: best, TRITON: 1.05 * best}
        task = Task(Case((target.rows, target.cols)), target.dtype)
        results.records += [recorded(task, impl, us) for impl, us in times.items()]
    return results


def all_results() -> Results:
    """A GPU run that meets every target."""
    results = table_results()
    for task in grid_tasks("few", shapes.FEW_DTYPES):
        best = 10 * targets.few_rows_reach(task.dtype, task.case.elements)
        results.records += [recorded(task, impl, us) for impl, us in ((COPY, 10.0), (AUTO, best), (FUSED, best))]
    for task in grid_tasks("strided", shapes.DEFAULT_DTYPES):
        best = 10.0 if (task.layout, task.case.dim) == ("contiguous", -1) else 12.0
        results.records += [recorded(task, impl, us) for impl, us in ((COPY, 9.0), (TORCH, 20.0), (AUTO, best))]
    for task in grid_tasks("cliffs", shapes.CLIFF_DTYPES):
        results.records.append(recorded(task, AUTO, 10.0 if task.case.cols % 8 == 0 else 11.0, None))
    for task in grid_tasks("gradients", shapes.DEFAULT_DTYPES):
        times = {COPY: 10.0, TORCH: 20.0, AUTO: 10.5, FUSED: 10.5, TRITON: 10.7}
        records = [recorded(task, impl, us) for impl, us in times.items()]
        results.records += [replace(record, op=op) for op in BACKWARD.values() for record in records]
    for task in grid_tasks("topk", shapes.DEFAULT_DTYPES):
        times = {COPY: 2.0, TORCH: 100.0, AUTO: 8.0, FUSED: 8.0, TRITON: 10.0}
        records = [recorded(task, impl, us) for impl, us in times.items()]
        results.records += [replace(record, op=TOPK) for record in records]
    for task in grid_tasks("host", shapes.HOST_DTYPES):
        limited = replace(task, case=replace(task.case, cores=2))
        results.records += [recorded(limited, SCIPY, None, 100.0), recorded(limited, NUMPY, None, 45.0)]
    unique = {(record.task, record.impl): record for record in reversed(results.records)}
    results.records = list(reversed(unique.values()))
    results.figures = list(ALL_FIGURES)
    return results


def change(results: Results, wanted: Callable[[Record], bool], op: str = "softmax", **fields: Any) -> None:
    changed = [record.op == op and wanted(record) for record in results.records]
    assert any(changed)
    results.records = [
        replace(record, **fields) if to_change else record
        for record, to_change in zip(results.records, changed, strict=True)
    ]


def at(impl: str, case: str, dtype: str = "float32", layout: str = "contiguous") -> Callable[[Record], bool]:
    return lambda r: (r.impl, r.case, r.dtype, r.layout) == (impl, case, dtype, layout)


def short(results: Results) -> dict[str, check.Finding]:
    return {finding.target.text: finding for finding in check.check(results) if finding.status == "short"}


@pytest.mark.parametrize("op", BACKWARD.values())
def test_a_slow_gradient_is_short(op: str) -> None:
    results = all_results()
    change(results, lambda r: r.impl == TRITON and r.cols == 4096, op=op, kernel_us=11.0)
    assert set(short(results)) == {"gradient of 1K to 32K columns: triton-fused / copy"}


def test_a_slow_topk_is_short() -> None:
    results = all_results()
    change(results, lambda r: r.impl == FUSED and r.rows == 64, op=TOPK, kernel_us=40.0)
    assert set(short(results)) == {"torch.topk of F.softmax, k = 8 / cuda-fused"}


def test_all_targets_can_be_shown() -> None:
    findings = check.check(all_results())
    assert [finding.target for finding in findings] == list(targets.TARGETS)
    assert {finding.status for finding in findings} == {"met"}
    assert list(dict.fromkeys(finding.target.number for finding in findings)) == [*"123456789", "10", "11", "12"]
    mean = next(finding for finding in findings if finding.target.mean)
    assert mean.value == pytest.approx(3.0)


def test_the_table_alone_leaves_the_rest_open() -> None:
    findings = check.check(table_results())
    assert {finding.status for finding in findings} == {"met", "not measured"}
    assert {finding.target.number for finding in findings if finding.status == "met"} == set("1268")


BEST_DEVICE = "auto / the best backend, device time"
FEW, FAILING = "few long rows: reach between", "few long rows: wrong or refused"
LARGE = "numpy / SciPy from 4 million elements"


@pytest.mark.parametrize(
    ("where", "fields", "texts"),
    [
        (at(AUTO, "512x50257"), {"kernel_us": 11.3}, {"auto: the table's reach, within 3%"}),
        (at(FUSED, "512x50257"), {"kernel_us": 11.3}, {"cuda-fused: the table's reach, within 3%"}),
        (at(TORCH, "32768x8"), {"kernel_us": 9.9}, {"F.softmax / auto over the table: every row"}),
        (at(TRITON, "4096x128"), {"kernel_us": 11.5}, {"triton-fused / cuda-fused, 132 rows up, to 16384"}),
        (at(TRITON, "4096x32768"), {"kernel_us": 16}, {"triton-fused / cuda-fused, elsewhere to 65536"}),
        (at(TRITON, "4096x32768"), {"kernel_us": 9.5}, {BEST_DEVICE}),
        (at(TRITON, "512x600"), {"host_us": 11.9}, {"host time at 512x600: triton-fused / F.softmax"}),
        (at(AUTO, "4096x128"), {"host_us": 7.5}, {"auto / the best backend, host time"}),
        (at(AUTO, "200x4096", "bfloat16"), {"kernel_us": 12}, {"no cliffs: a length or row count / its neighbor"}),
        (at(AUTO, "4096x8191"), {"kernel_us": 11.6}, {"an unaligned length / the nearest aligned one"}),
        (at(AUTO, "8192x8192@0"), {"kernel_us": 13.1}, {"strided / contiguous: float32"}),
        (at(AUTO, "8x1000x64x64@1", "float16"), {"kernel_us": 15.1}, {"strided / contiguous: half types"}),
        (at(AUTO, "8192x8192", "float16", "transposed"), {"kernel_us": 16.1}, {"strided / contiguous: transposed"}),
        (at(TORCH, "8192x8192", "bfloat16", "sliced"), {"kernel_us": 11.9}, {"strided input: auto / F.softmax"}),
        (at(AUTO, "2x50257"), {"kernel_us": 20}, {FEW, BEST_DEVICE}),
        (at(AUTO, "2x50257"), {"kernel_us": None, "status": "wrong: in a graph"}, {FAILING}),
        (at(NUMPY, "2 cores 1x8"), {"host_us": 101}, {"numpy / scipy.special.softmax"}),
        (at(NUMPY, "2 cores 8192x2048", "float64"), {"host_us": 51}, {LARGE}),
        (at(NUMPY, "2 cores 2048x2048", layout="transposed"), {"host_us": 51}, {LARGE}),
    ],
)
def test_one_record_makes_a_target_short(
    where: Callable[[Record], bool], fields: dict[str, Any], texts: set[str]
) -> None:
    results = all_results()
    change(results, where, **fields)
    (record,) = (r for r in results.records if r.op == "softmax" and where(r))
    found = short(results)
    assert len(found) == len(texts)
    for text in texts:
        (finding,) = [finding for name, finding in found.items() if name.startswith(text)]
        assert record.case.removeprefix("2 cores ") in finding.where
        assert record.dtype in finding.where


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(figures.FLAT, 1.11), "host time after ten thousand shapes / before"),
        (Figure(figures.CACHED, 4097), "entries in the fullest cache after them"),
        (Figure(figures.WARM, 75.1, "ms", AUTO), "first call, disk cache warm, beyond F.softmax's"),
        (Figure(figures.COLD, 1.51, "s", "bfloat16 512x600"), "first call, disk cache cold"),
        (Figure(figures.PACKAGES, 2), "GPU packages that a first call imports"),
        (Figure(figures.KERNELS, 101, "", "bfloat16"), "kernels for all row lengths of a dtype"),
        (Figure(figures.IMPORT, 30.1, "ms"), "import minikernel, beyond import numpy"),
        (
            Figure(figures.DEVICE_MEMORY, 1.0, "", "float32 8192x8192@0"),
            "strided: memory beyond the output / input",
        ),
        (Figure(figures.HOST_MEMORY, 16.1, "MiB", "float64 1x8"), "numpy: peak memory beyond the output"),
    ],
)
def test_one_figure_makes_a_target_short(figure: Figure, text: str) -> None:
    results = all_results()
    results.figures.append(figure)
    assert short(results).keys() == {text}


@pytest.mark.parametrize("name", sorted({figure.name for figure in ALL_FIGURES}))
def test_a_missing_figure_is_not_measured_rather_than_met(name: str) -> None:
    results = all_results()
    results.figures = [figure for figure in results.figures if figure.name != name]
    assert [finding.status for finding in check.check(results)].count("not measured") == 1


def test_a_missing_row_is_not_measured_rather_than_met() -> None:
    results = table_results()
    change(results, at(AUTO, "8x128256"), kernel_us=None, status="skipped: budget")
    (finding,) = [f for f in check.check(results) if f.target.text.startswith("auto: the table")]
    assert (finding.status, finding.where) == ("not measured", "missing: float32 8x128256")
    for impl, case, number in ((AUTO, "2x4096", "3"), (AUTO, "8192x8192", "4"), (AUTO, "2x32000", "5")):
        results = all_results()
        change(results, at(impl, case), kernel_us=None, host_us=None, status="skipped: budget")
        open_ = {f.target.number for f in check.check(results) if f.status == "not measured"}
        assert open_ == {number}


def test_a_slow_copy_has_another_of_as_many_bytes_as_its_floor() -> None:
    results = table_results()
    change(results, at(COPY, "4096x32768", "bfloat16"), kernel_us=12.0)
    assert check.check(results)[0].value == pytest.approx(1.0)


def points(dtype: str, times: dict[str, float]) -> Results:
    """Points of the grid ``cliffs``: 10 µs but where another time is given."""
    results = Results({})
    results.records = [
        recorded(task, AUTO, times.get(task.case.name, 10.0), None)
        for task in grid_tasks("cliffs", (dtype,))
        if task.case.name in {case for run in cliffs.series().values() for case in run}
    ]
    return results


def steep(found: Iterator[cliffs.Step]) -> list[tuple[str, str]]:
    return [(one, other) for ratio, (_, one, other) in found if ratio and ratio > 1.15]


def test_a_step_between_neighbors_is_seen_and_a_small_one_is_none() -> None:
    rows = rows_of(points("float32", {"100x4096": 11.6}).records)
    assert steep(cliffs.steps(rows)) == [("99x4096", "100x4096"), ("100x4096", "101x4096")]
    assert steep(cliffs.unaligned(rows)) == []
    assert cliffs.suspects(rows) == [("float32", "100x4096")]
    assert steep(cliffs.steps(rows_of(points("float32", {"100x4096": 11.4}).records))) == []
    short_ones = dict.fromkeys(cliffs.series()["1..300x4096"], 1.0)
    for us, expected in ((1.3, []), (1.31, [("1x4096", "2x4096")])):
        rows = rows_of(points("float32", short_ones | {"1x4096": us}).records)
        assert steep(cliffs.steps(rows)) == expected


def test_neighbors_are_aligned_alike() -> None:
    """Aligned rows may be faster than all others, by as much as an unaligned row may cost."""
    unaligned = {f"4096x{n}": 11.4 for run in shapes.CLIFF_LENGTHS for n in run if n * 2 % 16}
    rows = rows_of(points("bfloat16", unaligned).records)
    assert steep(cliffs.steps(rows)) == []
    assert steep(cliffs.unaligned(rows)) == []
    rows = rows_of(points("bfloat16", unaligned | {"4096x2045": 13.2}).records)
    assert steep(cliffs.steps(rows)) == [("4096x2044", "4096x2045"), ("4096x2045", "4096x2046")]
    assert steep(cliffs.unaligned(rows)) == [("4096x2045", "4096x2048")]
    assert cliffs.suspects(rows) == [("bfloat16", "4096x2045")]
    # A cliff at a boundary is between two unaligned lengths that an aligned one parts.
    high = {f"4096x{n}": 13.2 for n in shapes.CLIFF_LENGTHS[0] if n > 1024}
    assert ("4096x1023", "4096x1025") in steep(cliffs.steps(rows_of(points("bfloat16", high).records)))


def test_every_length_is_held_against_an_aligned_one() -> None:
    rows = rows_of(points("float32", {}).records) | rows_of(points("bfloat16", {}).records)
    pairs = {dtype: [p[1:] for _, p in cliffs.unaligned(rows) if p[0] == dtype] for dtype in shapes.CLIFF_DTYPES}
    assert ("4096x1030", "4096x1028") in pairs["float32"]
    assert ("4096x1030", "4096x1024") in pairs["bfloat16"]
    assert len(pairs["float32"]) == 5 * 8
    assert len(pairs["bfloat16"]) == 5 * 10


def test_reach_of_few_rows_is_the_tables_and_between() -> None:
    reach = targets.few_rows_reach
    assert reach("float32", 128256) == pytest.approx(1.7)
    assert reach("float32", 8 * 128256) == pytest.approx(1.45)
    assert reach("bfloat16", 8 * 1048576) == pytest.approx(1.25)
    assert reach("float32", 1) == pytest.approx(1.7)
    assert reach("bfloat16", 2**40) == pytest.approx(1.17)
    sizes = [2**k for k in range(10, 30)]
    bounds = [reach("float32", size) for size in sizes]
    assert bounds == sorted(bounds, reverse=True)
    assert 1.45 < reach("float32", 3 * 128256) < 1.7


def test_what_is_suspect_is_measured_again() -> None:
    results = all_results()
    assert targets.suspects(rows_of(results.records)) == []
    change(results, at(AUTO, "4096x128"), host_us=7.5)
    change(results, at(AUTO, "9x4096"), kernel_us=12.0)
    found = targets.suspects(rows_of(results.records))
    assert found == [("softmax", "float32", "contiguous", case) for case in ("9x4096", "4096x128")]


def test_check_prints_and_exits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "h200.json", table_results()
    path.write_text(results.dumps())
    assert check.main([str(path)]) == 0
    text = capsys.readouterr().out
    assert "F.softmax / auto over the table: geometric mean" in text
    assert "met" in text
    assert "not measured" in text
    assert "moved on" not in text

    results.header["source_hash"] = "0" * 16
    path.write_text(results.dumps())
    assert check.main([str(path)]) == 1
    assert "moved on" in capsys.readouterr().out

    results = table_results()
    change(results, at(AUTO, "8x128256"), kernel_us=99.0)
    path.write_text(results.dumps())
    assert check.main([str(path)]) == 1
    assert "short" in capsys.readouterr().out

    path.write_text("{")
    for bad in (path, tmp_path / "absent.json"):
        assert check.main([str(bad)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_check_lists_the_worst_place_or_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, results = tmp_path / "h200.json", all_results()
    for case, us in (("8192x8192@0", 20.0), ("4096x4096@0", 30.0)):
        change(results, at(AUTO, case), kernel_us=us)
    path.write_text(results.dumps())
    assert check.main([str(path)]) == 1
    text = capsys.readouterr().out
    (line,) = [line for line in text.splitlines() if "strided / contiguous: float32" in line]
    assert "≤ 1.300" in line
    assert "3.000" in line
    assert "float32 4096x4096@0 and 1 more" in line
    assert not [line for line in text.splitlines() if "2.000" in line and "float32 8192x8192@0" in line]
    assert "≤ 60 ms" in text
    assert check.main([str(path), "--all"]) == 1
    text = capsys.readouterr().out
    assert "and 1 more" not in text
    assert [line for line in text.splitlines() if "2.000" in line and "float32 8192x8192@0" in line]


def test_importing_is_timed_in_fresh_interpreters() -> None:
    (figure,) = figures.imports(rounds=1)
    assert (figure.name, figure.unit) == (figures.IMPORT, "ms")
    assert 0 < figure.value < 10_000


def test_few_kernels_serve_all_row_lengths() -> None:
    found = list(figures.kernels(H200, ("float32",)))
    assert [figure.where for figure in found] == ["float32"]
    assert 5 < found[0].value <= 100


def test_the_caches_of_many_shapes_are_counted() -> None:
    space = NumPySpace(0)
    peer = peers.Impl("peer", lambda op, x, dim, out: x, lambda op, dim: np.negative)
    found = {figure.name: figure.value for figure in figures.flatness(space, peer, count=150)}
    assert found[figures.CACHED] >= 150
    assert found[figures.FLAT] > 0


def test_numpys_memory_is_what_it_takes_beside_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [Task(Case((256, 1024)), "float32"), Task(Case((256, 256)), "float64", "transposed")]
    found = list(figures.host_memory(tasks))
    assert [figure.where for figure in found] == ["float32 256x1024", "float64 256x256 transposed"]
    assert all(0 <= figure.value < 16 for figure in found)

    plain = minikernel.softmax

    def greedy(x: Any, dim: int = -1, **more: Any) -> Any:
        room = np.empty(40 << 20, np.uint8)
        return plain(x + room[0] * 0, dim, **more)

    monkeypatch.setattr(minikernel, "softmax", greedy)
    assert all(40 <= figure.value < 60 for figure in figures.host_memory(tasks))


def test_only_what_needs_no_gpu_is_taken_without_one() -> None:
    space = NumPySpace(0)
    assert figures.collectors(space, None, 0.0).keys() == {"import", "numpy's memory"}


def in_a_fresh_interpreter(program: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_first_calls_are_made_in_forks() -> None:
    pytest.importorskip("torch")
    program = """
from functools import partial
import sys
import torch
from bench import first_calls, peers, shapes

def fail():
    raise ValueError("no such luck")

def vanish():
    import os
    os._exit(3)

case = shapes.parse_shape("4x30")
for impl in (peers.AUTO, peers.TORCH):
    print(first_calls.forked(partial(first_calls.first_call, impl, case, "float32", "cpu")))
print(first_calls.forked(partial(first_calls.packages_imported, peers.AUTO, case, "float32", "cpu")))
print("minikernel.backends.numpy_blocked" in sys.modules)
for call in (fail, vanish):
    try:
        first_calls.forked(call)
    except RuntimeError as error:
        print(error)
"""
    ours, theirs, packages, imported, failed, vanished = in_a_fresh_interpreter(program).splitlines()
    assert float(ours) > 0
    assert float(theirs) > 0
    assert float(packages) == 0  # the host's backend needs none
    assert imported == "False"  # each call is the first of its process
    assert failed == "ValueError: no such luck"
    assert vanished == "the process ended without an answer"


def test_caches_are_emptied_and_their_folders_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in first_calls.CACHES:
        monkeypatch.delenv(name, raising=False)
    first_calls.use_caches(tmp_path)
    folder = Path(os.environ["CUPY_CACHE_DIR"])
    assert folder.parent == tmp_path
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "kernel.cubin").write_bytes(b"1")
    first_calls.empty(tmp_path)
    assert (folder / "deep").is_dir()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not machine.has_gpu(), reason="PyTorch sees no NVIDIA GPU")(test))


@needs_gpu
def test_on_a_gpu_first_calls_are_timed() -> None:
    program = """
from bench import first_calls
first_calls.COLD_SHAPES, first_calls.COLD_DTYPES, first_calls.WARM_ROUNDS = ("512x600",), ("float32",), 1
first_calls.main()
"""
    found = [Figure(**json.loads(line)) for line in in_a_fresh_interpreter(program).splitlines()]
    assert [(figure.name, figure.where) for figure in found] == [
        (figures.PACKAGES, ""),
        (figures.WARM, AUTO),
        (figures.WARM, TORCH),
        (figures.COLD, "float32 512x600"),
    ]
    assert all(figure.value > 0 for figure in found)


@needs_gpu
def test_on_a_gpu_the_figures_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    space = TorchSpace("cuda", 0)
    found = {figure.name: figure.value for figure in figures.flatness(space, peers.torch_softmax(), count=100)}
    assert found[figures.CACHED] >= 100
    small = [Task(Case((64, 64), 0), "float32"), Task(Case((64, 64)), "float32", "transposed")]
    monkeypatch.setattr(figures, "grid_tasks", lambda grid, dtypes: small)
    memory = list(figures.device_memory(space))
    assert [figure.where for figure in memory] == ["float32 64x64@0", "float32 64x64 transposed"]
    assert all(figure.value >= 0 for figure in memory)
