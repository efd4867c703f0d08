"""Every kind of launch once, on arrays as small as can be, for ``compute-sanitizer``; to run by hand on a GPU.

    compute-sanitizer --tool memcheck python tests/sanitize.py     (and racecheck, initcheck, synccheck)

Results are compared with float64 too. Exit status 1 if one is wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
    # Each array is an allocation of its own, so that the tools see what lies outside it; torch reads this once.
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch
from cases import GPU_BACKENDS, NAN, mismatch, randn, reference

import minikernel
from minikernel import Problem, driver
from minikernel.backends import cuda_fused

#: What cuda-fused's plan is changed to: columns, and fields of a RowPlan that have room for them.
LAUNCHES = {
    "block, in registers": (2000, {"vectors": 4, "threads": 128}),
    "block, unaligned": (2001, {"vectors": 4, "threads": 160}),
    "block, shared memory": (3000, {"vectors": 2, "threads": 128, "shared_vectors": 4}),
    "block, streamed": (5000, {"vectors": 1, "threads": 96, "streamed": True}),
    "block, shared memory, streamed": (
        5000,
        {"vectors": 1, "threads": 128, "shared_vectors": 2, "streamed": True},
    ),
    "cluster of 2": (3000, {"vectors": 4, "threads": 128, "parts": 2}),
    "cluster of 8, shared memory": (9001, {"vectors": 1, "threads": 128, "parts": 8, "shared_vectors": 2}),
    "cluster of 4, streamed": (5000, {"vectors": 1, "threads": 96, "parts": 4, "streamed": True}),
    "grid": (5000, {"vectors": 4, "threads": 128, "parts": 3, "cooperative": True}),
    "grid, 40 blocks a row": (40_001, {"vectors": 2, "threads": 128, "parts": 40, "cooperative": True}),
    "grid, shared memory": (
        9001,
        {"vectors": 2, "threads": 128, "parts": 5, "cooperative": True, "shared_vectors": 3},
    ),
    "grid, streamed": (9001, {"vectors": 1, "threads": 96, "parts": 3, "cooperative": True, "streamed": True}),
}
_BLOCK = {
    "team": 0,
    "blocks_per_sm": 1,
    "overlap": False,
    "parts": 1,
    "cooperative": False,
    "shared_vectors": 0,
    "streamed": False,
}


def forced(cols: int, fields: dict[str, object]) -> str | None:
    """Run softmax_fused.cu by a plan of those fields."""
    x = randn(3, cols).cuda()
    y = torch.full_like(x, NAN)
    problem = Problem("softmax", "cuda", 0, "float32", "float32", 3, cols, 1, (cols, 1, 1))
    plan = replace(cuda_fused.plan(problem, driver.device(0)), **{**_BLOCK, **fields})
    kernel = cuda_fused.prepare_planned(problem, plan)
    scratch = torch.empty(kernel.scratch, dtype=torch.uint8, device="cuda")
    kernel.run(x.data_ptr(), y.data_ptr(), torch.cuda.current_stream().cuda_stream, scratch.data_ptr())
    return mismatch(y, reference(x))


def called(backend: str, x: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> str | None:
    """Call the public function."""
    x = x.cuda() if x.is_contiguous() else torch.empty_strided(x.shape, x.stride(), device="cuda").copy_(x)
    y = torch.full(x.shape, NAN, dtype=dtype or x.dtype, device="cuda")
    minikernel.softmax(x, dim, backend=backend, dtype=dtype, out=y)
    return mismatch(y, reference(x, dim))


def gradient(backend: str, x: torch.Tensor, dim: int = -1) -> str | None:
    """Call backward, of an input that lies alone in memory."""
    x = x.cuda().requires_grad_()
    dy = randn(*x.shape, seed=1).to(x)
    (dx,) = torch.autograd.grad(minikernel.softmax(x, dim, backend=backend), x, dy)
    exact = x.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(torch.softmax(exact, dim), exact, dy.double())
    error = float((dx.double() - expected).abs().max())
    return None if error < (1e-5 if x.dtype == torch.float32 else 3e-2) else f"off by up to {error:.1e}"


def masked(backend: str, x: torch.Tensor, dim: int = -1, causal: bool = False) -> str | None:
    """Forward and backward with a scale and a mask, each array alone in memory."""
    mask = (randn(*x.shape, seed=3) > 0).cuda()
    mask.select(dim, 0).fill_(True)
    given = x.cuda().requires_grad_()
    dy = randn(*x.shape, seed=1).to(given)
    y = minikernel.softmax(given, dim, scale=-0.5, mask=mask, causal=causal, backend=backend)
    (dx,) = torch.autograd.grad(y, given, dy)
    exact = given.detach().double().requires_grad_()
    kept = mask.tril() if causal else mask
    right = torch.softmax((exact * -0.5).masked_fill(~kept, -torch.inf), dim)
    (expected,) = torch.autograd.grad(right, exact, dy.double())
    error = float((dx.double() - expected).abs().max())
    if error > (1e-5 if x.dtype == torch.float32 else 3e-2):
        return f"its gradient is off by up to {error:.1e}"
    return mismatch(y.detach(), right.detach())


def largest(backend: str, x: torch.Tensor, k: int, dim: int = -1) -> str | None:
    """softmax_topk."""
    found = minikernel.softmax_topk(x.cuda(), k, dim, backend=backend)
    right = torch.topk(reference(x, dim), k, dim)
    if not torch.equal(found.indices.cpu(), right.indices):
        return "other indices"
    return mismatch(found.probabilities.cpu(), right.values)


def in_place(backend: str) -> str | None:
    x = randn(5, 700).cuda()
    expected = reference(x)
    minikernel.softmax(x, backend=backend, out=x)
    return mismatch(x, expected)


def runs() -> dict[str, Callable[[], str | None]]:
    """Everything to run, by what is printed of it."""
    found: dict[str, Callable[[], str | None]] = {}
    inputs = {
        "short rows": (randn(37, 64), -1, None),
        "short unaligned rows": (randn(37, 65), -1, None),
        "short rows out of step": (randn(37, 65)[:, 1:], -1, None),
        "transposed bfloat16": (randn(90, 64, dtype="bfloat16").t(), -1, None),
        "rows of 1": (randn(37, 1), -1, None),
        "a block a row": (randn(5, 2001), -1, None),
        "long rows": (randn(2, 20_001), -1, None),
        "middle axis": (randn(3, 70, 50), 1, None),
        "middle axis, contiguous": (randn(3, 50, 70).transpose(1, 2), 1, None),
        "transposed": (randn(90, 70).t(), -1, None),
        "every other column": (randn(70, 180)[:, ::2], -1, None),
        "bfloat16": (randn(5, 2049, dtype="bfloat16"), -1, None),
        "float16 to float32": (randn(5, 700, dtype="float16"), -1, torch.float32),
        "float64": (randn(5, 700, dtype="float64"), -1, None),
    }
    for backend in GPU_BACKENDS:
        for name, (x, dim, dtype) in inputs.items():
            found[f"{backend}: {name}"] = lambda b=backend, x=x, d=dim, t=dtype: called(b, x, d, t)
        found[f"{backend}: in place"] = lambda b=backend: in_place(b)
    gradients = {
        "short rows": (randn(37, 65), -1),
        "a block a row": (randn(5, 2001), -1),
        "a cluster a row": (randn(3, 40_001), -1),
        "read twice": (randn(4, 300_001), -1),
        "middle axis": (randn(3, 70, 50), 1),
        "long rows side by side": (randn(2, 4097, 4), 1),
        "bfloat16": (randn(5, 2049, dtype="bfloat16"), -1),
        "bfloat16, kept packed": (randn(300, 16_384, dtype="bfloat16"), -1),
    }
    for backend, (name, (x, dim)) in product(("cuda-fused", "triton-fused"), gradients.items()):
        found[f"{backend}: gradient, {name}"] = lambda b=backend, x=x, d=dim: gradient(b, x, d)
    with_scores = {
        "short rows": (randn(37, 65), -1, False),
        "short aligned rows": (randn(37, 64, dtype="bfloat16"), -1, False),
        "causal": (randn(2, 130, 130), -1, True),
        "a block a row": (randn(5, 2001), -1, False),
        "a cluster a row": (randn(3, 40_004), -1, False),
        "read twice": (randn(2, 1_200_004), -1, False),
        "middle axis": (randn(3, 70, 50), 1, False),
        "middle axis, odd": (randn(3, 70, 51), 1, False),
    }
    for backend, (name, (x, dim, causal)) in product(("cuda-fused", "triton-fused"), with_scores.items()):
        found[f"{backend}: masked, {name}"] = lambda b=backend, x=x, d=dim, c=causal: masked(b, x, d, c)
    # In whole 16 bytes, as every allocator gives them: triton-fused reads the last ones whole.
    with_topk = {
        "a warp a row": (randn(36, 65), 9, -1),
        "a block a row": (randn(200, 2001), 40, -1),
        "a cluster a row": (randn(4, 40_001), 64, -1),
        "float16": (randn(4, 9000, dtype="float16"), 1, -1),
        "middle axis": (randn(4, 700, 5), 8, 1),
    }
    for backend, (name, (x, k, dim)) in product(("cuda-fused", "triton-fused"), with_topk.items()):
        found[f"{backend}: largest, {name}"] = lambda b=backend, x=x, k=k, d=dim: largest(b, x, k, d)
    for name, (cols, fields) in LAUNCHES.items():
        found[f"cuda-fused: {name}"] = lambda c=cols, f=fields: forced(c, f)
    return found


def main() -> int:
    if reasons := driver.obstacles():
        print(f"sanitize.py: {'; '.join(reasons)}", file=sys.stderr)
        return 1
    available = minikernel.list_backends()
    wrong = 0
    for name, run in runs().items():
        info = available[name.partition(":")[0]]
        if not info.available:
            print(f"{name}: not run: {'; '.join(info.reasons)}")
            continue
        if "cluster" in name and driver.device(0).capability < 90:
            print(f"{name}: not run: this GPU has no clusters")
            continue
        fault = run()
        torch.cuda.synchronize()
        wrong += fault is not None
        print(f"{name}: {fault or 'right'}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
