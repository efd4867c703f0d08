"""Where an array's elements lie: pure arithmetic on shapes, strides and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class View:
    """An array seen as ``outer x cols x inner``, strides in elements."""

    outer: int
    cols: int
    inner: int
    strides: tuple[int, int, int]


def view(shape: Sequence[int], strides: Sequence[int], dim: int) -> View | None:
    """See an array as outer x cols x inner around ``dim``, or None if one stride each can't describe it."""
    outer = _merge(shape[:dim], strides[:dim])
    inner = _merge(shape[dim + 1 :], strides[dim + 1 :])
    if outer is None or inner is None:
        return None
    cols = shape[dim] if shape else 1
    col_stride = strides[dim] if cols > 1 else inner[0] * inner[1]
    return View(outer[0], cols, inner[0], (outer[1], col_stride, inner[1]))


def contiguous_view(shape: Sequence[int], dim: int) -> View:
    """See an array in C order as outer x cols x inner around ``dim``."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * shape[axis]
    found = view(shape, strides, dim)
    assert found is not None
    return found


def _merge(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """Adjacent axes as one (extent, stride), or None."""
    extent, stride = 1, 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        if extent == 1:
            extent, stride = size, step
        elif step == stride * extent:
            extent *= size
        else:
            return None
    return extent, stride


def normalize_dim(dim: Any, rank: int) -> int:
    """``dim`` as an index from 0; a 0-d array counts as having one axis.

    Raises:
        TypeError: It isn't an integer.
        IndexError: It is out of range; the message gives the range.
    """
    try:
        index = None if isinstance(dim, bool) else dim.__index__()
    except (AttributeError, TypeError):
        index = None
    if index is None:
        raise TypeError(f"dim must be an integer, not {type(dim).__name__}")
    axes = max(1, rank)
    if not -axes <= index < axes:
        raise IndexError(f"dim is out of range: expected {-axes} to {axes - 1} for a {rank}-d input, got {index}")
    return int(index % axes)


def type_name(x: Any) -> str:
    return f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie one after another in C order; an axis of one element may have any stride."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@dataclass(frozen=True)
class Footprint:
    """The memory of an array that isn't empty, in bytes from its address; axes of one element left out."""

    axes: tuple[tuple[int, int], ...]
    itemsize: int

    @classmethod
    def of(cls, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Footprint:
        """``strides`` are in bytes."""
        return cls(tuple((n, s) for n, s in zip(shape, strides, strict=True) if n > 1), itemsize)

    @property
    def low(self) -> int:
        return sum((n - 1) * s for n, s in self.axes if s < 0)

    @property
    def high(self) -> int:
        return sum((n - 1) * s for n, s in self.axes if s > 0) + self.itemsize

    def array(self, address: int) -> np.ndarray:
        """For NumPy to reason about the addresses, which may be a device's: it must not be read."""
        interface = {
            "version": 3,
            "shape": tuple(n for n, _ in self.axes),
            "strides": tuple(s for _, s in self.axes),
            "typestr": f"|V{self.itemsize}",
            "data": (address, True),
        }
        return np.asarray(_Exposed(interface))


class _Exposed:
    """Memory for NumPy to look at, described by the array interface."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of an array may lie in one place, as far as its strides tell."""
    reach = 0
    for stride, extent in sorted((abs(s), n) for n, s in zip(shape, strides, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += (extent - 1) * stride
    return False


def overlap(a: Footprint, a_address: int, b: Footprint, b_address: int) -> bool:
    """Whether two arrays of one device share any memory; in doubt, that they do."""
    try:
        # The stub knows no max_work but -1 and 0.
        return np.shares_memory(a.array(a_address), b.array(b_address), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
