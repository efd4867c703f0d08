"""softmax_topk: against a stable sort and softmax in float64, on every backend that has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import INF, INTERPRETED, NAN, Route, mismatch, randn
from hypothesis import given, settings
from hypothesis import strategies as st
from isolated import capture_first_call, in_the_interpreter
from torch.func import vmap

from minikernel import BackendError, TopK, explain, softmax_topk
from minikernel.problem import MOST_K, TOPK

SHAPES = (
    ((1, 1), -1), ((3, 5), -1), ((4, 64), -1), ((4, 65), -1), ((70, 600), -1), ((5, 1023), -1), ((3, 4097), -1),
    ((2, 9001), -1), ((300, 40), 0), ((2, 130, 7), 1), ((2, 70, 3, 4), 1), ((9,), 0),
)  # fmt: skip
LONG = ((1, 128_256), -1), ((8, 50_257), -1), ((2, 1_000_003), -1), ((64, 32_000), -1), ((4096, 1024), -1)


@pytest.fixture
def route(fused) -> Route:
    return fused


def expected(x: torch.Tensor, k: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: a row that isn't finite is NaN, at the first k indices."""
    wide = x.double()
    order = torch.sort(wide + 0.0, dim=dim, descending=True, stable=True).indices.narrow(dim, 0, k)
    probabilities = F.softmax(wide, dim)
    spoiled = ~torch.isfinite(probabilities.sum(dim, keepdim=True))
    first = torch.arange(k).reshape([-1 if axis == dim % x.dim() else 1 for axis in range(x.dim())])
    return torch.where(spoiled, NAN, probabilities.gather(dim, order)), torch.where(spoiled, first, order)


def verify(route: Route, x: torch.Tensor, k: int, dim: int = -1, seen=None) -> None:
    found = softmax_topk(route.kind.array(x) if seen is None else seen, k, dim, backend=route.backend)
    assert isinstance(found, TopK)
    probabilities, indices = (route.kind.tensor(part).cpu() for part in found)
    right, order = expected(x, k, dim)
    assert (probabilities.dtype, indices.dtype) == (x.dtype, torch.int64)
    assert route.kind.is_contiguous(found.probabilities)
    assert route.kind.is_contiguous(found.indices)
    assert torch.equal(indices, order)
    assert (wrong := mismatch(probabilities, right)) is None, wrong


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_shapes_and_ks(route, dtype, failures):
    if dtype not in route.dtypes:
        pytest.skip(f"{route.kind.name} has no {dtype}")
    for shape, dim in SHAPES + (() if INTERPRETED else LONG):
        # Each of Triton's kernels is compiled for its k, which takes seconds.
        few = route.backend == "triton-fused" and shape != (5, 1023)
        for k in (8,) if few else (1, 2, 8, 33, 64):
            if k <= shape[dim] and not (INTERPRETED and k in (2, 33)):
                with failures.case(f"{k} of {shape} over {dim}"):
                    verify(route, randn(*shape, dtype=dtype), k, dim)


@pytest.mark.parametrize("k", [1, 5, 40])
def test_ties_go_to_the_lower_index(route, k):
    for shape in ((6, 50), (3, 700), (2, 9000)):
        few = torch.randint(0, 4, shape, generator=torch.Generator().manual_seed(1)).float()
        verify(route, few, k)
        verify(route, torch.zeros(shape), k)
        verify(route, torch.where(few > 1, 0.0, -0.0), k)


@pytest.mark.parametrize("k", [3, 64])
def test_orders(route, k):
    for cols in (100, 5000) if INTERPRETED else (100, 5000, 70_000):
        ascending = torch.arange(cols, dtype=torch.float32).repeat(2, 1) / 100
        verify(route, ascending, k)
        verify(route, ascending.flip(1), k)
        verify(route, ascending.flip(1).roll(7, 1), k)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rows_that_are_not_finite(route, dtype):
    if dtype not in route.dtypes:
        pytest.skip(f"{route.kind.name} has no {dtype}")
    for cols in (70, 3000):
        x = randn(7, cols, dtype=dtype)
        x[1, 5], x[2, cols - 1], x[3] = NAN, INF, -INF
        x[4, 3:] = -INF
        x[5, ::2] = -INF
        x[6] = 0.0
        for k in (2, 9):
            verify(route, x, k)
    if x.dtype == torch.float32:  # a NaN of nothing but ones, over blocks, a cluster's too
        for cols in (40, 3000, *(() if INTERPRETED else (300_000,))):
            verify(route, torch.full((2, cols), -1, dtype=torch.int32).view(torch.float32), 30)


def test_far_apart(route):
    """Probabilities underflow, but x still tells which is larger."""
    x = torch.linspace(-3e4, 3e4, 500).repeat(2, 1)
    verify(route, x, 10)
    verify(route, x * 1e34, 10)


def test_layouts(route):
    kind = route.kind
    x = randn(60, 40)
    verify(route, x.T.contiguous(), 5, seen=kind.permute(kind.array(x), (1, 0)))
    verify(route, x[:1].expand(7, 40), 5, seen=kind.expand(kind.array(x[:1]), (7, 40)))
    if kind.name != "dlpack":  # whose exporter can't be sliced
        whole = kind.array(x)
        verify(route, x[:, 1:], 5, seen=whole[:, 1:])
        verify(route, x[:, ::3], 5, seen=whole[:, ::3])
        verify(route, x[::2, 1:], 5, 0, seen=whole[::2, 1:])


def test_half_to_float32(route):
    for dtype in ("float16", "bfloat16"):
        if dtype in route.dtypes:
            x = randn(5, 700, dtype=dtype)
            p, i = (
                route.kind.tensor(part).cpu()
                for part in softmax_topk(route.kind.array(x), 9, dtype="float32", backend=route.backend)
            )
            right, order = expected(x, 9, -1)
            assert p.dtype == torch.float32
            assert torch.equal(i, order)
            assert mismatch(p, right) is None


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=90), st.integers(1, 64))
def test_many_ties(values, k):
    x = np.array([values], np.float32)
    k = min(k, x.shape[1])
    found = softmax_topk(x, k)
    assert found.indices.tolist() == np.argsort(-x, 1, kind="stable")[:, :k].tolist()


def test_negative_strides():
    x = randn(4, 60).numpy()
    found = softmax_topk(x[:, ::-1], 5)
    right, order = expected(torch.from_numpy(x[:, ::-1].copy()), 5, -1)
    assert torch.equal(torch.from_numpy(found.indices), order)
    assert mismatch(torch.from_numpy(found.probabilities), right) is None


@pytest.mark.parametrize(
    ("k", "error", "message"),
    [(0, ValueError, "at least 1"), (65, ValueError, "at most 64"), (11, ValueError, "at most the 10"),
     (-1, ValueError, "at least 1"), (2.0, TypeError, "integer"), (True, TypeError, "integer"),
     ("3", TypeError, "integer")],
)  # fmt: skip
def test_k_is_checked(k, error, message):
    with pytest.raises(error, match=message):
        softmax_topk(torch.zeros(3, 100 if k == 65 else 10), k)


def test_arguments():
    with pytest.raises(TypeError, match="called 'dim'"):
        softmax_topk(torch.zeros(3, 4), 2, axis=1)
    with pytest.raises(TypeError, match="no argument 'out'; there are k, dim"):
        softmax_topk(torch.zeros(3, 4), 2, out=None)
    with pytest.raises(IndexError):
        softmax_topk(torch.zeros(3, 4), 2, 5)
    with pytest.raises(TypeError, match="softmax_topk has no meaning"):
        softmax_topk(torch.zeros(3, 4, dtype=torch.int32), 2)
    with pytest.raises(ValueError, match="no backend is named"):
        softmax_topk(torch.zeros(3, 4), 2, backend="nonsense")
    assert softmax_topk(torch.zeros(3, 4), np.int64(2)).indices.shape == (3, 2)
    assert MOST_K == 64


def test_empty_and_0d():
    found = softmax_topk(torch.zeros(0, 9), 4)
    assert found.probabilities.shape == found.indices.shape == (0, 4)
    found = softmax_topk(torch.tensor(2.0), 1)
    assert found.probabilities.shape == ()
    assert (found.probabilities.item(), found.indices.item()) == (1.0, 0)
    with pytest.raises(ValueError, match="at most the 0"):
        softmax_topk(torch.zeros(3, 0), 1)


def test_explain():
    said = explain(randn(4, 50), op=TOPK, k=3)
    assert said.backend == "numpy"
    with pytest.raises(TypeError, match="takes k"):
        explain(randn(4, 50), op=TOPK)
    with pytest.raises(TypeError, match="k is for op="):
        explain(randn(4, 50), k=3)
    with pytest.raises(TypeError, match="takes neither out nor scale"):
        explain(randn(4, 50), op=TOPK, k=3, scale=2)


@pytest.mark.gpu
def test_the_teaching_rungs_decline():
    for name in ("cuda-naive", "cuda-smem"):
        with pytest.raises(BackendError, match="not softmax_topk"):
            softmax_topk(randn(4, 50).cuda(), 3, backend=name)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-fused", "triton-fused"])
def test_copied_over_and_back(backend):
    x = randn(5, 300)
    right, order = expected(x, 7, -1)
    for array in (x, x.numpy()):
        p, i = (torch.as_tensor(part) for part in softmax_topk(array, 7, backend=backend))
        assert torch.equal(i, order)
        assert mismatch(p, right) is None


@pytest.mark.gpu
def test_a_device_array_on_numpy():
    x = randn(5, 300, dtype="bfloat16")
    p, i = softmax_topk(x.cuda(), 7, backend="numpy")
    right, order = expected(x, 7, -1)
    assert p.is_cuda
    assert torch.equal(i.cpu(), order)
    assert mismatch(p.cpu(), right) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-fused", "triton-fused"])
def test_captured_in_a_graph(backend):
    for shape in ((4, 128_256), (300, 600)):
        x = randn(*shape).cuda()
        softmax_topk(x, 8, backend=backend)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            p, i = softmax_topk(x, 8, backend=backend)
        for seed in range(2):
            x.copy_(randn(*shape, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            right, order = expected(x.cpu(), 8, -1)
            assert torch.equal(i.cpu(), order)
            assert mismatch(p.cpu(), right) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-fused", "triton-fused"])
def test_the_first_call_of_a_process_is_captured_or_says_to_warm_up(backend):
    capture_first_call(
        setup='x = torch.randn(4, 128_256, device="cuda")',
        call=f"minikernel.softmax_topk(x, 8, backend={backend!r})",
        check="""
right = torch.topk(torch.softmax(x.double(), -1), 8)
assert torch.equal(found.indices, right.indices)
assert (found.probabilities - right.values).abs().max() < 1e-6
""",
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_and_inference_mode(device):
    x = randn(3, 40, dtype="bfloat16").to(device)
    with torch.autocast(device, torch.bfloat16):
        assert softmax_topk(x, 2).probabilities.dtype == F.softmax(x, -1).dtype
    with torch.inference_mode():
        p, i = softmax_topk(x, 2)
    assert p.is_inference()
    assert torch.equal(i.cpu(), expected(x.cpu(), 2, -1)[1])


def test_integers_are_refused_by_its_name():
    for call in (softmax_topk, vmap(lambda row, k: softmax_topk(row, k).probabilities, in_dims=(0, None))):
        with pytest.raises(TypeError, match="softmax_topk has no meaning"):
            call(torch.zeros(2, 5, dtype=torch.int64), 2)


def test_gradients():
    x = randn(3, 40, dtype="float64").requires_grad_()
    for dim in (0, 1):
        assert torch.autograd.gradcheck(lambda x, dim=dim: softmax_topk(x, 3, dim).probabilities, x)
        assert torch.autograd.gradgradcheck(lambda x, dim=dim: softmax_topk(x, 3, dim).probabilities, x)
    assert not softmax_topk(x, 3).indices.requires_grad
    leaf, w, t = x.detach().requires_grad_(), randn(3, 2, dtype="float64"), randn(3, 2, dtype="float64", seed=2)
    with torch.autograd.forward_ad.dual_level():
        (dx,) = torch.autograd.grad(
            softmax_topk(leaf, 2).probabilities, leaf, torch.autograd.forward_ad.make_dual(w, t)
        )
        found = torch.autograd.forward_ad.unpack_dual(dx).tangent
    torch.testing.assert_close(found, torch.autograd.grad(torch.topk(F.softmax(leaf, -1), 2).values, leaf, t)[0])
    with pytest.raises(ValueError, match="at most 64"):
        vmap(lambda row: softmax_topk(row, 65, 0).indices)(torch.zeros(2, 100))
    spoiled = torch.tensor([[1.0, NAN, 2.0], [0.0, -0.0, 1.0]])
    found = vmap(lambda row: softmax_topk(row, 2, 0).indices)(spoiled)
    assert found.tolist() == softmax_topk(spoiled, 2).indices.tolist() == [[0, 1], [2, 0]]
    torch.testing.assert_close(
        vmap(lambda row: softmax_topk(row, 3, 0).probabilities)(x), torch.topk(F.softmax(x, -1), 3).values
    )


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-fused", "triton-fused"])
def test_gradients_on_a_gpu(backend):
    x, dy = randn(5, 700).cuda().requires_grad_(), randn(5, 9, seed=1).cuda()
    (dx,) = torch.autograd.grad(softmax_topk(x, 9, backend=backend).probabilities, x, dy)
    wide = x.detach().double().requires_grad_()
    (right,) = torch.autograd.grad(torch.topk(F.softmax(wide, -1), 9).values, wide, dy.double())
    torch.testing.assert_close(dx.double(), right, rtol=1e-4, atol=1e-7)


@pytest.mark.skipif(INTERPRETED, reason="the compiler has nothing to do with Triton's interpreter")
def test_compiled():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x):
        found = softmax_topk(x, 3)
        return found.probabilities * 2, found.indices

    x = randn(4, 50)
    p, i = compiled(x)
    found = softmax_topk(x, 3)
    assert torch.equal(p, found.probabilities * 2)
    assert torch.equal(i, found.indices)


def test_the_operator_is_sound():
    from torch.library import opcheck

    from minikernel import torch_ops  # noqa: F401

    for leaf in (False, True):
        opcheck(
            torch.ops.minikernel.softmax_topk.default, (randn(3, 20).requires_grad_(leaf), 4, -1, None, "numpy")
        )


def test_triton_in_the_interpreter():
    """Its values, without a GPU."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("this is that process")
    assert "passed" in in_the_interpreter(__file__, "triton and (layouts or half or far or float32-finite)")
