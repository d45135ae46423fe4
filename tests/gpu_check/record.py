"""What has ended of a run of the GPU check, also when somebody interrupts it."""

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from subprocess import SubprocessError

from document import Status, StepResult
from steps import Check, CheckFailed, NotTried

INTERRUPT_SECONDS = 2.0
"""A command that an interrupt ends may be noticed this much earlier than the interrupt."""


class Record:
    """The results of the steps that have begun, in that order. Those that passed are kept in a
    file, and are not run again where it has them; those named in `without` are not tried."""

    def __init__(self, file: Path, without: Collection[str] = ()) -> None:
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        self.passed = {one.name: one for one in (StepResult(**json.loads(x)) for x in lines)}
        self._file, self._without = file, without
        self._ended = dict(self.passed)
        self._begun = dict.fromkeys(self.passed, 0.0)
        self._interrupted = threading.Event()

    def timed(self, name: str, step: Callable[[Check], str], check: Check) -> StepResult:
        """Run a step, and tell on standard output when it begins and ends. After an interrupt none
        begins."""
        if self._interrupted.is_set():
            return StepResult(name, "not ended", 0.0, "")
        if name in self.passed:
            return self.passed[name]
        print(f"{name} ...", flush=True)
        self._begun[name] = started = time.monotonic()
        status: Status = "FAILED"
        try:
            if name in self._without:
                raise NotTried("left out")
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
        self._ended[name] = result = StepResult(name, status, seconds, figures)
        if status == "passed":
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
        return result

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
