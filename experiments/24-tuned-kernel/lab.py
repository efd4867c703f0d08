"""What the lab's scripts share: the ladder, the two shapes, and where their files go.

Imported first, it puts the checkout on the path in place of this folder, whose bench.py would hide bench/.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parents[1])

from minikernel.backends import cuda_parallel  # noqa: E402

#: Rungs by the manifest's names for them, and the backends that they are.
LADDER = {
    "naive": "cuda-naive",
    "smem": "cuda-smem",
    "parallel": cuda_parallel.BACKEND.name,
    "fused": "cuda-fused",
}
#: The first is launch-bound at any speed, the second as large as memory bandwidth needs.
SHAPES = ((512, 600), (32768, 4096))
LAUNCH_BOUND, BANDWIDTH_BOUND = (f"{rows}x{cols}" for rows, cols in SHAPES)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that all scripts have, ``--out``."""
    new = argparse.ArgumentParser(description=description, allow_abbrev=False)
    new.add_argument("--out", type=folder, default=HERE, metavar="DIR", help="where files are (default: here)")
    return new


def folder(text: str) -> Path:
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return path
