"""``python -m minikernel``: what this machine can run, and what to install for the rest."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import __version__, dispatch, driver, list_backends
from .registry import REGISTRY

_DESCRIPTION = "What this machine can run, and what to install for the rest."
_PACKAGES = ("numpy", "torch", "cupy-cuda12x", "cupy-cuda13x", "triton", "ml_dtypes")
_COLUMNS = ("backend", "runs here", "memory", "dtypes")


def _versions() -> dict[str, str]:
    """Versions of the packages that matter here, read from their metadata: nothing is imported."""
    found = {"minikernel": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> list[dict[str, str]]:
    """Model and compute capability of each visible GPU, from the driver: no framework is needed."""
    if driver.obstacles():
        return []
    found = []
    for index in range(driver.count()):
        major, minor = divmod(driver.device(index).capability, 10)
        found.append({"model": driver.name(index), "compute_capability": f"{major}.{minor}"})
    return found


def _environment() -> dict[str, str | None]:
    """The backend that MINIKERNEL_BACKEND names, None if it isn't set, and what is wrong with that name."""
    name = os.environ.get(dispatch.ENVIRONMENT_VARIABLE) or None
    error = None
    if name:
        try:
            dispatch.check_name(name)
        except ValueError as unknown:
            error = str(unknown)
    return {"backend": name, "error": error}


def survey() -> dict[str, Any]:
    """What this machine has and can run, as plain data ready for JSON.

    Returns:
        ``versions`` (package -> version), ``gpus`` (a list of ``model`` and ``compute_capability``),
        ``environment`` (the ``backend`` that MINIKERNEL_BACKEND names and the ``error`` in that, or None) and
        ``backends`` (name -> the fields of :class:`minikernel.BackendInfo` and ``cures``, the commands
        that install what the backend misses; best first).
    """
    required = {backend.name: backend.requires for backend in REGISTRY}
    backends = {}
    for name, info in list_backends().items():
        cures = [needed.cure for needed in required.get(name, ()) if not needed.is_installed()]
        backends[name] = {**vars(info), "limits": dict(info.limits), "cures": cures}
    return {"versions": _versions(), "gpus": _gpus(), "environment": _environment(), "backends": backends}


def _rows(backends: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, "yes" if b["available"] else "no", " ".join(b["devices"]), " ".join(b["dtypes"]))
        for name, b in backends.items()
    ]


def _notes(backends: dict[str, Any]) -> list[str]:
    """Why each backend that can't run here can't; backends with the same reasons share a paragraph."""
    by_reasons: dict[tuple[str, ...], list[str]] = {}
    for name, b in backends.items():
        if not b["available"]:
            by_reasons.setdefault(tuple(b["reasons"]), []).append(name)
    lines = []
    for reasons, names in by_reasons.items():
        lines += ["", f"{', '.join(names)}: not here", *(f"  {reason}" for reason in reasons)]
    return lines


def _print_table(rows: list[tuple[str, ...]]) -> None:
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the library depends on numpy alone
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        for row in (_COLUMNS, tuple("-" * width for width in widths), *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return

    table = Table(box=box.SIMPLE_HEAD)
    for column, cells in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
        longest = max(len(word) for text in (column, *cells) for word in text.split())
        table.add_column(column, min_width=longest)  # a narrow terminal may break lines, but cuts no word
    for name, runs, *rest in rows:
        table.add_row(Text(name, "bold"), Text(runs, "green" if runs == "yes" else "red"), *rest)
    Console().print(table, crop=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minikernel", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(arguments)

    found = survey()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(", ".join(f"{package} {version}" for package, version in found["versions"].items()))
    gpus = [f"{gpu['model']} (compute capability {gpu['compute_capability']})" for gpu in found["gpus"]]
    print("GPU:", ", ".join(gpus) or "none")
    if name := found["environment"]["backend"]:
        error = found["environment"]["error"]
        use = f"is wrong: {error}" if error else "decides for every call that names no backend"
        print(f"{dispatch.ENVIRONMENT_VARIABLE}={name} {use}")
    _print_table(_rows(found["backends"]))
    print(*_notes(found["backends"]), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
