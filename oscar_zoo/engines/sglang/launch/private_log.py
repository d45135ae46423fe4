"""The log of a server: only its user may read it, and secrets are removed before it is written.

SGLang prints its arguments, keys included, and a traceback may hold any value.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

REMOVED = b"***"
PIPE_BYTES = 1 << 20
"""What a server may print while nobody reads."""
END_SECONDS = 5.0
"""Seconds that the last words of a server may take, once it is gone."""


class Redactor:
    """Removes secrets from a stream, wherever its parts are cut."""

    def __init__(self, secrets: Collection[str]) -> None:
        forms = {form.encode() for secret in secrets if secret for form in _forms(secret)}
        self._forms = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._forms)) or b"(?!)")
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What can be written now: `data` without what may be the beginning of a secret."""
        clean = self._pattern.sub(REMOVED, self._held + data)
        held = self._beginning_at_the_end(clean)
        self._held = clean[len(clean) - held :]
        return clean[: len(clean) - held]

    def rest(self) -> bytes:
        """What was held back, once nothing follows."""
        held, self._held = self._held, b""
        return held

    def _beginning_at_the_end(self, data: bytes) -> int:
        longest = len(self._forms[0]) - 1 if self._forms else 0
        for length in range(min(longest, len(data)), 0, -1):
            if any(form.startswith(data[-length:]) for form in self._forms):
                return length
        return 0


def open_private(path: Path) -> BinaryIO:
    """Open a file for writing that only this user may read, also if it was there before."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(path, flags, 0o600)
    os.fchmod(number, 0o600)
    return os.fdopen(number, "wb", buffering=0)


@contextlib.contextmanager
def redacted_log(path: Path, secrets: Collection[str]) -> Iterator[tuple[BinaryIO, LogPump]]:
    """A pipe whose other end goes to the file `path` without `secrets`, as it is written.

    The end of the pipe is for a child; close it once the child has it. When the block ends, the log
    holds everything that the child and its children said.
    """
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # more than this user may have
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    pump = LogPump(reading, path, Redactor(secrets))
    pump.start()
    stream = os.fdopen(writing, "wb", buffering=0)
    try:
        yield stream, pump
    finally:
        stream.close()
        pump.join(END_SECONDS)


class LogPump(threading.Thread):
    """The thread that writes a log."""

    def __init__(self, reading: int, path: Path, redactor: Redactor) -> None:
        super().__init__(name="log", daemon=True)
        self._reading, self._redactor, self._log = reading, redactor, open_private(path)

    def run(self) -> None:
        """Write what comes until nobody holds the other end of the pipe."""
        with self._log, os.fdopen(self._reading, "rb", buffering=0) as stream:
            while data := stream.read(1 << 16):
                self._write(self._redactor.feed(data))
            self._write(self._redactor.rest())

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the server
            self._log.write(data)


def _forms(secret: str) -> set[str]:
    return {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")}
