"""What is to be computed, apart from the values: all that choosing and planning may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Bytes an element, by the dtype names used throughout the library.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
DTYPES = tuple(ITEMSIZE)
OPS = ("softmax", "log_softmax")
#: The gradient of each: from y, the output, and dy, the gradient of what follows, to dx. Of softmax it is
#: y * (dy - sum(dy * y)), of log-softmax dy - exp(y) * sum(dy).
BACKWARD = {"softmax": "softmax_backward", "log_softmax": "log_softmax_backward"}
#: The k largest of softmax's results, and where they are.
TOPK = "softmax_topk"
ALL_OPS = (*OPS, *BACKWARD.values(), TOPK)
#: What may be fused with an operation and its gradient, by the names of the arguments.
FEATURES = ("scale", "mask", "causal")
#: Axes of a mask beside the reduced one, those that one stride serves as one; a mask with more is copied first.
MOST_MASK_AXES = 4
#: Most results that :data:`TOPK` gives of a row.
MOST_K = 64


@dataclass(frozen=True)
class Mask:
    """Where a boolean mask, broadcast to the input's shape, lies: one byte an element, nonzero keeps.

    Attributes:
        outer: Extents and strides of the axes before the reduced one, slowest first. Their extents multiply to the
            problem's ``outer``; axes of extent 1 are left out, and neighbors with one stride are merged.
        col: Stride over the reduced axis.
        inner: As ``outer``, for the axes behind it.
        offset: The address modulo 16 bytes.

    Strides count bytes; 0 where the mask is broadcast. There are at most :data:`MOST_MASK_AXES` axes but the
    reduced one.
    """

    outer: tuple[tuple[int, int], ...]
    col: int
    inner: tuple[tuple[int, int], ...]
    offset: int = 0

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Extents and strides of all axes but the reduced one: a row's number counts over them."""
        return self.outer + self.inner

    @classmethod
    def contiguous(cls, outer: int, cols: int, inner: int) -> Mask:
        """A mask that isn't broadcast, in C order."""
        return cls(((outer, cols * inner),) * (outer > 1), inner, ((inner, 1),) * (inner > 1))


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
        scaled: Whether the input is multiplied by a number first; each call brings it. It is a normal number in
            float32, and may be negative.
        mask: Which elements count: the others are as if they were -inf, whatever they are, and their gradient is 0.
            None: all of them.
        causal: Whether only the columns up to a row's own number, modulo ``cols``, count. Then ``inner`` is 1.
        k: How many results of a row there are, in :data:`TOPK`: the output has as many columns.
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
    scaled: bool = False
    mask: Mask | None = None
    causal: bool = False
    k: int = 0

    @property
    def rows(self) -> int:
        """How many independent softmaxes there are."""
        return self.outer * self.inner

    @property
    def out_cols(self) -> int:
        """Columns of the output."""
        return self.k or self.cols

    @property
    def is_log(self) -> bool:
        """Whether it is log-softmax or its gradient."""
        return self.op.startswith("log_")

    @property
    def is_backward(self) -> bool:
        """Whether it is a gradient."""
        return self.op in BACKWARD.values()

    @property
    def features(self) -> tuple[str, ...]:
        """What is fused with the operation, of :data:`FEATURES`."""
        used = self.scaled, self.mask is not None, self.causal
        return tuple(name for name, is_used in zip(FEATURES, used, strict=True) if is_used)

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
            scaled=self.scaled,
            mask=self.mask,
            causal=self.causal,
        )


@dataclass(frozen=True)
class Kernel:
    """What a backend makes of a :class:`Problem`: ready to run, any number of times, from any thread.

    Attributes:
        run: ``run(x, out, stream, scratch)``. On the CPU ``x`` and ``out`` are NumPy arrays of shape
            ``(outer, cols, inner)`` (bfloat16 as its bit pattern in uint16) and the other two are 0.
            On a CUDA device all four are integers: two addresses, a ``cudaStream_t``, and the address
            of ``scratch`` bytes (or 0). ``run`` queues its work on that stream and doesn't wait.
            Of a backward, ``x`` is ``y``, and ``dy``, in the same form, takes the place of ``scratch``.
            With features two arguments follow: the mask, an address or a boolean NumPy array whose axes are those
            of ``Problem.mask`` (outer ones, cols, inner ones), 0 or None if there is none; and the scale, 1.0 if
            there is none. A gradient is multiplied by it, and 0 where nothing is kept, whatever y is there. In
            :data:`TOPK` one argument follows: where the indices go, int64 of the output's shape.
        scratch: Bytes of device memory that each call needs beside its output.
    """

    run: Callable[..., None]
    scratch: int = 0
