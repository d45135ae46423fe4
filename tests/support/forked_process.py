"""A command that goes on running as a fork of the process that imported SGLang, held as by
`subprocess.Popen`; see `forked_commands` for what forks cannot test."""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sglang_forks import connect

POLL_SECONDS = 0.02


class Output:
    """What a process writes into a file, as a pipe would give it: lines as they come, then the
    end."""

    def __init__(self, path: Path, ended: Callable[[], bool]) -> None:
        path.touch()
        self._stream, self._ended = path.open(encoding="utf-8"), ended

    def readline(self) -> str:
        """The next line; empty once the process has ended and everything was read."""
        line = ""
        while True:
            ended = self._ended()
            line += self._stream.readline()
            if ended or line.endswith("\n"):
                return line
            time.sleep(POLL_SECONDS)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")

    def read(self) -> str:
        return "".join(self)


class ForkedProcess:
    """Python with the arguments `command`, which starts in `folder`."""

    def __init__(
        self, command: Sequence[object], environment: Mapping[str, str], folder: Path
    ) -> None:
        results = Path(tempfile.mkdtemp(prefix="forked-", dir=folder))
        out, err, number = (results / name for name in ("out", "err", "pid"))
        forks, pool = connect(), ThreadPoolExecutor(1)
        self._code = pool.submit(
            forks.call,
            "forked_commands:_run",
            folder,
            err,
            command=[*map(str, command)],
            environment=dict(environment),
            out=str(out),
            number=str(number),
        )
        self._code.add_done_callback(lambda _: forks.close())
        pool.shutdown(wait=False)
        self.stdout, self.stderr = (Output(path, self._code.done) for path in (out, err))
        while not number.exists():
            assert not self._code.done(), err.read_text()
            time.sleep(POLL_SECONDS)
        self.pid = int(number.read_text())

    @property
    def returncode(self) -> int | None:
        return self._code.result() if self._code.done() else None

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        return self._code.result(timeout)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and nothing that it started."""
        self.send_signal(signal.SIGKILL)
