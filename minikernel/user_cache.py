"""Where the library keeps what it found out or compiled for this user."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder(name: str) -> Path:
    """The user's folder of that name: under XDG_CACHE_HOME or ``~/.cache``, on Windows under LOCALAPPDATA.

    Raises:
        RuntimeError: The user has no home.
    """
    variable, default = (
        ("LOCALAPPDATA", "AppData/Local") if sys.platform == "win32" else ("XDG_CACHE_HOME", ".cache")
    )
    given = Path(os.environ.get(variable) or "")
    if not given.is_absolute():
        given = Path.home() / default
    if not given.is_absolute():
        raise RuntimeError(f"the user's home {Path.home()} is no absolute path")
    return given / "minikernel" / name
