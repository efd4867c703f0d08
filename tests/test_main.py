"""``python -m minikernel`` says what this machine can run, and what would cure the rest."""

import json

import pytest
from isolated import python, run

import minikernel
from minikernel import __main__ as command
from minikernel import driver, tuned
from minikernel.sources import source_hash

AS_COMMAND = "import runpy; runpy.run_module('minikernel', run_name='__main__', alter_sys=True)"


def row_of(name: str, text: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


@pytest.mark.parametrize("absent", [(), ("rich",)], ids=["rich", "plain"])
def test_table_has_every_backend(absent):
    text = run(AS_COMMAND, absent=absent, CUDA_VISIBLE_DEVICES="")
    assert text.startswith(f"minikernel {minikernel.__version__}, python ")
    assert "GPU: none" in text
    for name, info in minikernel.list_backends().items():
        assert row_of(name, text)[2:] == [*info.devices, *info.dtypes]
    assert row_of("numpy", text)[1] == "yes"
    assert row_of("cuda-fused", text)[1] == "no"


def test_what_is_missing_is_named_with_its_cure():
    text = run(AS_COMMAND, absent=("cupy", "triton"))
    found = json.loads(run("import sys; sys.argv = ['', '--json']\n" + AS_COMMAND, absent=("cupy", "triton")))
    for name, module in (("cuda-naive", "cupy"), ("triton-fused", "triton")):
        backend = found["backends"][name]
        assert not backend["available"]
        (cure,) = backend["cures"]
        assert "pip install" in cure
        assert f"  {module} is not installed ({cure})" in text.splitlines()


def test_json_says_what_list_backends_says():
    found = json.loads(python("-m", "minikernel", "--json"))
    assert found["versions"]["minikernel"] == minikernel.__version__
    infos = minikernel.list_backends()
    assert list(found["backends"]) == list(infos)
    for name, info in infos.items():
        backend = found["backends"][name]
        assert backend["available"] == (not backend["reasons"])
        assert backend["dtypes"] == list(info.dtypes)
        assert backend["rank"] == info.rank


def test_a_backend_that_failed_to_load_is_in_the_table(monkeypatch, capsys):
    broken = minikernel.BackendInfo("other", False, ("its entry point failed",), (), (), (), 1_000_000, {})
    monkeypatch.setattr(command, "list_backends", lambda: {**minikernel.list_backends(), "other": broken})
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert row_of("other", text) == ["other", "no"]
    assert "other: not here\n  its entry point failed\n" in text


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that seems to have two; tables are what a test puts in the dictionary that it gets."""
    found = {}
    properties = driver.Device(capability=120, sm_count=1, shared_per_block=1, shared_per_sm=1, l2_bytes=1)
    monkeypatch.setattr(driver, "obstacles", list)
    monkeypatch.setattr(driver, "count", lambda: 2)
    monkeypatch.setattr(driver, "name", lambda index: f"GPU {index}")
    monkeypatch.setattr(driver, "device", lambda index: properties)
    monkeypatch.setattr(tuned, "search", lambda model: found.get(model, tuned.Found()))
    return found


@pytest.mark.usefixtures("two_gpus")
def test_gpus_come_from_the_driver():
    no_table = {"compute_capability": "12.0", "table": None, "table_faults": []}
    assert command.survey()["gpus"] == [{"model": "GPU 0", **no_table}, {"model": "GPU 1", **no_table}]


def test_what_auto_goes_by_is_said(two_gpus, capsys, tmp_path):
    table = tuned.Table("GPU 0", "2026-11-29T12:00:00+00:00", "", {}, source_hash(), ("cuda-fused",), {})
    older = tuned.Table("GPU 1", "2026-11-30T12:00:00+00:00", "", {}, "0" * 16, ("cuda-fused",), {})
    path = tmp_path / "gpu-0.json"

    def said():
        assert command.main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("GPU: "))
        return [line for line in lines[start + 1 :] if line.startswith(("auto on", "  x"))]

    assert said() == [
        f"auto on GPU {i} goes by rank: there is no table for this model (python -m minikernel tune measures one)"
        for i in (0, 1)
    ]
    two_gpus["GPU 0"] = tuned.Found(table, path, own=True)
    two_gpus["GPU 1"] = tuned.Found(older, path, faults=("x can't be used",))
    assert said() == [
        f"auto on GPU 0 goes by your table {path}, measured 2026-11-29",
        "auto on GPU 1 goes by minikernel's table, measured 2026-11-30 with other kernels than these",
        "  x can't be used",
    ]
    one, two = command.survey()["gpus"]
    assert one["table"] == {"path": str(path), "own": True, "date": table.date, "current": True}
    assert (two["table"]["own"], two["table"]["current"]) == (False, False)
    assert two["table_faults"] == ["x can't be used"]
    assert command.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == [one, two]


@pytest.mark.parametrize("width", [10, 30, 45, 80])
@pytest.mark.parametrize("absent", [(), ("rich",)], ids=["rich", "plain"])
def test_a_narrow_terminal_cuts_no_name(width, absent):
    text = run(AS_COMMAND, absent=absent, COLUMNS=str(width), CUDA_VISIBLE_DEVICES="")
    assert "…" not in text
    for name in minikernel.list_backends():
        assert row_of(name, text)[1] in ("yes", "no")


def test_the_environment_s_backend_is_shown_and_an_unknown_one_flagged(monkeypatch, capsys):
    def said():
        assert command.main([]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("MINIKERNEL_BACKEND")]

    monkeypatch.delenv("MINIKERNEL_BACKEND", raising=False)
    assert said() == []
    assert command.survey()["environment"] == {"backend": None, "error": None}
    monkeypatch.setenv("MINIKERNEL_BACKEND", "cuda-naive")
    assert said() == ["MINIKERNEL_BACKEND=cuda-naive decides for every call that names no backend"]
    monkeypatch.setenv("MINIKERNEL_BACKEND", "cuda")
    (line,) = said()
    assert line.startswith("MINIKERNEL_BACKEND=cuda is wrong: no backend is named 'cuda'")
    assert "cuda-naive" in line
    assert "no backend" in command.survey()["environment"]["error"]


@pytest.mark.gpu
def test_gpu_is_named():
    import cupy

    gpus = command.survey()["gpus"]
    assert len(gpus) == cupy.cuda.runtime.getDeviceCount()
    assert gpus[0]["model"] == cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    assert gpus[0]["compute_capability"].replace(".", "") == cupy.cuda.Device(0).compute_capability


def test_unknown_option_is_one_line_and_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--jsn"])
    assert exit_.value.code == 2
    assert "--jsn" in capsys.readouterr().err


def test_an_unknown_command_is_one_line_and_exit_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["tuna"])
    assert exit_.value.code == 2
    assert "'tuna'" in capsys.readouterr().err


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        command.main(["--help"])
    assert exit_.value.code == 0
    assert "tune" in capsys.readouterr().out
