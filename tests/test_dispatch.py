"""Choosing: the order of authority, what ``explain`` says, and falling back where it can be seen."""

import asyncio
import contextvars
import threading
import warnings
from dataclasses import replace

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
    Problem,
    api,
    cuda,
    dispatch,
    explain,
    softmax,
    tuned,
    use_backend,
)

X = np.zeros((2, 4), np.float32)
TENTH = np.float32(0.1)


@pytest.fixture(autouse=True)
def by_rank(monkeypatch):
    """As on a GPU that nobody has measured; test_tuned.py has those that someone has."""
    monkeypatch.setattr(tuned, "find", lambda index: tuned.Found())
    dispatch.REGISTRY._changed()
    yield
    dispatch.REGISTRY._changed()


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


@pytest.mark.usefixtures("two_more")
def test_a_child_task_inherits_a_block():
    async def child():
        return softmax(X)[0, 0]

    async def parent():
        with use_backend("tenths"):
            task = asyncio.create_task(child())
        return await task

    assert asyncio.run(parent()) == TENTH


@pytest.mark.usefixtures("two_more")
def test_a_block_can_be_entered_again_and_decorates():
    tenths, fifths = use_backend("tenths"), use_backend("fifths")
    for _ in range(2):
        with tenths, fifths, tenths:
            assert softmax(X)[0, 0] == TENTH
            with fifths:
                assert softmax(X)[0, 0] == np.float32(0.2)
            assert softmax(X, backend="auto")[0, 0] == TENTH, "auto in a call names no backend"
        assert softmax(X)[0, 0] == 0.25

    @use_backend("fifths")
    def decorated():
        return softmax(X)[0, 0]

    assert decorated() == decorated() == np.float32(0.2)
    assert softmax(X)[0, 0] == 0.25


@pytest.mark.usefixtures("two_more")
def test_one_block_object_serves_many_threads():
    block, barrier, seen = use_backend("tenths"), threading.Barrier(3, timeout=30), []

    def enter():
        with block:
            barrier.wait()
            seen.append(softmax(X)[0, 0])
        barrier.wait()
        seen.append(softmax(X)[0, 0])

    threads = [threading.Thread(target=contextvars.Context().run, args=(enter,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [TENTH] * 3 + [0.25] * 3


def test_a_block_s_name_is_checked_before_it_is_entered():
    with pytest.raises(ValueError, match="no backend is named 'cuda-fusd'"):
        use_backend("cuda-fusd")


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
print("MINIKERNEL_BACKEND=numpy" in minikernel.explain(np.zeros(3)).reason)
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
    assert decision.reason == ("The input is in cpu memory; numpy comes first among the backends that work there.")
    assert set(decision.rejected) == set(minikernel.list_backends()) - {"numpy"}
    for name in GPU_BACKENDS:
        assert decision.rejected[name] == ("it needs an array in cuda memory; the input is in cpu memory",)
    assert decision.passed_over == ()


def test_explain_takes_softmax_s_arguments_and_computes_nothing(registry):
    ran = []
    minikernel.register_backend(a_backend(prepare=lambda p: minikernel.Kernel(lambda *_: ran.append(1))))
    decision = explain(X, 0, op="log_softmax", backend="tenths", dtype="float32", out=np.empty_like(X))
    assert decision.backend == "tenths"
    assert decision.reason == "It was asked for by backend='tenths'."
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
    assert str(raised.value).splitlines() == [
        "No backend can take this input.",
        f"  {', '.join(GPU_BACKENDS)}: it needs an array in cuda memory; the input is in meta memory",
        "  numpy: it needs an array in cpu memory; the input is in meta memory",
    ]
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
    monkeypatch.setattr(cuda, "_functions", {})
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


def on_gpu(cols: int = 4, **changes) -> Problem:
    """A problem of a GPU, for a machine that may have none."""
    return replace(Problem("softmax", "cuda", 0, "float32", "float32", 2, cols, 1, (cols, 1, 1)), **changes)


def test_falling_back_to_the_host_warns_once_whatever_the_row_length(registry):
    for name in GPU_BACKENDS:
        registry.mark_unavailable(name, 0, f"{name} is switched off")
    minikernel.register_backend(
        a_backend(name="fussy", rank=1, devices=("cuda",), reasons=lambda p: [f"{p.cols} columns are odd"])
    )
    with pytest.warns(FallbackWarning, match="on the host") as caught:
        decisions = [dispatch.resolve(on_gpu(cols))[0] for cols in (3, 5, 7)]
    assert len(caught) == 1
    for decision in decisions:
        assert (decision.backend, decision.through, decision.fallback) == ("numpy", "cpu", True)
        assert decision.passed_over == ("fussy", *GPU_BACKENDS)


def test_the_host_backend_is_the_best_that_works_there(registry):
    for name in GPU_BACKENDS:
        registry.mark_unavailable(name, 0, "it is switched off")
    minikernel.register_backend(a_backend(rank=45))
    minikernel.register_backend(a_backend(name="lame", rank=44, reasons=lambda problem: ["it is lame"]))
    decision = dispatch.choose(on_gpu())
    assert (decision.backend, decision.through) == ("tenths", "cpu")
    assert dispatch.choose(on_gpu(dtype="float64", out_dtype="float64")).backend == "numpy"


def test_one_warning_names_all_that_do_not_work(registry):
    """Backends that fail one after the other are no news one by one."""

    def prepare(problem):
        raise BackendUnavailable("line 1")

    for rank, name in enumerate(("broken", "torn")):
        minikernel.register_backend(a_backend(name=name, rank=rank, prepare=prepare))
    with pytest.warns(FallbackWarning) as caught:
        assert [softmax(np.zeros((2, cols), np.float32))[0, 0] for cols in (4, 2)] == [0.25, 0.5]
    assert [str(w.message) for w in caught] == ["numpy is used because broken, torn don't work here: line 1"]


def test_only_what_works_in_that_memory_is_passed_over(registry):
    minikernel.register_backend(a_backend(rank=1, reasons=lambda problem: ["it is Sunday"]))
    minikernel.register_backend(a_backend(name="last", rank=99, reasons=lambda problem: ["it is Sunday"]))
    decision = explain(X)
    assert decision.passed_over == ("tenths",)
    assert decision.reason == "numpy comes first under auto among those that can take it, and not tenths."


def test_the_first_under_auto_is_said_to_be_first(registry):
    minikernel.register_backend(a_backend(rank=1, devices=("cpu", "cuda")))
    for problem in (on_gpu(), on_gpu(device="cpu")):
        assert dispatch.choose(problem).reason == "tenths comes first under auto, and takes it."


# Asking for one by name


def test_a_named_backend_that_cannot_run_here_says_who_could(registry):
    for name in GPU_BACKENDS:
        registry.mark_unavailable(name, 0, "no driver" if name != "triton-fused" else "no Triton")
    with pytest.raises(BackendError) as raised:
        softmax(X, backend="cuda-smem")
    first, *others = str(raised.value).splitlines()
    assert first.startswith("cuda-smem (asked for by backend='cuda-smem') can't run here: no ")
    assert first.endswith('. With backend="auto" it would run on numpy.')
    assert "copied" not in str(raised.value)
    assert "not asked for" not in str(raised.value)
    assert "  numpy: it could take this input" in others
    assert sum(name in line.split(":")[0] for name in GPU_BACKENDS for line in others) == len(GPU_BACKENDS)


def test_reasons_that_are_shared_are_said_once(registry, monkeypatch):
    same = {registry.get(name): ["no driver was found"] for name in GPU_BACKENDS}
    monkeypatch.setattr(registry, "_missing", same)
    decision = dispatch.choose(on_gpu(70_000), "cuda-fused")
    assert str(decision).splitlines() == [
        "cuda-fused (asked for by backend='cuda-fused') can't run here: no driver was found. "
        'With backend="auto" it would run on numpy, through the host.',
        "  cuda-fused, triton-fused, cuda-smem, cuda-naive: no driver was found",
        "  numpy: it needs an array in cpu memory; the input is in cuda memory",
    ]


def test_a_cpu_backend_asked_for_by_name_probes_no_gpu(registry, monkeypatch):
    minikernel.register_backend(a_backend(reasons=lambda problem: ["it is Sunday"]))
    monkeypatch.setattr(registry, "_missing", {})
    with use_backend("tenths"):
        decision = explain(X)
    assert decision.reason == (
        "tenths (asked for by use_backend('tenths')) can't take this input: it is Sunday. "
        'With use_backend("auto") it would run on numpy.'
    )
    assert decision.rejected["cuda-smem"] == ("it needs an array in cuda memory; the input is in cpu memory",)
    assert decision.rejected["numpy"] == ("it could take this input",)
    assert not {backend.name for backend in registry._missing} & set(GPU_BACKENDS)


def test_a_copy_is_told_of_where_there_is_one(registry):
    minikernel.register_backend(a_backend(devices=("cuda",)))
    decision = dispatch.choose(on_gpu(device="cpu"), "tenths")
    assert decision.reason == (
        "It was asked for by backend='tenths'. The input is copied from cpu to cuda memory and the output back."
    )
    assert decision.rejected["numpy"] == ("not asked for",)


def test_a_decision_prints_in_a_few_lines():
    assert str(explain(X)).splitlines() == [
        "numpy: The input is in cpu memory; numpy comes first among the backends that work there.",
        f"  {', '.join(GPU_BACKENDS)}: it needs an array in cuda memory; the input is in cpu memory",
    ]


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("cuda-fusd", "cuda-fused"), ("NumPy", "numpy"), ("triton", "triton-fused"), ("atuo", "auto")],
)
def test_a_wrong_name_suggests_the_closest(wrong, meant):
    with pytest.raises(ValueError, match=rf"no backend is named '{wrong}'.* Did you mean '{meant}'\?"):
        dispatch.check_name(wrong)


@pytest.mark.parametrize("wrong", ["nonsense", None, 3, ["numpy"], {"numpy": 1}, np.array(["auto", "numpy"])])
def test_a_name_that_is_none(wrong):
    for ask in (dispatch.check_name, dispatch.requested, use_backend, minikernel.registry.REGISTRY.get):
        with pytest.raises(ValueError, match=r"no backend is named .*; there are 'auto', 'cuda-fused'") as raised:
            ask(wrong)
        assert "Did you mean" not in str(raised.value)


# Asking and preparing


def test_those_ranked_after_the_chosen_are_asked_only_to_explain(registry):
    asked = []

    def ask(*_):
        asked.append(1)
        return []

    minikernel.register_backend(a_backend(rank=60, reasons=ask, obstacles=ask))
    decision, _ = dispatch.resolve(on_gpu(device="cpu"), complete=False)
    assert decision.backend == "numpy"
    assert "tenths" not in decision.rejected
    assert not asked
    assert explain(X).rejected["tenths"] == ("numpy comes first under auto",)
    assert len(asked) == 2


def test_a_prepare_that_raises_is_an_error_that_names_the_backend(registry):
    def prepare(problem):
        raise KeyError("columns")

    minikernel.register_backend(a_backend(rank=1, prepare=prepare))
    with pytest.raises(BackendError, match="prepare of 'tenths' raised KeyError: 'columns'") as raised:
        softmax(X)
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_prepare_must_return_a_kernel(registry):
    minikernel.register_backend(a_backend(rank=1, prepare=lambda problem: print))
    message = r"prepare of 'tenths' must return a minikernel\.Kernel, not builtin_function_or_method"
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            softmax(X)


# Remembering


def test_a_choice_made_before_a_change_is_not_kept_after_it(registry):
    def prepare(problem):
        minikernel.register_backend(a_backend(name="sudden", rank=0))
        return minikernel.Kernel(lambda x, out, *_: out.fill(0.2))

    minikernel.register_backend(a_backend(rank=1, prepare=prepare))
    dispatch.resolve(on_gpu(device="cpu"))
    assert not dispatch._kernels
    assert dispatch.resolve(on_gpu(device="cpu"))[0].backend == "sudden"
    assert len(dispatch._kernels) == 1


def test_one_unregistered_between_choosing_and_preparing(registry):
    """What was chosen is still there to finish the call."""

    def reasons(problem):
        registry.unregister("tenths")
        return []

    minikernel.register_backend(a_backend(rank=1, reasons=reasons))
    decision, _ = dispatch.resolve(on_gpu(device="cpu"), complete=False)
    assert decision.backend == "tenths"
    assert softmax(X)[0, 0] == 0.25


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


def test_a_backend_that_does_not_say_why_it_is_unavailable(registry):
    def prepare(problem):
        raise minikernel.BackendUnavailable

    minikernel.register_backend(a_backend(name="silent", rank=1, prepare=prepare))
    with pytest.warns(minikernel.FallbackWarning, match="silent"):
        np.testing.assert_allclose(minikernel.softmax(np.ones(4, np.float32)), 0.25)
    assert minikernel.list_backends()["silent"].reasons == ("it doesn't work here, and doesn't say why",)
