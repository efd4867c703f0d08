"""What is installed, from where, and that importing it costs and starts nothing."""

import json
import os
import shutil
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from isolated import ROOT, python, run

import minikernel
from minikernel.sources import source_hash

FRAMEWORKS = ("torch", "cupy", "triton", "rich", "scipy", "ml_dtypes", "matplotlib")
SOFTMAX_OF_ONES = """
import numpy as np
import minikernel
assert np.array_equal(minikernel.softmax(np.ones(3)), np.full(3, 1 / 3))
"""
NEEDS_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def test_importing_and_running_on_numpy_import_no_framework():
    report = "\nimport sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    assert not set(run("import minikernel" + report).split()) & set(FRAMEWORKS)
    assert not set(run(SOFTMAX_OF_ONES + report).split()) & set(FRAMEWORKS)


def reasons_after_softmax(**options):
    """Why each backend can't run, in a fresh interpreter where softmax has worked."""
    output = run(
        f"{SOFTMAX_OF_ONES}"
        "import json; print(json.dumps({k: v.reasons for k, v in minikernel.list_backends().items()}))",
        **options,
    )
    return json.loads(output)


@pytest.mark.parametrize("absent", [(name,) for name in FRAMEWORKS[:3]] + [FRAMEWORKS], ids="+".join)
def test_works_without(absent):
    reasons = reasons_after_softmax(absent=absent)
    assert reasons["numpy"] == []
    for module, names in (("cupy", ("cuda-naive", "cuda-smem", "cuda-fused")), ("triton", ("triton-fused",))):
        if module in absent:
            for name in names:
                assert any(f"{module} is not installed" in reason for reason in reasons[name])
                assert any("pip install" in reason for reason in reasons[name])


@pytest.mark.parametrize("value", ["", "-1"])
def test_works_with_no_gpu_visible(value):
    reasons = reasons_after_softmax(CUDA_VISIBLE_DEVICES=value)
    assert reasons.pop("numpy") == []
    assert set(reasons) >= {"cuda-naive", "cuda-smem", "cuda-fused", "triton-fused"}
    assert all(reasons.values())


@NEEDS_FORK
def test_fork_after_large_calls_does_not_hang():
    """The parent's threads don't exist in the child."""
    run("""
import os, signal
import numpy as np
import minikernel
x = np.random.default_rng(42).standard_normal((512, 8192), dtype=np.float32)
expected = minikernel.softmax(x)
child = os.fork()
if child == 0:
    signal.alarm(60)
    os._exit(0 if np.array_equal(minikernel.softmax(x), expected) else 1)
assert os.waitpid(child, 0)[1] == 0
""")


@NEEDS_FORK
@pytest.mark.gpu
def test_cuda_in_a_forked_child():
    run(f"""
import os
{SOFTMAX_OF_ONES}
child = os.fork()
if child == 0:
    import cupy
    y = minikernel.softmax(cupy.ones(3))
    os._exit(0 if abs(cupy.asnumpy(y) - 1 / 3).max() < 1e-15 else 1)
assert os.waitpid(child, 0)[1] == 0
""")


@pytest.mark.gpu
def test_visible_devices_set_after_import_are_heeded():
    run(f"""
import os
{SOFTMAX_OF_ONES}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
assert [name for name, info in minikernel.list_backends().items() if info.available] == ["numpy"]
""")


def test_installed_version_is_the_code_s():
    try:
        installed = metadata.version("minikernel")
    except metadata.PackageNotFoundError:
        pytest.skip("minikernel is not installed here: this is a bare checkout")
    assert installed == minikernel.__version__


def locate(*path: Path) -> tuple[Path, Path, list[str]]:
    """Where the package and its kernels are found with these folders on the path, and the kernels' names."""
    output = python(
        "-S",  # without site-packages, so that no installed copy can answer; numpy comes by its own path
        "-c",
        f"{SOFTMAX_OF_ONES}"
        "import json; from minikernel.cuda import kernels_dir; folder = kernels_dir()\n"
        "print(json.dumps([minikernel.__file__, str(folder), sorted(f.name for f in folder.iterdir())]))",
        path=path,
    )
    package, kernels, names = json.loads(output)
    return Path(package).parent, Path(kernels), names


@pytest.fixture(scope="module")
def numpy_alone(tmp_path_factory):
    """A folder from which numpy, and nothing else that is installed, can be imported."""
    folder = tmp_path_factory.mktemp("numpy-alone")
    site = Path(sys.modules["numpy"].__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        if (site / name).exists():
            (folder / name).symlink_to(site / name, target_is_directory=True)
    return folder


SOURCES = sorted(path.name for path in (ROOT / "kernels").iterdir())


def test_bare_checkout_runs_from_another_folder(tmp_path, numpy_alone):
    for name in ("minikernel", "kernels"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    assert locate(tmp_path, numpy_alone) == (tmp_path / "minikernel", tmp_path / "kernels", SOURCES)


def build(project: Path, folder: Path, kind: str) -> Path:
    """Build a wheel or an sdist offline, through the same hook that pip calls."""
    pytest.importorskip("hatchling", reason="building needs hatchling, which is not installed here")
    code = f"import sys; from hatchling.build import build_{kind} as build; print(build(sys.argv[1]))"
    return folder / python("-c", code, str(folder), cwd=project).splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    shutil.unpack_archive(build(ROOT, folder, "sdist"), folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_holds_the_package_and_its_kernels(wheel):
    files = contents(wheel)
    assert wheel.name == f"minikernel-{minikernel.__version__}-py3-none-any.whl"
    assert {Path(name).parts[0] for name in files} == {
        "minikernel",
        f"minikernel-{minikernel.__version__}.dist-info",
    }
    assert "minikernel/py.typed" in files
    packaged = {
        name.rpartition("/")[2]: body for name, body in files.items() if name.startswith("minikernel/_kernels/")
    }
    assert packaged == {path.name: path.read_bytes() for path in (ROOT / "kernels").iterdir()}
    assert {"common.cuh", "softmax_fused.cu"} <= set(packaged)
    assert "__init__.py" not in packaged, "kernels/ is data, not a package"


TABLES = {
    f"minikernel/tables/{path.name}": path.read_bytes() for path in (ROOT / "minikernel" / "tables").iterdir()
}


def test_wheel_and_sdist_hold_the_tables(wheel, sdist):
    assert TABLES
    files = contents(wheel)
    assert {name: body for name, body in files.items() if name.startswith("minikernel/tables/")} == TABLES
    assert {name: (sdist / name).read_bytes() for name in TABLES} == TABLES


def test_wheel_works_without_being_a_checkout(wheel, tmp_path, numpy_alone):
    shutil.unpack_archive(wheel, tmp_path, "zip")
    package = tmp_path / "minikernel"
    assert locate(tmp_path, numpy_alone) == (package, package / "_kernels", SOURCES)


def test_an_installed_table_is_found_and_is_of_the_installed_code(wheel, tmp_path, numpy_alone):
    """A table that is measured in a checkout goes for the wheel that is built of it."""
    shutil.unpack_archive(wheel, tmp_path, "zip")
    code = f"""
from minikernel import tuned
from minikernel.sources import source_hash
table = tuned.Table("A GPU", "", "", {{}}, {source_hash()!r}, ("cuda-fused",), {{}})
(tuned.SHIPPED / tuned.file_name("A GPU")).write_text(table.dumps(), encoding="utf-8")
found = tuned.search("A GPU")
print(found.path.parent, tuned.is_current(found.table))
"""
    output = python("-S", "-c", code, path=(tmp_path, numpy_alone), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert output.split() == [str(tmp_path / "minikernel" / "tables"), "True"]


def test_sdist_makes_the_same_wheel(wheel, sdist, tmp_path):
    assert contents(build(sdist, tmp_path, "wheel")) == contents(wheel)


def test_sdist_has_the_tests_and_the_sources(sdist):
    for name in ("kernels/common.cuh", "tests/test_packaging.py", "bench/run.py", "LICENSE", "README.md"):
        assert (sdist / name).is_file(), name


@pytest.mark.parametrize(
    "command",
    [
        'pip install -e ".[bench]" && python bench/run.py --backends all',
        'pip install -e ".[test]" && pytest -n auto',
    ],
)
@pytest.mark.parametrize("file", ["README.md", ".ci/run"])
def test_ci_runs_the_commands_that_the_readme_gives(file, command):
    assert command in (ROOT / file).read_text(encoding="utf-8")
