"""Compiles CUDA C++ with the NVRTC of torch's wheels, so no CUDA toolkit is needed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from oscar_kernels.nvrtc import cubins

Flags = Mapping[str, str | int]


class CompilerMissing(RuntimeError):
    """NVRTC cannot be loaded."""


class CompilationFailed(RuntimeError):
    """NVRTC refused the source; the message is its log."""


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
        """Text by name."""
        found = (
            x for x in resources.files(self.package).iterdir() if x.name.endswith((".cu", ".cuh"))
        )
        return {x.name: x.read_text(encoding="utf-8") for x in sorted(found, key=lambda x: x.name)}


@dataclass(frozen=True)
class Build:
    """One compilation, which may happen before the code is needed, in another process.

    Attributes:
        source: what is compiled.
        flags: values of the `-D` flags, sorted by name.
        arch: as `sm_90`.
        driver: version of the driver.
    """

    source: CudaSource
    flags: tuple[tuple[str, str | int], ...]
    arch: str
    driver: int

    @classmethod
    def of(cls, source: CudaSource, flags: Flags, arch: str, driver: int) -> Build:
        """With flags in any order."""
        return cls(source, tuple(sorted(flags.items())), arch, driver)

    def code(self) -> bytes:
        """See `compiled`."""
        return compiled(self.source, dict(self.flags), self.arch, driver=self.driver)


def compiled(source: CudaSource, flags: Flags, arch: str, *, driver: int = 0) -> bytes:
    """Machine code for one set of flags, kept in a private folder.

    Args:
        driver: version of the driver; a new one compiles again.
    """
    files = source.files()
    options = [
        f"-arch={arch}",
        "--std=c++17",
        *(f"-D{name}={value}" for name, value in sorted(flags.items())),
    ]
    text = [x for item in files.items() for x in item]
    key = [*text, *options, "NVRTC", *map(str, nvrtc_version()), "driver", str(driver)]
    return cubins.kept(key, lambda: compile_source(files, source.main, options))


def nvrtc_version() -> tuple[int, int]:
    """Major and minor version of the NVRTC in use."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    return major.value, minor.value


def compile_source(files: Mapping[str, str], main: str, options: Sequence[str]) -> bytes:
    """Compile `main` of `files`, which may include the others."""
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
