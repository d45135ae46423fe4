"""Commands at the same moment, as forks of a process that imported the command line once.

As a program it takes a list of jobs on each line of stdin, starts all of them at once, and answers
with a list when the last has ended.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

SIGNAL_CODE = -int(signal.SIGKILL)
BROKEN = 70
"""Exit code of a fork in which something else than the command failed."""
SUPPORT = Path(__file__).resolve().parents[2] / "tests/support"
IMPORTS = ("huggingface_hub", "requests")


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        arguments: behind `oscar-zoo`.
        folder: where it runs.
        environment: variables beside those of the process.
        killed_after: seconds after which it is killed, if it still runs.
        before: `MODULE:NAME` of a function of this folder that is called before the command.
    """

    arguments: Sequence[str]
    folder: str
    environment: Mapping[str, str]
    killed_after: float | None = None
    before: str | None = None


@dataclass(frozen=True)
class Done:
    """How a command ended; `code` is negative for a signal."""

    code: int
    out: str
    err: str

    @property
    def killed(self) -> bool:
        """Whether it was killed."""
        return self.code == SIGNAL_CODE


class ManyCommands:
    """Runs lists of jobs; a context manager.

    Args:
        work: a folder for outputs.
        environment: all variables of the process.
    """

    def __init__(self, work: Path, environment: Mapping[str, str]) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.environment = work, dict(environment)

    def __enter__(self) -> ManyCommands:
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(self.work)],
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def __call__(self, jobs: Sequence[Job]) -> list[Done]:
        """Run all `jobs` at once, to their ends."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([asdict(job) for job in jobs]) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        done = [Done(code, *self._said(number)) for number, code in enumerate(codes)]
        broken = next((one for one in done if one.code == BROKEN), None)
        if broken is not None:
            raise RuntimeError(f"a command could not run: {broken.err}")
        return done

    def _said(self, number: int) -> tuple[str, str]:
        out, err = (
            (self.work / f"{number}.{name}").read_text("utf-8", errors="replace")
            for name in ("out", "err")
        )
        return out, err


def main(work: Path) -> None:
    """Answer lists of jobs until stdin ends."""
    from fault_server import import_all

    sys.path.append(str(SUPPORT))
    import_all(IMPORTS)
    for line in sys.stdin:
        jobs = json.loads(line)
        ready, go = os.pipe()
        children = [_fork(job, work / str(number), ready, go) for number, job in enumerate(jobs)]
        os.close(ready)
        os.close(go)  # all begin now
        began = time.monotonic()
        for child, job in zip(children, jobs, strict=True):
            if job["killed_after"] is not None:
                _kill_later(child, began + job["killed_after"])
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)


def _kill_later(child: int, at: float) -> None:
    """Kill `child` at the time `at`; a child that has ended keeps its number until it is waited
    for, and one that was waited for is let alone."""
    handle = os.pidfd_open(child)

    def kill() -> None:
        time.sleep(max(0.0, at - time.monotonic()))
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)

    threading.Thread(target=kill, daemon=True).start()


def _fork(job: dict[str, Any], place: Path, ready: int, go: int) -> int:
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)  # its end closes when all are there
        _run(job, place)
    return child


def _run(job: dict[str, Any], place: Path) -> NoReturn:
    code = BROKEN
    try:
        signal.alarm(600)
        for number, name in ((1, "out"), (2, "err")):
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            os.dup2(os.open(place.with_suffix(f".{name}"), flags, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        if job["before"] is not None:
            module, _, name = job["before"].partition(":")
            getattr(importlib.import_module(module), name)()
        from oscar_zoo.cli.main import run

        code = 1  # with tracebacks asked for, errors of commands are not caught
        code = run(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
