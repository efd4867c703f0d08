"""Drop-ins: modules, and a context in which a whole model runs through minikernel."""

from __future__ import annotations

import pytest
import torch
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
from cases import randn
from isolated import run

import minikernel

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class Attention(torch.nn.Module):
    """A block of a small transformer that calls softmax in every way that there is."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.norm, self.gate, self.softmax = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 3),
            torch.nn.Softmax(-1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        gates = self.gate(x).mean(1)
        mixed = gates.softmax(-1)[:, :1, None, None] * torch.softmax(scores, -1)
        mixed = mixed + torch.softmax(input=gates, dim=-1)[:, 1:2, None, None] * F.softmax(scores, dim=-1)
        mixed = mixed + F.softmax(gates, -1)[:, 2:, None, None] * self.softmax(scores)
        return x + self.out((mixed @ v).transpose(1, 2).flatten(2))


class Labeled(torch.Tensor):
    pass


def make(device: str) -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Attention(), Attention(), torch.nn.Linear(32, 11), torch.nn.LogSoftmax(-1))
    return model.to(device), randn(2, 9, 32).to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_transformer_forward_and_backward(device, monkeypatch):
    model, x = make(device)
    target = torch.zeros(18, dtype=torch.long, device=device)

    def step():
        model.zero_grad()
        y = model(x)
        F.nll_loss(y.flatten(0, 1), target).backward()
        return y, [p.grad.clone() for p in model.parameters()]

    expected, expected_gradients = step()
    calls = []
    sound = minikernel.api._call
    monkeypatch.setattr(minikernel.api, "_call", lambda *given: calls.append(given[0]) or sound(*given))
    minikernel.api._calls.clear()  # so that every shape is seen once
    with minikernel.replace_softmax():
        y, gradients = step()
    assert set(calls) == {"softmax", "log_softmax"}
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_every_spelling_is_replaced_and_no_other():
    x = randn(3, 4)
    seen = []
    with minikernel.use_backend("numpy"), minikernel.replace_softmax():
        import minikernel.nn as nn

        original = dict(nn._REPLACED)
        try:
            for function, (ours, read) in original.items():
                nn._REPLACED[function] = (lambda *a, o=ours, **k: seen.append(o) or o(*a, **k), read)
            results = [
                F.softmax(x, -1), F.softmax(x, dim=1), torch.softmax(x, 1), torch.softmax(input=x, dim=1),
                torch.special.softmax(x, 1), x.softmax(1), x.softmax(dim=-1), torch.nn.Softmax(1)(x),
                F.softmax(x, 1, dtype=torch.float64).float(), torch.softmax(x, 1, out=torch.empty(3, 4)),
            ]  # fmt: skip
            logs = [
                F.log_softmax(x, -1), torch.log_softmax(x, 1), x.log_softmax(1), torch.nn.LogSoftmax(-1)(x),
                torch.special.log_softmax(x, 1),
            ]  # fmt: skip
            assert seen == [minikernel.softmax] * len(results) + [minikernel.log_softmax] * len(logs)
            F.relu(x), x.sum(), torch.exp(x)
            assert len(seen) == len(results) + len(logs)
        finally:
            nn._REPLACED.update(original)
    for result in results:
        torch.testing.assert_close(result, torch.softmax(x, 1))
    for result in logs:
        torch.testing.assert_close(result, torch.log_softmax(x, 1))


def test_what_has_no_path_goes_to_pytorch():
    sparse = torch.eye(3).to_sparse()
    labeled = torch.ones(3, 4).as_subclass(Labeled)
    with minikernel.replace_softmax():
        assert torch.sparse.softmax(sparse, 1).is_sparse
        assert type(torch.softmax(labeled, -1)) is Labeled
        assert torch.softmax(torch.ones(3, 4, device="meta"), -1).is_meta
        with pytest.warns(UserWarning, match="Implicit dimension"):
            F.softmax(torch.ones(3, 4))
        with pytest.raises(RuntimeError):
            torch.softmax(torch.ones(3, 4, dtype=torch.int64), -1)
        out = torch.empty(0)
        assert torch.softmax(torch.ones(3, 4), -1, out=out).shape == (3, 4)
        traced = torch.fx.experimental.proxy_tensor.make_fx(torch.nn.Softmax(-1))(torch.ones(3, 4))
        assert torch.allclose(traced(torch.ones(3, 4)), torch.full((3, 4), 0.25))


def test_the_backend_and_its_name():
    with pytest.raises(ValueError, match="nonsense"):
        minikernel.replace_softmax("nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        minikernel.nn.Softmax(backend="nonsense")
    with minikernel.replace_softmax("numpy"):
        torch.testing.assert_close(F.softmax(torch.ones(3, 4), -1), torch.full((3, 4), 0.25))


def test_modules():
    x = randn(3, 4, 5)
    for dim in (0, 1, -1):
        torch.testing.assert_close(minikernel.nn.Softmax(dim)(x), torch.nn.Softmax(dim)(x))
        torch.testing.assert_close(minikernel.nn.Softmax(dim)(input=x), torch.nn.Softmax(dim)(input=x))
        torch.testing.assert_close(minikernel.nn.LogSoftmax(dim)(x), torch.nn.LogSoftmax(dim)(x))
    module = minikernel.nn.Softmax(1, backend="numpy", dtype=torch.float64)
    assert module(x).dtype == torch.float64
    assert repr(module) == "Softmax(dim=1, backend='numpy', dtype=torch.float64)"
    assert repr(minikernel.nn.LogSoftmax()) == "LogSoftmax(dim=-1)"


def test_pytorch_is_imported_when_first_asked_for():
    output = run(
        "import sys, minikernel; print('torch' in sys.modules); minikernel.nn; print('torch' in sys.modules)"
    )
    assert output.split() == ["False", "True"]
