"""Which code a measurement measured: a hash over what decides a launch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from . import cuda

PACKAGE = Path(__file__).resolve().parent
_PATTERNS = ("backends/*.py", "cuda.py", "driver.py")


def source_files(package: Path = PACKAGE, kernels: Path | None = None) -> dict[str, Path]:
    """The files that :func:`source_hash` covers, in order: name as in the checkout -> where it is.

    Args:
        package: The folder ``minikernel`` of a checkout or an installation.
        kernels: The folder of CUDA sources; by default the one that this process compiles.
    """
    found = {f"kernels/{path.name}": path for path in (kernels or cuda.kernels_dir()).iterdir() if path.is_file()}
    for pattern in _PATTERNS:
        found |= {f"minikernel/{path.relative_to(package).as_posix()}": path for path in package.glob(pattern)}
    return dict(sorted(found.items()))


def source_hash(package: Path = PACKAGE, kernels: Path | None = None) -> str:
    """Hash of names and contents of the kernels, the backends and the launch code; 16 hex digits.

    It is the same in a checkout and in what is installed from it. Takes what :func:`source_files` takes.
    """
    digest = hashlib.sha256()
    for name, path in source_files(package, kernels).items():
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
