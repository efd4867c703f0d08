"""The public contract: axes, shapes, kinds of arrays, placement, and errors that say what to do."""

import inspect
import pydoc
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cases import GPU_BACKENDS, OPS, Bare, Exporter, mismatch, randn, reference

import minikernel
from minikernel import BackendError, explain, log_softmax, softmax

FUNCTIONS = (softmax, log_softmax)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_signature(function):
    parameters = inspect.signature(function).parameters
    named = ["backend", "dtype", "out", "scale", "mask", "causal"]
    assert list(parameters) == ["x", "dim", *named]
    assert (parameters["dim"].default, parameters["backend"].default) == (-1, "auto")
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in named)
    assert "unknown" not in pydoc.render_doc(function)


def test_version_and_names():
    assert minikernel.__version__ == "0.1.0"
    for name in minikernel.__all__:
        assert hasattr(minikernel, name)
    assert set(GPU_BACKENDS) | {"numpy"} <= set(minikernel.list_backends())


# Axes and shapes


@pytest.mark.parametrize("op", OPS)
def test_any_axis_of_any_rank(route, op, failures):
    for shape in ((7,), (3, 5), (2, 3, 4), (2, 1, 3, 2), (1, 2, 1, 2, 3), (2, 2, 2, 2, 2, 2), (1, 1, 1)):
        for dim in range(-len(shape), len(shape)):
            with failures.case(f"{shape}, dim {dim}"):
                route.verify(route.array(randn(*shape)), dim, op)


def test_zero_dimensional(route):
    x = route.array(torch.tensor(2.0))
    for dim in (0, -1):
        y = route.kind.tensor(route.run(x, dim))
        assert y.shape == ()
        assert y.item() == 1
        assert route.kind.tensor(route.run(x, dim, "log_softmax")).item() == 0
    for dim in (1, -2):
        with pytest.raises(IndexError, match="-1 to 0"):
            route.run(x, dim)


def test_axis_out_of_range(route):
    x = route.array(torch.zeros(2, 3))
    route.verify(x, -2)
    for dim in (2, -3, 100):
        with pytest.raises(IndexError, match=f"-2 to 1.*{dim}"):
            route.run(x, dim)
    with pytest.raises(IndexError, match="-1 to 0"):
        route.run(route.array(torch.zeros(0)), 1)


@pytest.mark.parametrize("dim", [None, 1.0, "1", (0,), [1]])
def test_axis_that_is_no_integer(route, dim):
    with pytest.raises(TypeError, match="dim must be an integer"):
        route.run(route.array(torch.zeros(2, 3)), dim)


def test_axis_that_can_be_an_index(route):
    for dim in (np.int64(0), np.int32(-2), torch.tensor(0)):
        route.verify(route.array(randn(3, 4)), dim.item())
        y = route.run(route.array(randn(3, 4)), dim)
        assert mismatch(route.kind.tensor(y).cpu(), reference(randn(3, 4), 0)) is None


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (4, 0, 5, 2), (0,), (0, 0)])
def test_empty(route, shape):
    for dtype in route.dtypes:
        x = route.array(torch.zeros(shape), dtype)
        for dim in range(-len(shape), len(shape)):
            y = route.run(x, dim)
            assert route.kind.tensor(y).shape == shape
            assert route.kind.dtype(y) == dtype
    assert route.kind.dtype(route.run(x, dtype="float64")) == "float64"
    with pytest.raises(IndexError):
        route.run(x, len(shape))
    with pytest.raises(ValueError, match="no backend is named"):
        route.run(x, backend="nonsense")


def test_empty_runs_no_kernel(route, registry, monkeypatch):
    def prepare(problem):
        raise AssertionError("an empty array reached a backend")

    for backend in registry:
        monkeypatch.setitem(registry._backends, backend.name, _replace(backend, prepare=prepare))
    assert route.kind.tensor(route.run(route.array(torch.zeros(0, 3)))).shape == (0, 3)
    assert explain(route.array(torch.zeros(0, 3))).backend is None


def _replace(backend, **changes):
    from dataclasses import replace

    return replace(backend, **changes)


# Kinds of arrays


def test_the_same_kind_comes_out(route):
    x = route.array(randn(3, 4))
    y = route.run(x)
    assert type(y) is type(x)
    if route.kind.name.startswith("torch") or route.kind.name == "cupy":
        assert y.device == x.device


def test_numpy_scalars_and_read_only_arrays():
    assert softmax(np.float32(3)).item() == 1
    x = randn(3, 4).numpy()
    x.flags.writeable = False
    before = x.copy()
    y = softmax(x)
    assert y.flags.writeable
    np.testing.assert_allclose(y, reference(torch.from_numpy(before)).numpy(), rtol=1e-5)
    np.testing.assert_array_equal(x, before)


def test_masked_arrays_are_refused_even_after_a_plain_one():
    softmax(np.ones((2, 3)))
    with pytest.raises(TypeError, match="mask"):
        softmax(np.ma.masked_array(np.ones((2, 3)), mask=[[0, 1, 0]] * 2))


def test_dlpack_without_a_namespace_gives_numpy():
    y = softmax(Bare(np.zeros((2, 4), np.float32)))
    assert isinstance(y, np.ndarray)
    np.testing.assert_array_equal(y, np.full((2, 4), 0.25, np.float32))


def test_dlpack_on_another_device_is_refused():
    class OnDevice(Exporter):
        def __dlpack_device__(self):
            return (8, 0)  # Metal

    with pytest.raises(TypeError, match=r"neither in host memory nor on an NVIDIA GPU \(DLPack device type 8\)"):
        softmax(OnDevice(np.zeros(3)))


def test_bfloat16_through_dlpack_is_read_by_pytorch(monkeypatch):
    class Kin(Bare):
        def __array_namespace__(self):
            return SimpleNamespace(from_dlpack=lambda y: Kin(torch.from_dlpack(y)))

    pytest.importorskip("ml_dtypes")
    x = randn(3, 40, dtype="bfloat16")
    y = softmax(Bare(x))
    assert y.dtype.name == "bfloat16"
    assert mismatch(torch.from_numpy(y.view(np.int16)).view(torch.bfloat16), reference(x)) is None
    y = softmax(Kin(x))
    assert type(y) is Kin
    assert mismatch(y.array, reference(x)) is None
    assert mismatch(softmax(Kin(x), dtype="float32").array, reference(x)) is None
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(TypeError, match=r"Bare can't be read through DLPack: .*bfloat16"):
        softmax(Bare(x))


def test_what_an_exporter_raises_is_not_lost():
    class Broken(Bare):
        def __dlpack__(self, **options):
            raise RuntimeError("the buffer was donated")

    with pytest.raises(TypeError, match="Broken can't be read through DLPack: the buffer was donated") as raised:
        softmax(Broken(np.zeros(3)))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_half_of_dlpack_names_the_other():
    class Half:
        def __dlpack__(self, **options):
            raise AssertionError

    with pytest.raises(TypeError, match="has __dlpack__ but not __dlpack_device__"):
        softmax(Half())


def test_a_tracer_is_sent_out_of_jit():
    tracer = type("Tracer", (), {"__module__": "jax._src.core", "__dlpack__": None})
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        softmax(type("DynamicJaxprTracer", (tracer,), {"__module__": "jax._src.interpreters"})())


NO_ARRAYS = {
    "a list": [1.0, 2.0],
    "a tuple": (1.0, 2.0),
    "a string": "softmax",
    "None": None,
    "a float": 1.0,
    "an object array": np.array([1.0, None], dtype=object),
    "strings": np.array(["a", "b"]),
    "dates": np.array(["2026-01-01"], dtype="datetime64[D]"),
    "a record": np.zeros(3, [("a", "f4")]),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_no_array_of_numbers(name, function):
    for backend in ("auto", "numpy"):
        with pytest.raises(TypeError) as raised:
            function(NO_ARRAYS[name], backend=backend)
        assert len(str(raised.value)) > 20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", ["sparse", "sparse_csr", "nested", "jagged", "quantized"])
@pytest.mark.filterwarnings("ignore:.*(prototype|beta state|deprecated|quantized).*")
def test_tensors_with_no_path_here(device, layout):
    dense = torch.eye(3, device=device)
    if layout == "quantized" and device == "cuda":
        pytest.skip("PyTorch quantizes on the CPU")
    parts = [torch.ones(2, device=device), torch.ones(3, device=device)]
    cure = {"nested": "torch.nested.to_padded_tensor(x, -torch.inf)", "quantized": "x.dequantize()"}
    cure["jagged"] = cure["nested"]
    x = {
        "sparse": lambda: dense.to_sparse(),
        "sparse_csr": lambda: dense.to_sparse_csr(),
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "quantized": lambda: torch.quantize_per_tensor(dense, 0.1, 0, torch.quint8),
    }[layout]()
    for call in (softmax, explain):
        expected = re.escape(f"no path here: pass a dense one ({cure.get(layout, 'x.to_dense()')})")
        with pytest.raises(TypeError, match=expected):
            call(x)


def test_meta_tensors_get_reasons():
    x = torch.zeros(2, 3, device="meta")
    with pytest.raises(BackendError) as raised:
        softmax(x)
    for name in minikernel.list_backends():
        assert name in str(raised.value)
    assert "meta" in str(raised.value)
    assert explain(x).backend is None


class Labeled(torch.Tensor):
    """A subclass with nothing of its own."""


def test_subclasses_of_tensors_are_refused_even_after_a_plain_one(torch_route):
    x = torch_route.array(randn(3, 4))
    torch_route.verify(x)
    for _ in range(2):
        with pytest.raises(TypeError, match="subclass"):
            torch_route.run(x.as_subclass(Labeled))
    torch_route.verify(torch.nn.Parameter(x, requires_grad=False))


# Gradients, of which there is more in test_gradients.py: nothing loses one in silence


GRADIENTS = ("numpy", "cuda-fused", "triton-fused")


def test_requires_grad(torch_route):
    x = torch_route.array(randn(3, 4))
    torch_route.verify(x)
    for given in (x.clone().requires_grad_(), torch.nn.Parameter(x.clone()), (x.clone().requires_grad_() * 2)):
        if torch_route.backend in GRADIENTS:
            assert torch_route.run(given).requires_grad
        else:
            with pytest.raises(BackendError, match="it has no gradient"):
                torch_route.run(given)
        with torch.no_grad():
            assert not torch_route.run(given).requires_grad
        with torch.inference_mode():
            torch_route.run(given)
        torch_route.run(given.detach())


def test_forward_mode_tangents(torch_route):
    forward_ad = torch.autograd.forward_ad
    x = torch_route.array(randn(3, 4))
    torch_route.verify(x)
    with forward_ad.dual_level():
        torch_route.verify(x)
        y = torch_route.run(forward_ad.make_dual(x, torch.ones_like(x)))
        assert forward_ad.unpack_dual(y).tangent is not None
    torch_route.verify(x)


def test_function_transforms(torch_route):
    x = torch_route.array(randn(3, 4))
    torch_route.verify(x)
    transforms = {
        "grad": lambda: torch.func.grad(lambda x: torch_route.run(x).sum())(x),
        "vmap": lambda: torch.vmap(torch_route.run)(x),
        "jvp": lambda: torch.func.jvp(torch_route.run, (x,), (torch.ones_like(x),)),
        "jacrev": lambda: torch.func.jacrev(torch_route.run)(x),
    }
    for name, call in transforms.items():
        call()
        assert torch_route.verify(x) is not None, f"{name} left something behind"
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.functionalize(torch_route.run)(x)
    torch_route.verify(x)


def test_fake_tensors_stay_fake(torch_route):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    x = torch_route.array(randn(3, 4))
    torch_route.verify(x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        y = torch_route.run(fake)
        assert type(y) is FakeTensor
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    assert type(torch_route.run(fake)) is FakeTensor
    torch_route.verify(x)


# Placement


def test_host_arrays_run_on_numpy_under_auto():
    for x in (np.zeros((2, 3), np.float32), torch.zeros(2, 3), Exporter(np.zeros((2, 3)))):
        assert explain(x).backend == "numpy"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch-cuda", "cupy"])
def test_device_arrays_run_on_the_best_backend_under_auto(kind, failures):
    from cases import KINDS, Route

    auto = Route("auto", KINDS[kind])
    for shape in ((512, 600), (1, 65537), (1, 151936), (1, 2**20 + 1), (0, 3), (3, 1)):
        x = auto.array(randn(*shape))
        with failures.case(shape):
            auto.verify(x)
            assert explain(x).backend in ((None,) if 0 in shape else ("cuda-fused", "triton-fused"))


@pytest.mark.parametrize("op", OPS)
def test_a_named_gpu_backend_takes_host_arrays(copied_route, op, failures):
    for dtype in copied_route.dtypes:
        for shape, dim in (((5, 600), -1), ((5, 600), 0), ((2, 3, 4), 1), ((), 0), ((0, 4), 0), ((2, 9000), -1)):
            with failures.case(f"{dtype}, {shape}, dim {dim}"):
                y = copied_route.verify(copied_route.array(randn(*shape), dtype), dim, op)
                assert type(y) is type(copied_route.array(randn(2)))
    x = copied_route.kind.permute(copied_route.array(randn(33, 40)), (1, 0))
    copied_route.verify(x)
    copied_route.verify(copied_route.kind.expand(copied_route.array(randn(1, 40)), (5, 40)))
    assert "copied" in explain(x, backend=copied_route.backend).reason


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["torch-cuda", "cupy"])
def test_numpy_by_name_takes_device_arrays(kind, failures):
    from cases import KINDS, Route

    host = Route("numpy", KINDS[kind])
    for dtype in ("float16", "float32", "float64"):
        for shape, dim in (((5, 600), -1), ((5, 600), 0), ((2, 3, 4), 1)):
            with failures.case(f"{dtype}, {shape}, dim {dim}"):
                host.verify(host.array(randn(*shape), dtype), dim)
                host.verify(host.kind.permute(host.array(randn(*shape), dtype), range(len(shape))[::-1]), dim)


@pytest.mark.gpu
def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    x = randn(5, 600).to("cuda:1")
    for backend in ("auto", *GPU_BACKENDS):
        for _ in range(2):
            y = softmax(x, backend=backend)
            assert y.device == x.device
            assert mismatch(y, reference(x)) is None
            assert torch.cuda.current_device() == 0


# explain


def test_explain_names_every_copy_and_cast(route, failures):
    x = route.array(randn(6, 8))
    half = route.array(randn(6, 8), "float16")
    odd = route.kind.permute(route.array(randn(2, 3, 4)), (1, 0, 2))
    for given, dtype, note in (
        (x, "float64", "cast from float32 to float64"),
        (half, "float32", "itself turns float16 into float32"),
        (odd, None, "copied first: its strides"),
        (odd, "float64", "cast from float32 to float64"),
    ):
        with failures.case(note):
            reason = explain(given, backend=route.backend, dtype=dtype).reason
            assert note in reason
            assert ("copied first" in reason) == note.startswith("copied")
    for word in ("cast", "copied first", "turns"):
        assert word not in explain(x, backend=route.backend).reason


def test_explain_names_the_flaws_of_numpy_arrays():
    record = np.zeros(7, [("flag", np.uint8), ("value", np.float32)])
    for x, note in (
        (np.zeros(3, ">f4"), "byte order"),
        (np.zeros(13, np.uint8)[1:].view(np.float32), "aligned"),
        (record["value"], "aligned"),
    ):
        reason = explain(x, backend="numpy").reason
        assert "copied first: " in reason
        assert note in reason
        assert "cast from" in (cast := explain(x, backend="numpy", dtype="float64").reason)
        assert "copied first" not in cast


def test_explain_names_lazy_negation(torch_route):
    x = torch.zeros(2, 3, dtype=torch.complex64, device=torch_route.kind.device).conj().imag
    assert "copied first: PyTorch negates it lazily" in explain(x, backend=torch_route.backend).reason


def test_explain_of_what_nothing_can_copy(registry, monkeypatch):
    """The GPU's kernel is there, and neither CuPy nor a PyTorch that could bring it a host array."""
    ours = minikernel.Backend("ours", 1, ("cuda",), ("float32",), lambda problem: minikernel.Kernel(None))
    minikernel.register_backend(ours)
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x = np.zeros(3, np.float32)
    with pytest.raises(BackendError, match="pip install"):
        softmax(x, backend="ours")
    decision = explain(x, backend="ours")
    assert decision.backend is None
    assert "pip install" in decision.reason


# Errors


@pytest.mark.parametrize("backend", ["cuda", "CUDA-FUSED", "", "numpy ", None, 3, ["numpy"], {}])
def test_a_name_that_is_no_backend_s(route, backend):
    x = route.array(torch.zeros(2, 3))
    route.run(x)
    with pytest.raises(ValueError, match="no backend is named") as raised:
        route.run(x, backend=backend)
    for name in ("auto", *minikernel.list_backends()):
        assert repr(name) in str(raised.value)
    with pytest.raises(ValueError, match="no backend is named"):
        explain(x, backend=backend)
    with pytest.raises(ValueError, match="no backend is named"):
        explain(route.array(torch.zeros(0)), backend=backend)


@pytest.mark.parametrize("function", [softmax, log_softmax, explain])
def test_axis_is_called_dim(function):
    with pytest.raises(TypeError, match="'dim'"):
        function(np.zeros(3), axis=0)
    with pytest.raises(TypeError, match="'inplace'"):
        function(np.zeros(3), inplace=True)


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_backend_that_is_not_available_says_why(backend):
    info = minikernel.list_backends()[backend]
    if info.available:
        pytest.skip(f"{backend} is available here")
    with pytest.raises(BackendError) as raised:
        softmax(np.zeros(3), backend=backend)
    for reason in info.reasons:
        assert reason in str(raised.value)


def test_torch_jit_trace_is_refused():
    """It would record an empty output, and nothing of what fills it."""
    x = torch.randn(3, 4)
    with pytest.raises(NotImplementedError, match="tracer"):
        torch.jit.trace(lambda v: minikernel.softmax(v), (x,))
    assert minikernel.softmax(x).shape == x.shape


def test_a_tensor_without_memory_is_refused():
    minikernel.softmax(torch.randn(3, 4))  # so that the same shape is remembered
    x = torch.randn(3, 4)
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        minikernel.softmax(x)
