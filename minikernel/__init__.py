"""``softmax(x)`` for any array, on the best kernel that this machine can run."""

from typing import TYPE_CHECKING, Any

from .api import TopK, explain, log_softmax, softmax, softmax_topk
from .dispatch import Decision, FallbackWarning, use_backend
from .problem import Kernel, Mask, Problem
from .registry import (
    Backend,
    BackendError,
    BackendInfo,
    BackendUnavailable,
    Requirement,
    list_backends,
    register_backend,
    unregister_backend,
)

if TYPE_CHECKING:
    from . import nn
    from .nn import replace_softmax

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``nn`` and ``replace_softmax`` need PyTorch, which is imported with the first of them that is asked for."""
    if name not in ("nn", "replace_softmax"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    nn = import_module(".nn", __name__)
    return nn if name == "nn" else nn.replace_softmax


__all__ = [
    "Backend",
    "BackendError",
    "BackendInfo",
    "BackendUnavailable",
    "Decision",
    "FallbackWarning",
    "Kernel",
    "Mask",
    "Problem",
    "Requirement",
    "TopK",
    "__version__",
    "explain",
    "list_backends",
    "log_softmax",
    "nn",
    "register_backend",
    "replace_softmax",
    "softmax",
    "softmax_topk",
    "unregister_backend",
    "use_backend",
]
