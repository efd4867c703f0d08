"""The ladder at V=600 over the batch, and at one shape that memory bounds: a preset of the unified bench.

``python experiments/24-tuned-kernel/bench.py`` writes bench.json beside it; manifest.py summarizes that.
Options of bench/run.py may follow, and win.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parents[1])

from bench import run  # noqa: E402
from bench.shapes import GRIDS  # noqa: E402
from minikernel import list_backends, register_backend  # noqa: E402
from minikernel.backends import cuda_parallel  # noqa: E402

BANDWIDTH_BOUND = "32768x4096"
LADDER = ("cuda-naive", "cuda-smem", cuda_parallel.BACKEND.name, "cuda-fused")


def main(argv: Sequence[str] | None = None) -> int:
    # The move between smem and fused isn't a built-in: it has a name in this process alone.
    if cuda_parallel.BACKEND.name not in list_backends():
        register_backend(cuda_parallel.BACKEND)
    shapes = ",".join([*(case.name for case in GRIDS["lab"]), BANDWIDTH_BOUND])
    preset = ["--backends", ",".join(LADDER), "--shapes", shapes, "--dtypes", "float32"]
    return run.main([*preset, "--json", str(HERE / "bench.json"), *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
