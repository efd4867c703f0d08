"""Which backend auto takes is measured: the tables, how they are found and looked up, and how they are made."""

from __future__ import annotations

import ctypes
import json
import math
import sys
import types
import warnings
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from cases import CACHE_VARIABLE, DTYPES, GPU_BACKENDS
from hypothesis import given
from hypothesis import strategies as st
from isolated import ROOT, run
from test_registry import a_backend

import minikernel
from minikernel import BackendUnavailable, FallbackWarning, Kernel, Problem, dispatch, driver, tuned, user_cache
from minikernel import __main__ as program
from minikernel.registry import REGISTRY
from minikernel.sources import source_hash
from minikernel.tune import command, points
from minikernel.tune.points import problem_of
from minikernel.tune.timer import GraphTimer, normal
from minikernel.tuned import Found, Point, Table, kind_of

GPU = "NVIDIA Test 1"
FUSED, TRITON = "cuda-fused", "triton-fused"
FIND = tuned.find


def a_table(found: dict[tuple[str, str], list[Point]], **changes) -> Table:
    header = {
        "gpu": GPU,
        "date": "2026-11-29T12:00:00+00:00",
        "command": tuned.COMMAND,
        "versions": {"minikernel": "0.1.0"},
        "source_hash": source_hash(),
        "backends": (FUSED, TRITON),
    }
    return Table(points=found, **(header | changes))


TABLE = a_table(
    {
        ("float16", "aligned"): [
            Point(1, 8, (1.0, 0.98)),
            Point(1, 262144, (None, 4.0)),
            Point(512, 1024, (2.0, 2.5)),
            Point(262144, 8, (4.304, 3.278)),
        ],
        ("float32", "axis"): [Point(64, 64, (3.0, 2.0))],
    }
)


def array(*shape: int, dtype: str = "float16", dim: int = -1, memory: str = "contiguous") -> Problem:
    """The problem of an array on a GPU that needn't be there."""
    problem = problem_of(dtype, shape, dim, memory)
    assert problem is not None
    return problem


@pytest.fixture
def has_table(registry, monkeypatch):
    """Let all GPU backends seem to work, and a GPU have a table."""

    def give(table: Table | None = TABLE, faults: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(tuned, "find", lambda index: Found(table, faults=faults))

    def missing(backend):
        return [] if backend.name in GPU_BACKENDS else backend.missing()

    monkeypatch.setattr(registry, "_absent", missing)
    monkeypatch.setattr(driver, "device", lambda index: driver.Device(90, 132, 232448, 233472, 60 << 20))
    give()
    return give


# Looking up

EXTENTS = st.integers(1, 1 << 20)
TIMES = st.floats(0.5, 5000).map(lambda time: float(f"{time:.4g}"))
TABLES = st.dictionaries(
    st.tuples(EXTENTS, EXTENTS.map(lambda n: 4 * n)), st.tuples(TIMES, TIMES | st.none()), min_size=1, max_size=12
).map(lambda found: a_table({("float32", "aligned"): [Point(*at, us) for at, us in found.items()]}))


@given(table=TABLES)
def test_a_measured_point_gives_its_own_best(table):
    for point in table.points["float32", "aligned"]:
        first, second = point.microseconds
        assert table.nearest("float32", "aligned", point.rows, point.cols) == point
        preference = tuned.prefer(table, array(point.rows, point.cols, dtype="float32"), (FUSED, TRITON))
        another = second is not None and first > 1.03 * second
        assert preference.backend == (TRITON if another else FUSED)
        assert preference.place == f"on {GPU} at {point.rows} x {point.cols} float32"


@given(table=TABLES, rows=EXTENTS, cols=EXTENTS)
def test_elsewhere_the_nearest_point_counts(table, rows, cols):
    def distance(point):
        return math.hypot(math.log2(point.rows / rows), math.log2(point.cols / cols))

    nearest = table.nearest("float32", "aligned", rows, cols)
    assert distance(nearest) <= min(map(distance, table.points["float32", "aligned"])) + 1e-9


def test_another_backend_must_be_more_than_3_percent_faster():
    assert tuned.pick({FUSED: 1.03, TRITON: 1.0}) == FUSED
    assert tuned.pick({FUSED: 1.0301, TRITON: 1.0}) == TRITON
    assert tuned.pick({FUSED: 1.0, TRITON: 5.0}) == FUSED
    assert tuned.pick({FUSED: 1.2, TRITON: 1.1, "other": 1.0}) == "other"
    assert tuned.pick({TRITON: 5.0}) == TRITON


def test_only_those_asked_for_count():
    thin = array(262144, 8)
    assert tuned.prefer(TABLE, thin, ("other", FUSED, TRITON)).backend == TRITON
    assert tuned.prefer(TABLE, thin, (FUSED,)).backend == FUSED
    assert tuned.prefer(TABLE, thin, ("other",)) is None
    assert tuned.prefer(TABLE, array(1, 262144), (FUSED, TRITON)).backend == TRITON, "the only one measured"
    assert tuned.prefer(TABLE, array(1, 262144), (FUSED,)) is None


def test_what_was_not_measured_has_no_preference():
    names = (FUSED, TRITON)
    assert tuned.prefer(TABLE, array(262144, 8, dtype="float64"), names) is None
    assert tuned.prefer(TABLE, array(262144, 9), names) is None, "unaligned rows"
    assert tuned.prefer(TABLE, replace(array(262144, 8), out_dtype="float32"), names) is None
    assert tuned.prefer(TABLE, replace(array(262144, 8), op="log_softmax"), names).backend == TRITON
    assert tuned.prefer(TABLE, array(64, 64, dtype="float32"), names) is None
    assert tuned.prefer(TABLE, array(64, 64, dtype="float32", dim=0), names).backend == TRITON


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (array(4, 8), "aligned"),
        (array(4, 12), "unaligned"),
        (array(4, 12, dtype="float32"), "aligned"),
        (array(4, 1024, memory="expanded"), "expanded"),
        (array(1, 1024, memory="expanded"), "aligned"),
        (array(1, 1024, memory="transposed"), "aligned"),
        (array(1, 50257), "unaligned"),
        (array(4, 8, memory="offset"), "shifted"),
        (array(4, 8, memory="sliced"), "shifted"),
        (array(4, 9, memory="expanded"), "expanded"),
        (replace(array(4, 8, memory="offset"), out_offset=2), "unaligned"),
        (replace(array(4, 8), out_offset=2), "shifted"),
        (array(4, 8, dim=0), "axis"),
        (array(4, 8, 2, dim=1), "axis"),
        (array(4, 8, memory="transposed"), "transposed"),
        (array(4, 8, 1, dim=1), "aligned"),
    ],
)
def test_kinds(problem, kind):
    assert kind_of(problem) == kind


@pytest.mark.parametrize("memory", ["contiguous", "offset", "sliced", "transposed", "expanded"])
@pytest.mark.parametrize(
    ("shape", "dim"), [((4, 6), -1), ((4, 6), 0), ((2, 3, 5, 7), 1), ((1, 9), -1), ((3, 5, 4), -1)]
)
def test_points_describe_the_arrays_that_the_bench_makes(memory, shape, dim):
    """As the library itself would describe such an array, in host memory."""
    if not (ROOT / "bench" / "buffers.py").exists():
        pytest.skip("the bench is part of the checkout, not of the package")
    from bench.buffers import lay_out
    from minikernel.layout import normalize_dim, view

    x = lay_out(np.zeros(2000, np.float32), shape, memory, np)
    seen = view(x.shape, tuple(step // x.itemsize for step in x.strides), normalize_dim(dim, x.ndim))
    problem = problem_of("float32", shape, dim, memory)
    assert (problem is None) == (seen is None)
    if problem:
        described = problem.outer, problem.cols, problem.inner, problem.strides
        assert described == (seen.outer, seen.cols, seen.inner, seen.strides)
        assert problem.x_offset == (4 if memory in ("offset", "sliced") else 0)


# Files


def test_a_table_survives_being_written():
    text = TABLE.dumps()
    assert tuned.loads(text) == TABLE
    assert "   [262144, 8, 4.304, 3.278]" in text.splitlines(), "a point a line"
    assert '"columns": [' in text
    assert json.loads(text)["columns"] == ["rows", "cols", "cuda-fused us", "triton-fused us"]


def broken(**changes) -> str:
    return json.dumps(json.loads(TABLE.dumps()) | changes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        (TABLE.dumps()[:200], "Expecting"),
        ("[" * 100_000, "recursion"),
        ("[1, 2]", "schema 1"),
        (broken(schema=2), "schema 1"),
        ('{"schema": 1}', "it has no 'columns'"),
        (broken(columns=["rows", "cols"]), "its columns are"),
        (broken(columns=3), "no such table"),
        (broken(gpu=7), "a name isn't a string"),
        (broken(points=[1]), "no such table"),
        (broken(points={"float32 sideways": []}), "there is no 'float32 sideways'"),
        (broken(points={"float32": []}), "not enough values"),
        (broken(points={"float32 axis": [[1, 2, 3.0]]}), "bad point"),
        (broken(points={"float32 axis": [[1, 0, 3.0, 4.0]]}), "bad point"),
        (broken(points={"float32 axis": [[1, 2, -3.0, 4.0]]}), "bad point"),
        (broken(points={"float32 axis": [[1, 2, "3", 4.0]]}), "bad point"),
        (broken(points={"float32 axis": [[1, 2, math.inf, 4.0]]}), "bad point"),
        (broken(points={"float32 axis": [3]}), "no such table"),
    ],
)
def test_a_file_that_is_no_table_says_why(text, why):
    with pytest.raises(ValueError, match=why):
        tuned.loads(text)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("NVIDIA H200", "nvidia-h200.json"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb.json"),
        ("NVIDIA H200 MIG 1g.18gb", "nvidia-h200-mig-1g-18gb.json"),
        ("../etc", "etc.json"),
    ],
)
def test_a_file_is_named_after_the_model(model, name):
    assert tuned.file_name(model) == name


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folder of the user's own tables, and that of those that are shipped; neither exists."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return user_cache.folder("tables"), tmp_path / "shipped"


def put(folder: Path, text: str, model: str = GPU) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / tuned.file_name(model)
    path.write_text(text, encoding="utf-8")
    return path


def test_the_user_s_own_table_wins_over_the_shipped_one(folders):
    own, shipped = folders
    assert tuned.search(GPU) == Found()
    path = put(shipped, TABLE.dumps())
    assert tuned.search(GPU) == Found(TABLE, path)
    measured_here = replace(TABLE, date="2027-01-01")
    path = put(own, measured_here.dumps())
    assert tuned.search(GPU) == Found(measured_here, path, own=True)
    assert tuned.search("NVIDIA Test 2") == Found()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "can't be used: Expecting"),
        ("\N{LATIN SMALL LETTER E WITH ACUTE}" * 9, "can't be used"),
        (replace(TABLE, gpu="NVIDIA Test 2").dumps(), "it was measured on NVIDIA Test 2"),
        (
            replace(TABLE, source_hash="0" * 16).dumps(),
            "it was measured with other kernels than these: run python -m minikernel tune again",
        ),
    ],
)
def test_a_table_that_cannot_be_used_gives_way_to_the_shipped_one(folders, text, why):
    own, shipped = folders
    path = put(own, text)
    alone = tuned.search(GPU)
    assert alone.table is None
    assert len(alone.faults) == 1
    assert str(path) in alone.faults[0]
    assert why in alone.faults[0]
    put(shipped, TABLE.dumps())
    assert tuned.search(GPU) == Found(TABLE, shipped / path.name, faults=alone.faults)


def test_bytes_that_are_no_text(folders):
    path = put(folders[0], "")
    path.write_bytes(b"\xff\xfe\x00")
    assert "can't be used" in tuned.search(GPU).faults[0]


def test_a_file_that_cannot_be_read(folders):
    own, _ = folders
    (own / tuned.file_name(GPU)).mkdir(parents=True)
    (fault,) = tuned.search(GPU).faults
    assert "can't be read" in fault


def test_a_shipped_table_belongs_to_its_code(folders):
    """What is released with other kernels is a fault of the release, which a test finds, and no news to a user."""
    put(folders[1], (older := replace(TABLE, source_hash="0" * 16)).dumps())
    assert tuned.search(GPU).table == older
    assert not tuned.is_current(older)
    assert tuned.is_current(TABLE)


def test_where_a_user_s_tables_lie(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache.folder("tables") == tmp_path / ".cache" / "minikernel" / "tables"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert user_cache.folder("tables") == tmp_path / ".cache" / "minikernel" / "tables"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert user_cache.folder("tables") == tmp_path / "x" / "minikernel" / "tables"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    assert user_cache.folder("tables") == tmp_path / "AppData" / "Local" / "minikernel" / "tables"
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert user_cache.folder("tables") == tmp_path / "local" / "minikernel" / "tables"


def test_a_user_without_a_home_has_no_table_of_their_own(folders, homeless):
    path = put(folders[1], TABLE.dumps())
    assert tuned.search(GPU) == Found(TABLE, path)


def test_without_a_gpu_nothing_is_read():
    output = run(
        """
import sys
import numpy as np
import minikernel
from minikernel import Problem, dispatch

minikernel.softmax(np.ones(3))
print([name for name in sys.modules if name.startswith("minikernel.tun")])

from minikernel import tuned

def search(model):
    raise AssertionError("it looked for a table")

tuned.search = search
on_gpu = Problem("softmax", "cuda", 0, "float32", "float32", 2, 4, 1, (4, 1, 1))
print(dispatch.choose(on_gpu).through)
print("minikernel.tune" in sys.modules)
""",
        CUDA_VISIBLE_DEVICES="",
    )
    assert output.split() == ["[]", "cpu", "False"]


def test_a_gpu_s_table_is_looked_for_once(folders, monkeypatch):
    tuned.find.cache_clear()
    asked = []
    monkeypatch.setattr(driver, "obstacles", list)
    monkeypatch.setattr(driver, "name", lambda index: asked.append(index) or f"NVIDIA Test {index}")
    put(folders[0], TABLE.dumps())
    try:
        assert tuned.find(1).table == tuned.find(1).table == TABLE
        assert tuned.find(2) == Found()
        assert asked == [1, 2]
        on_one = replace(array(262144, 8), index=1)
        assert tuned.preferred(on_one, (FUSED, TRITON)).backend == TRITON
        assert tuned.preferred(replace(on_one, index=2), (FUSED, TRITON)) is None
    finally:
        tuned.find.cache_clear()


def test_a_device_that_is_not_there_has_no_table(monkeypatch):
    def name(index):
        raise driver.CudaError("CUDA refused to find device 7")

    monkeypatch.setattr(driver, "obstacles", list)
    monkeypatch.setattr(driver, "name", name)
    assert tuned.find.__wrapped__(7) == Found()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "minikernel" / "tables").glob("*.json")), ids=lambda path: path.stem
)
def test_shipped_tables_are_sound(path):
    table = tuned.loads(path.read_text(encoding="utf-8"))
    assert path.name == tuned.file_name(table.gpu)
    assert table.dumps() == path.read_text(encoding="utf-8")
    assert set(table.backends) <= set(GPU_BACKENDS)
    for found in table.points.values():
        places = [(point.rows, point.cols) for point in found]
        assert len(set(places)) == len(places)


@pytest.mark.filterwarnings("default::UserWarning")
def test_shipped_tables_are_of_this_code():
    """A warning, and no failure: on a machine without that GPU nobody can measure again."""
    for path in (ROOT / "minikernel" / "tables").glob("*.json"):
        if not tuned.is_current(tuned.loads(path.read_text(encoding="utf-8"))):
            warnings.warn(f"{path.name} is older than the kernels: run {tuned.COMMAND}", UserWarning, stacklevel=1)


# Choosing


@pytest.mark.usefixtures("has_table")
def test_auto_takes_the_fastest_measured_and_says_so():
    decision = dispatch.choose(array(262144, 8))
    assert decision.backend == TRITON
    assert decision.reason == (f"triton-fused is the fastest measured on {GPU} at 262144 x 8 float16: 3.278 µs.")
    assert decision.rejected[FUSED] == (
        f"it was measured to take 4.304 µs on {GPU} at 262144 x 8 float16, and triton-fused comes first",
    )
    assert decision.rejected["cuda-smem"] == ("triton-fused comes first under auto",)
    assert decision.passed_over == ()
    assert " near 262144 x 8 float16: " in dispatch.choose(array(200_000, 8)).reason
    over = dispatch.choose(array(60, 60, dtype="float32", dim=0)).reason
    assert f"on {GPU} near 64 x 64 float32 over another axis than the last" in over


@pytest.mark.usefixtures("has_table")
def test_the_first_by_rank_stays_within_the_margin():
    decision = dispatch.choose(array(1, 8))
    assert decision.backend == FUSED
    assert decision.reason == (
        "cuda-fused is first under auto, and none was measured more than 3% faster "
        f"on {GPU} at 1 x 8 float16: 1 µs."
    )
    assert dispatch.choose(array(512, 1024)).reason == (
        f"cuda-fused is the fastest measured on {GPU} at 512 x 1024 float16: 2 µs."
    )


def test_without_a_table_rank_decides(has_table):
    has_table(None)
    decision = dispatch.choose(array(262144, 8))
    assert (decision.backend, decision.reason) == (FUSED, "cuda-fused comes first under auto, and takes it.")


@pytest.mark.usefixtures("has_table")
@pytest.mark.parametrize(("rank", "chosen"), [(1, "tenths"), (15, TRITON), (25, TRITON), (99, TRITON)])
def test_a_third_party_keeps_its_place(rank, chosen):
    minikernel.register_backend(a_backend(rank=rank, devices=("cuda",), dtypes=DTYPES))
    decision = dispatch.choose(array(262144, 8))
    assert decision.backend == chosen
    if chosen == "tenths":
        assert "measured" not in str(decision)
        assert decision.rejected[TRITON] == ("tenths comes first under auto",)
    # Where the table leaves cuda-fused first, rank 15 is before triton-fused as ever.
    minikernel.register_backend(a_backend(name="other", rank=1, devices=("cuda",), reasons=lambda p: ["no"]))
    decision = dispatch.choose(array(262144, 8))
    if chosen == TRITON:
        assert decision.reason.startswith(
            "triton-fused comes first under auto among those that can take it, and not other. triton-fused is the "
        )


@pytest.mark.usefixtures("has_table")
def test_a_third_party_between_two_built_ins_comes_after_the_faster_of_them(registry):
    minikernel.register_backend(a_backend(rank=15, devices=("cuda",), dtypes=DTYPES))
    registry.mark_unavailable(TRITON, 0, "it is switched off")
    assert dispatch.choose(array(262144, 8)).backend == FUSED
    registry.mark_unavailable(FUSED, 0, "it is switched off")
    assert dispatch.choose(array(262144, 8)).backend == "tenths"


@pytest.mark.usefixtures("has_table")
def test_the_fastest_measured_that_refuses_is_passed_over(monkeypatch, registry):
    refusing = replace(registry.get(TRITON), reasons=lambda problem: ["it is Sunday"])
    monkeypatch.setitem(registry._backends, TRITON, refusing)
    decision = dispatch.choose(array(262144, 8))
    assert decision.backend == FUSED
    assert decision.passed_over == (TRITON,)
    assert decision.rejected[TRITON] == ("it is Sunday",)
    assert decision.reason == (
        "cuda-fused comes first under auto among those that can take it, and not triton-fused."
    )


@pytest.mark.usefixtures("has_table")
def test_the_fastest_measured_that_does_not_compile_is_passed_over_visibly(monkeypatch, registry):
    def prepare(problem):
        raise BackendUnavailable("line 1")

    monkeypatch.setitem(registry._backends, TRITON, replace(registry.get(TRITON), prepare=prepare))
    sound = replace(registry.get(FUSED), prepare=lambda problem: Kernel(print))
    monkeypatch.setitem(registry._backends, FUSED, sound)
    with pytest.warns(FallbackWarning, match="cuda-fused is used because triton-fused doesn't work here: line 1"):
        decision, _ = dispatch.resolve(array(262144, 8))
    assert decision.backend == FUSED


@pytest.mark.usefixtures("has_table")
def test_the_fastest_measured_is_asked_first(monkeypatch, registry):
    """So that the other's packages needn't be imported."""
    asked = []

    def refuse(backend):
        asked.append(backend.name)
        return []

    monkeypatch.setattr(registry, "_absent", refuse)
    assert dispatch.choose(array(262144, 8), complete=False).backend == TRITON
    assert asked == [TRITON]


@pytest.mark.usefixtures("has_table")
def test_a_name_has_authority_over_the_table():
    assert dispatch.choose(array(262144, 8), FUSED).backend == FUSED
    with minikernel.use_backend(FUSED):
        assert dispatch.choose(array(262144, 8)).backend == FUSED


def test_a_table_that_cannot_be_used_is_one_warning(has_table, monkeypatch, registry):
    has_table(None, ("/tables/x.json can't be used: it was measured on NVIDIA Test 2",))
    sound = replace(registry.get(FUSED), prepare=lambda problem: Kernel(print))
    monkeypatch.setitem(registry._backends, FUSED, sound)
    message = "auto doesn't go by a table of measurements as it should: /tables/x.json can't be used"
    with pytest.warns(FallbackWarning, match=message) as caught:
        chosen = [dispatch.resolve(array(262144, cols))[0].backend for cols in (8, 16, 24)]
    assert chosen == [FUSED] * 3
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_a_host_array_asks_no_table(registry, monkeypatch):
    monkeypatch.setattr(tuned, "find", lambda index: pytest.fail("it looked for a table"))
    assert dispatch.choose(replace(array(2, 4), device="cpu")).backend == "numpy"


# Which points are measured


def test_the_grid_covers_all_kinds_and_no_more_than_fits():
    for dtype in DTYPES:
        fine, coarse = points.grid(dtype), points.grid(dtype, 6)
        assert {kind_of(problem) for problem in fine} == set(tuned.KINDS)
        assert {kind_of(problem) for problem in coarse} == set(tuned.KINDS)
        assert len(coarse) < 30 < 500 < len(fine) < 700
        assert max(problem.rows * problem.cols for problem in fine) == points.MAX_ELEMENTS
    places = {(problem.rows, problem.cols) for problem in points.grid("float16")}
    assert {(1, 8), (262144, 8), (1024, 262144), (2048, 600), (1024, 50257), (64, 151936), (4096, 2049)} <= places


def test_points_come_from_a_bench_result(tmp_path):
    def record(case, impl=FUSED, **changes):
        return {"impl": impl, "dtype": "float32", "dim": -1, "layout": "contiguous", "case": case, **changes}

    file = tmp_path / "result.json"
    records = [
        record("512x600"),
        record("512x600", TRITON),
        record("logits 48x30522", dtype="float16"),
        record("8x1000x64x64@1", dim=1),
        record("64x64", layout="transposed"),
        record("64x64", layout="sliced"),
        record("3x600", "auto"),
        record("3x600", "numpy"),
        record("()"),
        record("9x9", dtype="int64"),
        record("0x9"),
        record("65536x65536"),
    ]
    file.write_text(json.dumps({"records": records}))
    found = points.points_from(file, (FUSED, TRITON), index=1)
    assert found == [
        replace(problem, index=1)
        for problem in (
            array(512, 600, dtype="float32"),
            array(48, 30522),
            array(8, 1000, 64, 64, dtype="float32", dim=1),
            array(64, 64, dtype="float32", memory="transposed"),
            array(64, 64, dtype="float32", memory="sliced"),
            array(65536, 65536, dtype="float32"),
        )
    ]


def test_every_point_of_the_committed_result_is_read():
    path = ROOT / "bench" / "results" / "h200.json"
    if not path.exists():
        pytest.skip("the results are part of the checkout, not of the package")
    records = [r for r in json.loads(path.read_text(encoding="utf-8"))["records"] if r["impl"] == FUSED]
    found = points.points_from(path, (FUSED,))
    places = {(problem.dtype, problem.rows, problem.cols) for problem in found}
    assert places == {(r["dtype"], r["rows"], r["cols"]) for r in records}


@pytest.mark.parametrize("text", ["", "[]", '{"records": [{}]}', '{"records": [3]}', '{"record": []}'])
def test_a_file_that_is_no_bench_result(tmp_path, text):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"is not a result of bench/run\.py"):
        points.points_from(file, (FUSED,))


def test_points_that_are_wanted_come_first_and_each_place_once():
    wanted = [array(3, 8), array(5, 8, dtype="float32"), array(3, 8)]
    ordered = points.in_order(wanted, [p for dtype in DTYPES for p in points.grid(dtype, 6)] + [array(3, 8)])
    places = [(problem.dtype, kind_of(problem), problem.rows, problem.cols) for problem in ordered]
    assert len(set(places)) == len(places)
    dtypes = [problem.dtype for problem in ordered]
    assert dtypes == sorted(dtypes, key=dtypes.index), "a dtype after the other"
    assert set(dtypes) == set(DTYPES)
    assert ordered[0] == array(3, 8)
    first = points.in_order([], points.grid("float32"))[:60]
    assert {problem.cols for problem in first} >= {8, 64, 4096, 32768}, "a part covers the whole"
    assert len({problem.rows for problem in first}) > 10
    assert next(problem for problem in ordered if problem.dtype == "float32") == array(5, 8, dtype="float32")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_time_is_shared_between_dtypes():
    clock = Clock()
    problems = [array(n, 8, dtype=dtype) for dtype in ("float16", "float32", "float64") for n in range(1, 101)]
    taken = []
    for problem in points.within(30.0, problems, clock):
        taken.append(problem.dtype)
        clock.now += float(problem.dtype != "float32")
    assert Counter(taken) == {"float16": 10, "float32": 100, "float64": 20}
    assert len(list(points.within(math.inf, problems, clock))) == 300


# Measuring


def test_candidates_are_the_built_ins_that_could_be_fastest(registry):
    minikernel.register_backend(a_backend(rank=1, devices=("cuda",)))
    assert [backend.name for backend in command.candidates()] == [FUSED, TRITON]


def test_backends_that_refuse_or_fail_are_left_out(registry):
    def fail(problem):
        raise KeyError("columns")

    given_kernel = Kernel(print)
    some = [
        a_backend(name="sound", devices=("cuda",), dtypes=DTYPES, prepare=lambda problem: given_kernel),
        a_backend(name="fussy", devices=("cuda",), dtypes=("float32",), prepare=lambda problem: given_kernel),
        a_backend(name="broken", devices=("cuda",), dtypes=DTYPES, prepare=fail),
    ]
    problems = [array(3, 8), array(3, 8, dtype="float32")]
    kernels, failed = command.prepare_all(some, problems)
    assert [set(kernels[problem]) for problem in problems] == [{"sound"}, {"sound", "fussy"}]
    assert failed == {"broken": "KeyError: 'columns'"}


def test_what_was_measured_becomes_a_table():
    problems = [array(4, 16), array(2, 8), array(3, 9), array(7, 8)]
    kernels = {problem: {FUSED: Kernel(print), TRITON: Kernel(print)} for problem in problems}
    kernels[problems[2]] = {}
    seconds = {problems[0]: [1.23456e-6, 2e-6], problems[1]: [None, 3.3e-3], problems[3]: [None, None]}
    asked = []

    def timer(problem, given):
        asked.append(problem)
        return seconds[problem]

    header = {"gpu": GPU, "date": "", "command": "", "versions": {}, "source_hash": ""}
    table = command.tabulate(command.measure(problems, kernels, timer), (FUSED, TRITON), **header)
    assert asked == [problems[0], problems[1], problems[3]], "nothing is timed where no backend has a kernel"
    assert table.points == {("float16", "aligned"): [Point(2, 8, (None, 3300.0)), Point(4, 16, (1.235, 2.0))]}


def test_the_summary_says_where_the_first_by_rank_loses():
    assert command.summary(TABLE) == [
        ("float16", "aligned", "4", "1", "1.31", "triton-fused, 262144 x 8"),
        ("float32", "axis", "1", "1", "1.50", "triton-fused, 64 x 64"),
    ]
    dull = a_table({("float32", "axis"): [Point(64, 64, (1.0, 2.0))]})
    assert command.summary(dull) == [("float32", "axis", "1", "0", "", "")]


class FakeTimer:
    """Triton is faster in short rows, and cuda-fused in others."""

    def __init__(self, index):
        assert index == 0

    def fits(self, problem):
        return problem.rows * problem.cols < 1 << 23

    def __call__(self, problem, kernels):
        assert len(kernels) == 2
        return [2e-6, 1e-6 if problem.cols <= 100 else 4e-6]


@pytest.fixture
def a_gpu(has_table, folders, monkeypatch):
    """A machine that seems to have one GPU, and no table for it."""
    monkeypatch.setattr(driver, "obstacles", list)
    monkeypatch.setattr(driver, "count", lambda: 1)
    monkeypatch.setattr(driver, "name", lambda index: GPU)
    monkeypatch.setattr(command, "GraphTimer", FakeTimer)
    for name in (FUSED, TRITON):
        sound = replace(REGISTRY.get(name), prepare=lambda problem: Kernel(print))
        monkeypatch.setitem(REGISTRY._backends, name, sound)
    monkeypatch.setattr(tuned, "find", FIND)
    tuned.find.cache_clear()
    yield
    tuned.find.cache_clear()


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize("rich", [True, False], ids=["rich", "plain"])
def test_tune_writes_the_user_s_table_and_auto_follows_it(rich, monkeypatch, capsys):
    if not rich:
        for name in ("rich", "rich.progress"):
            monkeypatch.setitem(sys.modules, name, None)
    assert dispatch.choose(array(4096, 8)).backend == FUSED
    assert program.main(["tune", "--quick"]) == 0
    found = tuned.search(GPU)
    assert found.own
    assert found.path == tuned.own_path(GPU)
    table = found.table
    assert (table.gpu, table.backends) == (GPU, (FUSED, TRITON))
    assert table.command == "python -m minikernel tune --quick"
    assert table.source_hash == source_hash()
    assert table.versions["minikernel"] == minikernel.__version__
    assert {dtype for dtype, _ in table.points} == set(DTYPES)
    assert not list(found.path.parent.glob("*.partial"))

    count = 0
    for (dtype, kind), measured in table.points.items():
        for point in measured:
            count += 1
            assert point.rows * point.cols < 1 << 23, "the others don't fit"
            if kind == "aligned":
                chosen = dispatch.choose(array(point.rows, point.cols, dtype=dtype)).backend
                assert chosen == (TRITON if point.cols <= 100 else FUSED)
    text = capsys.readouterr().out
    assert f"{count} points on {GPU}: {found.path}" in text.replace("\n", " ").replace("  ", " ")
    assert "Measuring" in text
    assert "2.00" in text
    assert "triton-fused, " in text


@pytest.mark.usefixtures("a_gpu")
def test_tune_takes_points_and_an_output_and_a_budget(tmp_path):
    result, output = tmp_path / "result.json", tmp_path / "new" / "table.json"
    record = {"impl": FUSED, "dtype": "float64", "dim": -1, "layout": "contiguous", "case": "77x96"}
    result.write_text(json.dumps({"records": [record]}))
    options = ["--points-from", str(result), "--output", str(output), "--budget", "60"]
    assert program.main(["tune", *options]) == 0
    table = tuned.loads(output.read_text(encoding="utf-8"))
    assert table.command == f"python -m minikernel tune --points-from {result.as_posix()}"
    assert Point(77, 96, (2.0, 1.0)) in table.points["float64", "aligned"]
    assert sum(map(len, table.points.values())) > 1000
    assert tuned.search(GPU) == Found()
    assert program.main(["tune", *options[:4], "--budget", "0"]) == 1


@pytest.mark.usefixtures("a_gpu")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--device", "1"], "there is no GPU 1: this process sees 1"),
        (["--points-from", "absent.json"], "absent.json"),
        (["--quick", "--output", "/dev/null/x.json"], "/dev/null"),
    ],
)
def test_tune_says_why_it_did_not(options, why, capsys):
    assert program.main(["tune", *options]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line]
    assert line.startswith("python -m minikernel tune: ")
    assert why in line


@pytest.mark.usefixtures("a_gpu")
def test_tune_needs_a_choice(monkeypatch, capsys):
    missing = {FUSED: ["cupy is not installed (pip install it)"], TRITON: []}
    monkeypatch.setattr(REGISTRY, "_absent", lambda backend: missing.get(backend.name, []))
    assert program.main(["tune"]) == 1
    assert capsys.readouterr().err == (
        "python -m minikernel tune: nothing to choose between, with fewer than two fast backends here:\n"
        "  cuda-fused: cupy is not installed (pip install it)\n"
    )


def test_tune_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(driver, "obstacles", lambda: ["no NVIDIA driver was found"])
    assert program.main(["tune"]) == 1
    assert capsys.readouterr().err == "python -m minikernel tune: no NVIDIA driver was found\n"


# The instrument, on a GPU that is made of Python


class FakeCuda:
    """What GraphTimer needs of ``cupy.cuda``. Memory is the host's; time passes only as kernels say."""

    def __init__(self):
        self.now = 0.0
        self.free = 1 << 30
        self.capturing = None
        cuda = self

        class Stream:
            ptr = 7

            def __init__(self, non_blocking):
                assert non_blocking, "work on the legacy stream can't be captured"

            def begin_capture(self):
                cuda.capturing = []

            def end_capture(self):
                calls, cuda.capturing = cuda.capturing, None
                return types.SimpleNamespace(calls=calls, launch=lambda stream: [cuda.work(t) for t in calls])

        class Event:
            def record(self, stream):
                self.at = cuda.now

            def synchronize(self):
                assert cuda.capturing is None

        class Memory:
            def __init__(self, size):
                self.bytes = np.full(size + 512, 255, np.uint8)
                self.ptr, self.size = -(-self.bytes.ctypes.data // 512) * 512, size

        class MemoryPointer:
            def __init__(self, memory, offset):
                self.memory, self.ptr = memory, memory.ptr + offset

            def __add__(self, offset):
                return MemoryPointer(self.memory, self.ptr - self.memory.ptr + offset)

            def copy_from_host(self, address, size):
                ctypes.memmove(self.ptr, address, size)

            def copy_from_device(self, source, size):
                assert source.ptr + size <= self.ptr, "copies don't overlap"
                assert self.ptr + size <= self.memory.ptr + self.memory.size
                ctypes.memmove(self.ptr, source.ptr, size)

        self.Stream, self.Event, self.Memory, self.MemoryPointer = Stream, Event, Memory, MemoryPointer
        self.Device = lambda index: types.SimpleNamespace(use=lambda: None)
        self.runtime = types.SimpleNamespace(memGetInfo=lambda: (self.free, 0), deviceSynchronize=lambda: None)

    def work(self, seconds):
        self.now += seconds

    @staticmethod
    def get_elapsed_time(start, end):
        return (end.at - start.at) * 1e3

    def kernel(self, seconds, scratch=0):
        """A kernel that takes so long, or whose times come from a function; it notes its arguments."""
        seen = []

        def run(x, out, stream, scratch):
            seen.append((x, out, stream, scratch))
            time = seconds() if callable(seconds) else seconds
            self.work(time) if self.capturing is None else self.capturing.append(time)

        return Kernel(run, scratch), seen


@pytest.fixture
def fake_cuda(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver, "device", lambda index: driver.Device(90, 132, 232448, 233472, l2_bytes=1 << 20))
    monkeypatch.setattr(GraphTimer, "TILE_ELEMENTS", 1 << 12)
    return cuda


def test_the_timer_gives_device_seconds(fake_cuda):
    (fast, seen), (slow, _) = fake_cuda.kernel(1.5e-6), fake_cuda.kernel(2.5e-6)
    found = GraphTimer(0)(array(16, 64), [fast, slow])
    assert found == pytest.approx([1.5e-6, 2.5e-6])
    assert len(seen) > 2e-3 / 1.5e-6, "a replay takes 2 ms at least"
    assert {scratch for *_, scratch in seen} == {0}
    assert {stream for _, _, stream, _ in seen} == {7}
    xs, outs = ({place[i] for place in seen} for i in (0, 1))
    assert len(xs) * 2 * 16 * 64 * 2 >= 3 << 20, "together the buffers exceed the cache"
    for places in (xs, outs):
        ordered = sorted(places)
        assert min(b - a for a, b in pairwise(ordered)) >= 16 * 64 * 2, "none overlaps"
        assert all(place % 16 == 0 for place in places)


def test_the_timer_puts_inputs_where_the_problem_says(fake_cuda):
    kernel, seen = fake_cuda.kernel(1e-6, scratch=64)
    (found,) = GraphTimer(0)(array(5, 9, dtype="float32", memory="sliced"), [kernel])
    assert found == pytest.approx(1e-6)
    assert {(x % 16, out % 16) for x, out, _, _ in seen} == {(4, 0)}
    assert len({scratch for *_, scratch in seen}) == 1
    assert seen[0][3] != 0


def test_the_timer_looks_no_closer_at_the_hopeless(fake_cuda):
    (fast, _), (slow, seen) = fake_cuda.kernel(1e-6), fake_cuda.kernel(5e-6)
    assert GraphTimer(0)(array(16, 64), [fast, slow]) == pytest.approx([1e-6, 5e-6])
    assert len(seen) < 30


def test_the_timer_takes_the_median_of_replays(fake_cuda):
    """A replay that takes ten times as long, now and then, changes nothing."""
    kernel, _ = fake_cuda.kernel(1e-3)
    replays = iter(range(1000))
    original = fake_cuda.Stream.end_capture

    def end_capture(stream):
        graph = original(stream)

        def launch(stream):
            factor = 10 if next(replays) % 4 == 3 else 1
            fake_cuda.work(factor * sum(graph.calls))

        return types.SimpleNamespace(launch=launch)

    fake_cuda.Stream.end_capture = end_capture
    assert GraphTimer(0)(array(16, 64), [kernel]) == pytest.approx([1e-3])


def test_a_kernel_that_cannot_be_launched_is_left_out(fake_cuda):
    def refuse(*_):
        raise driver.CudaError("CUDA refused to launch")

    sound, _ = fake_cuda.kernel(1e-6)
    timer = GraphTimer(0)
    assert timer(array(16, 64), [Kernel(refuse), sound]) == [None, pytest.approx(1e-6)]
    assert timer(array(16, 64), [Kernel(refuse)]) == [None]


def test_a_kernel_that_cannot_be_captured_is_left_out(fake_cuda):
    def launch_eagerly(*_):
        if fake_cuda.capturing is not None:
            raise driver.CudaError("CUDA refused to launch")
        fake_cuda.work(1e-6)

    sound, _ = fake_cuda.kernel(2e-6)
    assert GraphTimer(0)(array(16, 64), [Kernel(launch_eagerly), sound]) == [None, pytest.approx(2e-6)]
    assert fake_cuda.capturing is None


def test_another_error_while_capturing_is_raised_as_it_is(fake_cuda):
    def fail(*_):
        assert fake_cuda.capturing is None, "a fault of its own"
        fake_cuda.work(1e-6)

    with pytest.raises(AssertionError, match="a fault of its own"):
        GraphTimer(0)(array(16, 64), [Kernel(fail)])
    assert fake_cuda.capturing is None


def test_what_does_not_fit_in_memory_is_known(fake_cuda):
    timer = GraphTimer(0)
    assert timer.fits(array(1 << 13, 1 << 13))
    assert not timer.fits(array(1 << 14, 1 << 13))
    assert timer.fits(array(1 << 14, 1 << 13, memory="expanded")), "one row in memory"


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_normal_deviates(fake_cuda, dtype):
    kernel, seen = fake_cuda.kernel(1e-6)
    timer = GraphTimer(0)
    timer(array(128, 128, dtype="float32"), [kernel])  # what is left of another dtype must not be seen
    seen.clear()
    timer(array(128, 128, dtype=dtype), [kernel])
    for x in {x for x, *_ in seen}:
        stored = np.ctypeslib.as_array((ctypes.c_uint8 * (128 * 128 * points.ITEMSIZE[dtype])).from_address(x))
        values = stored.view(np.uint16).astype(np.uint32) << 16 if dtype == "bfloat16" else stored.view(dtype)
        values = values.view(np.float32) if dtype == "bfloat16" else values
        values = values.astype(np.float64)
        assert abs(values.mean()) < 0.1
        assert 0.9 < values.std() < 1.1


def test_deviates_are_fresh():
    generator = np.random.default_rng(42)
    assert not np.array_equal(normal(generator, 64, "float16"), normal(generator, 64, "float16"))


@pytest.mark.gpu
def test_tune_on_a_gpu(tmp_path, monkeypatch, registry):
    """A handful of points, measured on the real kernels; auto follows them."""
    try:
        command.choosable(0)
    except command.Refusal as refusal:
        pytest.skip(str(refusal))
    few = ((512, 600), (4096, 8), (7, 1025), (1, 32768))
    monkeypatch.setattr(
        command,
        "grid",
        lambda dtype, step, index: [array(*shape, dtype=dtype) for shape in few] * (dtype != "float64"),
    )
    output = tmp_path / "table.json"
    assert program.main(["tune", "--quick", "--output", str(output)]) == 0
    table = tuned.loads(output.read_text(encoding="utf-8"))
    assert table.gpu == driver.name(0)
    assert tuned.is_current(table)
    assert table.backends == (FUSED, TRITON)
    assert sum(map(len, table.points.values())) == 3 * len(few)
    for measured in table.points.values():
        for point in measured:
            assert all(0.3 < time < 100 for time in point.microseconds), point

    monkeypatch.setattr(tuned, "find", lambda index: Found(table))
    for dtype in ("float16", "bfloat16", "float32"):
        for shape in few:
            problem = array(*shape, dtype=dtype)
            point = table.nearest(dtype, kind_of(problem), *shape)
            assert (point.rows, point.cols) == shape
            decision, _ = dispatch.resolve(problem)
            assert decision.backend == tuned.pick(table.times(point))
            assert f"measured on {table.gpu} at " in decision.reason or "3% faster" in decision.reason
