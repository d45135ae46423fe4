"""The program that holds an SGLang engine, forked from this process instead of started."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from oscar_zoo.engines.sglang import capture_process


class ForkedProgram:
    """What `capture_with_engine` needs of `subprocess.Popen`: group, standard streams, folder and
    variables alike.

    What this process has imported it need not import, but for `sglang`, which may be another one on
    its `PYTHONPATH`.
    """

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stderr: int,
        start_new_session: bool,
        **_: int,
    ) -> None:
        assert command[1:4] == ["-P", "-m", capture_process.__name__] and start_new_session
        theirs, ours = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(
                theirs[1]
            )  # or the end of its parent would not be the end of its standard input
            os.close(ours[0])
            for end, number in ((theirs[0], 0), (ours[1], 1), (stderr, 2)):
                os.dup2(end, number)
            self._main(command[3:], env, cwd)
        os.close(theirs[0])
        os.close(ours[1])
        self.stdin: BinaryIO = os.fdopen(theirs[1], "wb")
        self.stdout: BinaryIO = os.fdopen(ours[0], "rb")

    def wait(self) -> int:
        """Until it has ended: its exit status."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def prepare(self, path: list[str]) -> None:
        """In the fork, before the program; `path` is what it has beside this process's own."""
        sys.path[:0] = path
        sys.modules.pop("sglang", None)

    def _main(self, argv: list[str], env: Mapping[str, str], cwd: Path) -> None:
        try:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(env)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            sys.argv = argv
            self.prepare(env["PYTHONPATH"].split(os.pathsep))
            capture_process._main()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
