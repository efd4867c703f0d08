"""Write manifest.json from what was measured: bench.json by bench.py, ncu_report.txt by ncu_profile.py."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from lab import BANDWIDTH_BOUND, LADDER, LAUNCH_BOUND, parser

from bench.records import Results, load

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
    gpu, versions = results.header.get("gpu"), dict(results.header.get("versions") or {})
    if not gpu:
        raise ValueError("bench.json was measured without a GPU")
    if match := re.search(r"^ncu version: (\S+)", report, re.M):
        versions["ncu"] = match[1]
    if not gpu.get("hbm_peak_gbs"):
        raise ValueError(f"no datasheet bandwidth for {gpu.get('model')}: add it to bench/machine.py")
    against_torch = ratio(results, "F.softmax", LAUNCH_BOUND)
    written = {
        "experiment": "24-tuned-kernel",
        "date": results.header.get("date"),
        "seed": results.header.get("seed"),
        "gpu": {name: gpu.get(name) for name in ("model", "compute_capability", "hbm_peak_gbs", "copy_gbs")},
        "versions": {name: versions.get(name) for name in ("python", "cupy", "torch", "triton", "ncu")},
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
    if empty := gaps(written):
        raise ValueError(f"not measured: {', '.join(empty)}")
    return written


def gaps(tree: Mapping[str, Any], path: str = "") -> list[str]:
    """Paths of the fields that hold nothing."""
    found = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found += gaps(value, f"{path}{name}.")
        elif value is None or value == "" or (isinstance(value, float) and not math.isfinite(value)):
            found.append(path + name)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    out = parser(__doc__).parse_args(argv).out
    try:
        report = (out / "ncu_report.txt").read_text(encoding="utf-8")
        text = json.dumps(manifest(load(out / "bench.json"), report), indent=2) + "\n"
        (out / "manifest.json").write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"manifest.py: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
