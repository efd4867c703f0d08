"""``softmax(x)`` for any array, on the best kernel that this machine can run."""

from .api import explain, log_softmax, softmax
from .dispatch import Decision, FallbackWarning, use_backend
from .problem import Kernel, Problem
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

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendError",
    "BackendInfo",
    "BackendUnavailable",
    "Decision",
    "FallbackWarning",
    "Kernel",
    "Problem",
    "Requirement",
    "__version__",
    "explain",
    "list_backends",
    "log_softmax",
    "register_backend",
    "softmax",
    "unregister_backend",
    "use_backend",
]
