"""The registry: declarations as data, checked when they are made; reasons as sentences; built-ins that stay."""

import gc
import threading
import types
import weakref
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from cases import DTYPES, GPU_BACKENDS, OPS

import minikernel
from minikernel import Backend, BackendError, BackendInfo, Kernel, Problem, Requirement, driver
from minikernel import registry as registry_module
from minikernel.problem import ALL_OPS
from minikernel.registry import Registry

ON_CPU = Problem("softmax", "cpu", 0, "float32", "float32", 2, 4, 1, (4, 1, 1))
ABSENT = Requirement("a_package_that_is_not_there", "pip install it")


def tenths(problem):
    """A backend that no one could mistake for another: each result is 0.1."""
    return Kernel(lambda x, out, stream, scratch: out.fill(0.1))


def a_backend(**changes) -> Backend:
    given = {"name": "tenths", "rank": 60, "devices": ("cpu",), "dtypes": ("float32",), "prepare": tenths}
    return Backend(**(given | changes))


def test_built_in_backends_best_first():
    names = list(minikernel.list_backends())
    built_in = [name for name in names if name in (*GPU_BACKENDS, "numpy")]
    assert built_in == ["cuda-fused", "triton-fused", "cuda-smem", "cuda-naive", "numpy"]


@pytest.mark.parametrize("name", [*GPU_BACKENDS, "numpy"])
def test_each_declares_what_it_takes(name):
    info = minikernel.list_backends()[name]
    assert isinstance(info, BackendInfo)
    assert info.name == name
    assert info.dtypes == DTYPES
    assert info.ops == (OPS if name in ("cuda-smem", "cuda-naive") else ALL_OPS)
    assert info.devices == (("cpu",) if name == "numpy" else ("cuda",))
    assert info.available == (not info.reasons)
    assert all(isinstance(reason, str) and " " in reason for reason in info.reasons)


def test_numpy_is_always_available():
    assert minikernel.list_backends()["numpy"].available


def test_shared_memory_limits_are_declared_and_said():
    assert "227 KiB" in minikernel.list_backends()["cuda-smem"].limits["row"]


def test_a_row_too_long_for_shared_memory_is_a_reason(monkeypatch):
    t4 = driver.Device(75, 40, 64 * 1024, 64 * 1024, 4 * 2**20)
    monkeypatch.setattr(driver, "device", lambda index: t4)
    smem = minikernel.registry.REGISTRY.get("cuda-smem")
    problem = Problem("softmax", "cuda", 0, "float32", "float32", 4, 20_000, 1, (20_000, 1, 1))
    assert smem.declines(problem) == [
        "a row of 20000 float32 doesn't fit in a block's shared memory: at most 16376",
    ]
    assert smem.declines(replace(problem, cols=16376)) == []
    assert smem.declines(replace(problem, dtype="float16")) == []


def test_information_and_declarations_are_frozen():
    with pytest.raises(FrozenInstanceError):
        minikernel.list_backends()["numpy"].rank = 0
    with pytest.raises(FrozenInstanceError):
        a_backend().rank = 0


def test_register_run_and_unregister(registry):
    minikernel.register_backend(a_backend())
    assert list(minikernel.list_backends())[-1] == "tenths"
    x = np.zeros((2, 4), np.float32)
    np.testing.assert_array_equal(minikernel.softmax(x, backend="tenths"), np.full((2, 4), np.float32(0.1)))
    np.testing.assert_array_equal(minikernel.softmax(x), np.full((2, 4), 0.25))
    minikernel.unregister_backend("tenths")
    assert "tenths" not in minikernel.list_backends()
    with pytest.raises(ValueError, match="no backend is named 'tenths'"):
        minikernel.softmax(x, backend="tenths")


def test_a_lower_rank_wins_under_auto_at_once(registry):
    x = np.zeros((2, 4), np.float32)
    assert minikernel.softmax(x)[0, 0] == 0.25
    minikernel.register_backend(a_backend(rank=1))
    assert minikernel.softmax(x)[0, 0] == np.float32(0.1), "an earlier choice was remembered"
    assert minikernel.explain(x).backend == "tenths"
    assert minikernel.softmax(x.astype(np.float64))[0, 0] == 0.25
    minikernel.unregister_backend("tenths")
    assert minikernel.softmax(x)[0, 0] == 0.25


def test_replacing(registry):
    minikernel.register_backend(a_backend())
    with pytest.raises(ValueError, match="replace=True"):
        minikernel.register_backend(a_backend(rank=3))
    minikernel.register_backend(a_backend(rank=3), replace=True)
    assert minikernel.list_backends()["tenths"].rank == 3


def test_built_ins_stay(registry):
    for name in (*GPU_BACKENDS, "numpy"):
        with pytest.raises(ValueError, match="built-in"):
            minikernel.register_backend(a_backend(name=name), replace=True)
        with pytest.raises(ValueError, match="built-in"):
            minikernel.unregister_backend(name)
    with pytest.raises(ValueError, match="no backend is named"):
        minikernel.unregister_backend("tenths")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"name": ""}, ValueError, "name"),
        ({"name": "auto"}, ValueError, "auto"),
        ({"name": "Tenths"}, ValueError, "lower case"),
        ({"devices": ("gpu",)}, ValueError, r"devices \['gpu'\]"),
        ({"devices": ()}, ValueError, "devices"),
        ({"devices": "cpu"}, ValueError, "devices"),
        ({"dtypes": ("float8",)}, ValueError, r"dtypes \['float8'\]"),
        ({"ops": ("argmax",)}, ValueError, r"ops \['argmax'\]"),
        ({"prepare": None}, TypeError, "prepare"),
        ({"reasons": "never"}, TypeError, "reasons"),
        ({"name": 10}, TypeError, "name is a string; got 10"),
        ({"name": None}, TypeError, "name is a string"),
        ({"rank": "10"}, TypeError, "tenths: rank must be a finite number; got '10'"),
        ({"rank": True}, TypeError, "rank must be a finite number; got True"),
        ({"rank": float("nan")}, TypeError, "rank must be a finite number; got nan"),
        ({"rank": 1j}, TypeError, "rank"),
        ({"dtypes": None}, ValueError, "dtypes"),
        ({"requires": ("cupy",)}, TypeError, r"requires must be a tuple of minikernel\.Requirement"),
        ({"requires": ABSENT}, TypeError, r"requires must be a tuple of minikernel\.Requirement"),
        ({"limits": "short rows"}, TypeError, "limits must be a mapping"),
    ],
)
def test_a_declaration_is_checked_when_it_is_made(changes, error, words):
    with pytest.raises(error, match=words):
        a_backend(**changes)


@pytest.mark.parametrize("thing", [None, "tenths", dict, a_backend])
def test_only_a_backend_can_be_registered(registry, thing):
    with pytest.raises(TypeError, match=r"minikernel\.Backend"):
        minikernel.register_backend(thing)


def test_what_it_declares_is_what_it_is_asked_for(registry):
    minikernel.register_backend(
        a_backend(ops=("softmax",), reasons=lambda problem: ["it takes even rows only"] if problem.cols % 2 else [])
    )
    assert registry.rejects("tenths", ON_CPU) == []
    for change, reason in (
        ({"dtype": "float64"}, "it takes float32; the input is float64"),
        ({"device": "cuda"}, "it needs an array in cpu memory; the input is in cuda memory"),
        ({"op": "log_softmax"}, "it has softmax, not log_softmax"),
        ({"cols": 3}, "it takes even rows only"),
    ):
        assert registry.rejects("tenths", replace(ON_CPU, **change)) == [reason]
    with pytest.raises(BackendError, match="even rows only"):
        minikernel.softmax(np.zeros((2, 3), np.float32), backend="tenths")


def test_what_is_not_installed_is_a_reason_with_its_cure(registry):
    minikernel.register_backend(a_backend(rank=1, requires=(ABSENT,)))
    info = minikernel.list_backends()["tenths"]
    assert not info.available
    assert info.reasons == ("a_package_that_is_not_there is not installed (pip install it)",)
    assert minikernel.softmax(np.zeros(4, np.float32))[0] == 0.25
    with pytest.raises(BackendError, match="pip install it"):
        minikernel.softmax(np.zeros(4, np.float32), backend="tenths")


def test_obstacles_are_asked_for_once(registry):
    asked = []

    def obstacles():
        asked.append(1)
        return ["the moon is full"]

    minikernel.register_backend(a_backend(rank=1, obstacles=obstacles))
    for _ in range(3):
        minikernel.softmax(np.zeros(4, np.float32))
        minikernel.list_backends()
    assert len(asked) == 1


def test_a_kernel_is_prepared_once_for_each_problem(registry):
    prepared = []

    def prepare(problem):
        prepared.append(problem)
        return tenths(problem)

    minikernel.register_backend(a_backend(rank=1, prepare=prepare))
    for _ in range(5):
        minikernel.softmax(np.zeros((2, 4), np.float32))
    minikernel.softmax(np.zeros((2, 4), np.float32), backend="tenths")
    assert len(prepared) == 1
    minikernel.softmax(np.zeros((4, 2), np.float32))
    assert len(prepared) == 2
    assert {(p.rows, p.cols) for p in prepared} == {(2, 4), (4, 2)}


def test_a_registry_of_one_s_own_knows_the_same_built_ins():
    fresh = Registry()
    assert {b.name for b in fresh} >= {*GPU_BACKENDS, "numpy"}
    assert fresh.get("numpy").rank == 50


def test_a_rank_may_lie_between_two_others(registry):
    minikernel.register_backend(a_backend(rank=49.5))
    names = list(minikernel.list_backends())
    assert names.index("tenths") == names.index("numpy") - 1


# What speaks against a backend, and in which order


def test_the_machine_is_named_before_the_input(registry):
    """Who lacks a package reads how to get it, and not how long a row could have been."""
    asked = []

    def reasons(problem):
        asked.append(problem)
        return ["the row is too long"]

    minikernel.register_backend(a_backend(requires=(ABSENT,), reasons=reasons))
    assert registry.rejects("tenths", ON_CPU) == ["a_package_that_is_not_there is not installed (pip install it)"]
    assert not asked, "it may rely on what is missing"
    minikernel.register_backend(a_backend(obstacles=lambda: ["no accelerator"], reasons=reasons), replace=True)
    assert registry.rejects("tenths", ON_CPU) == ["no accelerator"]
    assert registry.rejects("tenths", replace(ON_CPU, dtype="float64")) == [
        "it takes float32; the input is float64"
    ]


def test_a_problem_in_other_memory_probes_nothing(registry):
    def never(*_):
        raise AssertionError("probed")

    minikernel.register_backend(a_backend(devices=("cuda",), obstacles=never, reasons=never))
    reason = "it needs an array in cuda memory; the input is in cpu memory"
    assert registry.rejects("tenths", ON_CPU) == [reason]
    registry.mark_unavailable("tenths", 0, "it failed to compile")
    assert registry.rejects("tenths", ON_CPU) == [reason]


def test_a_long_row_without_a_driver_is_about_the_driver(registry, monkeypatch):
    smem = registry.get("cuda-smem")
    monkeypatch.setattr(registry, "_missing", {smem: ["no NVIDIA driver was found"]})
    problem = Problem("softmax", "cuda", 0, "float32", "float32", 4, 70_000, 1, (70_000, 1, 1))
    assert registry.rejects("cuda-smem", problem) == ["no NVIDIA driver was found"]


@pytest.mark.parametrize("predicate", ["reasons", "obstacles"])
def test_a_predicate_that_raises_speaks_against_its_backend_only(registry, predicate):
    def fail(*_):
        raise ValueError("oops")

    minikernel.register_backend(a_backend(rank=1, **{predicate: fail}))
    said = f"its {predicate}() raised ValueError: oops"
    x = np.zeros((2, 4), np.float32)
    assert minikernel.softmax(x)[0, 0] == 0.25
    assert minikernel.explain(x).rejected["tenths"] == (said,)
    assert minikernel.list_backends()["tenths"].reasons == ((said,) if predicate == "obstacles" else ())
    with pytest.raises(BackendError) as raised:
        minikernel.softmax(x, backend="tenths")
    assert said in str(raised.value)


def test_a_predicate_that_returns_no_list(registry):
    minikernel.register_backend(a_backend(reasons=lambda problem: "it is Sunday"))
    assert registry.rejects("tenths", ON_CPU) == ["it is Sunday"]
    minikernel.register_backend(a_backend(reasons=lambda problem: None), replace=True)
    assert "its reasons() raised TypeError" in registry.rejects("tenths", ON_CPU)[0]


# Changing


@pytest.mark.parametrize("way", ["replace", "again"])
def test_a_backend_that_failed_can_be_replaced(registry, way):
    sound = a_backend()
    minikernel.register_backend(sound if way == "again" else a_backend(obstacles=lambda: ["no accelerator"]))
    assert minikernel.list_backends()["tenths"].available == (way == "again")
    registry.mark_unavailable("tenths", 0, "it failed to compile")
    assert registry.rejects("tenths", ON_CPU)
    if way == "again":
        minikernel.unregister_backend("tenths")
    minikernel.register_backend(sound, replace=way == "replace")
    assert registry.rejects("tenths", ON_CPU) == []
    assert minikernel.list_backends()["tenths"].available
    assert minikernel.softmax(np.zeros((2, 4), np.float32), backend="tenths")[0, 0] == np.float32(0.1)


def test_the_failure_of_one_that_was_replaced_is_not_the_new_one_s(registry):
    old = a_backend()
    minikernel.register_backend(old)
    minikernel.register_backend(a_backend(), replace=True)
    registry.mark_unavailable(old, 0, "it failed to compile")
    assert registry.rejects("tenths", ON_CPU) == []


def test_an_unregistered_backend_is_not_kept_alive(registry):
    backend = a_backend(rank=1)
    minikernel.register_backend(backend)
    minikernel.softmax(np.zeros((2, 4), np.float32))
    minikernel.list_backends()
    registry.mark_unavailable("tenths", 0, "it failed to compile")
    minikernel.unregister_backend("tenths")
    gone = weakref.ref(backend)
    del backend
    gc.collect()
    assert gone() is None


def test_names_can_be_iterated_while_others_come_and_go(registry):
    stop = threading.Event()
    failures = []

    def look():
        while not stop.is_set():
            try:
                assert "numpy" in minikernel.list_backends()
                assert len(list(registry)) >= 5
                assert minikernel.softmax(np.zeros((2, 4), np.float32))[0, 0] in (0.25, np.float32(0.1))
                minikernel.explain(np.zeros((2, 4), np.float32))
            except Exception as error:
                failures.append(repr(error))
                return

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        minikernel.register_backend(a_backend(rank=1))
        minikernel.unregister_backend("tenths")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


# Loading


class Point(types.SimpleNamespace):
    """An entry point that calls ``load``."""

    value = "somewhere:BACKEND"


@pytest.fixture
def points(monkeypatch):
    """Entry points for registries that haven't loaded yet."""
    found = []
    monkeypatch.setattr(registry_module, "_entry_points", lambda: found)
    return found


def test_packages_whose_metadata_is_odd_stop_nothing(tmp_path, monkeypatch):
    def put(name: str, entry_points: bytes, metadata: str | None = None) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "entry_points.txt").write_bytes(entry_points)
        if metadata:
            (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {metadata}\nVersion: 1.0\n")

    group = b"[minikernel.backends]\n"
    put("renamed-1.0.dist-info", group + b"one = somewhere:ONE\n", "real-name")
    put("nameless-1.0.dist-info", group + b"two = somewhere:TWO\n")
    put("bad_line-1.0.dist-info", group + b"not an entry point\n", "bad-line")
    put("not_text-1.0.dist-info", b"[console_scripts]\n\xff = a:b\n", "not-text")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"one", "two"} <= {point.name for point in registry_module._entry_points()}


def test_a_plug_in_that_exits_stops_nothing(points):
    def leave():
        raise SystemExit(3)

    points.append(Point(name="leaver", load=leave))
    info = Registry().info()["leaver"]
    assert not info.available
    assert "SystemExit: 3" in info.reasons[0]


def test_an_interrupt_while_loading_leaves_nothing_half_done(points):
    def interrupt():
        raise KeyboardInterrupt

    beside = a_backend(name="beside")
    points += [Point(name="beside", load=lambda: beside), Point(name="tenths", load=interrupt)]
    fresh = Registry()
    with pytest.raises(KeyboardInterrupt):
        fresh.names()
    points[1].load = a_backend
    assert fresh.names()[-3:] == ["numpy", "beside", "tenths"]
    assert fresh.info()["beside"].available


def test_an_interrupt_while_built_ins_load(points, monkeypatch):
    sound = registry_module.import_module

    def interrupt(name):
        if name.endswith("cuda_naive"):
            raise KeyboardInterrupt
        return sound(name)

    fresh = Registry()
    with monkeypatch.context() as patch:
        patch.setattr(registry_module, "import_module", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fresh.names()
    assert len(fresh.names()) == 5


def test_what_a_plug_in_decided_while_loading_is_not_kept(points):
    fresh = Registry()
    changes = []
    fresh.on_change(lambda: changes.append(fresh.names()))
    seen = []

    def load():
        seen.append(fresh.names())
        return a_backend(rank=1)

    points.append(Point(name="tenths", load=load))
    fresh.names()
    assert "numpy" in seen[0]
    assert "tenths" not in seen[0]
    assert changes[-1][0] == "tenths"


def test_a_plug_in_may_register_as_it_is_imported(points):
    fresh = Registry()

    def load():
        fresh.register(a_backend(name="beside"))
        return a_backend()

    points.append(Point(name="tenths", load=load))
    assert fresh.names()[-2:] == ["beside", "tenths"]
