"""Compile for a GPU before its first launch, in processes that do not touch it.

`recording` runs launchers on CPU tensors and keeps what they would compile: kernels in Triton by
the key that Triton itself would give them, and builds of NVRTC that the caller notes. `compile_all`
compiles each of them once, several at a time, into the folders where the process that launches
looks first. Nothing is launched.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from oscar_kernels import _triton
from oscar_kernels.chips import Target
from oscar_kernels.nvrtc import Build

WARP = 32
MOST_PROCESSES = 16
NICE = 5
PR_SET_PDEATHSIG = 1


class Job(Protocol):
    """Something to compile."""

    def code(self) -> object:
        """Compile it, or find it compiled."""
        ...


@dataclass(frozen=True)
class Launch:
    """A launch in Triton that was not made; its tensors are on the CPU.

    Attributes:
        key: what Triton tells its variants of a kernel apart by.
    """

    kernel: Any
    key: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def code(self) -> object:
        """Compile the kernel, and the function in C that launches it, into Triton's cache."""
        from triton.backends.nvidia.driver import CudaLauncher

        compiled = self.kernel.run(*self.arguments, grid=None, warmup=True, **self.options)
        with suppress(AssertionError):  # Triton finds no driver to link with
            CudaLauncher(compiled.src, compiled.metadata)
        return compiled


@dataclass
class Recorder:
    """What would be compiled, each thing once.

    Attributes:
        target: the GPU.
        builds: of NVRTC.
        launches: of Triton, by kernel and key.
    """

    target: Target
    builds: dict[Build, None] = field(default_factory=dict)
    launches: dict[tuple[str, str], Launch] = field(default_factory=dict)

    def note(self, build: Build) -> None:
        """Keep a build."""
        self.builds[build] = None

    @property
    def jobs(self) -> list[Job]:
        """All of it, roughly in the order of their costs, so that no long one is left for the end:
        the last launches do most."""
        return [*self.builds, *reversed(self.launches.values())]


class _Device:
    """What Triton asks its driver when it compiles."""

    def __init__(self, target: Target) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = target.capability
        self._target = GPUTarget("cuda", 10 * major + minor, WARP)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def recording(target: Target) -> Iterator[Recorder]:
    """In the block, launches in Triton on CPU tensors are recorded for `target` and do nothing.

    Afterwards this process can compile what was recorded, but launch nothing in Triton any more.
    """
    from triton import knobs
    from triton.runtime import driver, jit

    recorder, run = Recorder(target), jit.JITFunction.run

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        def keep(*, key: str, **_: Any) -> bool:
            found = Launch(kernel, key, arguments, options)
            recorder.launches.setdefault((kernel.__name__, key), found)
            return True  # so that Triton does not compile it

        knobs.runtime.jit_cache_hook = keep
        run(kernel, *arguments, grid=grid, warmup=True, **options)

    driver.set_active(_Device(target))
    _triton.compile_for(target)
    jit.JITFunction.run = record
    try:
        yield recorder
    finally:
        jit.JITFunction.run = run
        knobs.runtime.jit_cache_hook = None
        _triton.compile_for(None)


def compile_all(jobs: Sequence[Job], processes: int | None = None) -> list[str]:
    """Compile, several at a time, in forks of this process.

    Args:
        jobs: of a `Recorder`.
        processes: how many; one for each CPU by default, but at most `MOST_PROCESSES`.
    """
    if not jobs:
        return []
    usual = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    number = min(len(jobs), usual if processes is None else processes)
    _JOBS[:] = jobs
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(number, context, _begin, (os.getpid(),)) as pool:
        told = [pool.submit(_failure, place) for place in range(len(jobs))]
        return [line for one in told if (line := _result(one)) is not None]


_JOBS: list[Job] = []
"""Forks read them from here, because launches cannot be pickled."""


def _result(job: Future[str | None]) -> str | None:
    try:
        return job.result()
    except BrokenProcessPool:
        return "a process that compiles was killed"


def _begin(parent: int) -> None:
    """End this fork with its parent, and leave CPUs to others that want them."""
    os.nice(NICE)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _failure(number: int) -> str | None:
    try:
        _JOBS[number].code()
    except Exception as error:  # of any library; it must not cost the other jobs
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None
