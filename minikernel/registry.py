"""The registry: what a backend declares, and the one place that knows which there are."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from .problem import DTYPES, OPS, Kernel, Problem

ENTRY_POINT_GROUP = "minikernel.backends"

# A new built-in is one file in backends/ and one line here.
_BUILTIN_MODULES = (
    "minikernel.backends.cuda_fused",
    "minikernel.backends.triton_fused",
    "minikernel.backends.cuda_smem",
    "minikernel.backends.cuda_naive",
    "minikernel.backends.numpy_blocked",
)


class BackendError(RuntimeError):
    """No backend can take the input; the message lists every backend with its reasons."""


class BackendUnavailable(RuntimeError):
    """Raised by ``prepare`` when a backend turns out not to work here: its kernel won't compile, say."""


@dataclass(frozen=True)
class Requirement:
    """A Python package that a backend can't do without.

    Attributes:
        module: The name it is imported by.
        cure: The command that installs it.
    """

    module: str
    cure: str

    def is_installed(self) -> bool:
        """Whether the package can be found; it is not imported."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            return False


def _no_reasons(problem: Problem) -> list[str]:
    return []


def _no_obstacles() -> list[str]:
    return []


@dataclass(frozen=True, eq=False)
class Backend:
    """A backend's declaration.

    Attributes:
        name: What users call it; lower case, unique.
        rank: Order under ``auto``: the lowest rank that can take the input wins. The built-ins have
            10 (cuda-fused), 20 (triton-fused), 30 (cuda-smem), 40 (cuda-naive) and 50 (numpy).
        devices: Kinds of device whose memory it works on: ``"cpu"``, ``"cuda"``.
        dtypes: Names of the input dtypes that it takes, of float16, bfloat16, float32, float64.
        prepare: Makes a :class:`Kernel` for a :class:`Problem`; called once for each distinct problem
            and cached. Raises :class:`BackendUnavailable` if the backend doesn't work here.
        ops: Names of the operations it has: ``"softmax"``, ``"log_softmax"``.
        requires: The packages that it imports when it first runs.
        limits: What it won't take, in words, for people to read: limit name -> sentence.
        obstacles: Sentences saying why it can't run on this machine, beyond ``requires``; empty if it
            can. May import and initialize what it needs: it is not called on the hot path.
        reasons: Sentences saying why it can't take this problem, beyond ``devices``, ``dtypes`` and
            ``ops``; empty if it can.
    """

    name: str
    rank: int
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    prepare: Callable[[Problem], Kernel]
    ops: tuple[str, ...] = OPS
    requires: tuple[Requirement, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    obstacles: Callable[[], list[str]] = _no_obstacles
    reasons: Callable[[Problem], list[str]] = _no_reasons

    def __post_init__(self) -> None:
        if not self.name or self.name != self.name.lower() or self.name == "auto":
            raise ValueError(f"a backend's name is lower case, not empty and not 'auto'; got {self.name!r}")
        for attribute, known in (("devices", ("cpu", "cuda")), ("dtypes", DTYPES), ("ops", OPS)):
            given = getattr(self, attribute)
            if isinstance(given, str) or not given:
                raise ValueError(f"{self.name}: {attribute} is a non-empty tuple of names; got {given!r}")
            if unknown := [value for value in given if value not in known]:
                raise ValueError(f"{self.name}: unknown {attribute} {unknown}; known are {list(known)}")
        for attribute in ("prepare", "obstacles", "reasons"):
            if not callable(getattr(self, attribute)):
                raise TypeError(f"{self.name}: {attribute} must be callable")

    def missing(self) -> list[str]:
        """Why it can't run on this machine; empty if it can."""
        absent = [f"{r.module} is not installed ({r.cure})" for r in self.requires if not r.is_installed()]
        return absent or self.obstacles()

    def rejects(self, problem: Problem) -> list[str]:
        """Why its declaration rules out this problem, on any machine; empty if it doesn't."""
        found = []
        if problem.device not in self.devices:
            found.append(f"it works on {' and '.join(self.devices)} memory; the input is on {problem.device}")
        if problem.dtype not in self.dtypes:
            found.append(f"it takes {', '.join(self.dtypes)}; the input is {problem.dtype}")
        if problem.op not in self.ops:
            found.append(f"it has {', '.join(self.ops)}, not {problem.op}")
        return found or self.reasons(problem)


@dataclass(frozen=True)
class BackendInfo:
    """What :func:`list_backends` says about one backend on this machine.

    Attributes:
        name: The backend's name.
        available: Whether it can run here.
        reasons: Why not, as sentences; empty when available.
        devices, dtypes, ops, rank, limits: As the backend declares them.
    """

    name: str
    available: bool
    reasons: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    rank: int
    limits: Mapping[str, str]


class Registry:
    """Backends by name. Built-ins and entry points are loaded when someone first asks."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: dict[str, Backend] = {}
        self._builtin: set[str] = set()
        self._broken: dict[str, str] = {}
        self._unavailable: dict[tuple[str, int], str] = {}
        self._loaded = self._loading = False
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever an earlier choice may no longer be right."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        for listener in self._listeners:
            listener()

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:  # loading: a plug-in that registers something as it is imported
                return
            self._loading = True
            for module in _BUILTIN_MODULES:
                backend = import_module(module).BACKEND
                self._backends[backend.name] = backend
                self._builtin.add(backend.name)
            for point in entry_points(group=ENTRY_POINT_GROUP):
                self._load_entry_point(point)
            self._loaded = True

    def _load_entry_point(self, point: EntryPoint) -> None:
        try:
            loaded = point.load()
            backend = loaded if isinstance(loaded, Backend) else loaded()
            self._add(backend, replace=False)
        except Exception as error:  # another package's fault must not stop this one
            self._broken[point.name] = (
                f"its entry point {point.value!r} failed to load: {type(error).__name__}: {error}"
            )

    def _add(self, backend: Backend, *, replace: bool) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(f"a backend is a minikernel.Backend; got {type(backend).__name__}")
        if backend.name in self._builtin:
            raise ValueError(f"{backend.name!r} is a built-in backend and can't be replaced")
        if backend.name in self._backends and not replace:
            raise ValueError(f"a backend named {backend.name!r} is registered already; pass replace=True")
        self._backends[backend.name] = backend
        self._broken.pop(backend.name, None)

    def register(self, backend: Backend, *, replace: bool = False) -> None:
        self._load()
        with self._lock:
            self._add(backend, replace=replace)
            _missing.cache_clear()
        self._changed()

    def unregister(self, name: str) -> None:
        self._load()
        with self._lock:
            if name in self._builtin:
                raise ValueError(f"{name!r} is a built-in backend and can't be removed")
            if self._backends.pop(name, None) is None:
                raise ValueError(f"no backend is named {name!r}; there are {', '.join(self.names())}")
        self._changed()

    def names(self) -> list[str]:
        """Names of all backends that loaded, best first."""
        self._load()
        return [b.name for b in sorted(self._backends.values(), key=lambda b: (b.rank, b.name))]

    def get(self, name: str) -> Backend:
        """The backend of that name; ValueError lists the names there are."""
        self._load()
        backend = self._backends.get(name) if isinstance(name, str) else None
        if backend is None:
            why = self._broken.get(name, "") if isinstance(name, str) else ""
            raise ValueError(
                f"no backend is named {name!r}; there are 'auto', "
                + ", ".join(map(repr, self.names()))
                + (f". {name!r}: {why}" if why else "")
            )
        return backend

    def mark_unavailable(self, name: str, index: int, reason: str) -> None:
        """Remember that a backend failed to compile on the device of that ordinal."""
        with self._lock:
            self._unavailable[name, index] = reason
        self._changed()

    def missing(self, name: str) -> list[str]:
        """Why the backend can't run on this machine at all; empty if it can on some device."""
        return list(_missing(self.get(name))) or [
            reason for (failed, _), reason in self._unavailable.items() if failed == name
        ]

    def rejects(self, name: str, problem: Problem) -> list[str]:
        """Why the backend can't take this problem here; empty if it can."""
        backend = self.get(name)
        found = [r for r in (self._unavailable.get((name, problem.index)),) if r]
        # What its declaration rules out needs no probing, so a CPU array never initializes CUDA.
        return found or backend.rejects(problem) or list(_missing(backend))

    def fault(self, name: str, index: int) -> str:
        """Why a backend whose packages are all there doesn't work on a device, or "" if it does."""
        if reason := self._unavailable.get((name, index)):
            return reason
        backend = self.get(name)
        installed = all(r.is_installed() for r in backend.requires)
        return "; ".join(_missing(backend)) if installed and "cuda" in backend.devices else ""

    def info(self) -> dict[str, BackendInfo]:
        """Every backend, best first; those whose entry point failed to load come last."""
        found = {}
        for name in self.names():
            backend = self.get(name)
            reasons = tuple(self.missing(name))
            found[name] = BackendInfo(
                name,
                not reasons,
                reasons,
                backend.devices,
                backend.dtypes,
                backend.ops,
                backend.rank,
                backend.limits,
            )
        for name, reason in self._broken.items():
            found.setdefault(name, BackendInfo(name, False, (reason,), (), (), (), 1_000_000, {}))
        return found

    def __iter__(self) -> Iterator[Backend]:
        return iter([self.get(name) for name in self.names()])


@cache
def _missing(backend: Backend) -> tuple[str, ...]:
    return tuple(backend.missing())


REGISTRY = Registry()


def list_backends() -> dict[str, BackendInfo]:
    """Every registered backend and whether it can run on this machine.

    Returns:
        Name -> :class:`BackendInfo`, best first under ``auto``. Iterating it gives the names.
    """
    return REGISTRY.info()


def register_backend(backend: Backend, *, replace: bool = False) -> None:
    """Add a backend of your own, for this process.

    A package does the same for every process through the entry-point group ``minikernel.backends``,
    whose entries name a :class:`Backend` or a function that returns one.

    Args:
        backend: The declaration.
        replace: Whether to replace one of the same name. Built-ins can't be replaced.

    Raises:
        TypeError: ``backend`` is not a :class:`Backend`.
        ValueError: The name is taken.
    """
    REGISTRY.register(backend, replace=replace)


def unregister_backend(name: str) -> None:
    """Remove a backend that :func:`register_backend` added.

    Raises:
        ValueError: No backend has that name, or it is a built-in.
    """
    REGISTRY.unregister(name)
