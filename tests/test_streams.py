"""Streams, graphs, threads and memory: ordered as the caller's work is, without waiting, without growing."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest
import torch
from cases import GPU_BACKENDS, KINDS, OPS, Route, mismatch, randn, reference
from isolated import capture_first_call, run

import minikernel
from minikernel import softmax

ON_GPU = pytest.mark.gpu


@pytest.fixture(params=GPU_BACKENDS)
def gpu(request) -> Route:
    """Every GPU backend, from PyTorch."""
    info = minikernel.list_backends()[request.param]
    if not info.available:
        pytest.skip("; ".join(info.reasons))
    return Route(request.param, KINDS["torch-cuda"])


def spin(milliseconds: float = 20.0) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


# Streams


@ON_GPU
def test_a_side_stream_with_a_slow_producer(gpu):
    """Without an order between them the kernel would read what was there before."""
    for shape, dim in (((64, 600), -1), ((64, 600), 0), ((2, 20_000), -1)):
        values = randn(*shape).cuda()
        gpu.run(values, dim)  # warm, so that nothing waits for a compiler
        x = torch.full(shape, torch.nan, device="cuda")
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            spin()
            x.copy_(values)
            y = gpu.run(x, dim)
            del x
            z = torch.ones(shape, device="cuda")  # may take the memory that x had
            total = y + z - 1
        stream.synchronize()
        assert mismatch(y, reference(values, dim)) is None
        assert mismatch(total, reference(values, dim).float().double()) is None or (total - y).abs().max() < 1e-6


@ON_GPU
def test_cupy_s_own_stream(gpu):
    cupy = pytest.importorskip("cupy")
    route = Route(gpu.backend, KINDS["cupy"])
    values = randn(64, 600)
    expected = reference(values)
    route(values)
    source = route.array(values)
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream()):
        x = cupy.full((64, 600), cupy.nan, dtype=cupy.float32)
        cupy.cuda.Device().synchronize()
        with stream:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
                spin()
            x[...] = source
            y = route.run(x)
            doubled = y * 2
        stream.synchronize()
        assert mismatch(torch.from_numpy(cupy.asnumpy(doubled)) / 2, expected) is None


@ON_GPU
def test_each_framework_has_its_own_current_stream(gpu):
    """PyTorch's current stream says nothing about CuPy's arrays, nor the other way round."""
    cupy = pytest.importorskip("cupy")
    values = randn(64, 600)
    side = torch.cuda.Stream()
    gpu(values)
    with torch.cuda.stream(side), cupy.cuda.Stream(non_blocking=True):
        x = KINDS["torch-cuda"].array(values)
        y = gpu.run(x)
    side.synchronize()
    assert mismatch(y, reference(values.cuda())) is None


@ON_GPU
def test_the_same_bits_on_any_stream(gpu):
    x = randn(64, 4097).cuda()
    expected = gpu.run(x)
    torch.cuda.synchronize()
    for _ in range(4):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            y = gpu.run(x)
        stream.synchronize()
        assert torch.equal(y, expected)


@ON_GPU
def test_a_chain_of_calls_in_place(gpu):
    """Each reads what the one before wrote: launches that may start early must wait for it."""
    for shape, dim in (((512, 600), -1), ((64, 64), 0), ((8, 9000), -1), ((3000, 8), -1)):
        x = randn(*shape).cuda()
        expected = x.clone()
        for _ in range(30):
            gpu.run(x, dim, out=x)
            x.mul_(50)
        for _ in range(30):
            expected = gpu.run(expected, dim).clone()
            torch.cuda.synchronize()
            expected.mul_(50)
        assert torch.equal(x, expected)
    y = randn(512, 600).cuda()
    for _ in range(50):
        y = gpu.run(gpu.run(y).mul_(100))
    assert torch.isfinite(y).all()


@ON_GPU
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("op", OPS)
def test_a_warm_call_does_not_synchronize(gpu, op):
    cases = []
    for shape, dim, dtype in (((64, 600), -1, "float32"), ((64, 600), 0, "float16"), ((2, 20_000), -1, "bfloat16")):
        x = randn(*shape, dtype=dtype).cuda()
        out = torch.empty_like(x)
        gpu.run(x, dim, op)
        gpu.run(x, dim, op, out=out)
        cases.append((x, dim, out))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        spin(50)
        behind = torch.cuda.Event()
        behind.record()
        for x, dim, out in cases:
            gpu.run(x, dim, op)
            gpu.run(x, dim, op, out=out)
        assert not behind.query(), "it waited for the work before it"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


# Graphs


@ON_GPU
def test_a_captured_call_replays_with_new_values(gpu):
    for shape, dim in (((64, 600), -1), ((64, 600), 0), ((1, 20_000), -1), ((4, 8), -1)):
        x = randn(*shape).cuda()
        gpu.run(x, dim)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = gpu.run(x, dim)
            z = gpu.run(y, dim)
        for seed in range(3):
            x.copy_(randn(*shape, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            assert mismatch(y, reference(x, dim)) is None
            assert mismatch(z, reference(y, dim)) is None


@ON_GPU
@pytest.mark.parametrize("backend", ["auto", "triton-fused"])
def test_the_first_call_of_a_process_is_captured_or_says_to_warm_up(backend):
    capture_first_call(
        setup='x = torch.randn(64, 600, device="cuda")',
        call=f"minikernel.softmax(x, backend={backend!r})",
        check="""
assert (found.double() - torch.softmax(x.double(), -1)).abs().max() < 1e-6
assert minikernel.explain(x).backend in ("cuda-fused", "triton-fused"), minikernel.explain(x)
""",
    )


# Threads


def hammer(route: Route, calls: int) -> list[str]:
    """Eight threads at a barrier; what went wrong in any."""
    shapes = [((16, 600), -1), ((3, 14_000), -1), ((16, 600), 0), ((3, 5000), -1), ((100, 8), -1)]
    shapes = shapes if route.backend != "cuda-naive" else shapes[::2]
    arrays = [(route.array(randn(*shape, seed=i)), dim) for i, (shape, dim) in enumerate(shapes)]
    expected = [route.kind.tensor(route.run(x, dim)).cpu() for x, dim in arrays]
    barrier, wrong = threading.Barrier(8), []

    def work(number):
        try:
            barrier.wait()
            for call in range(calls):
                k = (call + number) % len(arrays)
                y = route.run(*arrays[k])
                if call % 50 == 0 and not torch.equal(route.kind.tensor(y).cpu(), expected[k]):
                    wrong.append(f"thread {number}, call {call}: other bits")
        except Exception as error:
            wrong.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def test_eight_threads(torch_route):
    assert hammer(torch_route, calls=100) == []


@ON_GPU
def test_a_thread_s_first_act_is_a_new_length(gpu):
    """The kernel is compiled already, but no context is current in the thread that sets it up and launches it."""
    lengths = [n for n in (14_000, 20_000, 30_001, 50_000) if not gpu.reasons(2, n)]
    arrays = [randn(2, cols).cuda() for cols in lengths]
    gpu.run(arrays[0])
    outs = [torch.empty_like(x) for x in arrays]
    errors = []

    def work():
        try:
            for x, out in zip(arrays, outs, strict=True):
                gpu.run(x, out=out)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    torch.cuda.synchronize()
    for x, out in zip(arrays, outs, strict=True):
        assert mismatch(out, reference(x)) is None


@ON_GPU
def test_eight_threads_with_nothing_compiled_yet_compile_once(tmp_path):
    available = [name for name in GPU_BACKENDS if minikernel.list_backends()[name].available]
    output = run(
        f"""
import threading, torch, minikernel
from minikernel import cuda
compiled = []
def counting(sound):
    def count(*args, **kwargs):
        compiled.append(1)
        return sound(*args, **kwargs)
    return count
cuda.compile_image = counting(cuda.compile_image)
if "triton-fused" in {available!r}:
    from minikernel.backends import triton_fused
    triton_fused.KernelSource.compile = counting(triton_fused.KernelSource.compile)
x = torch.randn(16, 60, device="cuda")
expected = torch.softmax(x.double(), -1)
for backend in {available!r}:
    compiled.clear()
    barrier, wrong = threading.Barrier(8), []
    def work():
        try:
            barrier.wait()
            for _ in range(1000):
                y = minikernel.softmax(x, backend=backend)
            if (y.double() - expected).abs().max() > 1e-6:
                wrong.append("wrong values")
        except Exception as error:
            wrong.append(repr(error))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    print(backend, len(compiled), *wrong)
""",
        XDG_CACHE_HOME=str(tmp_path / "minikernel"),
        TRITON_CACHE_DIR=str(tmp_path / "triton"),
    )
    assert output.splitlines() == [f"{name} 1" for name in available]


# Memory


def failing_calls(route: Route):
    x = route.array(randn(4, 6))
    return (
        lambda: route.run(x, 5),
        lambda: route.run(x, backend="nonsense"),
        lambda: route.run(x, out=route.kind.poisoned((4, 7), "float32")),
        lambda: route.run(x, dtype="int32"),
    )


def assert_fails(call):
    # pytest.raises keeps a few bytes of each error.
    try:
        call()
    except (ValueError, TypeError, IndexError):
        return
    raise AssertionError("a call that must fail didn't")


@ON_GPU
def test_device_memory_is_flat(gpu):
    x, out = randn(64, 60).cuda(), torch.empty(64, 60, device="cuda")
    calls = (lambda: gpu.run(x), lambda: gpu.run(x, out=out), lambda: gpu.run(x, 0), lambda: gpu.run(x.T))
    failing = failing_calls(gpu)

    def some(times):
        for _ in range(times):
            for call in calls:
                call()
        for _ in range(times // 10):
            for call in failing:
                assert_fails(call)
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = some(20)
    assert some(1000) <= before

    def taken():
        free_before, _ = torch.cuda.mem_get_info()
        some(1000)
        return free_before - torch.cuda.mem_get_info()[0]

    # Other processes take memory of the same GPU too; a leak shows each time.
    assert min(taken() for _ in range(5)) < 16 * 2**20


@ON_GPU
def test_cupy_s_pool_is_flat(gpu):
    cupy = pytest.importorskip("cupy")
    route = Route(gpu.backend, KINDS["cupy"])
    x = route.array(randn(64, 60))
    pool = cupy.get_default_memory_pool()
    for _ in range(20):
        route.run(x)
    before = pool.used_bytes()
    for _ in range(1000):
        route.run(x)
    assert pool.used_bytes() <= before


def test_host_memory_is_flat(torch_route):
    x, out = torch_route.array(randn(4, 6)), torch_route.array(randn(4, 6))
    failing = failing_calls(torch_route)

    def some(times):
        for _ in range(times):
            torch_route.run(x)
            torch_route.run(x, out=out)
        for _ in range(times // 4):
            for call in failing:
                assert_fails(call)
        gc.collect()

    some(100)
    tracemalloc.start()
    try:
        some(100)
        before = tracemalloc.get_traced_memory()[0]
        some(2000)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000, f"{grown} bytes more after 2000 calls"


def test_memory_is_flat_however_many_shapes_are_seen():
    """Twenty thousand shapes, more than any cache keeps."""
    from minikernel import api, dispatch

    for cols in range(1, 20_000):
        softmax(np.zeros((1, cols % 7 + 1, cols), np.float32)[:, :1, :3], dim=1)
    assert len(api._calls) <= dispatch.CACHE_SIZE
    assert len(dispatch._kernels) <= dispatch.CACHE_SIZE
