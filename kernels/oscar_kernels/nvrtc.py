"""CUDA C++ of this package: compiled at first use by the NVRTC of torch's wheels (no CUDA toolkit
is needed), kept in a private folder, loaded and launched through the driver.

The name of a kept file is the digest of everything that changes its bytes. The file begins with the
digest of the rest of it, so a damaged file is compiled again. Of several processes or threads that
want the same code, one compiles it and the others wait for it; one that was killed holds nobody up.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from filelock import FileLock

from oscar_kernels.chips import Target

logger = logging.getLogger(__name__)

VARIABLE = "OSCAR_KERNELS_CACHE"
"""Environment variable that names the folder; `oscar-kernels` in the user's cache by default."""
PATIENCE = 120.0
"""Seconds to wait for another process that compiles the same code; then both do."""
_PAUSE = 0.02

SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN

Flags = Mapping[str, str | int]


class CompilerMissing(RuntimeError):
    """NVRTC cannot be loaded."""


class CompilationFailed(RuntimeError):
    """NVRTC refused the source; the message is its log."""


class DriverError(RuntimeError):
    """The driver refused a call."""


def failure(load: Callable[[], object]) -> str | None:
    """Why code cannot be compiled and loaded, in one line; `None` once it is."""
    try:
        load()
    except (CompilerMissing, CompilationFailed, DriverError) as error:
        return " ".join(str(error).split())
    return None


@dataclass(frozen=True)
class CudaSource:
    """CUDA C++ of one folder.

    Attributes:
        package: name of the folder as a module.
        main: the file to compile; it may include the others.
    """

    package: str
    main: str

    @cache  # noqa: B019 - one per folder, for as long as the process lives
    def files(self) -> dict[str, str]:
        """Text by name; machine.cuh of this package is among them."""
        folders = (resources.files(x) for x in (__package__, self.package))
        found = (x for folder in folders for x in folder.iterdir())
        texts = sorted((x for x in found if x.name.endswith((".cu", ".cuh"))), key=lambda x: x.name)
        return {x.name: x.read_text(encoding="utf-8") for x in texts}


@dataclass(frozen=True)
class Build:
    """One compilation, which may happen before the code is needed, in another process.

    Attributes:
        source: what is compiled.
        flags: values of the `-D` flags, sorted by name.
        arch: as of `Target`.
        driver: version of the driver; a new one compiles again.
    """

    source: CudaSource
    flags: tuple[tuple[str, str | int], ...]
    arch: str
    driver: int

    @classmethod
    def of(cls, source: CudaSource, flags: Flags, arch: str, driver: int = 0) -> Build:
        """With flags in any order."""
        return cls(source, tuple(sorted(flags.items())), arch, driver)

    def code(self) -> bytes:
        """Machine code, kept in a private folder."""
        files = self.source.files()
        defined = (f"-D{name}={value}" for name, value in self.flags)
        options = [f"-arch={self.arch}", "--std=c++17", *defined]
        text = [x for item in files.items() for x in item]
        version = (*map(str, nvrtc_version()), "driver", str(self.driver))
        return kept(
            [*text, *options, "NVRTC", *version],
            lambda: compile_source(files, self.source.main, options),
        )


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_source(files: Mapping[str, str], main: str, options: Sequence[str]) -> bytes:
    """Compile `main` of `files`, which may include the others; PTX for `-arch=compute_80` and the
    like, else machine code."""
    library, program = _nvrtc(), ctypes.c_void_p()
    headers = {name: text for name, text in files.items() if name != main}
    created = library.nvrtcCreateProgram(
        ctypes.byref(program),
        files[main].encode(),
        main.encode(),
        len(headers),
        _strings(headers.values()),
        _strings(headers),
    )
    _check(created)
    try:
        if library.nvrtcCompileProgram(program, len(options), _strings(options)):
            log = _buffer(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
            raise CompilationFailed(log.rstrip(b"\0").decode(errors="replace").strip())
        if any(option.startswith("-arch=compute_") for option in options):
            return _buffer(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX)
        return _buffer(program, library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [x.encode() for x in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _buffer(
    program: ctypes.c_void_p, size_of: Callable[..., int], read: Callable[..., int]
) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(read(program, buffer))
    return buffer.raw


def _check(result: int) -> None:
    if result:
        raise CompilationFailed(f"NVRTC answered with error {result}")


@cache
def _nvrtc() -> ctypes.CDLL:
    seen = []
    for path in _candidates():
        with contextlib.suppress(OSError):
            # NVRTC looks its second library up by name, which finds one that is loaded.
            for builtins in (
                sorted(path.parent.glob("libnvrtc-builtins.so*")) if path.is_absolute() else ()
            ):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        seen.append(str(path))
    raise CompilerMissing(
        f"NVRTC was not found ({', '.join(seen)}); `pip install nvidia-cuda-nvrtc` for the CUDA"
        " version of torch"
    )


def _candidates() -> Iterator[Path]:
    """Wheels of NVIDIA beside torch, newest first, then the system's libraries."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = [x for x in Path(folder).glob("*/lib/libnvrtc.so.*") if x.suffix[1:].isdigit()]
        yield from sorted(found, key=lambda x: int(x.suffix[1:]), reverse=True)
    for major in (13, 12):
        yield Path(f"libnvrtc.so.{major}")


def folder() -> Path:
    """Where machine code is kept."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
        / "oscar-kernels"
    )


def kept(key: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """The bytes kept under `key`, or else those of `make`, which are kept from now on.

    Args:
        key: everything that changes the bytes.
    """
    place = _private(folder())
    if place is None:
        return make()
    path = place / f"{hashlib.sha256(repr(tuple(key)).encode()).hexdigest()}.cubin"
    code = _read(path)
    if code is None:
        with _alone(path.with_suffix(".lock")):
            code = _read(path)  # another process may have made it meanwhile
            if code is None:
                code = make()
                _write(path, code)
    return code


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, which is gone afterwards.

    Where the file system has no locks, or after `PATIENCE`, the body runs without one: two
    processes then compile the same code, and both are right.
    """
    lock = FileLock(path, timeout=PATIENCE, mode=0o600)
    with contextlib.suppress(OSError, NotImplementedError):
        lock.acquire(poll_interval=_PAUSE)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                path.unlink()  # whoever waits for it finds the code
        lock.release()


def _private(place: Path) -> Path | None:
    """The folder, made if missing; `None` if others could write to it, or it cannot be made."""
    try:
        for folder in (*reversed(place.parents), place):  # also the parents for this user alone
            folder.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
    except OSError as error:
        logger.warning("compiled kernels are not kept: %s", error)
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        logger.warning(
            "compiled kernels are not kept: %s must be a folder that only this user can open", place
        )
        return None
    return place


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as beside:
        made = Path(beside) / path.name
        made.touch(0o600)
        made.write_bytes(hashlib.sha256(code).digest() + code)
        made.replace(path)


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
        _call("cuFuncSetAttribute", self.handle, SHARED_BYTES, size)

    def blocks_per_multiprocessor(self, shared: int) -> int:
        """How many blocks with `shared` bytes of dynamic memory fit beside each other."""
        count = ctypes.c_int()
        _call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor",
            ctypes.byref(count), self.handle, self.threads, ctypes.c_size_t(shared),
        )  # fmt: skip
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
        _call("cuLaunchKernelEx", ctypes.byref(config), self.handle, arguments, None)


def load(code: bytes, names: dict[str, int]) -> list[Kernel]:
    """Load machine code into the current context; its functions `names` and their threads per
    block.
    """
    module = ctypes.c_void_p()
    _call("cuModuleLoadData", ctypes.byref(module), code)
    kernels = []
    for name, threads in names.items():
        function = ctypes.c_void_p()
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        kernels.append(Kernel(function, threads))
    return kernels


def version() -> int:
    """Of the driver, as 13000."""
    number = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(number))
    return number.value


def target(number: int) -> Target:
    """A GPU as the compiler sees it, or the older chip whose code it runs. No context is made, so
    none of its memory is taken."""
    device, found = ctypes.c_int(), ctypes.c_int()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(device), number)

    def attribute(name: int) -> int:
        _call("cuDeviceGetAttribute", ctypes.byref(found), name, device)
        return found.value

    capability = attribute(MAJOR), attribute(MINOR)
    own = Target(capability, attribute(SHARED_OPTIN), attribute(MULTIPROCESSORS), version())
    return own.as_older()


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"no NVIDIA driver: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")
