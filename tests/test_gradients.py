"""Autograd: gradients of every order, transforms, and never one that is lost."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import BESIDE_TORCH as OPS
from cases import INTERPRETED, randn
from isolated import in_the_interpreter
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

import minikernel
from minikernel import Backend, BackendError, Kernel, Problem, log_softmax, softmax
from minikernel.problem import BACKWARD

DTYPES = ("float32", "float16", "bfloat16", "float64")
#: Largest error of dx over the largest magnitude in its row, in units in the last place of its dtype.
ULPS = 8
SHAPES = (
    ((3, 5), -1), ((7, 1), -1), ((4, 600), -1), ((37, 33), -1), ((5, 1025), -1), ((3, 4097), 1), ((2, 20_001), -1),
    ((2, 7, 9), 1), ((300, 40), 0), ((2, 1000, 24), 1), ((3, 2, 4, 5), -2), ((), 0), ((0, 3), 1), ((3, 0), 0),
    ((1, 4097, 2), 1), ((1, 2049, 4), 1), ((1, 1027, 8), 1),
    *([((300, 16_384), -1)] if torch.cuda.is_available() else []),
)  # fmt: skip
GRADIENT_BACKENDS = (
    pytest.param("numpy", "cpu", id="numpy"),
    pytest.param("cuda-fused", "cuda", id="cuda-fused", marks=pytest.mark.gpu),
    pytest.param(
        "triton-fused",
        "cpu" if INTERPRETED else "cuda",
        id="triton-fused",
        marks=() if INTERPRETED else pytest.mark.gpu,
    ),
)
on_each_backend = pytest.mark.parametrize(("backend", "device"), GRADIENT_BACKENDS)


@pytest.fixture(autouse=True)
def available(request):
    backend = getattr(request.node, "callspec", None) and request.node.callspec.params.get("backend")
    if backend and not (info := minikernel.list_backends()[backend]).available:
        pytest.skip("; ".join(info.reasons))


def exact(op: str, x: torch.Tensor, dy: torch.Tensor, dim: int) -> torch.Tensor:
    """dx in float64, on the CPU."""
    x = x.detach().cpu().double().requires_grad_()
    (dx,) = torch.autograd.grad(OPS[op][1](x, dim), x, dy.cpu().double())
    return dx


def error(dx: torch.Tensor, expected: torch.Tensor, dy: torch.Tensor, dim: int) -> float:
    """The largest error, in units in the last place of the largest term that its row may have canceled."""
    if dx.numel() == 0:
        return 0.0
    scale = dy.cpu().double().abs() if dx.dim() == 0 else dy.cpu().double().abs().amax(dim, keepdim=True)
    return float(((dx.cpu().double() - expected).abs() / (scale * torch.finfo(dx.dtype).eps)).max())


@on_each_backend
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_those_of_float64(op, dtype, backend, device, failures):
    for shape, dim in SHAPES:
        with failures.case(f"{shape} over {dim}"):
            x = randn(*shape, dtype=dtype).to(device).requires_grad_()
            dy = randn(*shape, dtype=dtype, seed=1).to(device)
            y = OPS[op][0](x, dim, backend=backend)
            assert y.grad_fn is not None
            (dx,) = torch.autograd.grad(y, x, dy)
            assert (dx.dtype, dx.shape, dx.device) == (x.dtype, x.shape, x.device)
            assert dx.is_contiguous()
            # The saved output is rounded to its dtype, and of a long row all of dy is summed.
            allowed = ULPS * (1 if dtype in ("float32", "float64") or op == "softmax" else 8)
            allowed *= max(1.0, (x.shape[dim] if x.dim() else 1) ** 0.5 / 8) if op == "log_softmax" else 1
            assert error(dx, exact(op, x, dy, dim), dy, dim) < allowed


@on_each_backend
@pytest.mark.parametrize("given", ["float16", "bfloat16"])
def test_half_to_float32_gives_half_gradients(given, backend, device):
    for shape, dim in (((5, 700), -1), ((3, 50, 8), 1), ((2, 9), -1)):
        x = randn(*shape, dtype=given).to(device).requires_grad_()
        dy = randn(*shape, seed=1).to(device)
        y = softmax(x, dim, backend=backend, dtype=torch.float32)
        assert y.dtype == torch.float32
        (dx,) = torch.autograd.grad(y, x, dy)
        assert dx.dtype == x.dtype
        assert error(dx, exact("softmax", x, dy, dim), dy, dim) < ULPS


@on_each_backend
def test_other_casts_are_recorded(backend, device):
    x = randn(4, 60).to(device).requires_grad_()
    y = softmax(x, dtype="float64", backend=backend)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert (y.dtype, dx.dtype) == (torch.float64, torch.float32)
    (expected,) = torch.autograd.grad(F.softmax(x.double(), -1).square().sum(), x)
    torch.testing.assert_close(dx, expected)


@on_each_backend
@pytest.mark.parametrize("op", OPS)
def test_incoming_gradients_of_any_layout(op, backend, device):
    """Expanded (from a sum), transposed, sliced off a 16-byte boundary."""
    x = randn(6, 40).to(device).requires_grad_()
    layouts = {
        "expanded": torch.ones(1, 1).to(device).expand(6, 40),
        "transposed": randn(40, 6, seed=1).to(device).t(),
        "offset": randn(241, seed=1).to(device)[1:].view(6, 40),
        "every other": randn(6, 80, seed=1).to(device)[:, ::2],
    }
    for name, dy in layouts.items():
        (dx,) = torch.autograd.grad(OPS[op][0](x, backend=backend), x, dy)
        assert error(dx, exact(op, x, dy, -1), dy, -1) < ULPS * 5, name


@on_each_backend
def test_inputs_of_any_layout(backend, device):
    base = randn(70, 90).to(device)
    for x in (base.t(), base[:, 1:], base[::2], base[:1].expand(5, 90), base[:, ::3]):
        x = x.detach().requires_grad_()
        dy = randn(*x.shape, seed=1).to(device)
        (dx,) = torch.autograd.grad(softmax(x, backend=backend), x, dy)
        assert error(dx, exact("softmax", x, dy, -1), dy, -1) < ULPS


@on_each_backend
@pytest.mark.parametrize("op", OPS)
def test_nan_stays_in_its_row(op, backend, device):
    x = randn(4, 300).to(device)
    x[1, 7] = torch.nan
    x[2, :] = -torch.inf
    x[3, 5:] = -torch.inf
    x.requires_grad_()
    dy = randn(4, 300, seed=1).to(device)
    (dx,) = torch.autograd.grad(OPS[op][0](x, backend=backend), x, dy)
    assert dx[0].isfinite().all()
    assert dx[1].isnan().all()
    assert dx[2].isnan().all()
    assert dx[3].isfinite().all()


@on_each_backend
@pytest.mark.parametrize("op", OPS)
def test_every_order(op, backend, device):
    x = randn(3, 4, 5, dtype="float64").to(device).requires_grad_()
    for dim in (0, 1, -1):
        call = lambda x, dim=dim: OPS[op][0](x, dim, backend=backend)  # noqa: E731
        assert gradcheck(call, x, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
        assert gradgradcheck(call, x)
    number = torch.tensor(0.5, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda x: OPS[op][0](x, 0, backend=backend), number)


@on_each_backend
@pytest.mark.parametrize("op", OPS)
def test_transforms(op, backend, device):
    ours, theirs = (
        lambda x, f=f, kw=kw: f(x, -1, **kw) for f, kw in zip(OPS[op], ({"backend": backend}, {}), strict=True)
    )
    z = randn(4, 6, dtype="float64").to(device)
    for transform in (
        lambda f: grad(lambda x: f(x).square().sum())(z),
        lambda f: vmap(grad(lambda x: f(x).square().sum()))(z),
        lambda f: grad(lambda x: vmap(f)(x).square().sum())(z),
        lambda f: hessian(lambda x: f(x).square().sum())(z),
        lambda f: jacrev(jacfwd(f))(z),
        lambda f: jvp(f, (z,), (z.cos(),))[1],
        lambda f: vmap(vmap(f))(z[None]),
        lambda f: jvp(grad(lambda x: f(x).square().sum()), (z,), (z.cos(),))[1],
        lambda f: jvp(lambda x: jvp(f, (x,), (z.sin(),))[1], (z,), (z.cos(),))[1],
        lambda f: jacfwd(jacfwd(f))(z),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))


@on_each_backend
def test_vmap_over_every_axis(backend, device):
    x = randn(3, 4, 5).to(device)
    for batched in (0, 1, 2, -1):
        for dim in (0, 1, -1, -2):
            ours = vmap(lambda t, d=dim: softmax(t, d, backend=backend), in_dims=batched)(x)
            torch.testing.assert_close(ours, vmap(lambda t, d=dim: F.softmax(t, d), in_dims=batched)(x))
    assert (vmap(lambda t: softmax(t, 0, backend=backend))(x[0, 0]) == 1).all()
    with pytest.raises(IndexError):
        vmap(lambda t: softmax(t, 2, backend=backend))(x)


@on_each_backend
def test_forward_mode_duals(backend, device):
    x, t = (randn(4, 50, seed=s).to(device) for s in (0, 1))
    with forward_ad.dual_level():
        for ours, theirs in OPS.values():
            found = forward_ad.unpack_dual(ours(forward_ad.make_dual(x, t), backend=backend))
            wanted = forward_ad.unpack_dual(theirs(forward_ad.make_dual(x, t), -1))
            torch.testing.assert_close(found.primal, wanted.primal)
            torch.testing.assert_close(found.tangent, wanted.tangent)
        assert forward_ad.unpack_dual(softmax(x, backend=backend)).tangent is None


@on_each_backend
def test_tangents_of_incoming_gradients(backend, device):
    """Forward over an ordinary backward, and a transform around one."""
    x = randn(3, 5).to(device).requires_grad_()
    w, t = (randn(3, 5, seed=s).to(device) for s in (1, 2))

    def tangent(call):
        with forward_ad.dual_level():
            (dx,) = torch.autograd.grad((call(x) * forward_ad.make_dual(w, t)).sum(), x)
            return forward_ad.unpack_dual(dx).tangent

    torch.testing.assert_close(tangent(lambda x: softmax(x, backend=backend)), tangent(lambda x: F.softmax(x, -1)))

    def around(call):
        y = call(x)
        return grad(lambda s: (torch.autograd.grad(y, x, w, retain_graph=True)[0] * s).square().sum())(t[0, 0])

    torch.testing.assert_close(around(lambda x: softmax(x, backend=backend)), around(lambda x: F.softmax(x, -1)))


def test_operators_refuse_to_lose_a_tangent():
    softmax(randn(2, 3).requires_grad_()).sum().backward()  # defines them
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(randn(2, 3), randn(2, 3, seed=1))
        with pytest.raises(NotImplementedError, match="tangent"):
            torch.ops.minikernel.softmax(dual, -1)


@on_each_backend
def test_where_nothing_is_recorded(backend, device):
    x = randn(4, 50).to(device).requires_grad_()
    with torch.no_grad():
        assert not softmax(x, backend=backend).requires_grad
    with torch.inference_mode():
        assert softmax(x, backend=backend).is_inference()
    assert not softmax(x.detach(), backend=backend).requires_grad
    assert softmax(x, backend=backend).requires_grad  # whatever was remembered of the others


@on_each_backend
def test_the_output_is_what_is_saved(backend, device):
    x = randn(4, 50).to(device).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = softmax(x, backend=backend)
    assert [t.data_ptr() for t in saved] == [y.data_ptr()]
    y = softmax(x, backend=backend)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@on_each_backend
def test_checkpoint_and_functional_call(backend, device):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), minikernel.nn.Softmax(backend=backend)).to(device)
    x = randn(3, 8).to(device)
    names = dict(model.named_parameters())

    def gradients(run):
        return torch.autograd.grad(run().square().sum(), names.values())

    plain = gradients(lambda: model(x))
    torch.testing.assert_close(gradients(lambda: checkpoint(model, x, use_reentrant=False)), plain)
    torch.testing.assert_close(gradients(lambda: functional_call(model, names, (x,))), plain)


@on_each_backend
def test_backward_runs_in_other_threads(backend, device):
    """Autograd's own thread, and several at once, take the backend that forward chose."""
    wrong = []

    def work(seed):
        x = randn(16, 60, seed=seed).to(device).requires_grad_()
        dy = randn(16, 60, seed=seed + 1).to(device)
        with minikernel.use_backend(backend):
            y = softmax(x)
        for _ in range(20):
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            if error(dx, exact("softmax", x, dy, -1), dy, -1) > ULPS:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-naive", "cuda-smem"])
def test_backends_without_gradients_say_so(backend):
    x = randn(4, 50).cuda().requires_grad_()
    with pytest.raises(BackendError, match="it has no gradient, and the input requires grad"):
        softmax(x, backend=backend)
    with torch.no_grad():
        softmax(x, backend=backend)


def test_auto_passes_over_backends_without_gradients(registry):
    def prepare(problem: Problem) -> Kernel:
        return Kernel(lambda x, out, stream, scratch: out.fill(7))

    registry.register(Backend("sevens", 1, ("cpu",), ("float32",), prepare))
    x = randn(3, 4)
    assert (softmax(x) == 7).all()
    x.requires_grad_()
    assert minikernel.explain(x).backend == "numpy"
    assert "no gradient" in minikernel.explain(x).rejected["sevens"][0]
    torch.testing.assert_close(softmax(x), F.softmax(x, -1))


def test_a_gradient_that_cannot_be_prepared_is_found_out_in_time(registry):
    def prepare(problem: Problem) -> Kernel:
        if problem.op.endswith("backward"):
            raise minikernel.BackendUnavailable("no backward today")
        return Kernel(lambda x, out, stream, scratch: out.fill(7))

    backend = Backend("sevens", 1, ("cpu",), ("float32",), prepare, ops=("softmax", BACKWARD["softmax"]))
    registry.register(backend)
    x = randn(3, 4).requires_grad_()
    with pytest.warns(minikernel.FallbackWarning, match="no backward today"):
        y = softmax(x)
    torch.testing.assert_close(y, F.softmax(x, -1))
    registry.register(backend, replace=True)
    with pytest.raises(BackendError, match="no backward today"):
        softmax(x, backend="sevens")


def test_a_backend_s_own_gradient_is_used(registry):
    ran = []

    def prepare(problem: Problem) -> Kernel:
        ran.append(problem.op)
        return Kernel(lambda x, out, stream, scratch: out.fill(7))

    registry.register(Backend("sevens", 1, ("cpu",), ("float32",), prepare, ops=("softmax", BACKWARD["softmax"])))
    x = randn(3, 4).requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x).sum(), x)
    assert (dx == 7).all()
    assert ran == ["softmax", "softmax_backward"]


@pytest.mark.gpu
def test_what_is_copied_to_the_gpu_has_gradients_too():
    x = randn(4, 60).requires_grad_()
    (dx,) = torch.autograd.grad(softmax(x, backend="cuda-fused").square().sum(), x)
    (expected,) = torch.autograd.grad(F.softmax(x, -1).square().sum(), x)
    torch.testing.assert_close(dx, expected)


def test_out_with_gradients_is_refused():
    x, out = randn(3, 4), torch.empty(3, 4)
    with pytest.raises(RuntimeError, match="out= can't be recorded"):
        softmax(x.clone().requires_grad_(), out=out)
    with pytest.raises(RuntimeError, match="out= can't be recorded"):
        vmap(lambda t: softmax(t, out=out[0]))(x)
    with torch.no_grad():
        softmax(x.clone().requires_grad_(), out=out)


@pytest.mark.gpu
def test_autocast_gives_half_gradients():
    x = randn(4, 60, dtype="bfloat16").cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, theirs = softmax(x), F.softmax(x, -1)
    assert y.dtype == theirs.dtype == torch.float32
    dy = randn(4, 60, seed=1).cuda()
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(theirs, x, dy)
    assert dx.dtype == torch.bfloat16
    torch.testing.assert_close(dx, expected)


def test_a_given_dtype_is_kept_under_autocast(monkeypatch):
    from minikernel import arrays

    wide = arrays.Torch.effective_dtype
    # As on a GPU.
    monkeypatch.setattr(
        arrays.Torch,
        "effective_dtype",
        lambda self, x, dtype: torch.float32 if dtype is None else wide(self, x, dtype),
    )
    x = randn(3, 5, dtype="float64")
    assert softmax(x, dtype=torch.float16).dtype == torch.float16
    assert softmax(x.requires_grad_(), dtype=torch.float16).dtype == torch.float16


def test_autocast_on_the_cpu_is_pytorch_s():
    for dtype in (torch.float32, torch.bfloat16):
        x = randn(4, 6).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert softmax(x).dtype == F.softmax(x, -1).dtype
            assert log_softmax(x).dtype == F.log_softmax(x, -1).dtype


@pytest.mark.parametrize("recorded", [False, True])
def test_a_wrong_name_is_an_error_for_an_empty_tensor_too(recorded):
    with pytest.raises(ValueError, match="no backend is named 'nonsense'"):
        softmax(torch.zeros(0, 3, requires_grad=recorded), backend="nonsense")


def test_triton_in_the_interpreter():
    """Its values, without a GPU."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("this is that process")
    assert "passed" in in_the_interpreter(__file__, "triton and (float64 or half or nan or layout)")
