"""Write manifest.json from what was measured: bench.json by bench.py, ncu_report.txt by ncu_profile.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parents[1])

from bench.records import Results, load  # noqa: E402

LAUNCH_BOUND, BANDWIDTH_BOUND = "512x600", "32768x4096"
LADDER = {
    "naive": "cuda-naive",
    "smem": "cuda-smem",
    "parallel": "cuda-parallel",
    "fused": "cuda-fused",
}
REFERENCES = {"F_softmax_ref": "F.softmax", "copy": "copy"}


def measured(results: Results, impl: str, case: str) -> tuple[float, float]:
    """Device microseconds and GB/s of one implementation; ValueError if they weren't measured."""
    for record in results.records:
        if (record.impl, record.case, record.dtype, record.op) == (impl, case, "float32", "softmax"):
            if record.kernel_us and record.gbs:
                return record.kernel_us, record.gbs
            raise ValueError(f"{impl} at {case}: {record.status}, no device time")
    raise ValueError(f"{impl} at {case} isn't in bench.json")


def kernels(results: Results, case: str, label: str) -> dict[str, dict[str, float]]:
    """Device time and share of the datasheet's bandwidth for the ladder and the two references."""
    peak = results.header["gpu"]["hbm_peak_gbs"]
    found = {}
    for name, impl in {**LADDER, **REFERENCES}.items():
        us, gbs = measured(results, impl, case)
        found[name] = {label: round(us, 3), "fraction_of_peak": round(gbs / peak, 4)}
    return found


def dominant_stall(report: str, case: str) -> str:
    """The line that ncu_profile.py wrote for a shape."""
    match = re.search(rf"^== cuda-fused, {case} float32.*?^dominant stall:\s*(.+?)$", report, re.S | re.M)
    if not match:
        raise ValueError(f"ncu_report.txt names no dominant stall for {case}")
    return match[1].strip()


def ratio(results: Results, impl: str, case: str) -> float:
    """cuda-fused's device time over another's."""
    return round(measured(results, "cuda-fused", case)[0] / measured(results, impl, case)[0], 4)


def manifest(results: Results, report: str) -> dict[str, Any]:
    """The lab's record.

    Raises:
        ValueError: Something that it needs wasn't measured.
    """
    gpu, versions = results.header["gpu"], dict(results.header["versions"])
    if not gpu:
        raise ValueError("bench.json was measured without a GPU")
    if match := re.search(r"^ncu version: (\S+)", report, re.M):
        versions["ncu"] = match[1]
    wanted = ("python", "cupy", "torch", "triton", "ncu")
    if missing := [name for name in wanted if name not in versions]:
        raise ValueError(f"no version of {', '.join(missing)}")
    if not gpu["hbm_peak_gbs"]:
        raise ValueError(f"no datasheet bandwidth for {gpu['model']}")
    against_torch = ratio(results, "F.softmax", LAUNCH_BOUND)
    return {
        "experiment": "24-tuned-kernel",
        "date": results.header["date"],
        "seed": results.header["seed"],
        "gpu": {name: gpu[name] for name in ("model", "compute_capability", "hbm_peak_gbs", "copy_gbs")},
        "versions": {name: versions[name] for name in wanted},
        "kernels": kernels(results, LAUNCH_BOUND, "median_us_at_B512"),
        "bandwidth_bound": {
            "shape": BANDWIDTH_BOUND,
            "kernels": kernels(results, BANDWIDTH_BOUND, "median_us"),
            "fused_vs_F_softmax_ratio": ratio(results, "F.softmax", BANDWIDTH_BOUND),
            "fused_vs_copy_ratio": ratio(results, "copy", BANDWIDTH_BOUND),
            "dominant_stall_reason": dominant_stall(report, BANDWIDTH_BOUND),
        },
        "results_summary": {
            "fused_vs_F_softmax_ratio": against_torch,
            "fused_vs_copy_ratio": ratio(results, "copy", LAUNCH_BOUND),
            "dod_30pct_met": against_torch <= 3.0,
            "dominant_stall_reason": dominant_stall(report, LAUNCH_BOUND),
        },
    }


def main() -> int:
    try:
        report = (HERE / "ncu_report.txt").read_text(encoding="utf-8")
        written = manifest(load(HERE / "bench.json"), report)
    except (OSError, ValueError) as error:
        print(f"manifest.py: {error}", file=sys.stderr)
        return 1
    text = json.dumps(written, indent=2) + "\n"
    (HERE / "manifest.json").write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
