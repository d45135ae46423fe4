"""Memory of a server while it works: of its processes and of the GPUs. Linux only."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.models import hardware

PROC = Path("/proc")
PAUSE = 1.0
"""Seconds between two samples."""


@dataclass(frozen=True)
class Usage:
    """Bytes in use over a run.

    The first third is left out, because a server still fills its caches then.

    Attributes:
        early: median of a stretch in the middle.
        late: median of the last part.
        peak: maximum.
    """

    early: int
    late: int
    peak: int

    @property
    def growth(self) -> int:
        """Bytes that the end is above the middle."""
        return self.late - self.early


def usage(samples: Sequence[int]) -> Usage | None:
    """The usage that equally spaced `samples` show, or `None` without samples."""
    if not samples:
        return None
    n = len(samples)
    middle, end = samples[n // 3 : max(n // 2, n // 3 + 1)], samples[-max(1, n // 6) :]
    return Usage(int(statistics.median(middle)), int(statistics.median(end)), max(samples))


def group_memory(group: int, proc: Path = PROC) -> int:
    """Resident bytes of all processes of a process group, shared pages counted in each."""
    total, page = 0, os.sysconf("SC_PAGE_SIZE")
    for place in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # gone meanwhile
            fields = (place / "stat").read_text().rpartition(") ")[2].split()
            if int(fields[2]) == group:
                total += int(fields[21]) * page
    return total


def gpu_memory(numbers: range) -> int | None:
    """Bytes in use on the GPUs with these numbers, as `nvidia-smi` says; `None` without them.

    All users of these GPUs are counted.
    """
    found = hardware.visible(hardware.gpus())[numbers.start : numbers.stop]
    return sum(gpu.memory - gpu.free for gpu in found) if found else None


class Watch:
    """Samples the memory of a server in a thread while the block runs.

    Args:
        pause: seconds between two samples.
    """

    def __init__(self, group: int, gpus: range = range(0), pause: float = PAUSE) -> None:
        self._group, self._gpus, self._pause = group, gpus, pause
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._host: list[int] = []
        self._gpu: list[int] = []

    @property
    def host(self) -> Usage | None:
        """Memory of the processes."""
        return usage(self._host)

    @property
    def gpu(self) -> Usage | None:
        """Memory of the GPUs, or `None` without GPUs."""
        return usage(self._gpu)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        has_gpu = bool(self._gpus)
        while not self._done.is_set():
            began = time.monotonic()
            self._host.append(group_memory(self._group))
            found = gpu_memory(self._gpus) if has_gpu else None
            has_gpu = found is not None
            if found is not None:
                self._gpu.append(found)
            self._done.wait(max(0.0, self._pause - (time.monotonic() - began)))
