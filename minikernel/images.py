"""Compiled kernels on disk: a kernel that is there is loaded by the driver alone.

CuPy and Triton have caches too, but looking into them isn't free: CuPy compiles a few lines first, which takes
15 ms of every process, and Triton, which isn't even imported for a kernel found here, 400.
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
from typing import TypeVar

from . import user_cache

Loaded = TypeVar("Loaded")

#: Part of every key: a file written in another format is never read.
_FORMAT = "2"
_UNFINISHED = "new-"
#: Most files that are kept, those that were used last: several times the kernels that there are for one GPU.
MOST_FILES = 4000


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


def loaded(key: tuple[str, ...], compile: Callable[[], Image], load: Callable[[Image], Loaded]) -> Loaded:
    """What ``load`` makes of the image with that key in the user's cache.

    If there is none, or it can't be loaded, ``compile`` makes a new one, which is kept. A cache that can't be
    read or written is done without.

    Args:
        key: Everything that the image depends on: source, compiler, options, GPU.
    """
    path = _path(key)
    if path is not None and (found := _read(path)):
        with suppress(Exception):  # an image from a newer compiler than the driver knows, say
            return load(found)
    image = compile()
    result = load(image)
    if path is not None:
        with suppress(OSError):
            _write(path, _pack(image))
    return result


def _path(key: tuple[str, ...]) -> Path | None:
    digest = hashlib.sha256()
    for part in (_FORMAT, *key):
        digest.update(f"{len(part)}\0{part}".encode())
    try:
        return user_cache.folder("kernels") / digest.hexdigest()[:32]
    except RuntimeError:  # the user has no home
        return None


def _read(path: Path) -> Image | None:
    try:
        image = _unpack(path.read_bytes())
    except Exception:  # whatever is wrong with the file
        return None
    with suppress(OSError):  # a cache that others own may only be read
        os.utime(path)
    return image


def _pack(image: Image) -> bytes:
    content = json.dumps({"name": image.name, "shared": image.shared}).encode() + b"\n" + image.code
    return hashlib.sha256(content).digest() + content


def _unpack(packed: bytes) -> Image:
    digest, content = packed[:32], packed[32:]
    if digest != hashlib.sha256(content).digest():
        raise ValueError("the file was damaged")
    head, _, code = content.partition(b"\n")
    return Image(code, **json.loads(head))


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(name).replace(path)  # at once: another process sees all of it or nothing
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    _keep_newest(path.parent)


def _keep_newest(folder: Path) -> None:
    files = [file for file in folder.iterdir() if file.is_file() and not file.name.startswith(_UNFINISHED)]
    if len(files) > MOST_FILES:
        files.sort(key=lambda file: file.stat().st_mtime)
        for file in files[: len(files) - MOST_FILES]:
            file.unlink(missing_ok=True)
