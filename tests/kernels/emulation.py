"""CUDA C++ of a kernel as a shared library for the CPU, where g++ is."""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from oscar_kernels.nvrtc import CudaSource, Flags

EMULATOR = Path(__file__).parent / "emulator"
STANDARD = "standard.h"
"""Everything of the standard library that a kernel and its emulator include, which is compiled
once."""
OPTIONS = (
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fno-gnu-unique",  # the state of a library is its own
    "-Wno-unknown-pragmas",
    "-fPIC",
    "-shared",
)


class Emulator:
    """Compiles a kernel beside an emulator, once for each set of flags.

    Args:
        source: the kernel; the machine.cuh of the emulator takes the place of its own.
        name: file of the emulator that is compiled.
        parameters: what `parameters_size` of the library is compared with.
        folder: where files go.
    """

    def __init__(
        self, source: CudaSource, name: str, parameters: type[ctypes.Structure], folder: Path
    ) -> None:
        self._parameters, self._folder, self._name = parameters, folder, name
        self._made: dict[tuple[tuple[str, str | int], ...], ctypes.CDLL] = {}
        for file, text in source.files().items():
            (folder / file).write_text(text)
        shutil.copytree(EMULATOR, folder, dirs_exist_ok=True)
        lines = (text for path in folder.iterdir() for text in path.read_text().splitlines())
        included = sorted({line for line in lines if line.startswith("#include <")})
        (folder / STANDARD).write_text("\n".join(included) + "\n")

    def library(self, flags: Flags) -> ctypes.CDLL:
        """The library; a test without g++ is skipped."""
        key = tuple(sorted(flags.items()))
        if key not in self._made:
            target = self._folder / f"{len(self._made)}.so"
            self._compile(flags, target)
            found = ctypes.CDLL(str(target))
            found.emulate.restype = (
                ctypes.c_bool
            )  # as an int it would be true whatever was returned
            assert found.parameters_size() == ctypes.sizeof(self._parameters)
            self._made[key] = found
        return self._made[key]

    def _compile(self, flags: Mapping[str, str | int], target: Path) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++ to compile the emulator with")
        if not self._made:
            self._run(compiler, "-x", "c++-header", STANDARD, "-o", f"{STANDARD}.gch")
        defined = [f"-D{name}={value}" for name, value in flags.items()]
        standard = ("-include", STANDARD)
        self._run(compiler, *standard, *defined, self._name, "-o", str(target))

    def _run(self, compiler: str, *words: str) -> None:
        subprocess.run([compiler, *OPTIONS, *words], cwd=self._folder, check=True)
