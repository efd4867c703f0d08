"""The ladder at V=600 over the batch, and at one shape that memory bounds: a preset of the unified bench.

``python experiments/24-tuned-kernel/bench.py`` writes bench.json beside it; manifest.py summarizes that.
Options of bench/run.py may follow, and win.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lab import BANDWIDTH_BOUND, LADDER, parser

from bench import run
from bench.shapes import GRIDS
from minikernel import list_backends, register_backend
from minikernel.backends import cuda_parallel


def main(argv: Sequence[str] | None = None) -> int:
    options, more = parser(__doc__).parse_known_args(argv)
    # The move between smem and fused isn't a built-in: it has a name in this process alone.
    if cuda_parallel.BACKEND.name not in list_backends():
        register_backend(cuda_parallel.BACKEND)
    shapes = ",".join([*(case.name for case in GRIDS["lab"]), BANDWIDTH_BOUND])
    preset = ["--backends", ",".join(LADDER.values()), "--shapes", shapes, "--dtypes", "float32"]
    return run.main([*preset, "--json", str(options.out / "bench.json"), *more])


if __name__ == "__main__":
    sys.exit(main())
