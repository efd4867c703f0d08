"""The registry: declarations as data, checked when they are made; reasons as sentences; built-ins that stay."""

from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from cases import DTYPES, GPU_BACKENDS, OPS

import minikernel
from minikernel import Backend, BackendError, BackendInfo, Kernel, Problem, Requirement, driver
from minikernel.registry import Registry


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
    assert info.ops == OPS
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
    assert smem.rejects(problem) == [
        "a row of 20000 float32 doesn't fit in a block's shared memory: at most 16376",
    ]
    assert smem.rejects(replace(problem, cols=16376)) == []
    assert smem.rejects(replace(problem, dtype="float16")) == []


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
    problem = Problem("softmax", "cpu", 0, "float32", "float32", 2, 4, 1, (4, 1, 1))
    assert registry.rejects("tenths", problem) == []
    for change, reason in (
        ({"dtype": "float64"}, "it takes float32; the input is float64"),
        ({"device": "cuda"}, "it works on cpu memory; the input is on cuda"),
        ({"op": "log_softmax"}, "it has softmax, not log_softmax"),
        ({"cols": 3}, "it takes even rows only"),
    ):
        assert registry.rejects("tenths", replace(problem, **change)) == [reason]
    with pytest.raises(BackendError, match="even rows only"):
        minikernel.softmax(np.zeros((2, 3), np.float32), backend="tenths")


def test_what_is_not_installed_is_a_reason_with_its_cure(registry):
    absent = Requirement("a_package_that_is_not_there", "pip install it")
    minikernel.register_backend(a_backend(rank=1, requires=(absent,)))
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
