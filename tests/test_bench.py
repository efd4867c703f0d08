"""The bench: what it measures, what it refuses to time, and what it leaves behind."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest

import minikernel
from minikernel import Backend, Kernel, Problem, list_backends, register_backend, unregister_backend
from minikernel.backends import numpy_blocked

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "bench" / "run.py").exists():
    pytest.skip("the bench is part of the checkout, not of the package", allow_module_level=True)
pytest.importorskip("rich")

from bench import extras, figures, inputs, machine, peers, report, run, shapes, timing  # noqa: E402
from bench.buffers import Buffers, lay_out  # noqa: E402
from bench.measure import Bench  # noqa: E402
from bench.records import Figure, Record, Results, load  # noqa: E402
from bench.reference import Reference  # noqa: E402
from bench.rows import rows_of, usual  # noqa: E402
from bench.shapes import LAYOUTS, Case, Task, grid_tasks, parse_shape  # noqa: E402
from bench.spaces import NumPySpace, Space, TorchSpace  # noqa: E402
from minikernel.sources import source_files, source_hash  # noqa: E402

HEADER_KEYS = {"schema", "date", "seed", "source_hash", "command", "gpu", "cpu", "versions", "figures", "records"}
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


def test_everything_is_measured_once_and_the_table_first() -> None:
    tasks = grid_tasks("all", shapes.DEFAULT_DTYPES)
    keys = [(task.case.name, task.dtype, task.layout) for task in tasks]
    assert len(set(keys)) == len(keys)
    table = [(f"{t.rows}x{t.cols}", t.dtype, "contiguous") for t in shapes.TABLE]
    assert set(keys[: len(table)]) == set(table)
    scopes = {key: task.case.scope for key, task in zip(keys, tasks, strict=True)}
    assert scopes["4096x1024", "bfloat16", "contiguous"] == "all"  # in attention and in cliffs
    assert scopes["64x4096", "bfloat16", "contiguous"] == "brief"
    assert scopes["2x32000", "float32", "contiguous"] == "device"
    order = [shapes.SCOPES.index(task.case.scope) for task in tasks]
    assert order == sorted(order, reverse=True)


def test_strided_input_comes_with_the_same_rows_contiguous() -> None:
    tasks = grid_tasks("strided", shapes.DEFAULT_DTYPES)
    here = {(task.case.name, task.dtype, task.layout) for task in tasks}
    assert here >= {(shapes.last(task.case).name, task.dtype, "contiguous") for task in tasks}
    names = {(case, layout) for case, _, layout in here}
    assert names >= {("8192x8192", layout) for layout in ("sliced", "expanded", "transposed", "contiguous")}
    others = ("32x81x15130@1", "484160x81", "8x1000x64x64@1", "32768x1000", "4096x4096@0", "4096x4096")
    assert names >= {(case, "contiguous") for case in others}


def test_layouts_that_are_asked_for_come_alone() -> None:
    transposed = grid_tasks("strided", ("float32",), ("transposed",))
    assert {task.layout for task in transposed} == {"transposed"}
    assert {"8192x8192", "8192x8192@0"} <= {task.case.name for task in transposed}
    own = {task.layout for task in grid_tasks("strided", ("float32",)) if task.case.name == "8192x8192"}
    assert own == {"contiguous", "sliced", "expanded", "transposed"}


@pytest.mark.parametrize("task", grid_tasks("strided", ("float32",)), ids=lambda t: f"{t.case.name}-{t.layout}")
def test_strided_input_is_read_where_it_lies(task: Task) -> None:
    room = np.empty(task.case.elements * 2, np.float32)  # never touched
    x = lay_out(room, task.case.shape, task.layout, np)
    assert "copied" not in minikernel.explain(x, task.case.dim).reason


def test_what_is_not_read_where_it_lies_is_seen() -> None:
    crossed = np.empty((4, 3, 2), np.float32).transpose(1, 0, 2)
    assert "copied" in minikernel.explain(crossed).reason


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
        ["--layouts", ""],
        ["--grid", "few", "--dtypes", "float16"],
        ["--peers", "nobody"],
        ["--peers", "scipy,compile"],
        ["--cores", "-1"],
        ["--cores", "100000"],
        ["--slow", "never"],
        ["--budget", "soon"],
        ["--input", "absent.npy"],
        ["--input", __file__],
        ["--shapes", "2x3", "--grid", "lab"],
        ["--grid", "quick", "--json", "."],
        ["--grid", "quick", "--json", "absent/x.json"],
        ["--grid", "quick", "--markdown", "absent/x.md"],
        ["--grid", "quick", "--plots", "absent/plots"],
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
    assert not list(tmp_path.iterdir())


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
    absent = {name: info.reasons for name, info in list_backends().items() if "cpu" not in info.devices}
    if len(set(absent.values())) == 1:  # one reason, said once
        assert f"not measured: {', '.join(absent)}: " in done.stdout
    assert all(name in done.stdout for name in absent)
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
    assert "not measured: F.softmax: torch is not installed" in done.stdout
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


def test_scipy_is_measured_on_numpy_arrays(tmp_path: Path) -> None:
    asked = ("--shapes", "4x30,3x4x5@1", "--dtypes", "float32,float64", "--op", "softmax,log_softmax")
    result = measure(tmp_path, *asked, "--peers", "scipy", "--backends", "numpy")
    assert by_impl(result).keys() == {peers.COPY, peers.SCIPY, "numpy"}
    assert {record["status"] for record in result["records"]} == {"ok"}


def test_a_run_keeps_to_its_cores_and_says_so(tmp_path: Path) -> None:
    if machine.can_limit(1):
        pytest.skip("this system can't keep a process to some cores")
    before = os.sched_getaffinity(0)
    seen = []

    def watch(problem: Problem) -> Kernel:
        seen.append(len(os.sched_getaffinity(0)))
        return numpy_blocked.prepare(problem)

    register_backend(Backend("watched", 5001, ("cpu",), ("float32",), watch))
    try:
        asked = ("--shapes", "4x30", "--dtypes", "float32", "--backends", "watched", "--cores", "1")
        result = measure(tmp_path, *asked)
    finally:
        unregister_backend("watched")
    assert {record["case"] for record in result["records"]} == {"1 core 4x30"}
    assert result["cpu"]["cores"] == 1
    assert set(seen) == {1}
    assert os.sched_getaffinity(0) == before


def test_cores_are_physical_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if machine.can_limit(1):
        pytest.skip("this system can't keep a process to some cores")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    read = lambda path, encoding: siblings[int(re.findall(r"cpu(\d+)", str(path))[0])]  # noqa: E731
    monkeypatch.setattr(Path, "read_text", read)
    given = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cpus: given.append(set(cpus)))
    assert machine.usable_cores() == 2
    with machine.limited_to(2):
        assert given == [{0, 2}]
    assert given == [{0, 2}, {0, 1, 2, 3}]
    assert machine.can_limit(2) is None
    assert "are 2" in (machine.can_limit(3) or "")


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


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_one_axis_is_measured_and_none_is_unsupported(tmp_path: Path, op: str) -> None:
    path = tmp_path / "arrays.npz"
    np.savez(path, one=np.linspace(0, 1, 1000), none=np.float32(3))
    result = measure(tmp_path, "--input", str(path), "--op", op)
    found = {(r["impl"], r["case"]): r["status"] for r in result["records"]}
    for impl in by_impl(result):
        assert found[impl, "one 1000"] == "ok"
        assert found[impl, "none ()"].startswith("unsupported: a 0-d array")


def test_an_absent_backend_that_was_named_is_in_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = minikernel.list_backends()
    info["cuda-fused"] = replace(info["cuda-fused"], available=False, reasons=("no driver",))
    monkeypatch.setattr(minikernel, "list_backends", lambda: info)
    named = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32", "--backends", "cuda-fused,numpy")
    assert by_impl(named)["cuda-fused"]["status"] == "unsupported: no driver"
    assert by_impl(named)["numpy"]["status"] == "ok"
    assert "not measured: cuda-fused: no driver" in capsys.readouterr().out
    everything = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32")
    assert "cuda-fused" not in by_impl(everything)

    monkeypatch.setattr(machine, "has_torch", lambda: False)
    path = tmp_path / "none.json"
    assert (
        run.main(["--shapes", "4x30", "--dtypes", "float32", "--backends", "cuda-fused", "--json", str(path)]) == 1
    )
    captured = capsys.readouterr()
    assert captured.err == "run.py: no softmax could be measured here\n"
    assert "not measured: cuda-fused: no driver" in captured.out


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_implementations_take_turns_and_a_burst_is_no_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    order: list[str] = []

    def call(name: str, seconds: float) -> timing.Turn:
        def run_once(x: int) -> None:
            order.append(name)
            busy = 0.0 <= clock.now < 0.02  # other work, at first
            clock.now += seconds + (0.008 if busy else 0.0)

        return timing.Turn(run_once, [0], 0.008)

    found = timing.host_seconds([call("a", 1e-3), call("b", 2e-3)], lambda: None, 0.04)
    assert found == [pytest.approx(1e-3), pytest.approx(2e-3)]
    assert [name for name, _ in groupby(order)][:6] == list("ababab")


def test_work_that_is_only_queued_counts_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    queued = [0]

    def call(x: int) -> None:
        clock.now += 1e-6
        queued[0] += 1

    def synchronize() -> None:
        clock.now += 0.05 * queued[0]
        queued[0] = 0

    assert timing.host_seconds([timing.Turn(call, [0], 0.05)], synchronize, 0.03) == [pytest.approx(1e-6)]
    assert clock.now < 0.2


def test_who_raises_while_timed_spoils_no_other() -> None:
    def fail(x: int) -> None:
        raise RuntimeError("no")

    broken, right = timing.host_seconds(
        [timing.Turn(fail, [0], 1e-3), timing.Turn(abs, [0], 1e-3)], lambda: None, 1e-3
    )
    assert isinstance(broken, RuntimeError)
    assert isinstance(right, float)


def test_slow_means_slow_at_its_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    delays = iter((0.9, 0.8, 0.01))

    def launch(i: int) -> None:
        clock.now += next(delays)

    assert timing.once(launch, lambda: None, limit=0.1) == pytest.approx(0.01)
    delays = iter((2.0, 0.0))
    assert timing.once(launch, lambda: None, limit=0.1) == pytest.approx(2.0)


def test_threads_that_wait_for_each_other_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    before = torch.get_num_threads()
    for together, threads in ((8e-3, 1), (3e-6, 2)):
        monkeypatch.setattr(
            machine,
            "_typical_seconds",
            lambda call, seconds=together: seconds if torch.get_num_threads() == 2 else 1e-6,
        )
        with machine.settled_threads() as note:
            assert machine.cpu()["threads"] == threads
            assert (note is None) == (threads == 2)
            assert note is None or note.startswith("PyTorch runs on 1 thread, not 2")
        assert torch.get_num_threads() == before


def test_threads_are_recorded_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32", "--op", "log_softmax")
    assert result["cpu"].keys() == {"model", "cores", "threads"}
    printed = capsys.readouterr().out
    assert f"{result['cpu']['model']}, " in printed
    if machine.has_torch():
        assert "F.log_softmax" in printed
        assert "F.softmax" not in printed
        assert f"host time in µs, {result['cpu']['threads']} thread" in printed


def test_a_slow_call_is_timed_if_it_may_be(tmp_path: Path) -> None:
    asked = ("--shapes", "4x30", "--dtypes", "float64", "--backends", "numpy")
    for limit, status in (("1e-9", "skipped: slow"), ("60", "ok")):
        assert by_impl(measure(tmp_path, *asked, "--slow", limit))["numpy"]["status"] == status


def test_the_budget_is_kept_and_said(tmp_path: Path) -> None:
    result = measure(tmp_path, "--shapes", "8x40", "--budget", "0")
    assert {record["status"] for record in result["records"]} == {"skipped: budget"}
    assert len(result["records"]) == len(shapes.DEFAULT_DTYPES) * len(by_impl(result))


def test_a_slow_call_is_not_timed_and_larger_ones_not_tried(space: Space) -> None:
    base = peers.backend("numpy")
    calls = []

    def slow(op: str, x: Any, dim: int, out: Any) -> Any:
        calls.append(tuple(x.shape))
        time.sleep(0.01)
        return base.into(op, x, dim, out)

    bench = Bench(space, [peers.Impl("slow", slow, base.eager)], ["softmax"], slow=0.005)
    tasks = [Task(Case((rows, 1024)), "float32") for rows in (64, 128)]
    assert [record.status for record in bench.run(tasks)] == ["skipped: slow"] * 2
    assert set(calls) == {(64, 1024)}


class DeviceSpace(TorchSpace):
    """The CPU in the part of a device."""

    def __init__(self) -> None:
        super().__init__("cpu", 0)
        self.device = "cuda"

    def empty(self, count: int, dtype: str) -> Any:
        return self.xp.empty(count, dtype=self.dtype(dtype))

    def synchronize(self) -> None:
        pass


class DeviceTimer:
    """Runs what a graph would hold, and takes the next of the times that were set."""

    times: ClassVar[Iterator[float]] = iter(())
    limits: ClassVar[list[tuple[float, float]]] = []

    def __init__(self, launch: Any, buffers: int, first: float, replay: float) -> None:
        self._launch, self._replay = launch, replay
        self.results = [None]

    def replay(self) -> None:
        self.results[0] = self._launch(0)

    def seconds(self, limit: float) -> float:
        self.limits.append((self._replay, limit))
        return next(self.times)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceSpace:
    pytest.importorskip("torch")
    monkeypatch.setattr("bench.measure.GraphTimer", DeviceTimer)
    monkeypatch.setattr(DeviceTimer, "times", iter(lambda: 1e-5, None))
    monkeypatch.setattr(DeviceTimer, "limits", [])
    monkeypatch.setattr("bench.measure.Bench._time_copy", lambda *_: 1e-5)
    return DeviceSpace()


def test_of_hundreds_of_points_only_the_device_time_of_auto_is_taken(device: DeviceSpace) -> None:
    impls = [peers.copy(device.xp), peers.torch_softmax(), peers.backend("auto"), peers.backend("numpy")]
    points = [Task(Case((rows, 40), scope="brief"), "float32") for rows in (3, 4)]
    records = list(Bench(device, impls, ["softmax"]).run(points))
    assert [(r.impl, r.case, r.status) for r in records] == [("auto", "3x40", "ok"), ("auto", "4x40", "ok")]
    assert all(r.kernel_us == 10 and r.host_us is None and r.gbs for r in records)
    brief = DeviceTimer.limits[0]
    named = Bench(device, impls[:2] + impls[3:], ["softmax"])
    assert [r.impl for r in named.run(points)] == ["numpy"] * 2
    full = list(Bench(device, impls, ["softmax"]).run([Task(Case((3, 40)), "float32")]))
    assert [r.impl for r in full] == ["copy", "F.softmax", "auto", "numpy"]
    assert all(r.host_us for r in full)
    assert brief < DeviceTimer.limits[-1]


def test_a_wrong_point_among_hundreds_is_wrong(device: DeviceSpace) -> None:
    lazy = peers.Impl("auto", lambda op, x, dim, out: out, lambda op, dim: lambda x: x)
    (record,) = Bench(device, [lazy], ["softmax"]).run([Task(Case((3, 40), scope="brief"), "float32")])
    assert record.status.startswith("wrong: ")
    assert record.kernel_us is None


def test_on_a_cpu_a_point_has_its_host_time(space: Space) -> None:
    point = Task(Case((3, 40), scope="brief"), "float32")
    (record,) = Bench(space, [peers.copy(space.xp), peers.backend("auto")], ["softmax"]).run([point])
    assert record.kernel_us is None
    assert record.host_us is not None


def test_what_stands_out_is_measured_once_more(device: DeviceSpace, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Task(Case((rows, 4096), scope="brief"), "float32") for rows in range(1, 9)]
    bench = Bench(device, [peers.backend("auto")], ["softmax"])
    results = Results({})
    # The second is a cliff and stays one; the sixth was disturbed.
    monkeypatch.setattr(DeviceTimer, "times", iter([1e-5, 9e-5, *[1e-5] * 3, 5e-5, 1e-5, 1e-5]))
    results.records = list(bench.run(points))
    monkeypatch.setattr(DeviceTimer, "times", iter([9.5e-5, 1.1e-5]))
    extras.second_look(bench, points, results)
    assert [record.kernel_us for record in results.records] == [10, 90, 10, 10, 10, 11, 10, 10]
    assert next(DeviceTimer.times, None) is None


def test_a_second_look_lowers_times_and_finds_faults() -> None:
    def made(impl: str, kernel: float | None, host: float | None, status: str = "ok") -> Record:
        return Record("softmax", impl, "float32", 1, 2, -1, "contiguous", kernel, host, status=status, case="1x2")

    results = Results({})
    results.records = [made("auto", 3, 9), made("other", 5, 8)]
    results.improve(made("auto", 4, 7))
    results.improve(made("other", None, None, "skipped: budget"))
    assert results.records == [made("auto", 3, 7), made("other", 5, 8)]
    results.improve(made("other", 4, 9))
    results.improve(made("auto", None, None, "wrong: 1 of 2 values off"))
    assert results.records == [made("auto", None, None, "wrong: 1 of 2 values off"), made("other", 4, 8)]


def test_targets_add_figures_and_host_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Iterator[Figure]:
        yield Figure("half", 0.5)
        raise RuntimeError("no\nmore")

    taken = {"good": lambda: iter([Figure("a good one", 41.25, "ms", "here")]), "bad": fail}
    monkeypatch.setattr(figures, "collectors", lambda space, peer, deadline: taken)
    small = ("--shapes=2x3", "--dtypes=float32", "--device=cpu", "--backends=numpy", "--peers=scipy")
    monkeypatch.setattr(extras, "HOST_RUN", small)
    path = tmp_path / "result.json"
    result = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32", "--targets")
    assert [figure["name"] for figure in result["figures"]] == ["a good one", "half"]
    beside = {record["impl"] for record in result["records"] if record["case"] == "2x3"}
    assert beside == {peers.COPY, peers.SCIPY, "numpy"}
    assert load(path).dumps() == path.read_text()
    text = capsys.readouterr().out
    assert "a good one: 41.25 ms (here)" in text
    assert "not measured: bad: no more" in text

    monkeypatch.setattr(extras, "HOST_RUN", ("--shapes=2by3",))
    late = measure(tmp_path, "--shapes", "4x30", "--dtypes", "float32", "--targets", "--budget", "0")
    assert late["figures"] == []
    text = capsys.readouterr().out
    assert "not measured: good, bad: skipped: budget" in text
    assert "not measured: numpy beside scipy.special.softmax: run.py: bad shape" in text


def test_the_file_is_written_as_the_run_goes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    results = Results({"date": "2026-01-01"}, path)
    results.add(Record("softmax", "copy", "float32", 1, 2, -1, "contiguous", case="1x2"))
    assert len(load(path).records) == 1
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_a_file_that_cannot_be_written_is_named_as_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    (tmp_path / "result.json.partial").mkdir()
    with pytest.raises(SystemExit) as exit_status:
        run.main(["--shapes", "2x3", "--device", "cpu", "--json", str(path)])
    assert exit_status.value.code == 2
    assert capsys.readouterr().err == f"run.py: cannot write {path}: Is a directory\n"


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


def printed(results: Results, width: int, absent: dict[str, str]) -> str:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    report.print_tables(results, console, absent)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_narrow_terminal_cuts_no_word_and_wrong_is_seen() -> None:
    text = printed(sample_results(), 40, {"other": "no driver", "another": "no driver"})
    assert text.startswith("A GPU (copy at 4.00 TB/s), torch 2.13, 2026-01-02\n")
    assert "…" not in text
    for word in (
        *by_impl({"records": map(vars, sample_results().records)}),
        "wrong",
        "device time in µs; × the copy",
    ):
        assert word in text
    assert "cuda-naive: wrong: 3 of 4 values off" in text
    assert "not measured: other, another: no driver\n" in text


def test_no_headline_from_a_cpu_or_from_a_disturbed_run() -> None:
    assert "times as long" in report.markdown(sample_results())
    disturbed = sample_results()
    disturbed.records[0] = replace(disturbed.records[0], kernel_us=12.0)
    for text in (report.markdown(disturbed), printed(disturbed, 200, {})):
        assert "times as long" not in text
        assert "at 512x600 float32 the copy took 5.5 times cuda-fused's time" in text
    on_cpu = sample_results()
    on_cpu.header["gpu"] = None
    on_cpu.records = [replace(record, kernel_us=None, host_us=record.kernel_us) for record in on_cpu.records]
    assert "Host time as a multiple" in report.markdown(on_cpu)
    assert "times as long" not in report.markdown(on_cpu)


def test_a_figure_is_shown_at_its_largest() -> None:
    taken = [Figure("one", 1.5, "s", "here"), Figure("two", 4096), Figure("one", 2.5, "s", "there")]
    lines = report.figure_lines(taken)
    assert lines == ["one: 2.5 s (there)", "two: 4,096"]


def probes() -> Results:
    """The run in miniature, and what the probing grids add to it."""
    results = sample_results()

    def made(impl: str, case: str, kernel: float, layout: str = "contiguous", host: float | None = 7.0) -> Record:
        rows, cols = parse_shape(case).rows, parse_shape(case).cols
        return Record("softmax", impl, "float32", rows, cols, -1, layout, kernel, host, 1.0, 0, 0, case=case)

    for case, layout, auto in (
        ("8192x8192", "contiguous", 100.0),
        ("8192x8192@0", "contiguous", 120.0),
        ("8192x8192", "sliced", 101.0),
    ):
        times = {"copy": 90.0, "F.softmax": 9000.0, "auto": auto}
        results.records += [made(impl, case, us, layout) for impl, us in times.items()]
    results.records += [made("auto", f"4096x{n}", n / 1000, host=None) for n in (1020, 1021, 1025)]
    results.records += [made("auto", f"{n}x4096", 2.0, host=None) for n in (1, 2)]
    beside = Record("softmax", "numpy", "float32", 2, 3, -1, "contiguous", None, 5.0, 1.0, 0, 0, case="2 cores 2x3")
    results.records.append(beside)
    return results


def test_probing_grids_say_nothing_of_a_typical_input() -> None:
    text = report.markdown(probes())
    assert "1.60 times as long" in text
    assert "2 cores" not in text
    assert "4096x1021" not in text
    assert "| float32 | 8192x8192@0 |" in text
    alone = probes()
    alone.records = [record for record in alone.records if "8192" in record.case]
    assert "times as long" in report.markdown(alone)
    assert len(usual(rows_of(alone.records))) == 3


def test_hundreds_of_points_are_a_line() -> None:
    text = printed(probes(), 200, {})
    assert "auto, float32, 4096x1020..1030: 1.02 to 1.02 µs (3 points)" in text
    assert "auto, float32, 1..300x4096: 2.00 to 2.00 µs (2 points)" in text
    assert "4096x1021" not in text
    assert "2 cores 2x3" in text


def test_strided_input_has_a_table_of_its_own() -> None:
    results = probes()
    results.records.append(replace(results.records[0], dtype="float32", rows=4096, cols=128, case="4096x128"))
    text = report.markdown(results, table_only=True)
    assert "| dtype | shape | contiguous µs | F.softmax | auto |" in text
    assert "| float32 | 8192x8192@0 | 100 | 90.0 | 1.20 |" in text
    assert "| float32 | 8192x8192 sliced | 100 | 90.0 | 1.01 |" in text


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
    folders = tmp_path / "minikernel", tmp_path / "kernels"
    before = source_hash(*folders)
    assert before == source_hash()
    assert any(path.suffix == ".cu" for path in source_files(*folders).values())
    (folders[0] / "api.py").write_text("# decides no launch\n")
    assert source_hash(*folders) == before
    seen = {before}
    for path in source_files(*folders).values():
        path.write_bytes(path.read_bytes() + b"\n")
        assert source_hash(*folders) not in seen
        seen.add(source_hash(*folders))


LAB = ROOT / "experiments" / "24-tuned-kernel"


def experiment(name: str) -> ModuleType:
    path = LAB / f"{name}.py"
    if not path.exists():
        pytest.skip("the experiments are part of the checkout")
    spec = spec_from_file_location(f"experiment_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    entries = list(sys.path)
    sys.path.insert(0, str(LAB))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = entries
        sys.modules.pop("lab", None)
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
    del results.header["date"]
    with pytest.raises(ValueError, match=r"not measured: date$"):
        manifest.manifest(results, text)
    with pytest.raises(ValueError, match=r"not measured: date, versions\.ncu$"):
        manifest.manifest(results, text.partition("\n")[2])
    results.records = [r for r in results.records if r.impl != "cuda-smem"]
    with pytest.raises(ValueError, match="cuda-smem at 512x600 isn't in"):
        manifest.manifest(results, text)


def test_the_profile_is_of_one_kernel_by_its_whole_name() -> None:
    """softmax_fused_strided begins with the same letters."""
    profile = experiment("ncu_profile")
    assert "regex:^softmax_fused$" in profile._PROFILE
    with pytest.raises(ValueError, match="holds 1 kernels instead of 2"):
        profile.parse_raw(RAW_PAGE.rpartition('"1"')[0])


@pytest.mark.parametrize("name", ["bench", "manifest", "ncu_profile"])
def test_the_scripts_of_the_lab_run_by_themselves(name: str, tmp_path: Path) -> None:
    if not LAB.exists():
        pytest.skip("the experiments are part of the checkout")
    absent = script(str(LAB / f"{name}.py"), "--out", str(tmp_path / "absent"))
    assert absent.returncode == 2
    assert "there is no folder" in absent.stderr
    if name != "bench":  # with nothing to go by, or no ncu
        failed = script(str(LAB / f"{name}.py"), "--out", str(tmp_path), PATH="")
        assert failed.returncode == 1
        assert failed.stderr.startswith(f"{name}.py: ")
        assert failed.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_preset_measures_its_ladder(tmp_path: Path) -> None:
    preset = LAB / "bench.py"
    if not preset.exists():
        pytest.skip("the experiments are part of the checkout")
    done = script(str(preset), "--out", str(tmp_path), "--shapes", "8x600")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bench.json").read_text())
    assert {record["case"] for record in result["records"]} == {"8x600"}
    assert by_impl(result).keys() >= {"cuda-naive", "cuda-smem", "cuda-parallel", "cuda-fused"}


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


def test_the_k_largest_are_measured_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    asked = ["--op", "softmax_topk", "--k", "5", "--device", "cpu", "--dtypes", "float32"]
    assert run.main([*asked, "--shapes", "4x300,3x40x4@1", "--json", str(path)]) == 0
    records = json.loads(path.read_text())["records"]
    assert {(r["op"], r["status"]) for r in records} == {("softmax_topk", "ok")}
    assert {r["impl"] for r in records} == {"copy", "F.softmax", "auto", "numpy"}

    def switched(op: str, x: Any, dim: int, out: Any) -> Any:
        found = peers.backend("numpy", k=2).into(op, x, dim, out)
        return found.probabilities, found.indices.flip(dim)

    impls = [peers.Impl("switched", switched, peers.backend("numpy", k=2).eager)]
    (record,) = Bench(TorchSpace("cpu", 0), impls, ["softmax_topk"]).run([Task(Case((7, 300)), "float32")])
    assert record.status.startswith("wrong")


@pytest.mark.parametrize("op", ["softmax_backward", "log_softmax_backward"])
def test_gradients_are_measured_and_checked(op):
    space = TorchSpace("cpu", 0)
    impls = [peers.copy(space.xp), peers.torch_softmax(), peers.backend("auto"), peers.backend("numpy")]
    wrong = peers.Impl("wrong", lambda op, pair, dim, out: pair[1].clone(), lambda op, dim: lambda pair: pair)
    tasks = [Task(Case((7, 300)), "float32"), Task(Case((3, 50, 4), 1), "bfloat16"), Task(Case((5, 9)), "float64")]
    records = list(Bench(space, [*impls, wrong], [op]).run(tasks))
    assert [r.status for r in records if r.impl != "wrong"] == ["ok"] * 12
    assert all(r.status.startswith("wrong") for r in records if r.impl == "wrong")
    assert all(r.op == op and (r.impl == "copy" or r.max_abs_error is not None) for r in records)
    (strided,) = Bench(space, [impls[2]], [op]).run([Task(Case((8, 8)), "float32", "transposed")])
    assert strided.status.startswith("unsupported")
    (on_arrays,) = Bench(NumPySpace(0), [peers.backend("numpy")], [op]).run([Task(Case((8, 8)), "float32")])
    assert on_arrays.status == "unsupported: gradients are for PyTorch's tensors"
