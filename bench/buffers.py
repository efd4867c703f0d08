"""The arrays that one task reads and writes: so many that repetitions don't find their data cached."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from minikernel.problem import ITEMSIZE

from .shapes import Task
from .spaces import Space

MAX_BUFFERS = 1024
#: Buffers together exceed the L2 cache this many times, as far as MAX_BUFFERS allows.
CACHE_MULTIPLE = 3
#: Bytes to shift the outputs by: how two addresses map to memory channels changes a copy's speed.
PLACEMENTS = (0, 66048, 1180160)
_ALIGNMENT = 512


def lay_out(flat: Any, shape: tuple[int, ...], layout: str, xp: Any) -> Any:
    """View the start of a flat array as ``shape`` in one of the layouts of :data:`shapes.LAYOUTS`."""
    count, last = math.prod(shape), shape[-1]
    if layout == "contiguous":
        return flat[:count].reshape(shape)
    if layout == "offset":  # one element past an aligned address
        return flat[1 : count + 1].reshape(shape)
    if len(shape) < 2:
        raise NotImplementedError(f"the {layout} layout needs two axes")
    if layout == "transposed":
        return flat[:count].reshape(*shape[:-2], last, shape[-2]).swapaxes(-1, -2)
    if layout == "sliced":  # all but the first of last + 1 columns
        return flat[: count + count // last].reshape(*shape[:-1], last + 1)[..., 1:]
    if layout == "expanded":  # one slice of the first axis, seen shape[0] times
        return xp.broadcast_to(flat[: count // shape[0]].reshape(1, *shape[1:]), shape)
    raise ValueError(f"unknown layout {layout!r}")


class Buffers:
    """Rotating inputs and outputs of one task.

    Attributes:
        inputs: Arrays of the task's shape, dtype and layout; random, each different, or copies of ``source``.
        plain: As many contiguous inputs of the same size, for the copy that is the floor.
        outputs: As many contiguous outputs.
        bytes: Bytes that one call has to read and write.
    """

    def __init__(self, task: Task, space: Space, cache_bytes: int, source: np.ndarray | None = None) -> None:
        shape, itemsize = task.case.shape, ITEMSIZE[task.dtype]
        count = task.case.elements
        self.bytes = 2 * count * itemsize
        number = min(max(math.ceil(CACHE_MULTIPLE * cache_bytes / self.bytes), 2), MAX_BUFFERS)
        step = _ALIGNMENT // itemsize
        self._pitch = math.ceil((count + count // shape[-1] + 1) / step) * step
        self._shape, self._itemsize = shape, itemsize

        flat = space.empty(number * self._pitch, task.dtype)
        if source is None:
            space.fill_normal(flat)
        parts = [flat[i * self._pitch : (i + 1) * self._pitch] for i in range(number)]
        self.inputs = [lay_out(part, shape, task.layout, space.xp) for part in parts]
        self.plain = [lay_out(part, shape, "contiguous", space.xp) for part in parts]
        if source is not None:
            filled = space.from_numpy(source, task.dtype)
            for part, x in zip(parts, self.inputs, strict=True):
                part[...] = 0
                if task.layout == "expanded":
                    part[: count // shape[0]] = filled[:1].reshape(-1)
                else:
                    x[...] = filled
        self._out = space.empty(number * self._pitch + PLACEMENTS[-1] // itemsize, task.dtype)
        self.place(PLACEMENTS[0])

    def __len__(self) -> int:
        return len(self.inputs)

    def place(self, offset: int) -> None:
        """Let the outputs begin ``offset`` bytes, of :data:`PLACEMENTS`, into their memory."""
        first, count = offset // self._itemsize, math.prod(self._shape)
        starts = range(first, first + len(self) * self._pitch, self._pitch)
        self.outputs = [self._out[start : start + count].reshape(self._shape) for start in starts]

    def poison(self) -> None:
        """Fill all outputs with NaN, so that one that is never written is noticed."""
        self._out[...] = math.nan
