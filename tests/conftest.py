"""Fixtures and skips that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import CACHE_VARIABLE, GPU_BACKENDS, INTERPRETED, KINDS, Failures, Route

import minikernel
from minikernel import api, cuda, dispatch, driver
from minikernel.registry import REGISTRY


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and (reasons := driver.obstacles()):
        pytest.skip("; ".join(reasons))


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Compiled kernels are kept, but not among the user's own; processes of one run share them."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder / "cache"))
        yield


@pytest.fixture
def homeless(monkeypatch):
    """A user who has no home, and says of no folder that it's the cache."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setattr(Path, "home", fail)


def _routes(*pairs):
    return [
        pytest.param(
            (backend, kind), marks=pytest.mark.gpu if backend in GPU_BACKENDS else (), id=f"{backend}-{kind}"
        )
        for backend, kind in pairs
    ]


def _open(pair) -> Route:
    backend, kind = pair
    info = minikernel.list_backends()[backend]
    if not info.available:
        pytest.skip("; ".join(info.reasons))
    KINDS[kind].skip_unless_usable()
    return Route(backend, KINDS[kind])


@pytest.fixture(
    params=_routes(
        *(("numpy", kind) for kind in ("numpy", "torch-cpu", "dlpack")),
        *((backend, kind) for backend in GPU_BACKENDS for kind in ("torch-cuda", "cupy")),
    )
)
def route(request) -> Route:
    """Every backend, from every kind of array whose memory it works in."""
    return _open(request.param)


@pytest.fixture(params=_routes(("numpy", "torch-cpu"), *((backend, "torch-cuda") for backend in GPU_BACKENDS)))
def torch_route(request) -> Route:
    """Every backend once, from PyTorch: for what takes long, or depends on the backend alone."""
    return _open(request.param)


@pytest.fixture(params=_routes(*((b, kind) for b in GPU_BACKENDS for kind in ("numpy", "torch-cpu", "dlpack"))))
def copied_route(request) -> Route:
    """Every GPU backend from host memory: asked for by name, so the input is copied over and back."""
    return _open(request.param)


@pytest.fixture(
    params=[
        *_routes(*(("numpy", kind) for kind in ("numpy", "torch-cpu", "dlpack"))),
        *_routes(("cuda-fused", "torch-cuda"), ("cuda-fused", "cupy")),
        pytest.param(("triton-fused", "torch-cpu"), id="triton-fused")
        if INTERPRETED
        else _routes(("triton-fused", "torch-cuda"))[0],
    ]
)
def fused(request) -> Route:
    """The backends that take scale, mask and causality, and give the k largest."""
    return _open(request.param)


@pytest.fixture
def failures():
    """Collects the failures of many small cases; the test fails with them all at its end."""
    return Failures()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    result = yield
    if (found := pyfuncitem.funcargs.get("failures")) is not None:
        found.report()
    return result


@pytest.fixture
def registry(monkeypatch):
    """The registry, to do with as a test likes: what it remembers is put back afterwards."""
    REGISTRY.names()
    for name in ("_backends", "_broken", "_unavailable"):
        monkeypatch.setattr(REGISTRY, name, dict(getattr(REGISTRY, name)))
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(cuda, "_functions", dict(cuda._functions))
    _forget()
    yield REGISTRY
    monkeypatch.undo()
    _forget()


def _forget():
    REGISTRY._changed()
    assert not api._calls
    assert not dispatch._kernels
