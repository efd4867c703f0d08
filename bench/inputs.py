"""Someone's own arrays, from ``.npy`` and ``.npz`` files."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .shapes import DTYPES, Case, Task, check_dim


class InputError(ValueError):
    """A file that can't be read as arrays."""


def read(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a ``.npy`` or ``.npz`` file by name; a lone array goes by the file's name.

    Raises:
        InputError: The file is missing, damaged, of another kind or empty.
    """
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged archive open
            loaded = np.load(file, allow_pickle=False)
            arrays = dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else {path.stem: loaded}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        why = getattr(error, "strerror", None) or "not a .npy or .npz file of numbers"
        raise InputError(f"cannot read {path}: {why}") from error
    if not arrays:
        raise InputError(f"cannot read {path}: it holds no array")
    return arrays


def tasks(arrays: dict[str, np.ndarray], dim: int, dtypes: Sequence[str], layouts: Sequence[str]) -> list[Task]:
    """A task for each array, in its own dtype unless ``dtypes`` names others.

    Raises:
        ValueError: ``dim`` is out of range for one of them.
    """
    found = []
    for name, array in arrays.items():
        check_dim(array.shape, dim)
        is_real = array.dtype.kind in "biuf"
        for dtype in (dtypes if is_real else ()) or (array.dtype.name,):
            found += [Task(Case(array.shape, dim, label=name), dtype, layout) for layout in layouts]
    return found


def native(array: np.ndarray) -> np.ndarray:
    """The array in the machine's byte order where it holds numbers."""
    return array.astype(array.dtype.newbyteorder("=")) if array.dtype.name in DTYPES else array
