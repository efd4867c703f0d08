"""Which code a result measured: a hash over what decides the launches."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("kernels/*", "minikernel/backends/*.py", "minikernel/cuda.py", "minikernel/driver.py")


def source_files(root: Path = ROOT) -> list[Path]:
    """The files under ``root`` that :func:`source_hash` covers, in order."""
    return sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()})


def source_hash(root: Path = ROOT) -> str:
    """Hash of names and contents of the kernels, the backends and the launch code; 16 hex digits."""
    digest = hashlib.sha256()
    for path in source_files(root):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
