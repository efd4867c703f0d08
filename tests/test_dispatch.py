"""Choosing: the order of authority, what ``explain`` says, and falling back where it can be seen."""

import asyncio
import contextvars
import threading
import warnings

import numpy as np
import pytest
import torch
from cases import GPU_BACKENDS, mismatch, randn, reference
from isolated import run
from test_registry import a_backend

import minikernel
from minikernel import (
    BackendError,
    BackendUnavailable,
    Decision,
    FallbackWarning,
    api,
    cuda,
    dispatch,
    explain,
    softmax,
    use_backend,
)

X = np.zeros((2, 4), np.float32)
TENTH = np.float32(0.1)


@pytest.fixture
def two_more(registry):
    """Backends ``tenths`` and ``fifths``, which auto would never choose."""
    minikernel.register_backend(a_backend())
    minikernel.register_backend(
        a_backend(name="fifths", prepare=lambda p: minikernel.Kernel(lambda x, out, *_: out.fill(0.2)))
    )


# Order of authority


@pytest.mark.usefixtures("two_more")
def test_call_then_block_then_auto():
    assert softmax(X)[0, 0] == 0.25
    with use_backend("tenths"):
        assert softmax(X)[0, 0] == TENTH
        assert softmax(X, backend="fifths")[0, 0] == np.float32(0.2)
        with use_backend("fifths"):
            assert softmax(X)[0, 0] == np.float32(0.2)
            with use_backend("auto"):
                assert softmax(X)[0, 0] == 0.25
        assert softmax(X)[0, 0] == TENTH
    assert softmax(X)[0, 0] == 0.25


@pytest.mark.usefixtures("two_more")
def test_a_block_ends_with_an_error_too():
    with pytest.raises(ZeroDivisionError), use_backend("tenths"):
        raise ZeroDivisionError
    assert softmax(X)[0, 0] == 0.25


def test_a_block_with_a_wrong_name_fails_at_once():
    with pytest.raises(ValueError, match="no backend is named 'cuda'"), use_backend("cuda"):
        raise AssertionError("the block was entered")


@pytest.mark.usefixtures("two_more")
def test_a_block_is_a_thread_s_own():
    seen = []
    with use_backend("tenths"):
        thread = threading.Thread(target=contextvars.Context().run, args=(lambda: seen.append(softmax(X)[0, 0]),))
        thread.start()
        thread.join()
    assert seen == [0.25]


@pytest.mark.usefixtures("two_more")
def test_a_block_is_a_task_s_own():
    async def one(name):
        with use_backend(name):
            await asyncio.sleep(0)
            return softmax(X)[0, 0]

    async def both():
        return await asyncio.gather(one("tenths"), one("fifths"), one("auto"))

    assert asyncio.run(both()) == [TENTH, np.float32(0.2), 0.25]


def test_environment():
    code = """
import numpy as np, minikernel
x = np.zeros(3)
decision = minikernel.explain(x)
print(decision.backend, decision.reason)
with minikernel.use_backend("auto"):
    print(minikernel.explain(x).reason)
"""
    first, second = run(code, MINIKERNEL_BACKEND="numpy").splitlines()
    assert first.startswith("numpy ")
    assert "MINIKERNEL_BACKEND" in first
    assert "MINIKERNEL_BACKEND" not in second, "use_backend comes before the environment"
    assert run(code, MINIKERNEL_BACKEND="").splitlines()[0].startswith("numpy ")


def test_environment_is_read_once_at_the_first_dispatch():
    output = run("""
import os, numpy as np, minikernel
os.environ["MINIKERNEL_BACKEND"] = "numpy"  # after the import, before the first dispatch
print("is set" in minikernel.explain(np.zeros(3)).reason)
os.environ["MINIKERNEL_BACKEND"] = "nonsense"
print(minikernel.softmax(np.zeros(4))[0])
""")
    assert output.split() == ["True", "0.25"]


def test_a_wrong_name_in_the_environment_is_an_error_that_says_so():
    output = run(
        """
import numpy as np, minikernel
for call in (minikernel.softmax, minikernel.explain):
    try:
        call(np.zeros(3))
    except ValueError as error:
        print(error)
print(minikernel.softmax(np.zeros(4), backend="numpy")[0])
""",
        MINIKERNEL_BACKEND="nonsense",
    )
    *errors, result = output.splitlines()
    assert len(errors) == 2
    for error in errors:
        assert "MINIKERNEL_BACKEND" in error
        assert "'nonsense'" in error
        assert "'numpy'" in error
    assert result == "0.25"


# Explaining


def test_explain_names_what_runs_and_why_the_others_do_not():
    decision = explain(X)
    assert isinstance(decision, Decision)
    assert decision.backend == "numpy"
    assert set(decision.rejected) == set(minikernel.list_backends()) - {"numpy"}
    for name in GPU_BACKENDS:
        assert any("cpu" in reason for reason in decision.rejected[name])


def test_explain_takes_softmax_s_arguments_and_computes_nothing(registry):
    ran = []
    minikernel.register_backend(a_backend(prepare=lambda p: minikernel.Kernel(lambda *_: ran.append(1))))
    decision = explain(X, 0, op="log_softmax", backend="tenths", dtype="float32", out=np.empty_like(X))
    assert decision.backend == "tenths"
    assert "backend='tenths' was asked for" in decision.reason
    assert not ran
    assert set(decision.rejected) == set(minikernel.list_backends()) - {"tenths"}
    with pytest.raises(ValueError, match="argmax"):
        explain(X, op="argmax")
    with pytest.raises(IndexError):
        explain(X, 2)
    with pytest.raises(TypeError):
        explain([1.0])


def test_explain_tells_of_casts():
    assert "cast from float32 to float64" in explain(X, dtype="float64").reason
    assert "cast" not in explain(X.astype(np.float16), dtype="float32").reason


def test_explain_says_what_softmax_would_raise_for(registry):
    minikernel.register_backend(a_backend(reasons=lambda problem: ["it is Sunday"]))
    decision = explain(X, backend="tenths")
    assert decision.backend is None
    assert decision.rejected["tenths"] == ("it is Sunday",)
    with pytest.raises(BackendError, match="it is Sunday"):
        softmax(X, backend="tenths")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", *GPU_BACKENDS])
def test_explain_on_a_gpu(backend):
    x = torch.zeros(3, 600, device="cuda")
    decision = explain(x, backend=backend)
    assert decision.backend == ("cuda-fused" if backend == "auto" else backend)
    assert set(decision.rejected) == set(minikernel.list_backends()) - {decision.backend}
    assert all(decision.rejected.values())
    long = explain(torch.zeros(1, 70_000, device="cuda"))
    assert any("shared memory" in reason for reason in long.rejected["cuda-smem"])


def test_nothing_that_can_take_it_is_one_error_with_every_reason():
    with pytest.raises(BackendError) as raised:
        softmax(torch.zeros(2, 3, device="meta"))
    for name in minikernel.list_backends():
        assert f"\n  {name}: " in str(raised.value)
    assert isinstance(raised.value, RuntimeError)


# Falling back


def test_a_backend_that_fails_to_compile_is_passed_over_visibly_and_once(registry):
    def prepare(problem):
        raise BackendUnavailable("line 1: expected ';'")

    minikernel.register_backend(a_backend(name="broken", rank=1, prepare=prepare))
    assert minikernel.list_backends()["broken"].available
    with pytest.warns(FallbackWarning, match="numpy is used because broken doesn't work here: line 1") as caught:
        assert softmax(X)[0, 0] == 0.25
    assert len(caught) == 1
    assert softmax(X)[0, 0] == 0.25
    assert softmax(np.zeros((3, 4)))[0, 0] == 0.25
    info = minikernel.list_backends()["broken"]
    assert not info.available
    assert info.reasons == ("line 1: expected ';'",)
    assert explain(X).rejected["broken"] == ("line 1: expected ';'",)
    with pytest.raises(BackendError, match="expected ';'"):
        softmax(X, backend="broken")


def test_a_gpu_backend_that_fails_to_compile_warns_once(registry):
    """The warning is about the device, so it's tried with the problem of a GPU and no GPU."""
    broken = {"devices": ("cuda",), "rank": 1}

    def prepare(problem):
        raise BackendUnavailable("line 1: expected ';'")

    minikernel.register_backend(a_backend(name="broken", prepare=prepare, **broken))
    minikernel.register_backend(a_backend(name="sound", **(broken | {"rank": 2})))
    problem = minikernel.Problem("softmax", "cuda", 0, "float32", "float32", 2, 4, 1, (4, 1, 1))
    with pytest.warns(FallbackWarning, match=r"sound is used because broken doesn't work here: line 1") as caught:
        decision, _ = dispatch.resolve(problem)
    assert decision.backend == "sound"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch.resolve(problem)


def test_an_error_while_running_is_raised_and_not_hidden(registry):
    def fail(x, out, stream, scratch):
        raise RuntimeError("the launch failed")

    minikernel.register_backend(a_backend(rank=1, prepare=lambda problem: minikernel.Kernel(fail)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the launch failed"):
            softmax(X)
    assert minikernel.list_backends()["tenths"].available


@pytest.fixture
def no_gpu_backend(registry):
    for name in GPU_BACKENDS:
        registry.mark_unavailable(name, 0, f"{name} is switched off")


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gpu_backend")
@pytest.mark.parametrize("kind", ["torch-cuda", "cupy"])
def test_a_device_array_goes_through_the_host_with_one_warning(kind):
    from cases import KINDS

    kind = KINDS[kind]
    x = kind.array(randn(5, 600))
    with pytest.warns(FallbackWarning) as caught:
        y = softmax(x)
    assert len(caught) == 1
    for name in GPU_BACKENDS:
        assert f"{name}: {name} is switched off" in str(caught[0].message)
    assert type(y) is type(x)
    assert y.device == x.device
    assert mismatch(kind.tensor(y), reference(kind.tensor(x))) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for array in (x, kind.array(randn(3, 7)), kind.permute(x, (1, 0))):
            assert mismatch(kind.tensor(softmax(array)), reference(kind.tensor(array))) is None
            out = kind.poisoned(array.shape, "float32")
            softmax(array, out=out)
            assert mismatch(kind.tensor(out), reference(kind.tensor(array))) is None
    decision = explain(x)
    assert (decision.backend, decision.fallback) == ("numpy", True)
    assert "host" in decision.reason


@pytest.mark.gpu
@pytest.mark.usefixtures("no_gpu_backend")
def test_half_types_go_through_the_host_too():
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        x = randn(5, 600).to("cuda", dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            y = softmax(x)
        assert y.dtype == dtype
        assert mismatch(y, reference(x)) is None


@pytest.mark.gpu
def test_a_source_that_does_not_compile_is_passed_over_visibly(registry, monkeypatch):
    """NVRTC's own message becomes the reason, and auto goes on with Triton."""
    monkeypatch.setattr(cuda, "_modules", {})
    sound = cuda.source

    def broken(name):
        return "this is no C++\n" + sound(name) if name.startswith("softmax_fused") else sound(name)

    monkeypatch.setattr(cuda, "source", broken)
    x = torch.randn(5, 601, device="cuda")
    triton = minikernel.list_backends()["triton-fused"].available
    chosen = "triton-fused" if triton else "cuda-smem"
    with pytest.warns(FallbackWarning, match=rf"{chosen} is used because cuda-fused doesn't work here") as caught:
        y = softmax(x)
    assert len(caught) == 1
    assert mismatch(y, reference(x)) is None
    info = minikernel.list_backends()["cuda-fused"]
    assert not info.available
    assert "softmax_fused.cu failed to compile" in info.reasons[0]
    assert explain(x).backend == chosen
    with pytest.raises(BackendError, match="failed to compile"):
        softmax(x, backend="cuda-fused")
    assert mismatch(softmax(x, backend="cuda-smem"), reference(x)) is None


# Remembering


def test_caches_do_not_grow_without_bound(monkeypatch):
    monkeypatch.setattr(dispatch, "CACHE_SIZE", 50)
    for cols in range(1, 400):
        softmax(np.zeros((1, cols), np.float32))
        assert len(api._calls) <= 50
        assert len(dispatch._kernels) <= 50
    assert softmax(X)[0, 0] == 0.25


def test_nothing_is_imported_to_choose_numpy():
    assert run("""
import sys, numpy as np, minikernel
minikernel.softmax(np.zeros(4)), minikernel.explain(np.zeros(4))
print([name for name in ("torch", "cupy", "triton") if name in sys.modules])
""").strip() == "[]"  # fmt: skip
