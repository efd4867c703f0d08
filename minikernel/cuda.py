"""The CUDA border: finds ``kernels/``, compiles a kernel with CuPy's NVRTC, and remembers it."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from . import driver, images
from .driver import Launch
from .images import Image
from .problem import Kernel, Problem
from .registry import BackendUnavailable, Requirement

# The C++ types of the dtypes, as kernels/common.cuh defines them.
_TYPES = {"float16": "half", "bfloat16": "bfloat16", "float32": "float", "float64": "double"}

#: Most blocks that a grid may have along x.
MAX_GRID = 2**31 - 1

_SENTINEL = "common.cuh"
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)

_Key = tuple[str, tuple[tuple[str, str], ...], int]
_functions: dict[_Key, int] = {}
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
    """A kernel file with its includes pasted in, each once: all that an image of it depends on."""
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
        "LOG": "1" if problem.is_log else "0",
    }
    return shared | {name: str(int(v) if isinstance(v, bool) else v) for name, v in more.items()}


def options(macros: Mapping[str, str]) -> tuple[str, ...]:
    """Compiler options. With ``-ftz=true`` subnormal float32 results flush to zero."""
    return ("-std=c++17", "-ftz=true", *(f"-D{name}={value}" for name, value in sorted(macros.items())))


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


def arch_option(capability: int) -> str:
    """NVRTC's option for a GPU: its own code, or PTX for the newest GPU known to an NVRTC that is older than it."""
    from cupy.cuda import nvrtc

    known = [number for number in nvrtc.getSupportedArchs() if number <= capability]
    return f"-arch={'sm' if capability in known else 'compute'}_{max(known, default=capability)}"


def compile_image(name: str, macros: Mapping[str, str], arch: str) -> Image:
    """A kernel file, compiled by NVRTC; the kernel is named like the file. Needs no GPU.

    Args:
        name: Of the file.
        macros: What :func:`defines` gives.
        arch: What :func:`arch_option` gives.

    Raises:
        RuntimeError: It doesn't compile; the message is the compiler's own.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source(name), name, (), ())
    try:
        nvrtc.compileProgram(program, (*options(macros), arch))
        code = nvrtc.getCUBIN(program) if "sm_" in arch else nvrtc.getPTX(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{error}: {nvrtc.getProgramLog(program)}") from None
    finally:
        nvrtc.destroyProgram(program)
    return Image(code if isinstance(code, bytes) else code.encode(), Path(name).stem)


def compile_function(name: str, macros: Mapping[str, str], index: int) -> int:
    """The ``CUfunction`` of a file, named like it, compiled and loaded once per device and set of macros.

    Raises:
        BackendUnavailable: NVRTC or the driver refused it.
    """
    key = (name, tuple(sorted(macros.items())), index)
    # Held while compiling, so that threads that want the same kernel compile it once; setdefault is atomic.
    with _locks.setdefault(key, threading.Lock()):
        if key not in _functions:
            try:
                _functions[key] = _load(name, macros, index)
            except Exception as error:
                raise BackendUnavailable(f"{name} failed to compile: {_explain(error)}") from error
        return _functions[key]


def _load(name: str, macros: Mapping[str, str], index: int) -> int:
    from cupy.cuda import nvrtc

    arch = arch_option(driver.device(index).capability)
    return images.loaded(
        ("cuda", str(nvrtc.getVersion()), source(name), *options(macros), arch),
        lambda: compile_image(name, macros, arch),
        lambda image: driver.load(image.code, image.name, index),
    )


class Layout(ctypes.Structure):
    """``struct Layout`` of kernels/common.cuh."""

    _fields_ = [(name, ctypes.c_longlong) for name in ("rows", "cols", "inner", "x_outer", "x_col", "x_inner")]


def layout(problem: Problem) -> Layout:
    return Layout(problem.rows, problem.cols, problem.inner, *problem.strides)


def kernel(
    name: str,
    problem: Problem,
    macros: Mapping[str, str],
    launch: Launch,
    *constants: Any,
    leading: Iterable[Any] = (),
) -> Kernel:
    """Compile a kernel file for a problem and make it callable.

    Args:
        constants: The kernel's parameters behind the layout, as ctypes values; ``leading`` those before it.
    """
    function = compile_function(name, macros, problem.index)
    return driver.kernel(function, problem.index, launch, (*leading, layout(problem), *constants))
