"""``python -m minikernel``: what this machine can run, and what to install for the rest; ``tune`` measures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from . import __version__, dispatch, driver, list_backends, tuned
from .console import print_table
from .registry import REGISTRY
from .tune import command as tune

_DESCRIPTION = "What this machine can run, and what to install for the rest."
_TUNE_DESCRIPTION = "Measure which backend is the fastest where on this GPU, for auto to go by."
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


def _gpus() -> list[dict[str, Any]]:
    """What is known of each visible GPU, from the driver and from tables: no framework is needed."""
    if driver.obstacles():
        return []
    found = []
    for index in range(driver.count()):
        major, minor = divmod(driver.device(index).capability, 10)
        model = driver.name(index)
        found.append({"model": model, "compute_capability": f"{major}.{minor}", **_measurements(model)})
    return found


def _measurements(model: str) -> dict[str, Any]:
    """The table of measurements that auto goes by on a GPU model, and what is wrong with others."""
    found = tuned.search(model)
    table = None
    if found.table:
        current = tuned.is_current(found.table)
        table = {"path": str(found.path), "own": found.own, "date": found.table.date, "current": current}
    return {"table": table, "table_faults": list(found.faults)}


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
        ``versions`` (package -> version), ``gpus`` (a list of ``model``, ``compute_capability``, the ``table`` of
        measurements that auto goes by there, or None: its ``path``, whether it is the user's ``own``, its ``date``
        and whether it is ``current``; and ``table_faults``, what is wrong with those that can't be used),
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


def _table_notes(gpus: list[dict[str, Any]]) -> list[str]:
    """What auto goes by on each model of GPU."""
    lines = []
    for gpu in {gpu["model"]: gpu for gpu in gpus}.values():
        if table := gpu["table"]:
            whose = f"your table {table['path']}" if table["own"] else "minikernel's table"
            goes_by = f"{whose}, measured {table['date'][:10]}"
            goes_by += "" if table["current"] else " with other kernels than these"
        else:
            goes_by = f"rank: there is no table for this model ({tuned.COMMAND} measures one)"
        lines += [f"auto on {gpu['model']} goes by {goes_by}", *(f"  {fault}" for fault in gpu["table_faults"])]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m minikernel", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    commands = parser.add_subparsers(dest="command", metavar="tune")
    tune_parser = commands.add_parser("tune", help=_TUNE_DESCRIPTION, description=_TUNE_DESCRIPTION)
    tune.add_arguments(tune_parser)
    options = parser.parse_args(arguments)
    if options.command == "tune":
        return tune.main(options, _versions())

    found = survey()
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print(", ".join(f"{package} {version}" for package, version in found["versions"].items()))
    gpus = [f"{gpu['model']} (compute capability {gpu['compute_capability']})" for gpu in found["gpus"]]
    print("GPU:", ", ".join(gpus) or "none")
    for line in _table_notes(found["gpus"]):
        print(line)
    if name := found["environment"]["backend"]:
        error = found["environment"]["error"]
        use = f"is wrong: {error}" if error else "decides for every call that names no backend"
        print(f"{dispatch.ENVIRONMENT_VARIABLE}={name} {use}")
    print_table(_COLUMNS, _rows(found["backends"]))
    print(*_notes(found["backends"]), sep="\n")
    return 0


if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, head for example, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise SystemExit(status)
