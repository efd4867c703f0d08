"""A backend in a package of its own: found through its entry point, listed, named, and chosen by auto."""

import json
import sys
from pathlib import Path

import isolated
import numpy as np
import pytest
from isolated import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = ROOT / "examples" / "third-party-backend"


def lay_out(folder: Path, module: str | None = None, **entry_points: str) -> Path:
    """Put the example in a folder as pip would; ``module`` and ``entry_points`` replace its own."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    name = project["name"].replace("-", "_")
    entry_points = entry_points or project["entry-points"]["minikernel.backends"]

    info = folder / f"{name}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(
        "\n".join(["[minikernel.backends]", *(f"{key} = {value}" for key, value in entry_points.items())])
    )
    (folder / f"{name}.py").write_text(module or (EXAMPLE / f"{name}.py").read_text())
    return folder


@pytest.fixture
def run_with_example(tmp_path):
    """Runs a snippet where the example is installed, and returns what it prints as JSON."""

    def run(code: str, **options: str):
        folder = lay_out(tmp_path / "site", **options)
        return json.loads(isolated.run(f"import json\n{code}", path=(folder, ROOT)))

    return run


def test_it_is_listed(run_with_example):
    found = run_with_example("""
from dataclasses import asdict
from minikernel import list_backends
infos = list_backends()
print(json.dumps([list(infos), asdict(infos["exact"])]))
""")
    names, info = found
    assert names.index("cuda-naive") < names.index("exact") < names.index("numpy")
    assert info["available"]
    assert info["reasons"] == []
    assert info["dtypes"] == ["float16", "float32", "float64"]


@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_it_runs_under_its_name_and_wins_under_auto(run_with_example, op, dtype):
    """In its one rounding it is at most half a unit in the last place off, which tells it from numpy."""
    named, automatic, chosen, worst_ulp, odd = run_with_example(f"""
import numpy as np
import minikernel
x = np.random.default_rng(42).standard_normal((64, 3000)).astype("{dtype}")
named = minikernel.{op}(x, backend="exact")
automatic = minikernel.{op}(x)
wide = x.astype(np.longdouble)
wide -= wide.max(-1, keepdims=True)
total = np.exp(wide).sum(-1, keepdims=True)
reference = wide - np.log(total) if "{op}" == "log_softmax" else np.exp(wide) / total
ulp = np.spacing(np.abs(reference.astype("{dtype}"))).astype(np.longdouble)
odd = minikernel.{op}(np.array([[np.nan, 0], [np.inf, 0], [-np.inf, 0], [-np.inf, -np.inf]], "{dtype}"))
print(json.dumps([
    str(named.dtype), bool((named == automatic).all()), minikernel.explain(x).backend,
    float((np.abs(named - reference) / ulp).max()), np.isnan(odd).tolist(),
]))
""")
    assert named == dtype
    assert automatic is True
    assert chosen == "exact"
    rounds_once = dtype != "float64" or np.finfo(np.longdouble).eps < np.finfo(np.float64).eps
    assert worst_ulp <= (0.51 if rounds_once else 8)
    assert odd == [[True, True], [True, True], [False, False], [True, True]]


def test_what_it_does_not_declare_goes_elsewhere(run_with_example):
    pytest.importorskip("ml_dtypes")
    backend, rejected = run_with_example("""
import ml_dtypes, numpy as np
import minikernel
decision = minikernel.explain(np.ones((2, 3), ml_dtypes.bfloat16))
print(json.dumps([decision.backend, {name: list(why) for name, why in decision.rejected.items()}]))
""")
    assert backend == "numpy"
    assert rejected["exact"] == ["it takes float16, float32, float64; the input is bfloat16"]


def test_importing_minikernel_does_not_load_it(run_with_example):
    before, after = run_with_example("""
import sys
import numpy as np
import minikernel
before = "minikernel_exact" in sys.modules
minikernel.softmax(np.ones(3))
print(json.dumps([before, "minikernel_exact" in sys.modules]))
""")
    assert (before, after) == (False, True)


BROKEN = {
    "raises as it is imported": ("raise OSError('no such accelerator')", "OSError: no such accelerator"),
    "has no such name": ("", "AttributeError"),
    "is no backend": ("BACKEND = lambda: 'exact'", "TypeError: a backend is a minikernel.Backend; got str"),
    "takes a built-in's name": (
        "import dataclasses, minikernel.backends.numpy_blocked as built_in\n"
        "BACKEND = dataclasses.replace(built_in.BACKEND)",
        "'numpy' is a built-in backend",
    ),
    "declares an unknown dtype": (
        "import minikernel\nBACKEND = minikernel.Backend('exact', 1, ('cpu',), ('float8',), prepare=print)",
        "unknown dtypes ['float8']",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_one_is_reported_and_not_fatal(run_with_example, fault):
    module, reason = BROKEN[fault]
    result, available, reasons, error = run_with_example(
        """
import numpy as np
import minikernel
info = minikernel.list_backends()["exact"]
try:
    minikernel.softmax(np.ones(3), backend="exact")
except ValueError as raised:
    error = str(raised)
print(json.dumps([minikernel.softmax(np.zeros(4)).tolist(), info.available, info.reasons, error]))
""",
        module=module or "other = 1",
    )
    assert result == [0.25] * 4
    assert not available
    assert len(reasons) == 1
    assert "minikernel_exact:BACKEND" in reasons[0]
    assert reason in reasons[0]
    assert reason in error


def test_one_that_is_not_installed_is_reported(run_with_example):
    reasons = run_with_example(
        "import minikernel; print(json.dumps(minikernel.list_backends()['gone'].reasons))",
        gone="a_module_that_is_not_there:BACKEND",
    )
    assert "ModuleNotFoundError" in reasons[0]


def test_a_function_that_returns_a_backend_will_do(run_with_example):
    names = run_with_example(
        "import minikernel; print(json.dumps(list(minikernel.list_backends())))",
        module=(EXAMPLE / "minikernel_exact.py").read_text() + "\ndef make():\n    return BACKEND\n",
        made="minikernel_exact:make",
    )
    assert "exact" in names
