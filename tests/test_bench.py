"""The bench: what it measures, what it refuses to time, and what it leaves behind."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from minikernel import Backend, Kernel, Problem, list_backends, register_backend, unregister_backend

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "bench" / "run.py").exists():
    pytest.skip("the bench is part of the checkout, not of the package", allow_module_level=True)
pytest.importorskip("rich")

from bench import inputs, machine, peers, report, run, shapes  # noqa: E402
from bench.buffers import Buffers, lay_out  # noqa: E402
from bench.measure import Bench  # noqa: E402
from bench.records import Record, Results, load  # noqa: E402
from bench.reference import Reference  # noqa: E402
from bench.shapes import LAYOUTS, Case, Task, grid_tasks, parse_shape  # noqa: E402
from bench.sources import source_files, source_hash  # noqa: E402
from bench.spaces import NumPySpace, Space, TorchSpace  # noqa: E402

HEADER_KEYS = {"schema", "date", "seed", "source_hash", "command", "gpu", "cpu", "versions", "records"}
RECORD_KEYS = {
    "op",
    "impl",
    "dtype",
    "rows",
    "cols",
    "dim",
    "layout",
    "kernel_us",
    "host_us",
    "gbs",
    "max_rel_error",
    "max_abs_error",
    "status",
}


def needs_gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not machine.has_gpu(), reason="PyTorch sees no NVIDIA GPU")(test))


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout from elsewhere, with nothing installed on its path."""
    env = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT.parent, timeout=120)


def measure(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the bench in this process on the CPU; its JSON."""
    path = tmp_path / "result.json"
    assert run.main([*arguments, "--device", "cpu", "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def by_impl(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {record["impl"]: record for record in result["records"]}


@pytest.fixture
def wrong_backend() -> Iterator[list[Problem]]:
    """A backend whose second row is twice what it should be; yields the calls it got."""
    calls = []

    def prepare(problem: Problem) -> Kernel:
        def compute(x: Any, out: Any, stream: int, scratch: int) -> None:
            calls.append(problem)
            shifted = np.exp(x - x.max(axis=1, keepdims=True))
            out[...] = shifted / shifted.sum(axis=1, keepdims=True)
            out[1] *= 2

        return Kernel(compute)

    register_backend(Backend("wrong-second-row", 5000, ("cpu",), ("float32",), prepare))
    yield calls
    unregister_backend("wrong-second-row")


@pytest.mark.parametrize(
    ("text", "shape", "dim", "rows", "cols"),
    [
        ("512x600", (512, 600), -1, 512, 600),
        ("7", (7,), -1, 1, 7),
        ("8x1000x4x4@1", (8, 1000, 4, 4), 1, 128, 1000),
        ("3x5@-2", (3, 5), -2, 5, 3),
    ],
)
def test_shapes_are_read(text: str, shape: tuple[int, ...], dim: int, rows: int, cols: int) -> None:
    case = parse_shape(text)
    assert (case.shape, case.dim, case.rows, case.cols) == (shape, dim, rows, cols)
    assert case.name == text


@pytest.mark.parametrize("text", ["", "512x", "ax3", "5x0", "-1x3", "512x600@2", "512 x 600", "3.5x2"])
def test_bad_shapes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bad"):
        parse_shape(text)


def test_grids_hold_what_the_project_promises() -> None:
    lab = [(case.rows, case.cols) for case in shapes.GRIDS["lab"]]
    assert lab == [(b, 600) for b in (1, 8, 32, 128, 512, 2048, 8192)]
    assert len(shapes.GRIDS["llm"]) == 25
    everything = {(t.dtype, t.case.shape) for t in grid_tasks("all", shapes.DTYPES)}
    assert everything >= {(t.dtype, (t.rows, t.cols)) for t in shapes.TABLE}
    assert all(case.cols <= 256 for case in shapes.GRIDS["routers"])
    assert all(target.reach >= 1 for target in shapes.TABLE)


def test_table_grid_measures_each_row_in_its_own_dtype() -> None:
    tasks = grid_tasks("table", shapes.DEFAULT_DTYPES)
    assert [(t.dtype, *t.case.shape) for t in tasks] == [(t.dtype, t.rows, t.cols) for t in shapes.TABLE]
    wide = grid_tasks("table", ("float64",))
    assert wide
    assert max(task.case.elements for task in wide) <= shapes.FLOAT64_ELEMENTS
    assert len(set(tasks)) == len(tasks)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--backends", "cuda"],
        ["--backends", ""],
        ["--grid", "huge"],
        ["--dtypes", "int8"],
        ["--op", "softmin"],
        ["--shapes", "512by600"],
        ["--shapes", "512x600", "--dim", "2"],
        ["--layouts", "diagonal"],
        ["--peers", "nobody"],
        ["--budget", "soon"],
        ["--input", "absent.npy"],
        ["--input", __file__],
        ["--shapes", "2x3", "--grid", "lab"],
        ["--grid", "quick", "--json", "."],
        ["--no-such-option"],
    ],
    ids=" ".join,
)
def test_a_bad_request_is_one_line_and_exit_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_status:
        run.main(arguments)
    captured = capsys.readouterr()
    assert exit_status.value.code == 2
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("run.py: ")
    assert captured.out == ""


def test_damaged_and_empty_archives_are_refused(tmp_path: Path) -> None:
    damaged, empty = tmp_path / "damaged.npz", tmp_path / "empty.npz"
    np.savez(damaged, x=np.ones(100))
    damaged.write_bytes(damaged.read_bytes()[:80])
    np.savez(empty)
    for path in (damaged, empty):
        with pytest.raises(inputs.InputError, match=path.name):
            inputs.read(path)


def test_the_script_runs_from_a_bare_checkout(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    shape = ("--shapes", "8x40", "--dtypes", "float32")
    done = script(str(ROOT / "bench" / "run.py"), *shape, "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "8x40" in done.stdout
    for name, info in list_backends().items():
        if "cpu" not in info.devices:
            assert f"not measured {name}" in done.stdout
    result = json.loads(path.read_text())
    assert result["gpu"] is None
    assert {"copy", "auto", "numpy"} <= by_impl(result).keys()
    assert all(record["kernel_us"] is None and record["host_us"] > 0 for record in result["records"])

    printed = script(str(ROOT / "bench" / "report.py"), str(path))
    assert printed.returncode == 0, printed.stderr
    assert "| float32 | 8x40 |" in printed.stdout


def test_without_torch_numpy_is_measured_and_the_absence_said() -> None:
    # A None in sys.modules makes the import fail, as if torch weren't installed.
    program = (
        "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv.pop(1));"
        "from bench import run; sys.exit(run.main(sys.argv[1:]))"
    )
    done = script("-c", program, str(ROOT), "--shapes", "8x40", "--dtypes", "float32,float64")
    assert done.returncode == 0, done.stderr
    assert "not measured F.softmax: torch is not installed" in done.stdout
    assert "numpy" in done.stdout


def test_json_has_the_schema(tmp_path: Path) -> None:
    result = measure(tmp_path, "--shapes", "4x30,2x3x5@1", "--op", "softmax,log_softmax")
    assert result.keys() == HEADER_KEYS
    assert (result["schema"], result["seed"]) == (1, 42)
    assert result["source_hash"] == source_hash()
    assert result["command"].startswith("python bench/run.py --shapes 4x30,2x3x5@1")
    for record in result["records"]:
        assert record.keys() >= RECORD_KEYS
        assert record["status"] == "ok", record
        assert record["gbs"] > 0
        assert record["impl"] == "copy" or record["max_rel_error"] < 0.02
    strided = [r for r in result["records"] if r["case"] == "2x3x5@1"]
    assert {(r["rows"], r["cols"], r["dim"]) for r in strided} == {(10, 3, 1)}
    count = 2 * 2 * len(shapes.DEFAULT_DTYPES) * len(by_impl(result))
    assert len(result["records"]) == count
    assert load(tmp_path / "result.json").dumps() == (tmp_path / "result.json").read_text()


def test_only_named_backends_and_the_fixed_peers_are_measured(tmp_path: Path) -> None:
    result = measure(tmp_path, "--shapes", "4x30", "--backends", "numpy", "--dtypes", "float32")
    assert by_impl(result).keys() - {peers.TORCH} == {peers.COPY, "numpy"}


def test_a_wrong_result_is_never_timed(
    tmp_path: Path, wrong_backend: list[Problem], capsys: pytest.CaptureFixture[str]
) -> None:
    result = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32")
    record = by_impl(result)["wrong-second-row"]
    assert record["status"].startswith("wrong: 30 of 120 values off")
    assert record["kernel_us"] is record["host_us"] is record["gbs"] is None
    assert len(wrong_backend) == 1
    printed = capsys.readouterr().out
    assert "wrong-second-row: wrong: 30 of 120" in printed
    assert by_impl(result)["numpy"]["status"] == "ok"


def test_an_input_that_a_backend_refuses_is_unsupported(tmp_path: Path, wrong_backend: list[Problem]) -> None:
    result = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float64", "--backends", "wrong-second-row,numpy")
    record = by_impl(result)["wrong-second-row"]
    assert record["status"].startswith("unsupported: ")
    assert "float64" in record["status"]
    assert record["host_us"] is None
    assert not wrong_backend


def spaces() -> list[Any]:
    found: list[Any] = [pytest.param(lambda: NumPySpace(0), id="numpy")]
    try:
        import torch  # noqa: F401
    except ImportError:
        return found
    return [*found, pytest.param(lambda: TorchSpace("cpu", 0), id="torch")]


@pytest.fixture(params=spaces())
def space(request: pytest.FixtureRequest) -> Space:
    made: Space = request.param()
    return made


def test_a_result_that_is_never_written_is_wrong(space: Space) -> None:
    lazy = peers.Impl("lazy", lambda op, x, dim, out: out, lambda op, dim: lambda x: x)
    (record,) = Bench(space, [lazy], ["softmax"]).run([Task(Case((4, 30)), "float32")])
    assert record.status == "wrong: 120 of 120 values off, by up to nan; 120 NaN out of place"
    assert record.host_us is None


def test_a_result_that_raises_is_wrong_and_stops_nothing(space: Space) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("an illegal\nmemory access")

    failing = peers.Impl("failing", fail, lambda op, dim: fail)
    records = list(Bench(space, [failing, peers.copy(space.xp)], ["softmax"]).run([Task(Case((4, 30)), "float32")]))
    assert records[0].status == "wrong: raised RuntimeError: an illegal memory access"
    assert records[1].status == "ok"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(space: Space, layout: str) -> None:
    task = Task(Case((6, 5)), "float32", layout)
    buffers = Buffers(task, space, cache_bytes=0)
    x = buffers.inputs[0]
    assert tuple(x.shape) == (6, 5)
    strides = [s // 4 for s in x.strides] if isinstance(x, np.ndarray) else list(x.stride())
    address = x.ctypes.data if isinstance(x, np.ndarray) else x.data_ptr()
    wanted = {"transposed": [1, 6], "sliced": [6, 1], "expanded": [0, 1]}
    assert strides == wanted.get(layout, [5, 1])
    assert (address % 16 == 4) == (layout in ("offset", "sliced"))
    assert not bool((buffers.inputs[0] == buffers.inputs[1]).all())
    with pytest.raises(ValueError, match="layout"):
        lay_out(space.empty(9, "float32"), (3, 3), "diagonal", space.xp)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_measured(tmp_path: Path, layout: str) -> None:
    result = measure(tmp_path, "--shapes", "6x5,3x4x5@0", "--dtypes", "float32", "--layouts", layout)
    assert {(r["layout"], r["status"]) for r in result["records"]} == {(layout, "ok")}


def test_the_reference_is_softmax_in_float64(space: Space) -> None:
    from scipy.special import log_softmax, softmax

    values = np.random.default_rng(0).standard_normal((3, 4, 5)) * 30
    x = space.from_numpy(values, "float64")
    reference = Reference(x, 1, "float64", space)
    for op, function in (("softmax", softmax), ("log_softmax", log_softmax)):
        right = space.from_numpy(function(values, axis=1), "float64")
        assert reference.check(op, right).fault is None
        off = space.from_numpy(function(values, axis=1) * (1 + 1e-10), "float64")
        assert reference.check(op, off).fault is not None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_may_be_off_by_one_unit_in_the_last_place(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    space = TorchSpace("cpu", 0)
    x = torch.randn(16, 300, dtype=getattr(torch, dtype))
    right = x.double().softmax(-1).to(x.dtype)
    reference = Reference(x, -1, dtype, space)
    one_off = (right.view(torch.int16) + 1).view(x.dtype)
    two_off = (right.view(torch.int16) + 3).view(x.dtype)
    assert reference.check("softmax", one_off).fault is None
    assert reference.check("softmax", two_off).fault is not None


def test_nan_belongs_where_the_reference_has_it(space: Space) -> None:
    values = np.array([[0.0, math.inf], [0.0, 1.0], [-math.inf, -math.inf], [-math.inf, 0.0]])
    reference = Reference(space.from_numpy(values, "float32"), -1, "float32", space)
    right = np.array([[math.nan] * 2, [0.26894142, 0.73105858], [math.nan] * 2, [0.0, 1.0]])
    assert reference.check("softmax", space.from_numpy(right, "float32")).fault is None
    for row, value in ((0, 0.5), (1, math.nan), (2, 0.5)):
        wrong = right.copy()
        wrong[row] = value
        assert reference.check("softmax", space.from_numpy(wrong, "float32")).fault is not None


def test_large_results_are_sampled_and_hold_no_poison(monkeypatch: pytest.MonkeyPatch, space: Space) -> None:
    monkeypatch.setattr("bench.reference.MAX_ELEMENTS", 1000)
    x = space.empty(300 * 7, "float32").reshape(300, 7)
    space.fill_normal(x.reshape(-1))
    reference = Reference(x, -1, "float32", space)
    wide = space.wide(x)
    exact = space.xp.exp(wide) / space.xp.sum(space.xp.exp(wide), axis=-1, keepdims=True)
    right = space.from_numpy(np.asarray(exact), "float32")
    assert reference.check("softmax", right).fault is None
    for row in (0, 299):
        wrong = space.from_numpy(np.asarray(right), "float32")
        wrong[row] *= 2
        assert reference.check("softmax", wrong).fault == "7 of 448 values off, by up to " + (
            f"{float(right[row].max()):.1e}"
        )
    for row in range(300):
        unwritten = space.from_numpy(np.asarray(right), "float32")
        unwritten[row] = math.nan
        assert reference.check("softmax", unwritten).fault is not None


def test_own_arrays_are_measured_and_integers_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "arrays.npz"
    scores = np.random.default_rng(0).standard_normal((4, 3, 5)).astype(np.float32)
    scores[0, 0, 2:] = np.finfo(np.float32).min
    np.savez(
        path,
        scores=scores,
        mask=np.ones((4, 5), np.int64),
        empty=np.zeros((0, 5)),
        wide=np.eye(3, dtype=">f8"),
    )
    result = measure(tmp_path, "--input", str(path))
    found = {(r["case"], r["dtype"]): r["status"] for r in result["records"] if r["impl"] == "numpy"}
    assert found["scores 4x3x5", "float32"] == "ok"
    assert found["wide 3x3", "float64"] == "ok"
    assert found["mask 4x5", "int64"].startswith("skipped: int64 is not a floating-point dtype")
    assert found["empty 0x5", "float64"] == "skipped: empty array"
    printed = capsys.readouterr().out
    assert "mask 4x5" in printed
    assert "skipped: int64" in printed

    cast = measure(tmp_path, "--input", str(path), "--dtypes", "float32", "--dim", "0", "--backends", "numpy")
    status = {r["case"]: r["status"] for r in cast["records"] if r["impl"] == "numpy"}
    assert status == {
        "scores 4x3x5@0": "ok",
        "mask 4x5@0": "ok",
        "wide 3x3@0": "ok",
        "empty 0x5@0": "skipped: empty array",
    }


def test_recorded_tensors_are_measured(tmp_path: Path) -> None:
    path = ROOT / "tests" / "data" / "minilm.npz"
    result = measure(tmp_path, "--input", str(path))
    for record in result["records"]:
        wanted = "skipped" if record["dtype"] == "int64" else "ok"
        assert record["status"].split(":")[0] == wanted, record
    assert {r["dtype"] for r in result["records"]} == {"float32", "int64"}


def test_the_budget_is_kept_and_said(tmp_path: Path) -> None:
    result = measure(tmp_path, "--shapes", "8x40", "--budget", "0")
    assert {record["status"] for record in result["records"]} == {"skipped: budget"}
    assert len(result["records"]) == len(shapes.DEFAULT_DTYPES) * len(by_impl(result))


def test_a_slow_call_is_not_timed_and_larger_ones_not_tried(space: Space) -> None:
    base = peers.backend("numpy")
    calls = []

    def slow(op: str, x: Any, dim: int, out: Any) -> Any:
        import time

        calls.append(tuple(x.shape))
        time.sleep(0.01)
        return base.into(op, x, dim, out)

    bench = Bench(space, [peers.Impl("slow", slow, base.eager)], ["softmax"], slow=0.005)
    tasks = [Task(Case((rows, 1024)), "float32") for rows in (64, 128)]
    assert [record.status for record in bench.run(tasks)] == ["skipped: slow"] * 2
    assert set(calls) == {(64, 1024)}


def test_the_file_is_written_as_the_run_goes(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    results = Results({"date": "2026-01-01"}, path)
    results.add(Record("softmax", "copy", "float32", 1, 2, -1, "contiguous", case="1x2"))
    assert len(load(path).records) == 1
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def sample_results() -> Results:
    """A GPU run in miniature."""

    def record(impl: str, kernel: float | None, status: str = "ok", dtype: str = "float32") -> Record:
        return Record(
            "softmax", impl, dtype, 512, 600, -1, "contiguous", kernel, 7.0, 1.0, 0, 0, status, case="512x600"
        )

    results = Results(
        {
            "date": "2026-01-02T03:04:05+00:00",
            "gpu": {"model": "A GPU", "copy_gbs": 4000.0},
            "versions": {"torch": "2.13"},
        }
    )
    results.records = [
        record("copy", 2.0),
        record("F.softmax", 4.0),
        record("auto", 2.5),
        record("cuda-fused", 2.2),
        record("cuda-smem", None, "unsupported: too long"),
        record("cuda-naive", None, "wrong: 3 of 4 values off"),
        record("triton-fused", None, "skipped: slow"),
        record("numpy", None),
    ]
    return results


def test_markdown_is_made_from_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h200.json"
    path.write_text(sample_results().dumps())
    assert report.main([str(path)]) == 0
    text = capsys.readouterr().out
    head = "| dtype | shape | copy µs | F.softmax | auto | cuda-fused | triton-fused | cuda-smem | cuda-naive |"
    row = "| float32 | 512x600 | 2.00 | 2.00 | 1.25 | 1.10 | slow | – | wrong |"
    assert head in text
    assert row in text
    assert "A GPU (copy at 4.00 TB/s), torch 2.13, 2026-01-02" in text
    assert "1.60 times as long" in text
    assert "`F.softmax` 7.0 µs" in text


def test_a_file_that_is_no_result_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    for content in ("[]", "{", '{"schema": 2}', '{"schema": 1, "records": [{"op": 1}]}'):
        path.write_text(content)
        assert report.main([str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert report.main([str(tmp_path / "absent.json")]) == 2


def test_plots_and_markdown_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder, text = tmp_path / "plots", tmp_path / "report.md"
    shape = ("--shapes", "8x40,8x80", "--dtypes", "float32,float64")
    measure(tmp_path, *shape, "--plots", str(folder), "--markdown", str(text))
    assert {p.name for p in folder.iterdir()} == {"softmax-float32.png", "softmax-float64.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.iterdir())
    assert "| float64 | 8x80 |" in text.read_text()


def test_the_hash_follows_what_decides_the_launches(tmp_path: Path) -> None:
    for folder in ("kernels", "minikernel"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    before = source_hash(tmp_path)
    assert before == source_hash()
    assert any(path.suffix == ".cu" for path in source_files(tmp_path))
    (tmp_path / "minikernel" / "api.py").write_text("# decides no launch\n")
    assert source_hash(tmp_path) == before
    seen = {before}
    for path in source_files(tmp_path):
        path.write_bytes(path.read_bytes() + b"\n")
        assert source_hash(tmp_path) not in seen
        seen.add(source_hash(tmp_path))


def experiment(name: str) -> ModuleType:
    path = ROOT / "experiments" / "24-tuned-kernel" / f"{name}.py"
    if not path.exists():
        pytest.skip("the experiments are part of the checkout")
    spec = spec_from_file_location(f"experiment_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    entry = sys.path[0]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[0] = entry
    return module


STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
RAW_PAGE = f"""==PROF== talk before the table
"ID","Kernel Name","launch__registers_per_thread","gpu__time_duration.sum","{STALL.format("barrier")}",\
"{STALL.format("long_scoreboard")}","{STALL.format("selected")}"
"","","register/thread","us","inst","inst","inst"
"0","softmax_fused","32","2.5","1.5","0.5","9.0"
"1","softmax_fused","40","1,250.5","0.5","20.25","9.0"
"""


def test_the_profile_is_read_and_annotated() -> None:
    profile = experiment("ncu_profile")
    kernels, units = profile.parse_raw(RAW_PAGE)
    text = profile.report("2025.1", kernels, units, "details")
    assert "== cuda-fused, 512x600 float32: softmax_fused" in text
    assert "dominant stall:                     barrier (synchronization)" in text
    assert "dominant stall:                     long scoreboard (memory dependency)" in text
    assert f"{'registers:':36}32 a thread" in text
    manifest = experiment("manifest")
    assert manifest.dominant_stall(text, "512x600") == "barrier (synchronization)"
    assert manifest.dominant_stall(text, "32768x4096") == "long scoreboard (memory dependency)"


def test_the_manifest_comes_from_measurements_alone() -> None:
    manifest, profile = experiment("manifest"), experiment("ncu_profile")
    text = profile.report("2025.1", *profile.parse_raw(RAW_PAGE), "details")
    results = sample_results()
    results.header |= {
        "seed": 42,
        "gpu": {"model": "A GPU", "compute_capability": "9.0", "hbm_peak_gbs": 4800.0, "copy_gbs": 4000.0},
        "versions": {"python": "3.11", "cupy": "14", "torch": "2", "triton": "3", "numpy": "2"},
    }
    times = {
        "copy": 2.0,
        "F.softmax": 4.0,
        "cuda-naive": 9.0,
        "cuda-smem": 5.0,
        "cuda-parallel": 3.0,
        "cuda-fused": 2.5,
    }
    results.records = [
        Record("softmax", impl, "float32", rows, cols, -1, "contiguous", us, 7.0, 1200.0, case=f"{rows}x{cols}")
        for rows, cols in ((512, 600), (32768, 4096))
        for impl, us in times.items()
    ]
    written = manifest.manifest(results, text)
    assert written["kernels"]["fused"] == {"median_us_at_B512": 2.5, "fraction_of_peak": 0.25}
    assert written["results_summary"]["fused_vs_F_softmax_ratio"] == 0.625
    assert written["results_summary"]["dod_30pct_met"] is True
    assert written["versions"]["ncu"] == "2025.1"
    assert "null" not in json.dumps(written)
    results.records = [r for r in results.records if r.impl != "cuda-smem"]
    with pytest.raises(ValueError, match="cuda-smem at 512x600 isn't in"):
        manifest.manifest(results, text)


def test_the_preset_measures_its_ladder(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    preset = ROOT / "experiments" / "24-tuned-kernel" / "bench.py"
    if not preset.exists():
        pytest.skip("the experiments are part of the checkout")
    done = script(str(preset), "--shapes", "8x600", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "cuda-parallel" in done.stdout
    assert {r["case"] for r in json.loads(path.read_text())["records"]} == {"8x600"}


@needs_gpu
def test_on_a_gpu_device_and_host_time_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert run.main(["--shapes", "512x600,3x7", "--dtypes", "float32", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["gpu"]["copy_gbs"] > 0
    assert result["gpu"]["sm_count"] > 0
    for record in result["records"]:
        assert record["status"] == "ok", record
        assert record["host_us"] > 0
        assert (record["kernel_us"] is None) == (record["impl"] == "numpy")
    assert {"cuda-naive", "cuda-smem", "cuda-fused", "copy", "F.softmax", "auto"} <= by_impl(result).keys()


@needs_gpu
def test_on_a_gpu_work_that_a_graph_does_not_hold_is_wrong() -> None:
    import torch

    real = peers.torch_softmax()

    def forgetful(op: str, x: Any, dim: int, out: Any) -> Any:
        return out.mul_(1) if torch.cuda.is_current_stream_capturing() else real.into(op, x, dim, out)

    bench = Bench(TorchSpace("cuda", 0), [peers.Impl("forgetful", forgetful, real.eager)], ["softmax"])
    (record,) = bench.run([Task(Case((64, 64)), "float32")])
    assert record.status.startswith("wrong: ")
    assert record.status.endswith("in a CUDA graph")
    assert record.kernel_us is None
