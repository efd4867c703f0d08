"""What attention does to its scores before the softmax, fused with it: a scale, a mask, causality."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from numbers import Real
from typing import Any, NamedTuple

from .layout import type_name
from .problem import Mask

#: The smallest normal number of float32, and what is still finite times 2 log2(e).
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**126


class Scores(NamedTuple):
    """What a call says of them; ``scale`` and ``mask`` are None where it doesn't."""

    scale: Any = None
    mask: Any = None
    causal: Any = False

    def checked(self) -> Scores:
        """The same, with ``scale`` a float.

        Raises:
            TypeError: ``scale`` isn't a number, or ``causal`` isn't a bool.
            ValueError: ``scale`` is 0, or of a magnitude that arithmetic in float32 can't take.
        """
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be True or False, not {self.causal!r}")
        if self.scale is None:
            return self
        if isinstance(self.scale, bool) or not isinstance(self.scale, Real):
            cure = ": multiply the input by it, or pass its item()" if hasattr(self.scale, "item") else ""
            raise TypeError(f"scale must be a number, not {type_name(self.scale)}{cure}")
        try:
            scale = float(self.scale)
        except OverflowError:  # an integer that is too large
            scale = inf
        if not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:
            raise ValueError(f"the magnitude of scale must be from 2**-126 to 2**126; got {self.scale}")
        return self._replace(scale=scale)

    @property
    def factor(self) -> float:
        """The scale, 1.0 where there is none."""
        return 1.0 if self.scale is None else float(self.scale)


def given(scale: Any, mask: Any, causal: Any) -> Scores | None:
    """What a call says, or None where it says nothing."""
    return None if scale is None and mask is None and causal is False else Scores(scale, mask, causal)


def check_causal(shape: Sequence[int], axis: int) -> None:
    """Raise a ValueError unless the input is made of square matrices, and softmax runs over their columns."""
    if len(shape) < 2 or axis != len(shape) - 1 or shape[-1] != shape[-2]:
        raise ValueError(
            "causal=True is for square scores, whose last two axes are equally long, over the last axis; "
            f"got the shape {tuple(shape)} and the axis {axis} (a triangular mask= serves for others)"
        )


def check_broadcast(mask_shape: Sequence[int], shape: Sequence[int]) -> None:
    """Raise a ValueError unless a mask broadcasts to the input's shape, which it may not widen."""
    missing = len(shape) - len(mask_shape)
    if missing < 0 or any(m not in (1, n) for m, n in zip(mask_shape, shape[missing:], strict=True)):
        raise ValueError(f"mask must broadcast to the input's shape {tuple(shape)}, not {tuple(mask_shape)}")


def check_boolean(dtype: str) -> None:
    """Raise a TypeError unless a mask has that dtype."""
    if dtype != "bool":
        raise TypeError(f"mask must be boolean (True keeps), not {dtype}: compare first, as in mask != 0")


def mask_layout(
    mask_shape: Sequence[int], mask_strides: Sequence[int], shape: Sequence[int], axis: int, address: int = 0
) -> Mask:
    """Where a mask lies that is broadcast to the input's shape; softmax runs over ``axis``.

    Raises:
        ValueError: It can't be broadcast.
    """
    check_broadcast(mask_shape, shape)
    missing = len(shape) - len(mask_shape)
    strides = [0] * missing + [s if m > 1 else 0 for m, s in zip(mask_shape, mask_strides, strict=True)]
    axes = list(zip(shape, strides, strict=True))
    col = strides[axis] if axes else 0
    return Mask(_merge(axes[:axis]), col, _merge(axes[axis + 1 :]), address % 16)


def _merge(axes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Axes of (extent, stride) without those of one element, neighbors as one where one stride serves both."""
    merged: list[tuple[int, int]] = []
    for extent, stride in axes:
        if extent == 1:
            continue
        if merged and merged[-1][1] == extent * stride:
            merged[-1] = merged[-1][0] * extent, stride
        else:
            merged.append((extent, stride))
    return tuple(merged)
