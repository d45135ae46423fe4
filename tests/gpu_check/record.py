"""What has ended of a run of the GPU check, also when somebody interrupts it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from subprocess import SubprocessError

from document import Status, StepResult
from steps import Check, CheckFailed, NotTried

INTERRUPT_SECONDS = 2.0
"""A command that an interrupt ends may be noticed this much earlier than the interrupt."""


class Record:
    """The results of the steps that have begun, in that order."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._ended: dict[str, StepResult] = {}
        self._interrupted = threading.Event()

    def timed(self, name: str, step: Callable[[Check], str], check: Check) -> StepResult:
        """Run a step, and tell on standard output when it begins and ends. After an interrupt none
        begins."""
        if self._interrupted.is_set():
            return StepResult(name, "not ended", 0.0, "")
        print(f"{name} ...", flush=True)
        self._begun[name] = started = time.monotonic()
        status: Status = "FAILED"
        try:
            figures, status = step(check), "passed"
        except NotTried as error:
            figures, status = str(error), "not tried"
        except CheckFailed as error:
            figures = str(error)
        except (OSError, KeyError, ValueError, SubprocessError) as error:
            figures = f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        if status == "FAILED" and self._interrupted.wait(INTERRUPT_SECONDS):
            return StepResult(name, "not ended", seconds, "")
        print(f"{name}: {status} ({seconds:.0f} s) {figures}", flush=True)
        self._ended[name] = StepResult(name, status, seconds, figures)
        return self._ended[name]

    @contextmanager
    def until_interrupted(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        """Keep what has ended when an interrupt comes, and begin nothing more. The commands that
        run get the same signal, and how they end then is no result."""
        try:
            yield
        except KeyboardInterrupt:
            self._interrupted.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise

    def stopped(self) -> list[StepResult]:
        """The results when the interrupt came; of steps that had only begun too."""
        now = time.monotonic()
        return [
            self._ended.get(name) or StepResult(name, "not ended", now - begun, "")
            for name, begun in self._begun.items()
        ]
