"""First calls in fresh processes: ``python bench/first_calls.py`` prints figures, a JSON object a line.

Importing PyTorch takes seconds and isn't the question, nor is the import of the GPU package that runs. So this
process imports them without touching the GPU, and each call is made in a fork of it, which makes its own context on
the GPU first. The disk caches are in a folder of its own: a cold call finds them empty.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, product
from multiprocessing.connection import Connection
from pathlib import Path

if __name__ == "__main__":  # as a script, bench/ is on the path and the root isn't
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import peers
from bench.figures import COLD, PACKAGES, WARM
from bench.records import Figure
from bench.shapes import Case, parse_shape
from bench.spaces import TorchSpace

#: Where CuPy, Triton, the driver and the library itself keep what they compiled.
CACHES = ("CUPY_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
GPU_PACKAGES = ("cupy", "triton")
COLD_SHAPES = ("512x600", "1x128256", "4096x2049", "2048x128256", "8x1048576", "8192x8192@0")
COLD_DTYPES = ("float32", "bfloat16")
WARM_ROUNDS = 5


def first_call(impl: str, case: Case, dtype: str, device: str = "cuda") -> float:
    """Seconds from the first call of this process until its result is there."""
    space = TorchSpace(device, seed=42)
    x = space.empty(case.elements, dtype)
    space.fill_normal(x)
    x = x.reshape(case.shape)
    space.synchronize()
    made = peers.torch_softmax() if impl == peers.TORCH else peers.backend(impl)
    call = made.eager("softmax", case.dim)
    start = time.perf_counter()
    call(x)
    space.synchronize()
    return time.perf_counter() - start


def forked(call: Callable[[], float]) -> float:
    """What ``call`` returns in a fork of this process; RuntimeError says how it failed."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(call, sender))
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        answer = "the process ended without an answer"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return float(answer)


def _answer(call: Callable[[], float], sender: Connection) -> None:
    try:
        sender.send(call())
    except Exception as error:
        sender.send(f"{type(error).__name__}: {error}")


def empty(folder: Path) -> None:
    """Delete all files in a folder; CuPy wants to find the folders themselves where they were."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()


def use_caches(folder: Path) -> None:
    """Let everyone keep what they compile there; before they are imported, as some look only then."""
    for name in CACHES:
        os.environ[name] = str(folder / name.lower())


def packages_imported(impl: str, case: Case, dtype: str, device: str = "cuda") -> float:
    """How many of :data:`GPU_PACKAGES` are there after the first call of this process."""
    first_call(impl, case, dtype, device)
    return sum(package in sys.modules for package in GPU_PACKAGES)


def warm() -> Iterator[Figure]:
    """First calls at 512x600, auto's and PyTorch's in turn, with everything on disk that they compiled before."""
    lab = partial(first_call, case=parse_shape("512x600"), dtype="float32")
    forked(partial(lab, peers.AUTO))
    times: dict[str, list[float]] = {peers.AUTO: [], peers.TORCH: []}
    for _ in range(WARM_ROUNDS):
        for impl, found in times.items():
            found.append(forked(partial(lab, impl)))
    for impl, found in times.items():
        yield Figure(WARM, round(statistics.median(found) * 1e3, 1), "ms", impl)


def cold(caches: Path) -> Iterator[Figure]:
    """auto's first calls with nothing on disk, for shapes that need different kernels."""
    for shape, dtype in product(COLD_SHAPES, COLD_DTYPES):
        empty(caches)
        seconds = forked(partial(first_call, peers.AUTO, parse_shape(shape), dtype))
        yield Figure(COLD, round(seconds, 3), "s", f"{dtype} {shape}")


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        use_caches(Path(name))
        sys.dont_write_bytecode = False  # so that later calls find bytecode, as after pip install
        import torch  # noqa: F401

        imported = forked(partial(packages_imported, peers.AUTO, parse_shape("512x600"), "float32"))
        for package in GPU_PACKAGES:
            with suppress(ImportError):
                import_module(package)
        for figure in chain([Figure(PACKAGES, imported)], warm(), cold(Path(name))):
            print(json.dumps(vars(figure)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
