"""What is to be computed, apart from the values: all that choosing and planning may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Bytes an element, by the dtype names used throughout the library.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZE)
OPS = ("softmax", "log_softmax")
#: The gradient of each: from y, the output, and dy, the gradient of what follows, to dx. Of softmax it is
#: y * (dy - sum(dy * y)), of log-softmax dy - exp(y) * sum(dy).
BACKWARD = {"softmax": "softmax_backward", "log_softmax": "log_softmax_backward"}
ALL_OPS = (*OPS, *BACKWARD.values())


@dataclass(frozen=True)
class Problem:
    """One softmax over the middle axis of an array seen as ``outer x cols x inner``.

    The output is always contiguous. Strides count elements, not bytes, and may be zero or negative. In the
    backward of one, ``y`` and ``dy`` are the inputs: alike, contiguous, and both at a multiple of 16 bytes.

    Attributes:
        op: One of :data:`ALL_OPS`.
        device: Kind of device that the backend works on, ``"cpu"`` or ``"cuda"``.
        index: Ordinal of the device; 0 on the CPU.
        dtype: Name of the input's dtype, one of :data:`DTYPES`.
        out_dtype: Name of the output's dtype: the input's own, or float32 for a half type; backward, a half type
            for float32.
        outer, cols, inner: The three extents, each at least 1. Softmax runs over ``cols``.
        strides: The input's strides over the three axes, in elements.
        x_offset, out_offset: The two addresses modulo 16 bytes, the width of the widest access.
        recorded: Whether autograd records it, so that its backend must have the backward too.
    """

    op: str
    device: str
    index: int
    dtype: str
    out_dtype: str
    outer: int
    cols: int
    inner: int
    strides: tuple[int, int, int]
    x_offset: int = 0
    out_offset: int = 0
    recorded: bool = False

    @property
    def rows(self) -> int:
        """How many independent softmaxes there are."""
        return self.outer * self.inner

    def backward(self) -> Problem:
        """Its gradient's problem, on the same device."""
        return Problem(
            BACKWARD[self.op],
            self.device,
            self.index,
            self.out_dtype,
            self.dtype,
            self.outer,
            self.cols,
            self.inner,
            (self.cols * self.inner, self.inner, 1),
        )


@dataclass(frozen=True)
class Kernel:
    """What a backend makes of a :class:`Problem`: ready to run, any number of times, from any thread.

    Attributes:
        run: ``run(x, out, stream, scratch)``. On the CPU ``x`` and ``out`` are NumPy arrays of shape
            ``(outer, cols, inner)`` (bfloat16 as its bit pattern in uint16) and the other two are 0.
            On a CUDA device all four are integers: two addresses, a ``cudaStream_t``, and the address
            of ``scratch`` bytes (or 0). ``run`` queues its work on that stream and doesn't wait.
            Of a backward, ``x`` is ``y`` and the last argument is ``dy``, in the same form.
        scratch: Bytes of device memory that each call needs beside its output.
    """

    run: Callable[[Any, Any, int, int], None]
    scratch: int = 0
