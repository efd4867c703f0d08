"""Arrays of other frameworks: JAX's, and those that share memory with PyTorch's and CuPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import KINDS, Bare, mismatch, randn, reference
from isolated import run

from minikernel import explain, log_softmax, softmax

DTYPES = ("float32", "float16", "bfloat16")


@pytest.fixture
def jax():
    return pytest.importorskip("jax")


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_arrays_in_and_out(jax, dtype):
    x = jax.numpy.asarray(randn(5, 40).numpy()).astype(dtype)
    for ours, theirs in ((softmax, jax.nn.softmax), (log_softmax, jax.nn.log_softmax)):
        for dim in (-1, 0):
            y = ours(x, dim)
            assert isinstance(y, jax.Array)
            assert (y.dtype, y.shape, y.devices()) == (x.dtype, x.shape, x.devices())
            exact = theirs(x.astype("float32"), dim)
            tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
            np.testing.assert_allclose(np.asarray(y, np.float32), exact, rtol=tolerance, atol=tolerance / 10)
    assert softmax(x, dtype="float32").dtype == np.float32
    assert softmax(x.T).shape == (40, 5)


def test_jax_s_tracers_are_refused(jax):
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.jit(softmax)(jax.numpy.ones(3))
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.grad(lambda x: softmax(x).sum())(jax.numpy.ones(3))


def test_jax_is_not_imported_to_find_out():
    output = run("import sys, numpy as np, minikernel; minikernel.softmax(np.ones(3)); print('jax' in sys.modules)")
    assert output.split() == ["False"]


def test_tensors_that_share_memory_with_jax(jax):
    x = jax.numpy.asarray(randn(5, 40).numpy())
    shared = torch.from_dlpack(x)
    assert mismatch(softmax(shared), reference(shared)) is None


def test_without_cupy_a_gpu_array_is_sent_to_pytorch():
    output = run(
        """
import numpy as np, minikernel
class OnGPU:
    def __dlpack__(self, **options): raise AssertionError
    def __dlpack_device__(self): return (2, 0)
try: minikernel.softmax(OnGPU())
except TypeError as error: print(error)
""",
        absent=("cupy",),
    )
    assert "is read through CuPy: install it" in output
    assert "torch.from_dlpack" in output


# On a GPU


@pytest.fixture
def cupy():
    KINDS["cupy"].skip_unless_usable()
    import cupy

    return cupy


@pytest.mark.gpu
@pytest.mark.parametrize("source", ["cupy", "torch"])
def test_any_array_on_a_gpu_is_read_where_it_lies(cupy, source):
    x = randn(50, 300).cuda()
    array = x if source == "torch" else cupy.from_dlpack(x)
    y = softmax(Bare(array))
    assert isinstance(y, cupy.ndarray)
    assert mismatch(torch.from_dlpack(y), reference(x)) is None
    assert explain(Bare(array)).backend in ("cuda-fused", "triton-fused")
    kin = type("Kin", (Bare,), {"__array_namespace__": lambda self: torch})(array)
    assert mismatch(softmax(kin, 0), reference(x, 0)) is None
    assert type(softmax(kin)) is torch.Tensor


@pytest.mark.gpu
def test_memory_shared_between_cupy_and_pytorch(cupy):
    x = randn(50, 300).cuda()
    array = cupy.from_dlpack(x)
    out = torch.empty_like(x)
    softmax(array, out=cupy.from_dlpack(out))
    assert mismatch(out, reference(x)) is None
    softmax(x, out=x)
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(array), out.cpu().numpy())


@pytest.mark.gpu
def test_cupy_s_own_stream_and_pool(cupy):
    pool = cupy.cuda.MemoryPool()
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.using_allocator(pool.malloc), stream:
        x = cupy.asarray(randn(500, 300).numpy())
        before = pool.used_bytes()
        y = softmax(x * 2)
        assert pool.used_bytes() >= before + y.nbytes
    stream.synchronize()
    assert mismatch(torch.from_dlpack(y).cpu(), reference(randn(500, 300) * 2)) is None
