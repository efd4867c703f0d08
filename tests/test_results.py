"""Committed measurements have the schema, and say when the code has moved on; what is run by hand stays sound."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from minikernel.problem import ALL_OPS

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "bench" / "run.py").exists():
    pytest.skip("the bench is part of the checkout, not of the package", allow_module_level=True)

from bench import figures  # noqa: E402
from bench.peers import AUTO, COPY, OPTIONAL_NAMES, SCIPY, TORCH  # noqa: E402
from bench.records import load  # noqa: E402
from bench.shapes import DTYPES, LAYOUTS  # noqa: E402
from minikernel.sources import source_files, source_hash  # noqa: E402

RESULT = ROOT / "bench" / "results" / "h200.json"
BACKENDS = {"auto", "cuda-fused", "triton-fused", "cuda-smem", "cuda-naive", "numpy"}
HEADER = {"schema", "date", "seed", "source_hash", "command", "gpu", "cpu", "versions", "figures", "records"}
GPU = {"model", "compute_capability", "sm_count", "hbm_peak_gbs", "copy_gbs"}
STATUSES = ("ok", "unsupported: ", "wrong: ", "skipped: ")


@pytest.fixture
def result() -> dict[str, Any]:
    if not RESULT.exists():
        pytest.skip(f"nothing has been committed as {RESULT.relative_to(ROOT)}")
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def faults(record: dict[str, Any]) -> list[str]:
    """How a record contradicts itself or the schema."""
    ok = record["status"] == "ok"
    on_host = record["impl"] in ("numpy", SCIPY) or record["case"].startswith("2 cores ")
    brief = record["impl"] == AUTO and record["host_us"] is None
    timed = record["kernel_us"] if brief else record["host_us"]
    claims = {
        "impl": record["impl"] in {COPY, TORCH, *OPTIONAL_NAMES, *BACKENDS},
        "op": record["op"] in ALL_OPS,
        "dtype": record["dtype"] in DTYPES,
        "layout": record["layout"] in LAYOUTS,
        "extents": record["rows"] > 0 and record["cols"] > 0,
        "status": ok or record["status"].startswith(STATUSES[1:]),
        "timed only if right": ok == (timed is not None) == (record["gbs"] is not None),
        "device time": (record["kernel_us"] is not None) == (ok and not on_host),
        "positive": all(record[key] is None or record[key] > 0 for key in ("kernel_us", "host_us", "gbs")),
        "checked": not ok or record["impl"] == COPY or record["max_abs_error"] is not None,
    }
    return [claim for claim, holds in claims.items() if not holds]


def test_the_committed_result_has_the_schema(result: dict[str, Any]) -> None:
    assert result.keys() | {"figures"} == HEADER
    assert (result["schema"], result["seed"]) == (1, 42)
    assert result["gpu"].keys() == GPU
    assert all(result["gpu"].values())
    assert "H200" in result["gpu"]["model"]
    datetime.fromisoformat(result["date"])
    loaded = load(RESULT)
    assert loaded.records  # each has the fields of a Record and no other
    named = {value for name, value in vars(figures).items() if name.isupper() and isinstance(value, str)}
    assert {figure.name for figure in loaded.figures} <= named
    assert all(figure.value >= 0 for figure in loaded.figures)


def test_the_committed_records_are_consistent(result: dict[str, Any]) -> None:
    wrong = [(record, found) for record in result["records"] if (found := faults(record))]
    assert not wrong, wrong[:5]
    keys = [tuple(r[key] for key in ("op", "impl", "dtype", "layout", "case")) for r in result["records"]]
    assert len(set(keys)) == len(keys)
    assert {r["impl"] for r in result["records"]} >= {COPY, TORCH, *BACKENDS}
    assert not [r for r in result["records"] if r["status"].startswith("wrong")]


@pytest.mark.filterwarnings("default::UserWarning")
def test_the_committed_result_is_of_this_code(result: dict[str, Any]) -> None:
    """A warning, and no failure: on a machine without that GPU nobody can measure again."""
    if result["source_hash"] != source_hash():
        warnings.warn(
            f"{RESULT.relative_to(ROOT)} is older than the kernels or launch plans: run bench/run.py again",
            UserWarning,
            stacklevel=1,
        )


def test_faults_are_found() -> None:
    right = {
        "op": "softmax",
        "impl": "cuda-fused",
        "dtype": "float32",
        "rows": 2,
        "cols": 3,
        "layout": "contiguous",
        "case": "2x3",
        "kernel_us": 1.0,
        "host_us": 2.0,
        "gbs": 3.0,
        "max_abs_error": 0.0,
        "status": "ok",
    }
    assert faults(right) == []
    untimed = right | {"kernel_us": None, "host_us": None, "gbs": None}
    assert faults(untimed | {"status": "wrong: 1 of 6 values off"}) == []
    assert faults(untimed) == ["timed only if right", "device time"]
    assert faults(right | {"status": "skipped: slow"}) == ["timed only if right", "device time"]
    assert faults(right | {"status": "fine"})[0] == "status"
    assert faults(right | {"impl": "cuda"}) == ["impl"]
    assert faults(right | {"impl": "numpy", "kernel_us": None}) == []
    assert faults(right | {"host_us": None}) == ["timed only if right"]
    assert faults(right | {"impl": "auto", "host_us": None}) == []
    assert faults(right | {"impl": SCIPY, "case": "2 cores 2x3", "kernel_us": None}) == []
    assert faults(right | {"impl": "copy", "case": "2 cores 2x3"}) == ["device time"]


def test_the_hash_covers_what_decides_a_launch() -> None:
    covered = set(source_files())
    assert covered >= {path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").iterdir()}
    named = ("cuda.py", "driver.py", *(f"backends/{name}.py" for name in ("cuda_fused", "triton_fused")))
    assert covered >= {f"minikernel/{name}" for name in (*named, "backends/triton_kernels.py")}


def test_forced_launches_have_room_for_their_rows() -> None:
    """sanitize.py's plans, from the words of their names; a GPU isn't needed to see that they'd be right."""
    from sanitize import LAUNCHES

    for name, (cols, fields) in LAUNCHES.items():
        packs, parts = -(-cols // 4), int(fields.get("parts", 1))
        share = packs if parts == 1 else -(-packs // (parts * 8)) * 8
        held = (int(fields["vectors"]) + int(fields.get("shared_vectors", 0))) * int(fields["threads"])
        assert ("streamed" in name) == bool(fields.get("streamed")) == (share > held), name
        assert ("shared" in name) == ("shared_vectors" in fields)
        assert ("grid" in name) == bool(fields.get("cooperative"))


@pytest.mark.gpu
def test_sanitize_runs() -> None:
    command = [sys.executable, str(ROOT / "tests" / "sanitize.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cuda-fused: grid: right" in done.stdout.splitlines()
