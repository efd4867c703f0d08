"""torch.compile: one operator, no graph break, any shape."""

from __future__ import annotations

import pytest
import torch
import torch.fx.experimental.proxy_tensor
import torch.nn.functional as F
from cases import BESIDE_TORCH as OPS
from cases import randn
from isolated import run
from torch.library import opcheck

import minikernel
from minikernel import log_softmax, softmax

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_forward_and_backward_without_a_graph_break(op, device):
    ours, theirs = OPS[op]
    x = randn(4, 60).to(device).requires_grad_()
    y = compiled(lambda x: ours(x * 2, -1) + 1)(x)
    expected = theirs(x * 2, -1) + 1
    torch.testing.assert_close(y, expected)
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    (expected_dx,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(dx, expected_dx)


@pytest.mark.parametrize("device", DEVICES)
def test_dynamic_shapes_compile_once(device):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    call = torch.compile(lambda x: softmax(x, 1), fullgraph=True, dynamic=True, backend=count)
    for rows, cols in ((3, 4), (5, 6), (7, 9)):
        x = randn(rows, cols).to(device)
        torch.testing.assert_close(call(x), F.softmax(x, 1))
    assert len(graphs) == 1


def test_arguments_reach_the_operator():
    x = randn(4, 6, dtype="float16")
    y = compiled(lambda x: softmax(x, 0, dtype=torch.float32, backend="numpy"))(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, F.softmax(x, 0, dtype=torch.float32))
    y = compiled(lambda x: log_softmax(x, dtype="float64"))(x)
    torch.testing.assert_close(y, F.log_softmax(x, -1, dtype=torch.float64))
    out = torch.empty(4, 6)
    assert compiled(lambda x, out: softmax(x, out=out))(x.float(), out) is not None
    torch.testing.assert_close(out, F.softmax(x.float(), -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", OPS)
def test_the_operators_are_well_formed(op, device):
    operators = torch.ops.minikernel
    softmax(randn(2, 2).requires_grad_())  # defines them
    x, y = randn(3, 4).to(device).requires_grad_(), randn(3, 4, seed=1).to(device)
    half = randn(3, 4, dtype="float16").to(device).requires_grad_()
    for arguments in ((x, -1), (x, 0, torch.float64), (half, 1, torch.float32), (half, 1)):
        opcheck(getattr(operators, op).default, arguments)
    opcheck(getattr(operators, f"{op}_backward").default, (y, y, -1, torch.float32))
    opcheck(getattr(operators, f"{op}_backward").default, (y, y, -1, torch.float16))


def test_the_very_first_call_may_be_compiled():
    """Even where minikernel was imported before PyTorch, and nothing has run yet."""
    output = run(
        """
import minikernel
import torch
call = torch.compile(lambda x: minikernel.softmax(x), fullgraph=True, backend="eager")
x = torch.randn(3, 4)
print(torch.allclose(call(x), torch.softmax(x, -1)))
"""
    )
    assert output.split() == ["True"]


@pytest.mark.parametrize("device", DEVICES)
def test_modules_and_the_choice_of_backend(device):
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), minikernel.nn.LogSoftmax()).to(device)
    x = randn(3, 6).to(device)
    torch.testing.assert_close(compiled(model)(x), F.log_softmax(model[0](x), -1))


@pytest.mark.gpu
def test_inductor():
    x = randn(8, 600).cuda().requires_grad_()
    call = torch.compile(lambda x: softmax(x.sin()).cos(), fullgraph=True)
    try:
        y = call(x)
    except Exception as error:
        if "compiler" in str(error).lower():  # Inductor itself wants a C++ compiler
            pytest.skip(str(error)[:200])
        raise
    torch.testing.assert_close(y, F.softmax(x.sin(), -1).cos())


def test_other_threads_run_while_one_compiles(monkeypatch):
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    x = randn(3, 5)
    torch.testing.assert_close(softmax(x), F.softmax(x, -1))
    torch.testing.assert_close(torch.ops.minikernel.softmax(x, -1), F.softmax(x, -1))
    assert softmax(x.numpy()).shape == (3, 5)


@pytest.mark.parametrize("op", OPS)
def test_double_backward_through_the_operator(op):
    x = randn(3, 5, dtype="float64").requires_grad_()
    ours = getattr(torch.ops.minikernel, op)
    softmax(x)
    assert torch.autograd.gradcheck(lambda x: ours(x, -1), x)
    assert torch.autograd.gradgradcheck(lambda x: ours(x, -1), x)
    number = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: ours(x, 0), number)


@pytest.mark.parametrize("op", OPS)
def test_transforms_inside_a_compiled_function(op):
    ours, theirs = OPS[op]
    x, t = randn(3, 5), randn(3, 5, seed=1)
    call = torch.compile(lambda x, t: torch.func.jvp(lambda x: ours(x, -1), (x,), (t,))[1], backend="eager")
    torch.testing.assert_close(call(x, t), torch.func.jvp(lambda x: theirs(x, -1), (x,), (t,))[1])
    call = torch.compile(torch.vmap(lambda x: ours(x, 0)), backend="eager")
    torch.testing.assert_close(call(x), theirs(x, 1))


@pytest.mark.parametrize("op", OPS)
def test_grad_inside_a_compiled_function_is_left_to_eager_mode(op):
    x = randn(3, 5)

    def of(call):
        return torch.func.grad(lambda x: (call(x, -1) ** 3).sum())

    ours, theirs = map(of, OPS[op])
    torch.testing.assert_close(torch.compile(ours, backend="aot_eager")(x), theirs(x))
    torch.testing.assert_close(torch.compile(torch.vmap(ours), backend="aot_eager")(x), torch.vmap(theirs)(x))


def test_replace_softmax_leaves_no_graph_break():
    x = randn(3, 5)
    call = compiled(lambda x: F.softmax(x, -1) + x.log_softmax(0))
    with minikernel.replace_softmax():
        torch.testing.assert_close(call(x), torch.softmax(x, -1) + torch.log_softmax(x, 0))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    x = randn(3, 5)
    program = torch.export.export(torch.nn.Sequential(minikernel.nn.Softmax()), (x,), strict=strict)
    assert "minikernel.softmax" in str(program.graph)
    torch.testing.assert_close(program.module()(x), F.softmax(x, -1))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(mode):
    x = randn(3, 5)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: log_softmax(x, 0), tracing_mode=mode)(x)
    torch.testing.assert_close(graph(x * 2), F.log_softmax(x * 2, 0))


def test_symbolic_trace():
    x = randn(3, 5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), minikernel.nn.Softmax())
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_linearize():
    x, t = randn(3, 5), randn(3, 5, seed=1)
    _, ours = torch.func.linearize(lambda x: softmax(x, 0), x)
    _, theirs = torch.func.linearize(lambda x: F.softmax(x, 0), x)
    torch.testing.assert_close(ours(t), theirs(t))


def test_out_is_checked_as_in_eager_mode():
    call = torch.compile(lambda x, out: softmax(x, out=out), backend="eager")
    x = randn(3, 5)
    with pytest.raises(ValueError, match="shape"):
        call(x, torch.empty(4, 3, 5))
    with pytest.raises(TypeError, match="dtype"):
        call(x, torch.empty(3, 5, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="grad"):
        call(x.clone().requires_grad_(), torch.empty(3, 5))


def test_a_backend_without_gradients_is_refused_by_the_operator(registry):
    def prepare(problem):
        return minikernel.Kernel(lambda x, out, stream, scratch: out.fill(7))

    registry.register(minikernel.Backend("sevens", 90, ("cpu",), ("float32",), prepare))
    x = randn(3, 5)
    call = torch.compile(lambda x: softmax(x, backend="sevens"), fullgraph=True, backend="eager")
    assert (call(x) == 7).all()
    registry.register(minikernel.Backend("first", 1, ("cpu",), ("float32",), prepare))
    auto = torch.compile(lambda x: softmax(x), fullgraph=True, backend="eager")
    assert (auto(x) == 7).all()
    torch.testing.assert_close(auto(x.clone().requires_grad_()), F.softmax(x, -1))
    with pytest.raises(minikernel.BackendError, match="it has no gradient"):
        call(x.requires_grad_())
