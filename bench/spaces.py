"""Where arrays live: PyTorch on a device, or NumPy where PyTorch is absent; one small interface for both."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class Space(Protocol):
    """Makes arrays and does what the two frameworks spell differently.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        xp: The framework's module. PyTorch takes NumPy's ``axis`` and ``keepdims``.
    """

    device: str
    xp: Any

    def dtype(self, name: str) -> Any:
        """The framework's dtype of that name; NotImplementedError if it has none."""

    def empty(self, count: int, dtype: str) -> Any:
        """A flat array, not initialized."""

    def fill_normal(self, flat: Any) -> None:
        """Fill with fresh draws from the standard normal distribution."""

    def from_numpy(self, array: np.ndarray, dtype: str) -> Any:
        """A copy in this space, cast to ``dtype``."""

    def wide(self, x: Any) -> Any:
        """A float64 copy."""

    def rounded(self, x: Any, dtype: str) -> Any:
        """float64 values rounded to ``dtype``, as float64."""

    def largest(self, x: Any, k: int) -> Any:
        """The k largest along the last axis, in descending order."""

    def gather(self, x: Any, indices: Any) -> Any:
        """Elements along the last axis, by their indices there."""

    def repeats(self, indices: Any) -> bool:
        """Whether one comes twice along the last axis."""

    def synchronize(self) -> None:
        """Wait for all work queued so far."""


class TorchSpace:
    xp: Any
    device: str

    def __init__(self, device: str, seed: int) -> None:
        import torch

        self.xp = torch
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def dtype(self, name: str) -> Any:
        return getattr(self.xp, name)

    def empty(self, count: int, dtype: str) -> Any:
        return self.xp.empty(count, dtype=self.dtype(dtype), device=self.device)

    def fill_normal(self, flat: Any) -> None:
        flat.normal_(generator=self._generator)

    def from_numpy(self, array: np.ndarray, dtype: str) -> Any:
        return self.xp.as_tensor(array).to(self.device, self.dtype(dtype), copy=True)

    def wide(self, x: Any) -> Any:
        return x.to(self.xp.float64, copy=True)

    def rounded(self, x: Any, dtype: str) -> Any:
        return x.to(self.dtype(dtype)).to(self.xp.float64)

    def largest(self, x: Any, k: int) -> Any:
        return self.xp.topk(x, k, -1).values

    def gather(self, x: Any, indices: Any) -> Any:
        return x.gather(-1, indices)

    def repeats(self, indices: Any) -> bool:
        return bool((indices.sort(-1).values.diff(dim=-1) == 0).any())

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.xp.cuda.synchronize()


class NumPySpace:
    device: str = "cpu"
    xp: Any = np

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def dtype(self, name: str) -> Any:
        if name != "bfloat16":
            return np.dtype(name)
        try:
            import ml_dtypes
        except ImportError:
            raise NotImplementedError("NumPy has no bfloat16 (pip install ml_dtypes)") from None
        return np.dtype(ml_dtypes.bfloat16)

    def empty(self, count: int, dtype: str) -> Any:
        return np.empty(count, self.dtype(dtype))

    def fill_normal(self, flat: Any) -> None:
        flat[...] = self._generator.standard_normal(flat.shape, np.float32)

    def from_numpy(self, array: np.ndarray, dtype: str) -> Any:
        return array.astype(self.dtype(dtype))

    def wide(self, x: Any) -> Any:
        return x.astype(np.float64)

    def rounded(self, x: Any, dtype: str) -> Any:
        with np.errstate(over="ignore"):
            return x.astype(self.dtype(dtype)).astype(np.float64)

    def largest(self, x: Any, k: int) -> Any:
        return np.sort(x, axis=-1)[..., ::-1][..., :k]

    def gather(self, x: Any, indices: Any) -> Any:
        return np.take_along_axis(x, indices, -1)

    def repeats(self, indices: Any) -> bool:
        return bool((np.diff(np.sort(indices, -1)) == 0).any())

    def synchronize(self) -> None:
        pass
