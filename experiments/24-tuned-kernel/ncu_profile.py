"""Profile cuda-fused with Nsight Compute and annotate what it says.

``python experiments/24-tuned-kernel/ncu_profile.py`` runs this file again under ``ncu --set full``, writes
ncu_report.ncu-rep with a kernel for each shape, and ncu_report.txt: for each the figures that matter in the
lab's words, then ncu's own details page.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from lab import SHAPES, parser

#: What a repository should hold of a profile, at most.
MAX_BYTES = 5_000_000

#: ncu's stall reasons and the lab's names for them.
STALLS = {
    "long_scoreboard": "memory dependency",
    "lg_throttle": "memory throttle",
    "drain": "memory throttle",
    "tex_throttle": "texture",
    "short_scoreboard": "shared-memory dependency",
    "mio_throttle": "shared-memory and special-function throttle",
    "math_pipe_throttle": "pipe busy",
    "wait": "execution dependency",
    "barrier": "synchronization",
    "membar": "synchronization",
    "gmma": "tensor-core dependency",
    "no_instruction": "instruction fetch",
    "no_instructions": "instruction fetch",
    "branch_resolving": "branch",
    "dispatch_stall": "dispatch",
    "imc_miss": "constant memory dependency",
    "not_selected": "not selected",
    "sleeping": "sleeping",
    "misc": "other",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")

#: Local-memory accesses, which is where spilled registers go; the name depends on ncu's version.
_LOCAL = (
    ("smsp__inst_executed_op_local_ld.sum", "smsp__inst_executed_op_local_st.sum"),
    ("smsp__sass_inst_executed_op_local_ld.sum", "smsp__sass_inst_executed_op_local_st.sum"),
    ("sass__inst_executed_local_loads", "sass__inst_executed_local_stores"),
    ("l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum"),
    ("derived__local_spilling_requests",),
    ("sass__inst_executed_register_spilling",),
)
_CONFLICTS = (
    (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
)

Metrics = Mapping[str, str]


def launch() -> None:
    """What ncu watches: the fused kernel once on each shape, on a GPU whose clocks are up."""
    import torch

    import minikernel

    generator = torch.Generator("cuda").manual_seed(42)
    inputs = [torch.randn(shape, device="cuda", generator=generator) for shape in SHAPES]
    for _ in range(500):
        torch.neg(inputs[-1])
    torch.cuda.synchronize()
    for x in inputs:
        minikernel.softmax(x, backend="cuda-fused")
        torch.cuda.synchronize()


def number(metrics: Metrics, *names: str) -> float | None:
    """The first of the metrics that the report has, as a number."""
    for name in names:
        # Metrics with a value for each instruction begin with their total.
        if match := re.match(r"-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?", metrics.get(name, "")):
            return float(match[0].replace(",", ""))
    return None


def total(metrics: Metrics, families: Iterable[tuple[str, ...]]) -> float | None:
    """The sum over the first family of metrics that the report has all of."""
    for family in families:
        values = [value for name in family if (value := number(metrics, name)) is not None]
        if len(values) == len(family):
            return sum(values)
    return None


def stalls(metrics: Metrics) -> list[tuple[str, float]]:
    """Why warps waited: ncu's reasons and the warps held by each per issue, the largest first."""
    found = {}
    for name in metrics:
        if (match := _STALL.fullmatch(name)) and match[1] != "selected":
            found[match[1]] = number(metrics, name) or 0.0
    return sorted(found.items(), key=lambda item: -item[1])


def dominant_stall(metrics: Metrics) -> str:
    """The largest stall by ncu's name and the lab's, such as ``long scoreboard (memory dependency)``.

    Raises:
        ValueError: The report has no stall reasons.
    """
    if not (found := stalls(metrics)):
        raise ValueError("the report has no warp-state metrics: profile with --set full")
    return stall_name(found[0][0])


def stall_name(reason: str) -> str:
    """A stall reason as people read it."""
    return f"{reason.replace('_', ' ')} ({STALLS.get(reason, 'no name in the lab')})"


#: What the annotated report says of each kernel: label, unit, and how to get it.
FIGURES: tuple[tuple[str, str, Callable[[Metrics], float | None]], ...] = (
    ("duration, caches cold", "", lambda m: number(m, "gpu__time_duration.sum")),
    ("theoretical occupancy", "%", lambda m: number(m, "sm__maximum_warps_per_active_cycle_pct")),
    ("achieved occupancy", "%", lambda m: number(m, "sm__warps_active.avg.pct_of_peak_sustained_active")),
    (
        "memory throughput against the peak",
        "%",
        lambda m: number(
            m,
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
    ),
    ("compute throughput", "%", lambda m: number(m, "sm__throughput.avg.pct_of_peak_sustained_elapsed")),
    ("L1 hit rate", "%", lambda m: number(m, "l1tex__t_sector_hit_rate.pct")),
    ("L2 hit rate", "%", lambda m: number(m, "lts__t_sector_hit_rate.pct")),
    ("shared-memory bank conflicts", "", lambda m: total(m, _CONFLICTS)),
    ("registers", "a thread", lambda m: number(m, "launch__registers_per_thread")),
    ("local-memory accesses (spills)", "", lambda m: total(m, _LOCAL)),
    ("waves", "an SM", lambda m: number(m, "launch__waves_per_multiprocessor")),
)


def annotate(metrics: Metrics, units: Metrics, shape: tuple[int, int]) -> list[str]:
    """The lines of the report on one kernel."""
    lines = [f"== cuda-fused, {shape[0]}x{shape[1]} float32: {metrics.get('Kernel Name', '')}"]
    for label, unit, find in FIGURES:
        value = find(metrics)
        if label.startswith("duration"):
            unit = units.get("gpu__time_duration.sum", "")
        lines.append(f"{label + ':':36}" + ("not in this report" if value is None else f"{value:,.4g} {unit}"))
    lines.append(f"{'dominant stall:':36}{dominant_stall(metrics)}")
    held = sum(value for _, value in stalls(metrics)) or 1.0
    for reason, value in stalls(metrics)[:5]:
        lines.append(f"    {stall_name(reason):52}{value:8.2f} warps per issue, {value / held:.0%} of all stalls")
    return [line.rstrip() for line in lines]


def parse_raw(text: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """ncu's raw page as CSV: a dict of metrics for each kernel, and the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]  # ncu talks before the table
    rows = list(csv.DictReader(lines))
    if len(rows) != 1 + len(SHAPES):  # the first has the units
        raise ValueError(f"ncu's raw page holds {max(len(rows) - 1, 0)} kernels instead of {len(SHAPES)}")
    return rows[1:], rows[0]


def _ncu(*arguments: str) -> str:
    try:
        done = subprocess.run(["ncu", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("ncu isn't on the path: it comes with the CUDA toolkit, as Nsight Compute") from None
    if done.returncode:
        raise RuntimeError(f"ncu failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return done.stdout


def report(versions: str, kernels: Iterable[Metrics], units: Metrics, details: str) -> str:
    """The whole text: what was run, each kernel annotated, and ncu's details."""
    parts = [
        f"ncu version: {versions}",
        f"command: ncu {' '.join(_PROFILE)} python ncu_profile.py --launch",
        "",
    ]
    for metrics, shape in zip(kernels, SHAPES, strict=True):
        parts += [*annotate(metrics, units, shape), ""]
    return "\n".join([*parts, "== ncu --page details", details])


_PROFILE = (
    "--set",
    "full",
    "--clock-control",
    "none",
    "--target-processes",
    "all",
    "-k",
    "regex:^softmax_fused$",
    "-c",
    str(len(SHAPES)),
)


def profile(out: Path) -> str:
    """Write both reports into a folder; returns the annotated part of the text.

    Raises:
        OSError, RuntimeError, ValueError: ncu couldn't, or what it wrote isn't what was asked for.
    """
    written = out / "ncu_report.ncu-rep"
    versions = _ncu("--version")
    _ncu(*_PROFILE, "-f", "-o", str(written), sys.executable, str(Path(__file__).resolve()), "--launch")
    if not written.is_file():
        raise RuntimeError(f"ncu wrote no {written}: it saw no launch of softmax_fused")
    if (size := written.stat().st_size) > MAX_BYTES:
        print(f"ncu_profile.py: {written} has {size:,} bytes: too many to commit", file=sys.stderr)
    kernels, units = parse_raw(_ncu("--import", str(written), "--page", "raw", "--csv"))
    details = _ncu("--import", str(written), "--page", "details")
    match = re.search(r"Version ([\w.]+)", versions)
    text = report(match[1] if match else versions.split()[-1], kernels, units, details)
    (out / "ncu_report.txt").write_text(text, encoding="utf-8")
    return text.partition("== ncu --page details")[0]


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__doc__)
    command.add_argument("--launch", action="store_true", help="only what ncu watches")
    options = command.parse_args(argv)
    if options.launch:
        launch()
        return 0
    try:
        print(profile(options.out))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"ncu_profile.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
