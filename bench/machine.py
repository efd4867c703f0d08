"""What the measurements ran on: the GPU and its datasheet bandwidth, the CPU, the versions."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

import minikernel

#: Memory bandwidth by datasheet in 1e9 bytes a second; the first name found in the device's is it.
HBM_PEAK_GBS = {
    "B300": 8000,
    "B200": 8000,
    "GB200": 8000,
    "H200": 4800,
    "H100 NVL": 3938,
    "H100 PCIe": 2039,
    "H100": 3350,
    "A100-SXM4-80GB": 2039,
    "A100 80GB PCIe": 1935,
    "A100": 1555,
    "A30": 933,
    "A10G": 600,
    "A10": 600,
    "L40S": 864,
    "L40": 864,
    "L4": 300,
    "V100": 900,
    "T4": 320,
    "RTX 5090": 1792,
    "RTX 4090": 1008,
    "RTX 3090 Ti": 1008,
    "RTX 3090": 936,
}


def has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def has_gpu() -> bool:
    """Whether PyTorch is here and sees an NVIDIA GPU."""
    if not has_torch():
        return False
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


def hbm_peak_gbs(model: str, memory_clock_khz: int = 0, bus_bits: int = 0) -> float | None:
    """Datasheet bandwidth by the device's name, or else what its memory clock and bus width allow."""
    for name, peak in HBM_PEAK_GBS.items():
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", model):
            return float(peak)
    return 2 * memory_clock_khz * 1e3 * bus_bits / 8 * 1e-9 or None


def gpu() -> dict[str, Any]:
    """The ``gpu`` object of a result; measures the copy bandwidth, which also warms the GPU up."""
    import torch

    from .timing import GraphTimer

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    xs, ys = torch.zeros(2, 1 << 27, device="cuda"), torch.empty(2, 1 << 27, device="cuda")
    torch.neg(xs[0], out=ys[0])
    torch.cuda.synchronize()
    timer = GraphTimer(lambda i: torch.neg(xs[i], out=ys[i]), 2, first=3e-4)
    timer.seconds(limit=0.3)
    seconds = timer.seconds()
    return {
        "model": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "hbm_peak_gbs": hbm_peak_gbs(
            properties.name,
            getattr(properties, "memory_clock_rate", 0),
            getattr(properties, "memory_bus_width", 0),
        ),
        "copy_gbs": round(2 * xs[0].nbytes / seconds * 1e-9, 1),
    }


def cache_bytes() -> int:
    """Size of the current GPU's L2 cache."""
    import torch

    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)


def usable_cores() -> int:
    """Physical cores that this process may run on: hyperthreads of one core count once."""
    return len(_one_of_each_core())


def _one_of_each_core() -> list[int]:
    """A hyperthread of each physical core that this process may run on."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = Path("/sys/devices/system/cpu")
    cores: dict[str, int] = {}
    for cpu in sorted(usable):
        try:
            core = (siblings / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        except OSError:
            core = str(cpu)
        cores.setdefault(core, cpu)
    return list(cores.values())


def can_limit(cores: int) -> str | None:
    """Why this process can't keep to so many cores, or None."""
    if not hasattr(os, "sched_setaffinity"):
        return "this system can't keep a process to some cores"
    usable = usable_cores()
    return None if 1 <= cores <= usable else f"the cores that may be used here are {usable}"


@contextmanager
def limited_to(cores: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, to so many physical cores; 0 leaves things as they are."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _one_of_each_core()[:cores])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpu(framework: str = "torch") -> dict[str, Any]:
    """The ``cpu`` object of a result: model, usable cores, and PyTorch's threads (None where it isn't used)."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists() and (match := re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8"))):
        model = match[1].strip()
    threads = None
    if framework == "torch" and has_torch():
        import torch

        threads = torch.get_num_threads()
    return {"model": model, "cores": usable_cores(), "threads": threads}


@contextmanager
def settled_threads() -> Iterator[str | None]:
    """Let PyTorch use a thread a core, or one where others keep its threads waiting for each other.

    OpenMP's threads spin until the last has arrived, which takes a time slice if that one isn't running.
    Yields a sentence where it came to that.
    """
    if not has_torch():
        yield None
        return
    import torch

    before, cores = torch.get_num_threads(), usable_cores()
    x = torch.zeros(4, 4)
    try:
        # Not neg: PyTorch runs an elementwise kernel of so few elements on one thread anyway.
        torch.set_num_threads(1)
        alone = _typical_seconds(lambda: torch.softmax(x, -1))
        torch.set_num_threads(cores)
        together = _typical_seconds(lambda: torch.softmax(x, -1)) if cores > 1 else alone
        note = None
        if together > max(_TOGETHER_SECONDS, _TOGETHER_TIMES * alone):
            torch.set_num_threads(1)
            note = (
                f"PyTorch runs on 1 thread, not {cores}: this machine is busy, and together they took "
                f"{together * 1e6:,.0f} µs for 16 elements"
            )
        yield note
    finally:
        torch.set_num_threads(before)


#: Longer than this, and than so many times one thread, isn't what threads cost on an idle machine.
_TOGETHER_SECONDS, _TOGETHER_TIMES = 50e-6, 20


def _typical_seconds(call: Callable[[], Any]) -> float:
    """The longest median of a few batches, so that a burst of other work doesn't go unseen."""
    medians = []
    for _ in range(5):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        medians.append(statistics.median(times))
    return max(medians)


def versions() -> dict[str, str]:
    """Versions of Python and of what is installed here; frameworks aren't imported."""
    found = {"python": platform.python_version()}
    found |= {"numpy": np.__version__, "minikernel": minikernel.__version__}
    for name, distributions in {
        "torch": ("torch",),
        "triton": ("triton",),
        "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
        "scipy": ("scipy",),
        "nvrtc": ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    }.items():
        for distribution in distributions:
            try:
                found[name] = version(distribution)
                break
            except PackageNotFoundError:
                continue
    if driver := _driver():
        found["driver"] = driver
    return found


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
