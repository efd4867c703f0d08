"""Every CUDA source compiles for every supported GPU, on any machine: NVRTC needs no driver. Nothing spills."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from cases import OPS
from test_plan import DEVICES, LENGTHS, PAIRS, fused_problems
from test_plan_columns import problems as columns_problems
from test_plan_topk import topk_problems

from minikernel import cuda
from minikernel.backends import cuda_fused, fused_backward, fused_topk
from minikernel.backends.fused_columns import plan_columns
from minikernel.problem import BACKWARD, Mask, Problem

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
NOT_FUSED = ("softmax_naive.cu", "softmax_smem.cu", "softmax_parallel.cu")


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    pytest.importorskip("cupy", reason="NVRTC is reached through CuPy, which is not installed here")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except Exception as error:
        pytest.skip(f"CuPy finds no NVRTC: {error}")
    return nvrtc


def test_supported_capabilities_are_the_compiler_s(nvrtc):
    known = set(nvrtc.getSupportedArchs())
    assert {80, 90} <= known
    if missing := set(CAPABILITIES) - known:
        assert missing <= {75, 100, 120}, "an older NVRTC has no Blackwell, a newer one may drop Turing"


@cache
def resources(file: str, macros: tuple[tuple[str, str], ...], capability: int) -> dict[str, int]:
    """What a kernel takes of a multiprocessor, as ptxas reports it."""
    from cupy.cuda import nvrtc

    if capability not in nvrtc.getSupportedArchs():
        pytest.skip(f"this NVRTC can't compile for sm_{capability}")
    options = [*cuda.options(dict(macros)), f"-arch=sm_{capability}", "--ptxas-options=-v"]
    program = nvrtc.createProgram(cuda.source(file), file, [], [])
    try:
        nvrtc.compileProgram(program, options)
        assert nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        pytest.fail(f"{file} {dict(macros)} for sm_{capability}:\n{nvrtc.getProgramLog(program)}")
    finally:
        log = nvrtc.getProgramLog(program)
        nvrtc.destroyProgram(program)
    # A Turing multiprocessor runs 1024 threads: blocks of 128 promised nine times are taken as eight.
    promised = dict(macros)
    if capability == 75 and int(promised.get("BLOCKS", 0)) * int(promised.get("THREADS", 0)) > 1024:
        log = log.replace("ptxas warning : Value of threads per SM", "ptxas: Value of threads per SM")
    assert not re.search(r"\bwarning\b", log), log
    local = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    used = re.search(r"Used (\d+) registers", log)
    if not (local and used):
        pytest.skip("this NVRTC doesn't report registers and spills")
    stack, stores, loads = map(int, local.groups())
    return {"stack": stack, "spill stores": stores, "spill loads": loads, "registers": int(used[1])}


def macros_of(problem: Problem, **more: object) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(cuda.defines(problem, **more).items()))


def a_problem(op: str, dtype: str, out_dtype: str) -> Problem:
    return Problem(op, "cuda", 0, dtype, out_dtype, 512, 600, 1, (600, 1, 1))


def assert_lean(file: str, macros: tuple[tuple[str, str], ...], capability: int) -> None:
    used = resources(file, macros, capability)
    in_local_memory = {name: size for name, size in used.items() if name != "registers" and size}
    assert not in_local_memory, f"{file} {dict(macros)} for sm_{capability} uses local memory: {used}"


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("file", NOT_FUSED)
def test_the_lower_rungs(file, capability, failures):
    for op, (dtype, out_dtype) in product(OPS, PAIRS if capability in (80, 90) else PAIRS[1::2]):
        with failures.case(f"{op}, {dtype} to {out_dtype}"):
            if dtype != "float64":  # double's exp and log call a slow path with a stack on some GPUs
                assert_lean(file, macros_of(a_problem(op, dtype, out_dtype)), capability)
            else:
                resources(file, macros_of(a_problem(op, dtype, out_dtype)), capability)


@cache
def row_macros(op: str, dtype: str, out_dtype: str, capability: int) -> frozenset[tuple[tuple[str, str], ...]]:
    """All sets of macros that planning comes to for rows in one piece."""
    device = DEVICES[capability]
    plans = ((p, cuda_fused.plan(p, device)) for p in fused_problems(op, dtype, out_dtype))
    return frozenset(macros_of(p, **plan.macros()) for p, plan in plans if isinstance(plan, cuda_fused.RowPlan))


@cache
def columns_macros(op: str, dtype: str, out_dtype: str, capability: int) -> list[tuple[tuple[str, str], ...]]:
    """All sets of macros that planning comes to for rows side by side."""
    plans = ((p, plan_columns(p, DEVICES[capability])) for p in columns_problems(op, dtype, out_dtype))
    return sorted({macros_of(p, **plan.macros()) for p, plan in plans if plan})


def strided_macros(op: str, dtype: str, out_dtype: str) -> list[tuple[tuple[str, str], ...]]:
    switches = product((1, 2, 4, 8, 16, 32), (False, True), (False, True))
    problem = a_problem(op, dtype, out_dtype)
    return [
        macros_of(problem, **cuda_fused.StridedPlan(lanes, turn_in, turn_out, grid=1).macros())
        for lanes, turn_in, turn_out in switches
    ]


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_few_kernels_serve_all_row_lengths(dtype, out_dtype):
    """Each is compiled when it is first needed, so there mustn't be one for each length."""
    for capability in (75, 90):
        assert len(row_macros("softmax", dtype, out_dtype, capability)) < 100


def _heaviest(sets: frozenset[tuple[tuple[str, str], ...]]) -> list[tuple[tuple[str, str], ...]]:
    """One of each way to work, with the most vectors a thread: where registers run out first."""
    heaviest: dict[tuple[object, ...], tuple[tuple[str, str], ...]] = {}
    for macros in sorted(sets):
        m = dict(macros)
        way = m["TEAM"] != "0", m["CLUSTER"] != "1", m["GRID"], m["SHARED"], m["STREAMED"], m["CONGRUENT"]
        way = *way, int(m["THREADS"]) * int(m["BLOCKS"])  # what is left of the registers for each thread
        if way not in heaviest or int(m["VECTORS"]) >= int(dict(heaviest[way])["VECTORS"]):
            heaviest[way] = macros
    # And the other extreme: one thread a row with all of its odd elements.
    lightest = min(sets, key=lambda m: (dict(m)["TEAM"] != "1", dict(m)["WIDE"] == "1", int(dict(m)["VECTORS"])))
    return [*heaviest.values(), lightest]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_fused_kernel(dtype, failures):
    """A third of what planning comes to on an H200, for the dtypes that differ most: each takes a second."""
    for macros in sorted(row_macros("softmax", dtype, dtype, 90))[dtype == "bfloat16" :: 3]:
        with failures.case(macros):
            assert_lean("softmax_fused.cu", macros, 90)


@pytest.mark.parametrize(
    ("op", "dtype", "out_dtype"),
    [*(("softmax", *pair) for pair in PAIRS), *(("log_softmax", *pair) for pair in PAIRS if pair[0] != "float64")],
)
def test_the_heaviest_fused_kernels(op, dtype, out_dtype, failures):
    for macros in _heaviest(row_macros(op, dtype, out_dtype, 90)):
        with failures.case(macros):
            assert_lean("softmax_fused.cu", macros, 90)


@pytest.mark.parametrize("capability", [75, 80, 100, 120])
def test_fused_kernels_for_other_gpus(capability, failures):
    for dtype in ("float32", "bfloat16"):
        for macros in _heaviest(row_macros("softmax", dtype, dtype, capability)):
            with failures.case(macros):
                assert_lean("softmax_fused.cu", macros, capability)


@pytest.mark.parametrize("capability", [75, 90, 120])
def test_strided_kernels(capability, failures):
    pairs = PAIRS if capability == 90 else [("float32", "float32")]
    for dtype, out_dtype in pairs:
        found = strided_macros("softmax", dtype, out_dtype)
        for macros in found[:: 3 if (dtype, capability) == ("float32", 90) else len(found) // 4 + 1]:
            with failures.case(macros):
                assert_lean("softmax_fused_strided.cu", macros, capability)


@cache
def backward_macros(
    op: str, dtype: str, out_dtype: str, capability: int
) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    """Files and sets of macros that planning gradients comes to."""
    found = set()
    for outer, cols, inner in product((8, 4096), LENGTHS, (1, 3, 64)):
        p = Problem(BACKWARD[op], "cuda", 0, dtype, out_dtype, outer, cols, inner, (cols * inner, inner, 1))
        plan = fused_backward.plan(p, DEVICES[capability])
        found.add((plan.file, macros_of(p, **plan.macros())))
    return sorted(found)


@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_backward_kernels(capability, failures):
    pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "float16"), ("float64", "float64")]
    for op, (dtype, out_dtype) in product(OPS, pairs if capability in (75, 90) else pairs[:2]):
        for file, macros in backward_macros(op, dtype, out_dtype, capability)[:: 1 if capability == 90 else 4]:
            with failures.case(f"{file} {macros}"):
                if dtype != "float64" or op == "softmax":
                    assert_lean(file, macros, capability)


@cache
def topk_macros(dtype: str, out_dtype: str, capability: int) -> list[tuple[tuple[str, str], ...]]:
    """All sets of macros that planning the k largest comes to."""
    device = DEVICES[capability]
    problems = topk_problems(dtype, out_dtype)
    return sorted({macros_of(p, **fused_topk.plan(p, device).macros()) for p in problems})


@pytest.mark.parametrize("capability", [75, 80, 90, 100, 120])
def test_topk_kernels(capability, failures):
    pairs = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float64", "float64")]
    for dtype, out_dtype in pairs if capability in (75, 90) else pairs[:2]:
        found = topk_macros(dtype, out_dtype, capability)
        # All of one dtype on an H200; of the others those where registers run out first.
        if (capability, dtype) != (90, "float32"):
            found = [m for m in found if dict(m)["TEAM"] == "0" and dict(m)["CLUSTER"] in ("1", "16")]
        for macros in found:
            with failures.case(macros):
                assert_lean("softmax_topk.cu", macros, capability)


def scored(problem: Problem, causal: bool, aligned: bool) -> Problem:
    """With a scale and a mask of every element."""
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    mask = Mask(((outer, cols * inner),), inner, ((inner, 1),) if inner > 1 else (), 0 if aligned else 1)
    return replace(problem, scaled=True, mask=mask, causal=causal and inner == 1)


@cache
def scores_macros(
    op: str, dtype: str, capability: int, causal: bool, aligned: bool
) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    """Files and sets of macros that planning scaled and masked problems comes to: the heaviest of them."""
    device, found = DEVICES[capability], set()
    forward = [*fused_problems(op, dtype, dtype), *columns_problems(op, dtype, dtype)]
    for problem in forward[:: 1 if capability == 90 else 7]:
        p = scored(problem, causal, aligned)
        plan = cuda_fused.plan(p, device)
        found.add((plan.file, macros_of(p, **plan.macros(), **cuda_fused.scores_macros(p, plan))))
    rows = frozenset(macros for file, macros in found if file == "softmax_fused.cu")
    columns = [macros for file, macros in found if file == "softmax_fused_columns.cu"]
    heaviest = [("softmax_fused.cu", macros) for macros in _heaviest(rows)]
    heaviest += [("softmax_fused_columns.cu", macros) for macros in _widest(columns)]
    heaviest += [pair for pair in sorted(found) if pair[0] == "softmax_fused_strided.cu"][:2]
    return heaviest


@pytest.mark.parametrize(("causal", "aligned"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_with_scores(dtype, causal, aligned, failures):
    every = 1 if aligned and not causal else 2  # each takes a second
    for file, macros in scores_macros("softmax", dtype, 90, causal, aligned)[::every]:
        with failures.case(f"{file} {macros}"):
            assert_lean(file, macros, 90)


@pytest.mark.parametrize("capability", [75, 80, 100, 120])
def test_kernels_with_scores_for_other_gpus(capability, failures):
    for file, macros in scores_macros("log_softmax", "bfloat16", capability, True, True)[::3]:
        with failures.case(f"{file} {macros}"):
            assert_lean(file, macros, capability)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_backward_kernels_with_scores(op, causal, failures):
    for dtype, (outer, cols, inner) in product(("float32", "bfloat16"), product((8, 4096), LENGTHS[::6], (1, 64))):
        p = Problem(BACKWARD[op], "cuda", 0, dtype, dtype, outer, cols, inner, (cols * inner, inner, 1))
        p = scored(p, causal, aligned=True)
        plan = fused_backward.plan(p, DEVICES[90])
        macros = macros_of(p, **plan.macros(), **fused_backward.scores_macros(p, plan))
        with failures.case(f"{plan.file} {macros}"):
            assert_lean(plan.file, macros, 90)


def _widest(sets: list[tuple[tuple[str, str], ...]]) -> list[tuple[tuple[str, str], ...]]:
    """One of each way to work, with the widest packs and the most in registers: where these run out first."""

    def weight(macros: tuple[tuple[str, str], ...]) -> tuple[int, int]:
        m = dict(macros)
        return int(m["WIDE"]), int(m["VECTORS"])

    ways: dict[tuple[str, ...], tuple[tuple[str, str], ...]] = {}
    for macros in sorted(sets, key=weight):
        ways[tuple(dict(macros)[name] for name in ("CLUSTER", "SHARED", "TURN", "ALIGNED", "BLOCKS"))] = macros
    return list(ways.values())


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_the_widest_columns_kernels(dtype, out_dtype, failures):
    for macros in _widest(columns_macros("softmax", dtype, out_dtype, 90)):
        with failures.case(macros):
            assert_lean("softmax_fused_columns.cu", macros, 90)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_kernels_of_every_width(dtype, failures):
    for macros in columns_macros("softmax", dtype, dtype, 90)[::5]:
        with failures.case(macros):
            assert_lean("softmax_fused_columns.cu", macros, 90)


def test_columns_kernels_of_log_softmax(failures):
    for macros in _widest(columns_macros("log_softmax", "bfloat16", "bfloat16", 90)):
        with failures.case(macros):
            assert_lean("softmax_fused_columns.cu", macros, 90)


@pytest.mark.parametrize("capability", [75, 80, 100, 120])
def test_columns_kernels_for_other_gpus(capability, failures):
    for dtype in ("float32", "bfloat16"):
        for macros in _widest(columns_macros("softmax", dtype, dtype, capability)):
            with failures.case(macros):
                assert_lean("softmax_fused_columns.cu", macros, capability)


def test_the_reader_of_spills_can_say_no(monkeypatch):
    """A kernel that can't do without local memory is seen to use it."""
    greedy = """
extern "C" __global__ void kernel(float* x, int n) {
    float many[64];
    for (int i = 0; i < 64; ++i) many[i] = x[i];
    for (int i = 0; i < n; ++i) many[int(x[i])] += 1;
    for (int i = 0; i < 64; ++i) x[i] = many[i];
}
"""
    monkeypatch.setattr(cuda, "source", lambda name: greedy)
    with pytest.raises(AssertionError, match="local memory"):
        assert_lean("greedy.cu", (), 90)


def test_a_source_has_its_includes_pasted_in():
    """NVRTC gets no include path, and what is compiled is remembered by this text."""
    fused = ("softmax_fused.cu", "softmax_fused_columns.cu", "softmax_fused_strided.cu", "softmax_topk.cu")
    for file in (*NOT_FUSED, *fused):
        assert "#include" not in cuda.source(file)
        assert "struct Layout {" in cuda.source(file)


def test_an_image_for_a_gpu_that_the_compiler_knows_and_for_a_newer_one(nvrtc):
    macros = cuda.defines(a_problem("softmax", "float32", "float32"))
    assert cuda.arch_option(90) == "-arch=sm_90"
    image = cuda.compile_image("softmax_naive.cu", macros, cuda.arch_option(90))
    assert image.name == "softmax_naive"
    assert image.code.startswith(b"\x7fELF")
    newer = cuda.compile_image("softmax_naive.cu", macros, cuda.arch_option(999))
    assert f".target sm_{max(nvrtc.getSupportedArchs())}".encode() in newer.code
    assert b".entry softmax_naive" in newer.code


def test_a_source_that_does_not_compile_says_where(nvrtc, monkeypatch):
    monkeypatch.setattr(cuda, "source", lambda name: "this is no C++")
    with pytest.raises(RuntimeError, match=r"softmax_naive\.cu\(1\): error"):
        cuda.compile_image("softmax_naive.cu", {}, "-arch=sm_90")
