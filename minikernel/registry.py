"""The registry: what a backend declares, and the one place that knows which there are."""

from __future__ import annotations

import difflib
import importlib.util
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import isfinite
from typing import Any

from .problem import ALL_OPS, BACKWARD, DTYPES, FEATURES, OPS, TOPK, Kernel, Problem

ENTRY_POINT_GROUP = "minikernel.backends"

# What a backend needs for the gradient of an operation; that of the k largest starts from all of softmax again.
_BACKWARD_TAKES = {op: {backward} for op, backward in BACKWARD.items()}
_BACKWARD_TAKES[TOPK] = {"softmax", BACKWARD["softmax"]}

# A new built-in is one file in backends/ and one line here.
_BUILTIN_MODULES = (
    "minikernel.backends.cuda_fused",
    "minikernel.backends.triton_fused",
    "minikernel.backends.cuda_smem",
    "minikernel.backends.cuda_naive",
    "minikernel.backends.numpy_blocked",
)


class BackendError(RuntimeError):
    """No backend can take the input, or the one that should failed; the message names each with its reasons."""


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
        except Exception:  # looking for a.b imports a, which may raise anything
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
            10 (cuda-fused), 20 (triton-fused), 30 (cuda-smem), 40 (cuda-naive) and 50 (numpy); among
            the first two, a table of measurements may say otherwise.
        devices: Kinds of device whose memory it works on: ``"cpu"``, ``"cuda"``.
        dtypes: Names of the input dtypes that it takes, of float16, bfloat16, float32, float64.
        prepare: Makes a :class:`Kernel` for a :class:`Problem`; called once for each distinct problem
            and cached. Raises :class:`BackendUnavailable` if the backend doesn't work here.
        ops: Names of the operations it has: ``"softmax"``, ``"log_softmax"``, for gradients
            ``"softmax_backward"``, ``"log_softmax_backward"``, and ``"softmax_topk"``.
        features: Names of what it fuses with them, of ``"scale"``, ``"mask"``, ``"causal"``.
        requires: The packages that it imports when it first runs.
        limits: What it won't take, in words, for people to read: limit name -> sentence.
        obstacles: Sentences saying why it can't run on this machine, beyond ``requires``; empty if it
            can. May import and initialize what it needs: it is not called on the hot path.
        reasons: Sentences saying why it can't take this problem, beyond ``devices``, ``dtypes`` and
            ``ops``; empty if it can.
    """

    name: str
    rank: float
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    prepare: Callable[[Problem], Kernel]
    ops: tuple[str, ...] = OPS
    features: tuple[str, ...] = ()
    requires: tuple[Requirement, ...] = ()
    limits: Mapping[str, str] = field(default_factory=dict)
    obstacles: Callable[[], list[str]] = _no_obstacles
    reasons: Callable[[Problem], list[str]] = _no_reasons

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"a backend's name is a string; got {self.name!r}")
        if not self.name or self.name != self.name.lower() or self.name == "auto":
            raise ValueError(f"a backend's name is lower case, not empty and not 'auto'; got {self.name!r}")
        if isinstance(self.rank, bool) or not isinstance(self.rank, int | float) or not isfinite(self.rank):
            raise TypeError(f"{self.name}: rank must be a finite number; got {self.rank!r}")
        for attribute, known in (("devices", ("cpu", "cuda")), ("dtypes", DTYPES), ("ops", ALL_OPS)):
            given = getattr(self, attribute)
            if not isinstance(given, tuple | list) or not given:
                raise ValueError(f"{self.name}: {attribute} is a non-empty tuple of names; got {given!r}")
            self._check_known(attribute, given, known)
        if not isinstance(self.features, tuple | list):
            raise ValueError(f"{self.name}: features is a tuple of names; got {self.features!r}")
        self._check_known("features", self.features, FEATURES)
        needed = self.requires
        if not isinstance(needed, tuple | list) or not all(isinstance(r, Requirement) for r in needed):
            raise TypeError(f"{self.name}: requires must be a tuple of minikernel.Requirement; got {needed!r}")
        if not isinstance(self.limits, Mapping) or not all(
            isinstance(text, str) for pair in self.limits.items() for text in pair
        ):
            raise TypeError(f"{self.name}: limits must be a mapping, name -> sentence; got {self.limits!r}")
        for attribute in ("prepare", "obstacles", "reasons"):
            if not callable(getattr(self, attribute)):
                raise TypeError(f"{self.name}: {attribute} must be callable")

    def _check_known(self, attribute: str, given: Iterable[str], known: Iterable[str]) -> None:
        if unknown := [value for value in given if value not in known]:
            raise ValueError(f"{self.name}: unknown {attribute} {unknown}; known are {list(known)}")

    def rules_out(self, problem: Problem) -> list[str]:
        """Why its declaration rules out this problem, on any machine; asks and probes nothing."""
        found = []
        if problem.device not in self.devices:
            wanted = " or ".join(self.devices)
            found.append(f"it needs an array in {wanted} memory; the input is in {problem.device} memory")
        if problem.dtype not in self.dtypes:
            found.append(f"it takes {', '.join(self.dtypes)}; the input is {problem.dtype}")
        if problem.op not in self.ops:
            found.append(f"it has {', '.join(self.ops)}, not {problem.op}")
        elif problem.recorded and not _BACKWARD_TAKES[problem.op] <= {*self.ops}:
            found.append("it has no gradient, and the input requires grad")
        found += [f"it has no {feature}=" for feature in problem.features if feature not in self.features]
        return found

    def missing(self) -> list[str]:
        """Why it can't run on this machine; empty if it can."""
        absent = [f"{r.module} is not installed ({r.cure})" for r in self.requires if not r.is_installed()]
        return absent or _sentences("obstacles", self.obstacles)

    def declines(self, problem: Problem) -> list[str]:
        """Why it can't take this problem where all that it needs is there; empty if it can."""
        return _sentences("reasons", self.reasons, problem)


def _sentences(predicate: str, ask: Callable[..., Iterable[str]], *arguments: Problem) -> list[str]:
    """What a predicate says; one that raises speaks against its own backend and stops nothing else."""
    try:
        said = ask(*arguments)
        return [said] if isinstance(said, str) else [str(sentence) for sentence in said]
    except Exception as error:
        return [f"its {predicate}() raised {type(error).__name__}: {error}"]


@dataclass(frozen=True)
class BackendInfo:
    """What :func:`list_backends` says about one backend on this machine.

    Attributes:
        name: The backend's name.
        available: Whether it can run here.
        reasons: Why not, as sentences; empty when available.
        devices, dtypes, ops, rank, limits, features: As the backend declares them.
    """

    name: str
    available: bool
    reasons: tuple[str, ...]
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    rank: float
    limits: Mapping[str, str]
    features: tuple[str, ...] = ()


def _entry_points() -> list[Any]:
    """What ``importlib.metadata.entry_points`` finds in the library's group, in half the time: only packages that
    have the group are parsed. A package whose files can't be read has none."""
    from importlib import metadata  # here: it takes half as long as all else to import

    points: dict[str, list[Any]] = {}
    for found in metadata.distributions():
        try:
            if ENTRY_POINT_GROUP in (found.read_text("entry_points.txt") or ""):
                # Of two versions on the path the first is the one that is installed.
                points.setdefault(found.name or str(found), [*found.entry_points.select(group=ENTRY_POINT_GROUP)])
        except Exception:  # another package's fault must not stop this one
            continue
    return [point for of_one in points.values() for point in of_one]


class Registry:
    """Backends by name. Built-ins and entry points are loaded when someone first asks.

    Every mapping here is replaced, never changed, so that who reads one needs no lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: dict[str, Backend] = {}  # best first
        self._builtin: frozenset[str] = frozenset()
        self._broken: dict[str, str] = {}
        self._unavailable: dict[tuple[Backend, int], str] = {}
        self._missing: dict[Backend, list[str]] = {}
        self._generation = 0
        self._loaded = self._loading = False
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever an earlier choice may no longer be right."""
        self._listeners.append(listener)

    def _changed(self) -> None:
        with self._lock:
            self._generation += 1
            self._missing = {}
        for listener in self._listeners:
            listener()

    @property
    def generation(self) -> int:
        """How many changes there were: what was chosen before one must not be remembered after it."""
        self._load()
        return self._generation

    def _load(self) -> None:
        if self._loaded:
            return
        with self._lock:
            if self._loaded or self._loading:  # loading: a plug-in that uses the library as it is imported
                return
            self._loading = True
            try:
                builtin = [import_module(module).BACKEND for module in _BUILTIN_MODULES]
                self._builtin = frozenset(backend.name for backend in builtin)
                self._publish({**self._backends, **{backend.name: backend for backend in builtin}})
                self._load_entry_points()
                self._loaded = True
            finally:
                self._loading = False
        self._changed()

    def _load_entry_points(self) -> None:
        found: dict[str, Backend] = {}
        broken: dict[str, str] = {}
        for point in _entry_points():
            try:
                loaded = point.load()
                backend = loaded if isinstance(loaded, Backend) else loaded()
                self._check_new(backend, {**self._backends, **found})
                found[backend.name] = backend
            except (Exception, SystemExit) as error:  # another package's fault must not stop this one
                broken[point.name] = (
                    f"its entry point {point.value!r} failed to load: {type(error).__name__}: {error}"
                )
        self._publish({**self._backends, **found})
        self._broken = {name: why for name, why in broken.items() if name not in self._backends}

    def _check_new(self, backend: Backend, taken: Mapping[str, Backend]) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(f"a backend is a minikernel.Backend; got {type(backend).__name__}")
        if backend.name in self._builtin:
            raise ValueError(f"{backend.name!r} is a built-in backend and can't be replaced")
        if backend.name in taken:
            raise ValueError(f"a backend named {backend.name!r} is registered already; pass replace=True")

    def _publish(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(sorted(backends.items(), key=lambda item: (item[1].rank, item[0])))

    def _without(self, name: str) -> dict[str, Backend]:
        """The other backends; what was found out about this one is forgotten."""
        self._unavailable = {key: why for key, why in self._unavailable.items() if key[0].name != name}
        return {other: backend for other, backend in self._backends.items() if other != name}

    def register(self, backend: Backend, *, replace: bool = False) -> None:
        self._load()
        with self._lock:
            self._check_new(backend, {} if replace else self._backends)
            self._publish({**self._without(backend.name), backend.name: backend})
            self._broken = {name: why for name, why in self._broken.items() if name != backend.name}
        self._changed()

    def unregister(self, name: str) -> None:
        with self._lock:
            self.get(name)
            if name in self._builtin:
                raise ValueError(f"{name!r} is a built-in backend and can't be removed")
            self._publish(self._without(name))
        self._changed()

    def backends(self) -> Mapping[str, Backend]:
        """All backends that loaded, by name, best first, as they are now: later changes don't show."""
        self._load()
        return self._backends

    def is_builtin(self, name: str) -> bool:
        return name in self._builtin

    def names(self) -> list[str]:
        """Names of all backends that loaded, best first."""
        return list(self.backends())

    def get(self, name: str) -> Backend:
        """The backend of that name; ValueError lists the names there are."""
        backend = self.backends().get(name) if isinstance(name, str) else None
        if backend is None:
            raise self.unknown(name)
        return backend

    def unknown(self, name: object) -> ValueError:
        """The error for a name that no backend has: the names there are, the closest, and why it didn't load."""
        names = ["auto", *self.backends()]
        message = f"no backend is named {name!r}; there are {', '.join(map(repr, names))}"
        if isinstance(name, str):
            if close := difflib.get_close_matches(name.lower(), names, 1):
                message += f". Did you mean {close[0]!r}?"
            if why := self._broken.get(name):
                message += f". {name!r}: {why}"
        return ValueError(message)

    def mark_unavailable(self, backend: str | Backend, index: int, reason: str) -> None:
        """Remember that a backend failed to compile on the device of that ordinal."""
        backend = self._known(backend)
        with self._lock:
            if self._backends.get(backend.name) is not backend:
                return  # replaced meanwhile: the new one may well work
            self._unavailable = {**self._unavailable, (backend, index): reason}
        self._changed()

    def missing(self, backend: str | Backend) -> list[str]:
        """Why the backend can't run on this machine, or on one of its devices; empty if it can."""
        backend = self._known(backend)
        return self._absent(backend) or [
            reason for (failed, _), reason in self._unavailable.items() if failed is backend
        ]

    def lacks(self, backend: Backend, problem: Problem) -> list[str]:
        """Why the backend can't run on this machine, or on the problem's device; empty if it can."""
        failure = self._unavailable.get((backend, problem.index))
        return [failure] if failure else self._absent(backend)

    def rejects(self, backend: str | Backend, problem: Problem) -> list[str]:
        """Why the backend can't take this problem here; empty if it can."""
        backend = self._known(backend)
        # What its declaration rules out needs no probing, so a CPU array never initializes CUDA.
        found = backend.rules_out(problem) or self.lacks(backend, problem) or backend.declines(problem)
        if not found and problem.recorded and problem.op in BACKWARD:
            found = [f"of the gradient: {why}" for why in backend.declines(problem.backward())]
        return found

    def fault(self, backend: Backend, problem: Problem) -> list[str]:
        """Why a backend that should take it, and whose packages are all there, doesn't work on its device."""
        if backend.rules_out(problem):
            return []
        failed = (backend, problem.index) in self._unavailable
        installed = all(r.is_installed() for r in backend.requires)
        return self.lacks(backend, problem) if failed or (installed and "cuda" in backend.devices) else []

    def _known(self, backend: str | Backend) -> Backend:
        return backend if isinstance(backend, Backend) else self.get(backend)

    def _absent(self, backend: Backend) -> list[str]:
        """``backend.missing()``, found out once."""
        memo = self._missing  # a change in the meantime leaves this one behind
        if (found := memo.get(backend)) is None:
            found = memo[backend] = backend.missing()
        return list(found)

    def info(self) -> dict[str, BackendInfo]:
        """Every backend, best first; those whose entry point failed to load come last."""
        found = {}
        for name, backend in self.backends().items():
            reasons = tuple(self.missing(backend))
            found[name] = BackendInfo(
                name,
                not reasons,
                reasons,
                backend.devices,
                backend.dtypes,
                backend.ops,
                backend.rank,
                backend.limits,
                backend.features,
            )
        for name, reason in self._broken.items():
            found.setdefault(name, BackendInfo(name, False, (reason,), (), (), (), 1_000_000, {}))
        return found

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.backends().values())


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
