"""The few calls of the CUDA driver that a compiled kernel needs, on torch's context and current
stream."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from oscar_kernels.chips import Target

SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN


class DriverError(RuntimeError):
    """The driver refused a call."""


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_int * 15),
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True)
class Kernel:
    """A function of a loaded module.

    Attributes:
        handle: of the driver.
        threads: of a block.
    """

    handle: ctypes.c_void_p
    threads: int

    def allow_shared(self, size: int) -> None:
        """Raise the limit of dynamic shared memory to `size` bytes."""
        _check(_driver().cuFuncSetAttribute(self.handle, SHARED_BYTES, size), "cuFuncSetAttribute")

    def blocks_per_multiprocessor(self, shared: int) -> int:
        """How many blocks with `shared` bytes of dynamic memory fit beside each other."""
        count = ctypes.c_int()
        call = _driver().cuOccupancyMaxActiveBlocksPerMultiprocessor
        result = call(ctypes.byref(count), self.handle, self.threads, ctypes.c_size_t(shared))
        _check(result, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return count.value

    def launch(
        self,
        grid: tuple[int, int],
        parameters: ctypes.Structure,
        stream: int,
        *,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """Queue the kernel.

        Args:
            shared: bytes of dynamic shared memory.
            early: its blocks may start before the kernel in front has ended; it waits itself (sm_90
                and later).
        """
        attribute = _Attribute(SERIALIZATION, 0, 1)
        config = _Config(
            (ctypes.c_uint * 3)(*grid, 1), (ctypes.c_uint * 3)(self.threads, 1, 1), shared, stream,
            ctypes.pointer(attribute), int(early),
        )  # fmt: skip
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        _check(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self.handle, arguments, None),
            "cuLaunchKernelEx",
        )


def load(code: bytes, names: dict[str, int]) -> list[Kernel]:
    """Load machine code into the current context; its functions `names` and their threads per
    block.
    """
    module = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    kernels = []
    for name, threads in names.items():
        function = ctypes.c_void_p()
        _check(
            _driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()),
            f"cuModuleGetFunction {name}",
        )
        kernels.append(Kernel(function, threads))
    return kernels


def version() -> int:
    """Version of the driver, as 13000."""
    number = ctypes.c_int()
    _check(_driver().cuDriverGetVersion(ctypes.byref(number)), "cuDriverGetVersion")
    return number.value


def target(number: int) -> Target:
    """A GPU as the compiler sees it. No context is made, so none of its memory is taken."""
    device, found = ctypes.c_int(), ctypes.c_int()
    _check(_driver().cuInit(0), "cuInit")
    _check(_driver().cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")

    def attribute(name: int) -> int:
        result = _driver().cuDeviceGetAttribute(ctypes.byref(found), name, device)
        _check(result, "cuDeviceGetAttribute")
        return found.value

    capability = attribute(MAJOR), attribute(MINOR)
    return Target(capability, attribute(SHARED_OPTIN), attribute(MULTIPROCESSORS), version())


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no NVIDIA driver: {error}") from error


def _check(result: int, call: str) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{call}: {(text.value or b'unknown error').decode()} ({result})")
