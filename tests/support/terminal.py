"""A command on a terminal of its own, and the person who sits there."""

import contextlib
import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

STREAMS = ("stdin", "stdout", "stderr")
SECONDS = 300


class Terminal:
    """Python with the arguments `command`, which is gone when the block ends; `seen` is all that it
    showed.

    Args:
        env: all of its variables.
        streams: those that are the terminal; with all of them, Ctrl-C there is a signal.
    """

    def __init__(
        self,
        command: Sequence[object],
        env: Mapping[str, str] | None = None,
        streams: Sequence[str] = STREAMS,
        **given: Any,
    ) -> None:
        self.seen = ""
        self._ours, theirs = pty.openpty()
        given |= dict.fromkeys(streams, theirs)
        if streams == STREAMS:
            take = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731
            given |= {"start_new_session": True, "preexec_fn": take}
        words = [sys.executable, *map(str, command)]
        self.child = subprocess.Popen(words, env=env or os.environ | {"TERM": "xterm"}, **given)
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()  # what fails here must not wait for it
        self.child.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """What it showed, without control sequences."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def is_silent(self, seconds: float = SECONDS) -> bool:
        return not select.select([self._ours], [], [], seconds)[0]

    def read(self) -> bool:
        """See more; whether there was any."""
        assert not self.is_silent(), f"silent after: {self.seen}"
        with contextlib.suppress(OSError):  # the other side is closed
            if part := os.read(self._ours, 65536):
                self.seen += part.decode(errors="replace")
                return True
        return False

    def see(self, what: str | Callable[[str], bool], times: int = 1) -> None:
        """Wait until a text was shown so often, or until what was shown is enough."""
        while not (what(self.text) if callable(what) else self.seen.count(what) >= times):
            assert self.read(), self.seen

    def end(self) -> int:
        """The exit code, with all that was shown until then in `seen`."""
        while self.read():
            pass
        return self.child.wait(SECONDS)
