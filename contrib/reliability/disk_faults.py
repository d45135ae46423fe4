"""Commands whose system calls fail, or that die, at a chosen call below one folder.

A process with `disk_faults.c` preloaded imports the command line once and forks for every command,
so that a fault takes milliseconds.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
SERVER = Path(__file__).with_name("fault_server.py")
HOW = {"count": 0, "kill": 1, "torn": 2, "fail": 3, "short": 4}


@dataclass(frozen=True)
class Fault:
    """What happens to which call.

    Attributes:
        how: `kill` before the call; `torn`, after half of a write; `short`, half of a write is
            written and reported; `fail` with `error`; `count` does nothing.
        at: number of the call, from 1.
        error: an errno.
        stays: every later call fails, too.
        reads: calls that change nothing are counted, too.
    """

    how: str = "count"
    at: int = 0
    error: int = 0
    stays: bool = False
    reads: bool = False


@dataclass(frozen=True)
class Ended:
    """How a command ended; `code` is negative for a signal, `calls` those that were counted (0
    where it was killed)."""

    code: int
    out: str
    err: str
    calls: int


def lacking() -> str | None:
    """Why faults cannot be injected here, or `None`."""
    if sys.platform != "linux":
        return "system calls are replaced on Linux only"
    return None if shutil.which("cc") else "no C compiler"


class FaultyCommands:
    """Runs `oscar-zoo` with faults; a context manager.

    Args:
        work: a folder for the library and the outputs, outside of every `root`.
        imports: modules to import before the first fork.
    """

    def __init__(self, work: Path, imports: Sequence[str] = ()) -> None:
        work.mkdir(parents=True, exist_ok=True)
        library = work / "disk_faults.so"
        compiled = ["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"]
        subprocess.run(compiled, check=True)
        self.work, self.imports, self.library = work, imports, library

    def __enter__(self) -> FaultyCommands:
        variables = {**os.environ, "LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, SERVER, self.library, *self.imports],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def __call__(
        self,
        root: Path,
        *arguments: str,
        fault: Fault = Fault(),
        environment: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run a command in the folder `root`, below which calls are counted.

        Args:
            environment: variables in place of all that begin with `OSCAR_ZOO`.
        """
        job = {
            "root": str(root),
            "arguments": arguments,
            "environment": {**state(root), **(environment or {})},
            "out": str(self.work / "out"),
            "err": str(self.work / "err"),
            **asdict(fault),
            "how": HOW[fault.how],
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        out, err = (
            (self.work / name).read_text("utf-8", errors="replace") for name in ("out", "err")
        )
        return Ended(answer["code"], out, err, answer["calls"])


def state(root: Path) -> dict[str, str]:
    """Variables that keep everything a command writes below `root`."""
    names = ("CACHE", "DATA", "STATE", "CONFIG")
    return {f"OSCAR_ZOO_{name}": str(root / "home" / name.lower()) for name in names}
