"""scale=, mask= and causal=: against PyTorch's own operations in float64, forward and backward."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import BESIDE_TORCH, INF, INTERPRETED, NAN, Route, mismatch, randn
from isolated import in_the_interpreter
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jvp, vmap

import minikernel
from minikernel import BackendError, explain, log_softmax, scores, softmax
from minikernel.problem import MOST_MASK_AXES, Mask

#: Shapes, axes, and shapes of masks.
CASES = (
    ((4, 600), -1, (4, 600)), ((4, 600), -1, (600,)), ((4, 600), -1, (4, 1)), ((6, 8), -1, ()),
    ((2, 3, 5, 64), -1, (2, 1, 5, 64)), ((2, 3, 5, 64), -1, (1, 3, 1, 64)), ((2, 3, 5, 64), -1, (5, 64)),
    ((2, 3, 2, 3, 2, 33), -1, (2, 1, 2, 1, 2, 33)), ((5, 1025), -1, (5, 1025)), ((3, 9001), -1, (1, 9001)),
    ((2, 40_000), -1, (2, 40_000)), ((30, 64), 0, (30, 64)), ((2, 33, 16), 1, (2, 33, 1)),
    ((2, 33, 16), 1, (33, 16)), ((2, 300, 6, 8), 1, (2, 1, 6, 8)), ((2, 300, 5, 7), 1, (1, 300, 5, 1)),
    ((1,), 0, (1,)), ((), 0, ()),
)  # fmt: skip
LONG = ((8, 128_256), -1, (8, 128_256)), ((1, 600_001), -1, (600_001,)), ((2, 1_048_576), -1, (2, 1))


@pytest.fixture
def trained(fused) -> Route:
    if not fused.kind.name.startswith("torch"):
        pytest.skip("gradients are PyTorch's")
    return fused


def a_mask(*shape: int, seed: int = 5, kept: float = 0.6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < kept


def screened(x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None, causal: bool = False):
    """What the softmax is to see, in PyTorch's operations."""
    x = x * scale
    if mask is not None:
        x = x.masked_fill(~mask, -INF)
    return x.masked_fill(~torch.ones_like(x, dtype=torch.bool).tril(), -INF) if causal else x


def expected(op: str, x: torch.Tensor, dim: int, **asked) -> torch.Tensor:
    return BESIDE_TORCH[op][1](screened(x.double(), **asked), dim)


def verify(route: Route, op: str, x: torch.Tensor, dim: int = -1, **asked) -> None:
    given = {name: route.kind.array(v) if isinstance(v, torch.Tensor) else v for name, v in asked.items()}
    y = route.kind.tensor(route.run(route.kind.array(x), dim, op, **given)).cpu()
    assert y.dtype == x.dtype
    right = expected(op, x, dim, **asked)
    if op == "log_softmax":  # the error is that of its largest terms, before it is rounded
        eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        allowed = {"rtol": 2 * torch.finfo(x.dtype).eps, "atol": 64 * eps}
        torch.testing.assert_close(y.double(), right.to(x.dtype).double(), **allowed, equal_nan=True)
    else:
        wrong = mismatch(y, right, op)
        assert wrong is None, wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_masks_of_every_shape(fused, op, dtype, failures):
    if dtype not in fused.dtypes:
        pytest.skip(f"{fused.kind.name} has no {dtype}")
    for shape, dim, mask_shape in CASES + (() if INTERPRETED or dtype == "float64" else LONG):
        with failures.case(f"{shape} over {dim}, a mask of {mask_shape}"):
            verify(fused, op, randn(*shape, dtype=dtype), dim, mask=a_mask(*mask_shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_scales(fused, op, dtype, failures):
    if dtype not in fused.dtypes:
        pytest.skip(f"{fused.kind.name} has no {dtype}")
    for shape, dim in (((4, 600), -1), ((5, 1025), -1), ((2, 20_001), -1), ((2, 33, 16), 1), ((64, 30), 0)):
        for scale in (0.125, -0.7, 3, 1e-3, np.float32(0.3)):
            with failures.case(f"{shape} over {dim}, times {scale}"):
                x = randn(*shape, dtype=dtype, scale=3.0)
                verify(fused, op, x, dim, scale=float(scale))
                verify(fused, op, x, dim, scale=float(scale), mask=a_mask(*shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_causal(fused, op, dtype, failures):
    if dtype not in fused.dtypes:
        pytest.skip(f"{fused.kind.name} has no {dtype}")
    shapes = ((1, 1), (2, 3, 5, 5), (7, 64, 64), (130, 130), (2, 600, 600), (2052, 2052))
    for shape in shapes[:3] if INTERPRETED else shapes:
        with failures.case(shape):
            x = randn(*shape, dtype=dtype)
            verify(fused, op, x, causal=True)
            verify(fused, op, x, causal=True, scale=-0.3, mask=a_mask(shape[-1]))


def test_causal_of_a_transposed_input(fused):
    x = randn(3, 40, 40)
    y = fused.run(fused.kind.permute(fused.kind.array(x), (0, 2, 1)), causal=True)
    assert mismatch(fused.kind.tensor(y).cpu(), expected("softmax", x.mT, -1, causal=True)) is None


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_what_is_masked_out_is_never_looked_at(fused, op):
    for shape, dim in (((6, 300), -1), ((3, 5000), -1), ((2, 33, 16), 1)):
        x = randn(*shape)
        mask = a_mask(*shape)
        for poison in (NAN, INF, -INF):
            for scale in (1.0, -2.0):
                spoiled = torch.where(mask, x, torch.tensor(poison))
                clean = torch.where(mask, x, torch.tensor(0.0))
                given = {"mask": fused.kind.array(mask), "scale": scale}
                one, other = (
                    fused.kind.tensor(fused.run(fused.kind.array(of), dim, op, **given)) for of in (spoiled, clean)
                )
                assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_a_row_of_which_nothing_is_kept_is_nan(fused, op):
    for shape, dim in (((6, 300), -1), ((6, 5000), -1), ((6, 33), -1), ((300, 6), 0)):
        x, mask = randn(*shape), a_mask(*shape)
        mask.movedim(dim, -1)[2] = False
        y = fused.kind.tensor(fused.run(fused.kind.array(x), dim, op, mask=fused.kind.array(mask))).movedim(dim, -1)
        assert y[2].isnan().all()
        assert not y[[0, 1, 3, 4, 5]].isnan().any()


def test_huge_values_do_not_overflow(fused):
    x = torch.tensor([[3e38, 3e38, -3e38], [1e30, 1e30 * (1 - 1e-6), 0]])
    y = fused.kind.tensor(fused.run(fused.kind.array(x), scale=100.0)).cpu()
    assert mismatch(y, torch.tensor([[0.5, 0.5, 0], [1, 0, 0]], dtype=torch.float64)) is None
    for op in ("softmax", "log_softmax"):
        for cols in (3, 3000):
            for scale in (2e-38, -2e-38):
                verify(fused, op, torch.tensor([[3e38, -3e38, 0.0]]).repeat(2, cols // 3), scale=scale)


def test_out_and_dtype(fused):
    if not fused.kind.takes_out:
        pytest.skip("no out= here")
    x, mask = randn(4, 60, dtype="float16"), a_mask(4, 60)
    out = fused.kind.poisoned((4, 60), "float32")
    y = fused.run(fused.kind.array(x), dtype="float32", mask=fused.kind.array(mask), scale=0.5, out=out)
    assert y is out
    assert mismatch(fused.kind.tensor(out).cpu(), expected("softmax", x, -1, mask=mask, scale=0.5)) is None


def test_strided_masks(fused):
    kind = fused.kind
    x, mask = randn(6, 40), a_mask(40, 6)
    seen = kind.permute(kind.array(mask), (1, 0))
    assert (
        mismatch(kind.tensor(fused.run(kind.array(x), mask=seen)).cpu(), expected("softmax", x, -1, mask=mask.T))
        is None
    )
    if kind.name != "dlpack":  # whose exporter can't be sliced
        wide = a_mask(6, 81)
        seen = kind.array(wide)[:, 1::2]
        right = expected("softmax", x, -1, mask=wide[:, 1::2])
        assert mismatch(kind.tensor(fused.run(kind.array(x), mask=seen)).cpu(), right) is None


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradients(trained, op, dtype, failures):
    device = trained.kind.device
    squares = ((3, 64, 64), (2, 1100, 1100)) if not INTERPRETED else ((3, 64, 64),)
    cases = [*CASES, *((shape, -1, None) for shape in squares)]
    for shape, dim, mask_shape in cases:
        for scale in (0.5, -1.5):
            with failures.case(f"{shape} over {dim}, a mask of {mask_shape}, times {scale}"):
                asked = {"scale": scale} | (
                    {"causal": True} if mask_shape is None else {"mask": a_mask(*mask_shape, kept=0.9)}
                )
                x, dy = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1)
                wide = x.double().requires_grad_()
                right = BESIDE_TORCH[op][1](screened(wide, **asked), dim)
                (right,) = torch.autograd.grad(right, wide, dy.double())
                given = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in asked.items()}
                leaf = x.to(device).requires_grad_()
                (dx,) = torch.autograd.grad(trained.run(leaf, dim, op, **given), leaf, dy.to(device))
                assert (dx.dtype, dx.shape) == (x.dtype, x.shape)
                dx = dx.cpu().double()
                assert torch.equal(dx.isnan(), right.isnan())
                cols = x.shape[dim] if x.dim() else 1
                allowed = 16 * torch.finfo(x.dtype).eps * abs(scale) * float(dy.double().abs().max())
                allowed *= 8 * max(1.0, cols**0.5 / 8) if op == "log_softmax" else 1
                known = ~right.isnan()
                assert _largest((dx - right)[known]) < allowed


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_no_gradient_where_nothing_is_looked_at(trained, op):
    """Nor NaN from a row of which nothing is kept, or that is NaN."""
    x, mask = randn(5, 300), a_mask(5, 300)
    mask[1] = False
    x[2, 0], mask[2, 0] = NAN, True
    device = trained.kind.device
    leaf = x.to(device).requires_grad_()
    y = trained.run(leaf, op=op, mask=mask.to(device), scale=2.0)
    (dx,) = torch.autograd.grad(y, leaf, randn(5, 300, seed=1).to(device))
    dx = dx.cpu()
    assert (dx[~mask] == 0).all()
    assert dx[[0, 3, 4]].isfinite().all()
    assert dx[2][mask[2]].isnan().all()


def test_nan_in_dy_where_nothing_is_looked_at(trained):
    x, mask, dy = randn(3, 700), a_mask(3, 700), randn(3, 700, seed=1)
    device = trained.kind.device

    def gradient(dy):
        leaf = x.to(device).requires_grad_()
        (dx,) = torch.autograd.grad(trained.run(leaf, mask=mask.to(device)), leaf, dy.to(device))
        return dx

    assert torch.equal(gradient(torch.where(mask, dy, NAN)), gradient(torch.where(mask, dy, 0.0)))


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_every_order(trained, op):
    device = trained.kind.device
    x = randn(3, 5, 5, dtype="float64").to(device).requires_grad_()
    mask = a_mask(5, 5).fill_diagonal_(True).to(device)
    for asked in ({"scale": -0.7, "mask": mask}, {"causal": True, "scale": 2.0}):
        # log-softmax has -inf where nothing is kept, which no difference quotient can take.
        def call(x, asked=asked):
            y = trained.run(x, op=op, **asked)
            return y if op == "softmax" else y.exp()

        assert gradcheck(call, x, check_forward_ad=True, check_batched_grad=True)
        assert gradgradcheck(call, x)


def test_transforms(trained):
    device = trained.kind.device
    z, mask = randn(4, 6, 6, dtype="float64").to(device), a_mask(6, 6).fill_diagonal_(True).to(device)
    masks = torch.stack([mask, mask.T, mask | mask.T, mask])

    def ours(x, mask=mask):
        return softmax(x, scale=0.5, mask=mask, causal=True, backend=trained.backend)

    def theirs(x, mask=mask):
        return F.softmax(screened(x, scale=0.5, mask=mask, causal=True), -1)

    for transform in (
        lambda f: grad(lambda x: f(x).square().sum())(z),
        lambda f: vmap(grad(lambda x: f(x).square().sum()))(z),
        lambda f: hessian(lambda x: f(x).square().sum())(z[0]),
        lambda f: jvp(f, (z,), (z.cos(),))[1],
        lambda f: vmap(f)(z, masks),
        lambda f: vmap(f, (None, 0))(z[0], masks),
    ):
        torch.testing.assert_close(transform(ours), transform(theirs))
    for wrong, error in (
        (mask[None, None], ValueError),
        (mask[:, :1, None], ValueError),
        (mask.double(), TypeError),
    ):
        with pytest.raises(error, match="mask must"):
            grad(lambda x, wrong=wrong: ours(x, wrong).sum())(z[0])
        with pytest.raises(error, match="mask must"):
            vmap(lambda x, wrong=wrong: ours(x, wrong))(z)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(z, z.cos())
        torch.testing.assert_close(
            forward_ad.unpack_dual(ours(dual)).tangent, forward_ad.unpack_dual(theirs(dual)).tangent
        )


@pytest.mark.skipif(INTERPRETED, reason="the compiler has nothing to do with Triton's interpreter")
def test_compiled(trained):
    device = trained.kind.device
    x, mask = randn(4, 6, 6).to(device), a_mask(6, 6).to(device)

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def compiled(x, scale, mask):
        return softmax(x, scale=scale, mask=mask, causal=True, backend=trained.backend)

    for scale in (0.5, 0.25):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        one = compiled(leaves[0], scale, mask)
        other = softmax(leaves[1], scale=scale, mask=mask, causal=True, backend=trained.backend)
        torch.testing.assert_close(one, other, equal_nan=True)
        for y in (one, other):
            y.nan_to_num().square().sum().backward()
        torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.skipif(INTERPRETED, reason="the compiler has nothing to do with Triton's interpreter")
def test_scales_are_checked_where_a_call_is_compiled():
    def compiled(call):
        return torch.compile(call, backend="aot_eager")

    x = randn(3, 5)
    with pytest.raises(Exception, match="magnitude of scale"):
        compiled(lambda x: vmap(lambda row: softmax(row, scale=0.0))(x))(x)
    with pytest.raises(Exception, match="magnitude of scale"):
        compiled(lambda x: softmax(x, scale=0.0))(x)
    with pytest.raises(Exception, match="scale must be a number"):
        compiled(lambda x, scale: softmax(x, scale=scale))(x, torch.tensor(2.0))


def test_operators_are_sound():
    from torch.library import opcheck

    from minikernel import torch_ops  # noqa: F401

    mask = a_mask(3, 5, 5).logical_or(torch.eye(5, dtype=torch.bool))
    for op in ("softmax", "log_softmax"):
        for leaf in (False, True):
            x = randn(3, 5, 5).requires_grad_(leaf)
            opcheck(getattr(torch.ops.minikernel, op).default, (x, -1, None, "numpy", 0.5, mask, True))
        backward = getattr(torch.ops.minikernel, f"{op}_backward").default
        y = randn(3, 5, 5).softmax(-1)
        opcheck(backward, (randn(3, 5, 5, seed=1), y, -1, torch.float32, "numpy", 0.5, mask, True))


def test_explain_says_what_the_teaching_rungs_lack():
    said = explain(randn(4, 5), mask=a_mask(4, 5), scale=2)
    assert said.backend == "numpy"
    for name in ("cuda-naive", "cuda-smem"):
        reasons = minikernel.registry.REGISTRY.get(name).rules_out(
            minikernel.Problem(
                "softmax", "cuda", 0, "float32", "float32", 4, 5, 1, (5, 1, 1), scaled=True, causal=True
            )
        )
        assert reasons == ["it has no scale=", "it has no causal="]


@pytest.mark.gpu
def test_the_teaching_rungs_decline():
    for name in ("cuda-naive", "cuda-smem"):
        with pytest.raises(BackendError, match="it has no mask="):
            softmax(randn(4, 5).cuda(), mask=a_mask(4, 5).cuda(), backend=name)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"scale": 0}, ValueError, "magnitude of scale"),
        ({"scale": INF}, ValueError, "magnitude of scale"),
        ({"scale": 10**400}, ValueError, "magnitude of scale"),
        ({"scale": 1e-39}, ValueError, "magnitude of scale"),
        ({"scale": -1e39}, ValueError, "magnitude of scale"),
        ({"scale": NAN}, ValueError, "magnitude of scale"),
        ({"scale": "2"}, TypeError, "scale must be a number"),
        ({"scale": True}, TypeError, "scale must be a number"),
        ({"scale": torch.tensor(2.0)}, TypeError, "multiply the input"),
        ({"mask": torch.ones(4, 5)}, TypeError, "mask must be boolean"),
        ({"mask": np.ones((4, 5), bool)}, TypeError, "mask must be the same kind"),
        ({"mask": [[True]]}, TypeError, "mask must be"),
        ({"mask": torch.ones(4, 4, dtype=torch.bool)}, ValueError, "broadcast"),
        ({"mask": torch.ones(2, 4, 5, dtype=torch.bool)}, ValueError, "broadcast"),
        ({"mask": torch.ones(4, 5, dtype=torch.bool, device="meta")}, (TypeError, ValueError), "device|meta"),
        ({"causal": True}, ValueError, "square"),
        ({"causal": 1}, TypeError, "True or False"),
    ],
)
def test_what_is_refused(asked, error, message):
    for call in (softmax, log_softmax, explain):
        with pytest.raises(error, match=message):
            call(randn(4, 5), **asked)


def test_causal_is_of_the_last_axis():
    with pytest.raises(ValueError, match="over the last axis"):
        softmax(randn(5, 5), 0, causal=True)
    with pytest.raises(ValueError, match="square"):
        softmax(randn(5), causal=True)


def test_a_mask_must_not_be_written():
    memory = torch.zeros(64)
    x, out = randn(4, 4), memory[:16].view(4, 4)
    mask = memory.view(torch.bool)[:16].view(4, 4)
    with pytest.raises(ValueError, match="out overlaps the mask"):
        softmax(x, mask=mask, out=out)


def test_empty_inputs():
    assert softmax(torch.zeros(0, 3), mask=torch.ones(3, dtype=torch.bool), scale=2).shape == (0, 3)
    assert softmax(torch.zeros(3, 0), mask=torch.ones(3, 1, dtype=torch.bool)).shape == (3, 0)
    assert softmax(torch.zeros(2, 0, 0), causal=True).shape == (2, 0, 0)


def test_masks_are_not_expanded():
    x, mask = randn(2, 3, 5, 64), a_mask(2, 1, 1, 64)
    assert "expanded" not in explain(x, mask=mask).reason
    x, mask = randn(2, 2, 2, 2, 2, 2, 8), a_mask(2, 1, 2, 1, 2, 1, 8)
    assert "expanded" in explain(x, mask=mask).reason
    assert mismatch(softmax(x, mask=mask), expected("softmax", x, -1, mask=mask)) is None
    leaf = x.requires_grad_()
    softmax(leaf, mask=mask, scale=2).square().sum().backward()
    wide = x.detach().double().requires_grad_()
    F.softmax(screened(wide, 2, mask), -1).square().sum().backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-4, atol=1e-6)


def test_layouts_of_masks():
    def layout(mask, shape, axis):
        return scores.mask_layout(mask.shape, mask.stride(), shape, axis)

    whole = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    assert layout(whole, (2, 3, 5, 7), 3) == Mask(((30, 7),), 1, ())
    assert layout(whole[:, :1], (2, 3, 5, 7), 3) == Mask(((2, 105), (3, 0), (5, 7)), 1, ())
    assert layout(whole[:1, :1, :1], (2, 3, 5, 7), 3) == Mask(((30, 0),), 1, ())
    assert layout(whole[0, 0, 0], (2, 3, 5, 7), 1) == Mask(((2, 0),), 0, ((5, 0), (7, 1)))
    assert layout(whole[..., :1], (2, 3, 5, 7), 1) == Mask(((2, 105),), 35, ((5, 7), (7, 0)))
    assert layout(torch.tensor(True), (), 0) == Mask((), 0, ())
    assert len(layout(whole[:, :1], (2, 3, 5, 7), 3).rows) <= MOST_MASK_AXES


def test_an_expanded_mask_is_planned_for_as_one_that_never_was_broadcast():
    whole = torch.ones(6, 40, dtype=torch.bool)
    assert Mask.contiguous(6, 40, 1) == scores.mask_layout(whole.shape, whole.stride(), (6, 40), 1)
    whole = torch.ones(6, 40, 8, dtype=torch.bool)
    assert Mask.contiguous(6, 40, 8) == scores.mask_layout(whole.shape, whole.stride(), (6, 40, 8), 1)


def test_numpy_masks_may_be_read_backwards():
    x, mask = randn(4, 60).numpy(), a_mask(4, 60).numpy()
    right = expected("softmax", torch.from_numpy(x), -1, mask=torch.from_numpy(mask[:, ::-1].copy()))
    assert mismatch(torch.from_numpy(softmax(x, mask=mask[:, ::-1])), right) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-fused", "triton-fused"])
def test_host_arrays_are_copied_with_their_masks(backend):
    x, mask = randn(2, 3, 40), a_mask(2, 1, 40)
    right = expected("softmax", x, -1, mask=mask, scale=0.5)
    assert mismatch(softmax(x, mask=mask, scale=0.5, backend=backend), right) is None
    given = softmax(x.numpy(), mask=mask.numpy(), scale=0.5, backend=backend)
    assert mismatch(torch.from_numpy(given), right) is None


@pytest.mark.gpu
def test_device_arrays_are_copied_to_numpy_with_their_masks():
    x, mask = randn(2, 3, 40, dtype="bfloat16"), a_mask(2, 1, 40)
    y = softmax(x.cuda(), mask=mask.cuda(), scale=0.5, backend="numpy")
    assert mismatch(y.cpu(), expected("softmax", x, -1, mask=mask, scale=0.5)) is None


def test_a_scale_is_not_part_of_what_is_remembered():
    x = randn(4, 50)
    softmax(x, scale=0.1)
    before = len(minikernel.api._calls)
    for scale in np.linspace(0.2, 3, 50):
        softmax(x, scale=scale)
    assert len(minikernel.api._calls) == before


#: Other dtypes are in test_triton_fused.py.
OTHERS = "float64 or float16 or transforms or order or scales"


def test_triton_in_the_interpreter():
    """Its values, without a GPU."""
    pytest.importorskip("triton")
    if INTERPRETED:
        pytest.skip("this is that process")
    assert "passed" in in_the_interpreter(__file__, f"triton and not ({OTHERS})")


def test_a_saved_mask_that_comes_back_otherwise():
    """A hook may give back a copy, laid out in its own way."""
    wide = a_mask(4, 10).logical_or(torch.eye(4, 10, dtype=torch.bool))
    mask, dy = wide[:, ::2], randn(4, 5, seed=1)
    x = randn(4, 5).requires_grad_()
    (right,) = torch.autograd.grad(F.softmax(screened(x, mask=mask), -1), x, dy)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.contiguous(), lambda t: t):
        y = softmax(x, mask=mask)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy)[0], right)


def test_a_mask_made_in_inference_mode():
    with torch.inference_mode():
        mask = a_mask(3, 5).fill_(True)
    x = randn(3, 5).requires_grad_()
    softmax(x, mask=mask).square().sum().backward()
    assert x.grad.isfinite().all()


def test_masks_are_not_kept_alive():
    for options in ({}, {"dtype": torch.float64}):
        for recorded in (False, True):
            mask = a_mask(3, 7)
            seen = weakref.ref(mask)
            softmax(randn(3, 7).requires_grad_(recorded), mask=mask, **options)
            del mask
            gc.collect()
            assert seen() is None, (options, recorded)


def test_a_mask_of_more_axes_than_numpy_has():
    base = a_mask(4, 3)
    x, mask = randn(*[1] * 66, 3, 4), base.t().reshape([1] * 66 + [3, 4])
    right = expected("softmax", x.reshape(3, 4), -1, mask=base.t())
    assert mismatch(softmax(x, mask=mask).reshape(3, 4), right) is None


def test_transforms_refuse_and_round_as_plain_calls_do():
    with pytest.raises(TypeError, match="dtype int64"):
        vmap(lambda row: softmax(row, scale=2.0))(torch.tensor([[1, 2, 3]]))
    x = torch.tensor([[1e30, 2e30]])
    assert vmap(lambda row: softmax(row, scale=1e30))(x).tolist() == softmax(x, scale=1e30).tolist() == [[0, 1]]


def test_explain_refuses_what_softmax_does():
    x, out = randn(4, 4), torch.zeros(16).view(4, 4)
    with pytest.raises(ValueError, match="out overlaps the mask"):
        explain(x, mask=out.view(torch.bool)[:, :4], out=out)
    with pytest.raises(RuntimeError, match="out= can't be recorded"):
        explain(x.requires_grad_(), out=out)


def test_auto_passes_over_a_backend_that_declines_the_gradient(registry):
    def prepare(problem):
        return minikernel.Kernel(lambda x, out, stream, scratch, *more: out.fill(7))

    declining = minikernel.Backend(
        "sevens", 1, ("cpu",), ("float32",), prepare, ops=("softmax", "softmax_backward"), features=("mask",),
        reasons=lambda problem: ["no masks there"] if problem.is_backward and problem.mask else [],
    )  # fmt: skip
    registry.register(declining)
    x, mask = randn(3, 5), a_mask(3, 5)
    assert (softmax(x, mask=mask) == 7).all()
    x.requires_grad_()
    said = explain(x, mask=mask)
    assert said.backend == "numpy"
    assert said.rejected["sevens"] == ("of the gradient: no masks there",)
    assert softmax(x, mask=mask).grad_fn is not None
