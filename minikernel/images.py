"""Compiled kernels on disk: a kernel that is there is loaded by the driver alone, and no compiler is even imported.

CuPy and Triton have caches too, but to look into them takes the whole package: CuPy compiles a few lines first, and
Triton reads its own sources, which costs 15 and 400 ms of every process.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from . import user_cache

#: Part of every key: a file written in another format is never read.
_FORMAT = "1"
#: Most files that are kept; the library has about a hundred kernels for each GPU model and version of itself.
MOST_FILES = 1000


@dataclass(frozen=True)
class Image:
    """What a compiler made of one kernel.

    Attributes:
        code: For ``cuModuleLoadData``: a cubin or PTX.
        name: Of the kernel in it.
        shared: Bytes of shared memory that the kernel's code expects of its launch.
    """

    code: bytes
    name: str
    shared: int = 0


def cached(key: tuple[str, ...], compile: Callable[[], Image]) -> Image:
    """The image with that key in the user's cache; if there is none, what ``compile`` makes, which is then kept.

    A cache that can't be read or written is done without.

    Args:
        key: Everything that the image depends on: source, options, GPU.
    """
    path = _path(key)
    if path is None:
        return compile()
    with suppress(OSError, ValueError, KeyError, TypeError):
        return _unpack(path.read_bytes())
    image = compile()
    with suppress(OSError):
        _write(path, _pack(image))
    return image


def _path(key: tuple[str, ...]) -> Path | None:
    digest = hashlib.sha256()
    for part in (_FORMAT, *key):
        digest.update(f"{len(part)}\0{part}".encode())
    try:
        return user_cache.folder("kernels") / digest.hexdigest()[:32]
    except RuntimeError:  # the user has no home
        return None


def _pack(image: Image) -> bytes:
    head = {"name": image.name, "shared": image.shared, "sha256": hashlib.sha256(image.code).hexdigest()}
    return json.dumps(head).encode() + b"\n" + image.code


def _unpack(packed: bytes) -> Image:
    line, _, code = packed.partition(b"\n")
    head = json.loads(line)
    if head["sha256"] != hashlib.sha256(code).hexdigest():
        raise ValueError("the file was damaged")
    return Image(code, str(head["name"]), int(head["shared"]))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix="new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)  # at once: another process sees all of it or nothing
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    _keep_newest(path.parent)


def _keep_newest(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > MOST_FILES:
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) - MOST_FILES]:
            file.unlink(missing_ok=True)
