"""What all tests share: kinds of arrays, routes into a backend, the float64 reference, and tolerances."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import minikernel

GPU_BACKENDS = ("cuda-fused", "triton-fused", "cuda-smem", "cuda-naive")
OPS = ("softmax", "log_softmax")
DTYPES = ("float16", "bfloat16", "float32", "float64")
INF, NAN = float("inf"), float("nan")

#: A little of everything: powers of two and their neighbors, short rows and long ones.
LENGTHS = (1, 2, 3, 7, 8, 31, 33, 64, 127, 255, 256, 257, 600, 1024, 1025, 2049, 4097)


#: Whether this is a process in which Triton's kernels run in its interpreter, on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: Each operation, and PyTorch's own.
BESIDE_TORCH = {
    "softmax": (minikernel.softmax, torch.nn.functional.softmax),
    "log_softmax": (minikernel.log_softmax, torch.nn.functional.log_softmax),
}

#: Says where the user's cache is.
CACHE_VARIABLE = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"


class Bare:
    """DLPack and not a word on whose it is."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from float64: ``relative * |reference| + absolute``.

    The reference is rounded to the result's dtype first, so a relative error of 2**-10 in float16 is one unit
    in the last place. ``absolute`` is the smallest normal number in float32 and bfloat16, where smaller
    results may flush to zero, and one subnormal step in float16. Near log(1) = 0 what counts is the
    error of the sum, ``log_absolute``.
    """

    relative: float
    absolute: float
    log_absolute: float


TOLERANCES = {
    "float16": Tolerance(2**-10, 2**-24, 1e-6),
    "bfloat16": Tolerance(2**-7, 2**-126, 1e-6),
    "float32": Tolerance(1e-5, 2**-126, 2e-6),
    "float64": Tolerance(1e-12, 2**-1022, 1e-14),
}


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def randn(*shape: int, dtype: str = "float32", seed: int = 42, scale: float = 1.0) -> torch.Tensor:
    """The same normal deviates every time, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(torch_dtype(dtype))


def reference(x: torch.Tensor, dim: int = -1, op: str = "softmax") -> torch.Tensor:
    """The definition, in float64, wherever ``x`` is."""
    x = x.double()
    if x.numel() == 0:
        return x
    shifted = x - x.amax(dim, keepdim=True)
    total = shifted.exp().sum(dim, keepdim=True)
    return shifted - total.log() if op == "log_softmax" else shifted.exp() / total


def mismatch(result: torch.Tensor, expected: torch.Tensor, op: str = "softmax") -> str | None:
    """Where and by how much a result leaves its dtype's tolerance, or None."""
    if result.shape != expected.shape:
        return f"its shape is {tuple(result.shape)}, not {tuple(expected.shape)}"
    tolerance = TOLERANCES[dtype_name(result.dtype)]
    actual, expected = result.double(), expected.to(result.dtype).double()
    absolute = tolerance.log_absolute if op == "log_softmax" else tolerance.absolute
    slack = tolerance.relative * expected.abs() + absolute
    right = ((actual - expected).abs() <= slack) | (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(right.all()):
        return None
    wrong = (~right).nonzero()
    first = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {right.numel()} elements are wrong, the first at {first}: "
        f"{actual[first].item()!r} instead of {expected[first].item()!r}"
    )


class Kind:
    """A kind of array: how to make one of a CPU tensor, look at it in other ways, and read it.

    ``name`` is what tests are called by; ``dtypes`` what it can hold.
    """

    name: str
    dtypes: tuple[str, ...] = DTYPES
    on_gpu = False
    takes_out = True

    def skip_unless_usable(self) -> None:
        """Skip the test where this kind's framework is missing."""

    def array(self, tensor: torch.Tensor) -> Any:
        """A new array with the values and dtype of a CPU tensor."""
        raise NotImplementedError

    def tensor(self, x: Any) -> torch.Tensor:
        """The values of an array, on its own device."""
        raise NotImplementedError

    def permute(self, x: Any, axes: Sequence[int]) -> Any:
        return x.transpose(axes)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        raise NotImplementedError

    def type_of(self, dtype: str) -> Any:
        """The framework's own dtype of that name."""
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def is_contiguous(self, x: Any) -> bool:
        return bool(x.flags.c_contiguous)

    def poisoned(self, shape: Sequence[int], dtype: str) -> Any:
        """An array full of NaN."""
        return self.array(torch.full(tuple(shape), NAN, dtype=torch_dtype(dtype)))


class NumPyKind(Kind):
    name = "numpy"

    def array(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(self.type_of("bfloat16"))
        return tensor.numpy()

    def tensor(self, x: Any) -> torch.Tensor:
        x = np.array(x, order="C")
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return np.broadcast_to(x, shape)

    def type_of(self, dtype: str) -> Any:
        if dtype == "bfloat16":
            return pytest.importorskip("ml_dtypes").bfloat16
        return np.dtype(dtype)


class Exporter:
    """An array of a framework that nobody has heard of: it has DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return Exporter

    @staticmethod
    def from_dlpack(x: Any) -> Exporter:
        return Exporter(np.from_dlpack(x))


class DLPackKind(NumPyKind):
    name = "dlpack"
    dtypes = ("float16", "float32", "float64")  # NumPy's own DLPack, which serves here, has no bfloat16
    takes_out = False

    def array(self, tensor: torch.Tensor) -> Any:
        return Exporter(super().array(tensor))

    def tensor(self, x: Any) -> torch.Tensor:
        return super().tensor(x.array)

    def permute(self, x: Any, axes: Sequence[int]) -> Any:
        return Exporter(x.array.transpose(axes))

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        # DLPack is for memory that may be written to, and what broadcast_to gives may not.
        strides = np.broadcast_to(x.array, shape).strides
        return Exporter(np.lib.stride_tricks.as_strided(x.array, shape, strides))

    def dtype(self, x: Any) -> str:
        return x.array.dtype.name

    def is_contiguous(self, x: Any) -> bool:
        return bool(x.array.flags.c_contiguous)


class TorchKind(Kind):
    def __init__(self, device: str) -> None:
        self.name = f"torch-{device}"
        self.device = device
        self.on_gpu = device == "cuda"

    def array(self, tensor: torch.Tensor) -> Any:
        # A copy even on the CPU, so that a test may write into it.
        return tensor.clone(memory_format=torch.contiguous_format).to(self.device)

    def tensor(self, x: Any) -> torch.Tensor:
        return x

    def permute(self, x: Any, axes: Sequence[int]) -> Any:
        return x.permute(*axes)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return x.expand(*shape)

    def type_of(self, dtype: str) -> Any:
        return torch_dtype(dtype)

    def is_contiguous(self, x: Any) -> bool:
        return x.is_contiguous()


class CuPyKind(Kind):
    name = "cupy"
    on_gpu = True

    @property
    def cupy(self) -> Any:
        return pytest.importorskip("cupy")

    def skip_unless_usable(self) -> None:
        try:
            self.cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            pytest.skip(f"CuPy doesn't work here: {error}")

    def array(self, tensor: torch.Tensor) -> Any:
        tensor = tensor.contiguous()
        if tensor.dtype != torch.bfloat16:
            return self.cupy.asarray(tensor.numpy())
        try:
            return self.cupy.asarray(tensor.view(torch.int16).numpy()).view(self.type_of("bfloat16"))
        except (TypeError, ValueError) as error:
            pytest.skip(f"this CuPy has no bfloat16: {error}")

    def tensor(self, x: Any) -> torch.Tensor:
        x = self.cupy.ascontiguousarray(x).reshape(x.shape)
        if x.dtype.name == "bfloat16":
            return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)
        if x.dtype == bool:
            return torch.from_dlpack(x.view(np.uint8)).bool()
        return torch.from_dlpack(x)

    def expand(self, x: Any, shape: Sequence[int]) -> Any:
        return self.cupy.broadcast_to(x, shape)

    def type_of(self, dtype: str) -> Any:
        if dtype == "bfloat16":
            return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
        return np.dtype(dtype)


KINDS: dict[str, Kind] = {
    kind.name: kind for kind in (NumPyKind(), DLPackKind(), TorchKind("cpu"), TorchKind("cuda"), CuPyKind())
}


class Failures:
    """Collects what is wrong with many small cases, so that one test can show them all."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.cases = 0

    @contextmanager
    def case(self, label: object) -> Iterator[None]:
        self.cases += 1
        try:
            yield
        except Exception as error:
            self.found.append(f"{label}: {type(error).__name__}: {error}")

    def report(self) -> None:
        assert self.cases, "no case ran"
        shown = "\n".join(self.found[:30])
        assert not self.found, f"{len(self.found)} of {self.cases} cases failed\n{shown}"


@dataclass(frozen=True)
class Route:
    """A kind of array on its way through a backend."""

    backend: str
    kind: Kind

    @property
    def dtypes(self) -> tuple[str, ...]:
        return self.kind.dtypes

    def array(self, values: Any, dtype: str | None = None) -> Any:
        """An array of this route's kind from a tensor or nested lists; float32 unless said otherwise."""
        tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.float64)
        if dtype or not isinstance(values, torch.Tensor):
            tensor = tensor.to(torch_dtype(dtype or "float32"))
        return self.kind.array(tensor)

    def run(self, x: Any, dim: int = -1, op: str = "softmax", **options: Any) -> Any:
        return getattr(minikernel, op)(x, dim, **{"backend": self.backend, **options})

    def __call__(self, values: Any, dim: int = -1, op: str = "softmax", dtype: str | None = None) -> Any:
        """The result for a tensor or nested lists, as a CPU tensor."""
        return self.kind.tensor(self.run(self.array(values, dtype), dim, op)).cpu()

    def reasons(self, rows: int, cols: int, dtype: str = "float32") -> list[str]:
        """Why the backend doesn't take so long a row, if it doesn't."""
        device = "cpu" if self.backend == "numpy" else "cuda"
        problem = minikernel.Problem("softmax", device, 0, dtype, dtype, rows, cols, 1, (cols, 1, 1))
        return minikernel.registry.REGISTRY.get(self.backend).reasons(problem)

    def passes_over(self, rows: int, cols: int, dtype: str = "float32") -> bool:
        """Whether a test of many shapes leaves this one out: it's refused, or too long for one thread a row."""
        return bool(self.reasons(rows, cols, dtype)) or (self.backend == "cuda-naive" and cols > 20_000)

    def verify(
        self,
        x: Any,
        dim: int = -1,
        op: str = "softmax",
        *,
        dtype: str | None = None,
        poison: bool = False,
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Run, and assert that the result is right; with ``poison`` into memory that held NaN."""
        kind = self.kind
        given = kind.tensor(x)
        options: dict[str, Any] = {"dtype": dtype} if dtype else {}
        wanted = dtype or dtype_name(given.dtype)
        if poison and kind.takes_out:
            options["out"] = kind.poisoned(given.shape, wanted)
        y = (run or self.run)(x, dim, op, **options)
        assert kind.dtype(y) == wanted
        assert kind.is_contiguous(y)
        wrong = mismatch(kind.tensor(y), reference(given, dim, op), op)
        assert wrong is None, wrong
        return y
