"""The CUDA border: finds ``kernels/``, compiles a kernel with NVRTC through CuPy, and remembers it."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from . import driver
from .driver import Launch
from .problem import Kernel, Problem
from .registry import BackendUnavailable, Requirement

# The C++ types of the dtypes, as kernels/common.cuh defines them.
_TYPES = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}

#: Most blocks that a grid may have along x.
MAX_GRID = 2**31 - 1

_SENTINEL = "common.cuh"
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)

_Key = tuple[str, tuple[tuple[str, str], ...], int]
_modules: dict[_Key, tuple[Any, int]] = {}
_locks: dict[_Key, threading.Lock] = {}

REQUIRES = (Requirement("cupy", "pip install 'minikernel[cuda12]', or [cuda13] for a driver of CUDA 13"),)


@cache
def kernels_dir() -> Path:
    """The folder of CUDA sources: the checkout's own if this is a checkout, else the installed one."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "kernels", package / "_kernels"):
        if (folder / _SENTINEL).is_file():
            return folder
    raise FileNotFoundError(f"minikernel is installed without its CUDA sources: no {_SENTINEL} beside {package}")


@cache
def source(name: str) -> str:
    """A kernel file with its includes pasted in, each once, so that CuPy's cache sees every line that matters."""
    seen: set[str] = set()

    def paste(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        text = (kernels_dir() / file).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda match: paste(match.group(1)), text)

    return paste(name)


def defines(problem: Problem, **more: object) -> dict[str, str]:
    """The macros that every kernel file is compiled with, and ``more``."""
    shared = {
        "IN": _TYPES[problem.dtype],
        "OUT": _TYPES[problem.out_dtype],
        "LOG": "1" if problem.op == "log_softmax" else "0",
    }
    return shared | {name: str(int(v) if isinstance(v, bool) else v) for name, v in more.items()}


def options(macros: Mapping[str, str]) -> tuple[str, ...]:
    """Compiler options: CuPy adds ``-ftz=true``, so subnormal float32 results flush to zero."""
    return ("-std=c++17", *(f"-D{name}={value}" for name, value in sorted(macros.items())))


@cache
def obstacles() -> list[str]:
    """Why CUDA kernels can't be compiled and run on this machine; empty if they can."""
    if found := driver.obstacles():
        return found
    try:
        import cupy
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # CuPy reports a missing library, a wrong wheel and an old driver in many ways
        return [_explain(error)]
    return []


def _explain(error: BaseException) -> str:
    text = " ".join(str(error).split())
    cure = ""
    if "nvrtc" in text.lower():
        cure = "; NVRTC comes with pip install 'minikernel[cuda12]' (or [cuda13])"
    elif "multiple CuPy packages" in text or "insufficient" in text.lower():
        cure = "; keep the one CuPy wheel that fits the driver: cupy-cuda12x or cupy-cuda13x"
    return f"{type(error).__name__}: {text[:600]}{cure}"


def compile_function(name: str, macros: Mapping[str, str], index: int) -> int:
    """The ``CUfunction`` of a file, named like it, compiled once per device and set of macros.

    Raises:
        BackendUnavailable: NVRTC or the driver refused it.
    """
    key = (name, tuple(sorted(macros.items())), index)
    # Held while compiling, so that threads that want the same kernel compile it once; setdefault is atomic.
    with _locks.setdefault(key, threading.Lock()):
        if key not in _modules:
            try:
                import cupy

                with driver.setting_up(index), cupy.cuda.Device(index):
                    module = cupy.RawModule(code=source(name), options=options(macros))
                    _modules[key] = module, module.get_function(Path(name).stem).kernel.ptr
            except Exception as error:
                raise BackendUnavailable(f"{name} failed to compile: {_explain(error)}") from error
        return _modules[key][1]


class Layout(ctypes.Structure):
    """``struct Layout`` of kernels/common.cuh."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("rows", "cols", "inner", "x_outer", "x_col", "x_inner")]


def layout(problem: Problem) -> Layout:
    return Layout(problem.rows, problem.cols, problem.inner, *problem.strides)


def kernel(name: str, problem: Problem, macros: Mapping[str, str], launch: Launch, *constants: Any) -> Kernel:
    """Compile a kernel file for a problem and make it callable."""
    function = compile_function(name, macros, problem.index)
    return driver.kernel(function, problem.index, launch, (layout(problem), *constants))
