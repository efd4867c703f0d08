"""The CUDA driver through ctypes: device properties and kernel launches, whoever compiled the kernel.

CuPy's own launcher has neither clusters, cooperative grids nor programmatic dependent launch
(``cuLaunchKernelEx`` has all three), and Triton's costs twice as much host time.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from .problem import Kernel

_Plan = TypeVar("_Plan")

_SUCCESS = 0
_INVALID_CONTEXT = 201
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
_NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
_CAPTURE_RELAXED = 2
# Device attributes.
_MULTIPROCESSOR_COUNT = 16
_L2_CACHE_SIZE = 38
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
_COOPERATIVE_LAUNCH = 95
_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
# Launch attributes.
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_CLUSTER_SCHEDULING_POLICY = 5
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
# A cluster's blocks go where there is room first, instead of one to a multiprocessor.
_LOAD_BALANCING = 2
# Older drivers can't capture a programmatic dependent launch in a CUDA graph.
_OVERLAP_SINCE = 12030
# A block gets 48 KiB of shared memory without opting in; a kernel's static variables count too, up to 8 KiB here.
_SURE_SHARED_BYTES = 40 * 1024


class CudaError(RuntimeError):
    """The driver refused a call; the message has the driver's name for the error."""


class DoesNotFit(CudaError):
    """The device can't run all the blocks at once that ``launch`` needs at once."""

    def __init__(self, message: str, launch: Launch) -> None:
        super().__init__(message)
        self.launch = launch


@cache
def _driver() -> ctypes.CDLL:
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise CudaError(f"no NVIDIA driver was found ({name} can't be loaded)") from error
    if hasattr(library, "cuLaunchKernelEx"):
        library.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return library


def _check(code: int, doing: str) -> None:
    if code != _SUCCESS:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        label = name.value.decode() if name.value else f"error {code}"
        raise CudaError(f"CUDA refused to {doing}: {label}")


@dataclass(frozen=True)
class Device:
    """What planning a launch needs to know of a GPU.

    Attributes:
        capability: Compute capability as major * 10 + minor, for example 90.
        sm_count: Streaming multiprocessors.
        shared_per_block: Most shared memory that one block can opt in to, in bytes.
        shared_per_sm: Shared memory of a multiprocessor, in bytes.
        l2_bytes: Size of the L2 cache, in bytes.
        max_cluster: Most blocks that a cluster may have; 1 where there are no clusters.
        cooperative: Whether all blocks of a grid can be made to run at once.
    """

    capability: int
    sm_count: int
    shared_per_block: int
    shared_per_sm: int
    l2_bytes: int
    max_cluster: int = 16
    cooperative: bool = True


@cache
def device(index: int) -> Device:
    """Properties of the GPU of that ordinal."""
    cuda = _driver()
    _check(cuda.cuInit(0), "initialize")
    handle = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(handle), index), f"find device {index}")

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, handle), f"describe device {index}")
        return value.value

    capability = attribute(_COMPUTE_CAPABILITY_MAJOR) * 10 + attribute(_COMPUTE_CAPABILITY_MINOR)
    return Device(
        capability=capability,
        sm_count=attribute(_MULTIPROCESSOR_COUNT),
        shared_per_block=attribute(_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        shared_per_sm=attribute(_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
        l2_bytes=attribute(_L2_CACHE_SIZE),
        max_cluster=16 if capability >= 90 else 1,
        cooperative=bool(attribute(_COOPERATIVE_LAUNCH)),
    )


@cache
def _version() -> int:
    """The newest CUDA version that the driver supports, as major * 1000 + minor * 10."""
    found = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(found)), "give its version")
    return found.value


def count() -> int:
    """How many CUDA devices this process sees."""
    cuda = _driver()
    _check(cuda.cuInit(0), "initialize")
    found = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(found)), "count the devices")
    return found.value


def name(index: int) -> str:
    """The model name of the GPU of that ordinal."""
    text = ctypes.create_string_buffer(256)
    handle = ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), index), f"find device {index}")
    _check(_driver().cuDeviceGetName(text, len(text), handle), f"name device {index}")
    return text.value.decode()


@cache
def obstacles() -> list[str]:
    """Why no CUDA kernel can run on this machine; empty if one can."""
    try:
        devices = count()
    except CudaError as error:
        return [str(error)]
    if not hasattr(_driver(), "cuLaunchKernelEx"):
        return ["the NVIDIA driver is too old: CUDA 12 needs version 525 or newer"]
    return [] if devices else ["no CUDA device is visible"]


class _ClusterShape(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("flag", ctypes.c_int), ("cluster", _ClusterShape)]


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


_STREAM_WORD = _Config.stream.offset // 8


def _words(structure: Any) -> memoryview:
    """A structure as 8-byte integers, which are set in half the time of its fields."""
    return memoryview(structure).cast("B").cast("Q")


@dataclass(frozen=True)
class Launch:
    """How a kernel is started; no more than the driver needs.

    Attributes:
        grid: Blocks along x.
        block: Threads a block.
        shared: Bytes of dynamic shared memory a block.
        cluster: Blocks a cluster; 1 for none. Needs compute capability 9.0.
        cooperative: Whether all blocks must be resident at once, so that they can wait for one another.
        overlap: Programmatic dependent launch: the kernel may start before its predecessor in the stream
            has ended, and waits (``griddepcontrol.wait``) before it touches memory.
        scratch: Bytes of device memory each call needs beside its output.
        inputs: Arrays that it reads. A second one takes the place of scratch memory.
        per_call: What each call brings besides, a letter each: ``P`` an address, ``f`` a float, ``d`` a double.
    """

    grid: int
    block: int
    shared: int = 0
    cluster: int = 1
    cooperative: bool = False
    overlap: bool = False
    scratch: int = 0
    inputs: int = 1
    per_call: str = ""

    def attributes(self) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = []
        if self.cooperative:
            found.append((_COOPERATIVE, 1))
        if self.cluster > 1:
            found.append((_CLUSTER_DIMENSION, _ClusterShape(self.cluster, 1, 1)))
            found.append((_CLUSTER_SCHEDULING_POLICY, _LOAD_BALANCING))
        if self.overlap and _version() >= _OVERLAP_SINCE:
            found.append((_PROGRAMMATIC_STREAM_SERIALIZATION, 1))
        return found


_opted_in: dict[int, int] = {}
_lock = threading.Lock()


def _opt_in(function: int, launch: Launch) -> None:
    """Allow a function what the launch needs beyond what every GPU grants, for as long as it lives."""
    cuda, handle = _driver(), ctypes.c_void_p(function)
    # One function serves many lengths: a shorter row must not take back what a longer one was granted.
    with _lock:
        if launch.shared > max(_SURE_SHARED_BYTES, _opted_in.get(function, 0)):
            _check(
                cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared),
                f"give a block {launch.shared} bytes of shared memory",
            )
            _opted_in[function] = launch.shared
    if launch.cluster > 8 and cuda.cuFuncSetAttribute(handle, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1):
        raise DoesNotFit(f"this GPU has no clusters of {launch.cluster} blocks", launch)


def _check_fit(function: int, launch: Launch, index: int, config_at: int) -> None:
    """Raise DoesNotFit unless blocks that wait for one another can all run at once."""
    cuda, handle, found = _driver(), ctypes.c_void_p(function), ctypes.c_int()
    if launch.cluster > 1:
        code = cuda.cuOccupancyMaxActiveClusters(ctypes.byref(found), handle, ctypes.c_void_p(config_at))
        if code or not found.value:
            raise DoesNotFit(f"device {index} can't run a cluster of {launch.cluster} such blocks", launch)
    if launch.cooperative:
        code = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(found), handle, launch.block, ctypes.c_size_t(launch.shared)
        )
        if code or found.value * device(index).sm_count < launch.grid:
            raise DoesNotFit(f"device {index} can't run {launch.grid} such blocks at once", launch)


def kernel(function: int, index: int, launch: Launch, constants: Sequence[Any]) -> Kernel:
    """Make a compiled function callable.

    Args:
        function: ``CUfunction`` handle of a kernel with the parameters ``(x, out, [scratch,] *per_call,
            *constants)``; ``scratch`` is there if ``launch.scratch`` isn't 0 or there is a second input, and
            ``per_call`` is what ``launch.per_call`` says.
        index: Ordinal of the device that the function was loaded on.
        launch: How to start it.
        constants: The remaining parameters, as ctypes values.
    """
    cuda = _driver()
    attributes = launch.attributes()
    pointers = 3 if launch.scratch or launch.inputs > 1 else 2
    # Triton's kernels end with up to two pointers of its own, null here; the driver reads only those there are.
    null = ctypes.c_uint64(0)
    null_at = ctypes.addressof(null)

    def new_frame() -> tuple[memoryview, memoryview, int, int, list[Any]]:
        slots = (ctypes.c_uint64 * (3 + len(launch.per_call)))()
        values = list(constants)
        addresses = [ctypes.addressof(slots) + 8 * i for i in (*range(pointers), *range(3, len(slots)))]
        addresses += [ctypes.addressof(value) for value in values]
        params = (ctypes.c_void_p * (len(addresses) + 2))(*addresses, null_at, null_at)
        array = (_Attribute * max(1, len(attributes)))()
        for entry, (number, value) in zip(array, attributes, strict=False):
            entry.id = number
            if isinstance(value, _ClusterShape):
                entry.value.cluster = value
            else:
                entry.value.flag = value
        config = _Config(
            (launch.grid, 1, 1),
            (launch.block, 1, 1),
            launch.shared,
            None,
            ctypes.addressof(array),
            len(attributes),
        )
        return (
            _words(slots),
            _words(config),
            ctypes.addressof(config),
            ctypes.addressof(params),
            [slots, values, params, array, config, null],
        )

    # Launches in progress may not share memory: another thread can run while the driver reads it.
    idle = [new_frame()]
    with setting_up(index):
        _opt_in(function, launch)
        _check_fit(function, launch, index, idle[0][2])
    launch_kernel = cuda.cuLaunchKernelEx

    def write_more(slots: memoryview, more: Sequence[float]) -> None:
        for i, (letter, value) in enumerate(zip(launch.per_call, more, strict=True), 3):
            slots[i] = int(value) if letter == "P" else int.from_bytes(struct.pack(f"<{letter}", value), "little")

    def run(x: int, out: int, stream: int, scratch: int, *more: float) -> None:
        try:
            frame = idle.pop()
        except IndexError:
            frame = new_frame()
        slots, config, config_at, params_at, _ = frame
        slots[0] = x
        slots[1] = out
        if scratch:
            slots[2] = scratch
        if more:
            write_more(slots, more)
        config[_STREAM_WORD] = stream
        code = launch_kernel(config_at, function, params_at, None)
        if code == _INVALID_CONTEXT:  # this thread's first act on the GPU
            bind_primary_context(index)
            code = launch_kernel(config_at, function, params_at, None)
        idle.append(frame)
        if code:
            _check(code, f"launch {launch}")

    return Kernel(run, launch.scratch)


def prepare_fitting(device: Device, plan: Callable[[Device], _Plan], prepare: Callable[[_Plan], Kernel]) -> Kernel:
    """The kernel for a plan that the device can run: on a slice of a GPU, say, for one that needs less at once."""
    while True:
        try:
            return prepare(plan(device))
        except DoesNotFit as error:
            if error.launch.cooperative:
                device = replace(device, cooperative=False)
            else:
                device = replace(device, max_cluster=error.launch.cluster // 2)


@contextmanager
def setting_up(index: int) -> Iterator[None]:
    """The device's primary context, in which modules can be loaded, also while this thread captures a graph."""
    cuda = _driver()
    before, mode = ctypes.c_void_p(), ctypes.c_int(_CAPTURE_RELAXED)
    _check(cuda.cuInit(0), "initialize")
    _check(cuda.cuCtxGetCurrent(ctypes.byref(before)), "read the current context")
    _check(cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "set the capture mode")
    try:
        bind_primary_context(index)
        yield
    finally:
        cuda.cuCtxSetCurrent(before)
        cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def load(image: bytes, name: str, index: int) -> int:
    """``CUfunction`` handle of a kernel in a cubin or PTX, loaded on a device for as long as the process lives."""
    cuda = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with setting_up(index):
        _check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"load {name}")
        _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), f"find {name}")
    return function.value or 0


@cache
def primary_context(index: int) -> ctypes.c_void_p:
    """The device's primary context, which every framework uses; kept for as long as the process lives."""
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    _check(_driver().cuDeviceGet(ctypes.byref(handle), index), f"find device {index}")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"use device {index}")
    return context


def bind_primary_context(index: int) -> None:
    """Make the device's primary context current in this thread."""
    _check(_driver().cuCtxSetCurrent(primary_context(index)), f"use device {index}")
