"""Memory of a server while it works: of its processes, and of the GPUs. Linux only, as servers are."""

from __future__ import annotations

import os
import statistics
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PAUSE = 1.0
"""Seconds between two looks."""


@dataclass(frozen=True)
class Usage:
    """Bytes over a run: medians of a stretch in its middle and of its last part, and the most ever seen.

    A server still fills its caches in the first third, which is left out.
    """

    early: int
    late: int
    peak: int

    @property
    def growth(self) -> int:
        """Bytes by which the end is above the middle."""
        return self.late - self.early


def usage(samples: Sequence[int]) -> Usage | None:
    """From equally spaced `samples`; `None` without any."""
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


def gpu_memory() -> int | None:
    """Bytes in use on all GPUs together, whoever uses them, by the driver's own tool; `None` without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    variables = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, env=variables, check=True)
        return sum(int(line) for line in done.stdout.split()) * (1 << 20)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


class Watch:
    """Looks at a server's memory in a thread of its own while the block runs."""

    def __init__(self, group: int, pause: float = PAUSE) -> None:
        self._group, self._pause = group, pause
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._host: list[int] = []
        self._gpu: list[int] = []

    @property
    def host(self) -> Usage | None:
        """Of the processes."""
        return usage(self._host)

    @property
    def gpu(self) -> Usage | None:
        """Of the GPUs; `None` where there are none."""
        return usage(self._gpu)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        has_gpu = True
        while not self._done.is_set():
            began = time.monotonic()
            self._host.append(group_memory(self._group))
            found = gpu_memory() if has_gpu else None
            has_gpu = found is not None
            if found is not None:
                self._gpu.append(found)
            self._done.wait(max(0.0, self._pause - (time.monotonic() - began)))
