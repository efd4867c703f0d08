"""Training on a GPU: captured in graphs, on several streams, in many threads, without waiting for the GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from cases import randn
from isolated import capture_first_call, run

import minikernel
from minikernel import softmax

pytestmark = pytest.mark.gpu

#: Rows of a warp, of a block and of a cluster, and another axis.
SHAPES = (((64, 600), -1), ((16, 5000), -1), ((2, 60_000), -1), ((4, 300, 32), 1))


@pytest.fixture(params=["cuda-fused", "triton-fused", "auto"])
def backend(request) -> str:
    if request.param != "auto" and not (info := minikernel.list_backends()[request.param]).available:
        pytest.skip("; ".join(info.reasons))
    return request.param


def step(
    x: torch.Tensor, dy: torch.Tensor, dim: int, backend: str, **scores: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient."""
    y = softmax(x, dim, backend=backend, **scores)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def beside(x: torch.Tensor, dy: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by PyTorch in float64."""
    x = x.detach().double().requires_grad_()
    y = F.softmax(x, dim)
    return y.detach().float(), torch.autograd.grad(y, x, dy.double())[0].float()


def spin(milliseconds: float) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def test_a_captured_training_step_replays_with_new_values(backend):
    """As PyTorch's manual says: warmed up on a side stream, forward and backward captured together."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 600), minikernel.nn.Softmax(backend=backend)).cuda()
    given, target = torch.randn(32, 64, device="cuda"), torch.randn(32, 600, device="cuda")

    def train():
        loss = F.mse_loss(model(given), target)
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            train()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train()
    for seed in range(3):
        given.copy_(randn(32, 64, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        # Not the model's own parameters, whose part in the captured graph is still there.
        leaves = [parameter.detach().requires_grad_() for parameter in model.parameters()]
        expected = F.mse_loss(F.softmax(F.linear(given, *leaves), -1), target)
        gradients = torch.autograd.grad(expected, leaves)
        torch.testing.assert_close(loss.detach(), expected.detach())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("scores", ["", "mask=mask, scale=1.0,"])
def test_the_first_step_of_a_process_is_captured_or_says_to_warm_up(backend, scores):
    capture_first_call(
        setup="""
x = torch.randn(64, 600, device="cuda", requires_grad=True)
dy = torch.randn(64, 600, device="cuda")
mask = torch.ones(600, dtype=torch.bool, device="cuda")
""",
        call=f"torch.autograd.grad(minikernel.softmax(x, {scores} backend={backend!r}), x, dy)[0]",
        check="""
wide = x.detach().double().requires_grad_()
(right,) = torch.autograd.grad(torch.softmax(wide, -1), wide, dy.double())
assert (found.double() - right).abs().max() < 1e-6
""",
    )


def test_a_captured_step_with_scores_replays_with_a_new_mask(backend):
    x, dy, mask = (
        randn(16, 5000).cuda().requires_grad_(),
        randn(16, 5000, seed=1).cuda(),
        randn(16, 5000).cuda() > 0,
    )
    step(x, dy, -1, backend, mask=mask, scale=-2.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step(x, dy, -1, backend, mask=mask, scale=-2.0)
    for seed in range(2, 4):
        mask.copy_(randn(16, 5000, seed=seed) > 0)
        graph.replay()
        torch.cuda.synchronize()
        wide = x.detach().double().requires_grad_()
        expected = F.softmax((wide * -2).masked_fill(~mask, -torch.inf), -1)
        torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-9)
        right = torch.autograd.grad(expected, wide, dy.double())[0]
        torch.testing.assert_close(dx.double(), right, rtol=1e-4, atol=1e-7)


def test_two_streams_interleaved(backend):
    """Each step on its own stream, behind a slow producer there: backward must run on the stream of its forward."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for shape, dim in SHAPES:
        values = [randn(*shape, seed=s).cuda() for s in (0, 1)]
        dy = randn(*shape, seed=2).cuda()
        step(values[0].clone().requires_grad_(), dy, dim, backend)  # warm, so that nothing waits for a compiler
        inputs = [torch.full(shape, torch.nan, device="cuda") for _ in streams]
        torch.cuda.synchronize()
        outputs, gradients = [], []
        for stream, x, value in zip(streams, inputs, values, strict=True):
            with torch.cuda.stream(stream):
                spin(10)
                x.copy_(value)
                x.requires_grad_()
                outputs.append(softmax(x, dim, backend=backend))
        for stream, x, y in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                gradients.append(torch.autograd.grad(y, x, dy)[0])
        torch.cuda.synchronize()
        for value, y, dx in zip(values, outputs, gradients, strict=True):
            right_y, right_dx = beside(value, dy, dim)
            torch.testing.assert_close(y.detach(), right_y, rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(dx, right_dx, rtol=1e-4, atol=1e-7)


def test_memory_is_reused_on_a_side_stream(backend):
    """What backward has freed may be another tensor's at once, on the same stream."""
    values, dy = randn(256, 5000).cuda(), randn(256, 5000, seed=1).cuda()
    right = beside(values, dy, -1)[1]
    step(values.clone().requires_grad_(), dy, -1, backend)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(side):
        spin(10)
        for i in range(8):
            x = values.clone().requires_grad_()
            found.append(step(x, dy * (i + 1), -1, backend)[1])
            del x
            torch.full_like(values, torch.nan)  # takes the memory of something that is gone
    side.synchronize()
    for i, dx in enumerate(found):
        torch.testing.assert_close(dx, right * (i + 1), rtol=1e-4, atol=1e-6)


def synchronizations(work) -> int:
    """How many calls that wait for the GPU are made, as the profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        work()
    names = [event.key for event in seen.key_averages() for _ in range(event.count)]
    return sum("Synchronize" in name for name in names)


@pytest.mark.filterwarnings("ignore")
def test_training_synchronizes_nowhere(backend):
    steps = []
    for shape, dim in SHAPES:
        x, dy = randn(*shape).cuda().requires_grad_(), randn(*shape, seed=1).cuda()
        steps += [(x, dy, dim, {}), (x, dy, dim, {"scale": 0.125, "mask": x > 0})]
    square, dy = randn(2, 64, 64).cuda().requires_grad_(), randn(2, 64, 64, seed=1).cuda()
    steps.append((square, dy, -1, {"causal": True}))

    def work():
        for x, dy, dim, scores in steps:
            step(x, dy, dim, backend, **scores)
            with torch.no_grad():
                minikernel.softmax_topk(x, 4, dim, backend=backend)

    work()
    torch.cuda.synchronize()

    idle = synchronizations(lambda: None)  # the profiler's own
    assert synchronizations(lambda: (work(), torch.cuda.synchronize())) > idle, "nothing is counted here"
    assert synchronizations(work) == idle

    torch.cuda.set_sync_debug_mode("error")
    try:
        spin(50)
        behind = torch.cuda.Event()
        behind.record()
        work()
        assert not behind.query(), "it waited for the work before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_many_threads_with_many_streams_and_nothing_compiled_yet():
    output = run(
        """
import threading, torch, torch.nn.functional as F, minikernel
shapes = [((64, 600), -1), ((16, 5000), -1), ((2, 60_000), -1), ((4, 300, 32), 1)]
torch.cuda.init()
barrier, wrong = threading.Barrier(8), []
def work(number):
    try:
        stream = torch.cuda.Stream()
        torch.manual_seed(number)
        barrier.wait()
        with torch.cuda.stream(stream):
            for turn in range(8):
                shape, dim = shapes[(turn + number) % len(shapes)]
                x = torch.randn(shape, device="cuda", requires_grad=True)
                dy = torch.randn(shape, device="cuda")
                (dx,) = torch.autograd.grad(minikernel.softmax(x, dim), x, dy)
                wide = x.detach().double().requires_grad_()
                (right,) = torch.autograd.grad(F.softmax(wide, dim), wide, dy.double())
                if (dx - right).abs().max() > 1e-5:
                    wrong.append((number, turn))
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not wrong, wrong
print("right")
"""
    )
    assert output.split()[-1] == "right"


def test_threads_with_streams_share_a_warm_cache(backend):
    x, dy = randn(64, 600).cuda(), randn(64, 600, seed=1).cuda()
    expected = step(x.clone().requires_grad_(), dy, -1, backend)[1]
    torch.cuda.synchronize()
    wrong = []

    def work():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    _, dx = step(x.clone().requires_grad_(), dy, -1, backend)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(dx, expected):
                    wrong.append("other bits")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
