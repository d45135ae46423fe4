"""The log of a server: only its user may read it, and secrets are removed before it is written.

SGLang prints its arguments, keys included, and a traceback may hold any value.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from oscar_zoo import errors

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
    def __init__(self, reading: int, path: Path, redactor: Redactor) -> None:
        super().__init__(name="log", daemon=True)
        self._reading, self._redactor, self._log = reading, redactor, open_private(path)

    def run(self) -> None:
        with self._log, os.fdopen(self._reading, "rb", buffering=0) as stream:
            while data := stream.read(1 << 16):
                self._write(self._redactor.feed(data))
            self._write(self._redactor.rest())

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not stop the server
            self._log.write(data)


def _forms(secret: str) -> set[str]:
    return {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe="")}


TAIL_BYTES = 1 << 18
NAMES_ERROR = re.compile(
    r"[\w.]*(Error|Exception|Mismatch)(: |$)|[\w .-]{0,60}: error: |error: |\S*/python[\d.]*: "
    r"|Value error, "
)
"""Lines of a log that name an error: the end of a traceback, and what an argument parser or Python
itself says."""
OF_PYDANTIC = re.compile(r"^Value error, | \[type=\w+, input_value=.*")
OURS = re.compile(rf"(?:{re.escape(errors.__name__)}(?:\.\w+)+|error): (?P<message>.+)")
"""Lines that this library wrote, at the end of a traceback or in its place (`worker_errors`)."""
FOLLOWS = re.compile(
    r"(EOFError|BrokenPipeError|Connection\w*Error)\b|RuntimeError: (Rank \d+|Initialization"
    r" failed|Engine core initialization failed)"
)
"""What other processes say because one of them failed."""
CRASHED = re.compile(r"Subprocess (?P<name>\S+) \(pid=\d+\) crashed with exit code (?P<code>-?\d+)")
"""What SGLang says of a process of its own that ended without a word."""
TAKEN = re.compile(
    rb"attempting to bind on address \([^)]*?, (?P<port>\d+)[^)]*\): address already in use"
)
"""What Python's asyncio says of a port where another process listens."""
BEHIND = re.compile(
    r"(?:\([\w -]+ pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[\S+\] ?)?(?:\[rank\d+\]: )?"
)
"""What vLLM writes in front of a line: process, time, place in its code, and rank."""
HINT = "hint: "
PARSER_SAYS = ": error: "
"""What stands between the name of a program and what is wrong with its arguments."""
UNKNOWN = "no error in its log"
"""The cause that `cause_in` tells when it finds none."""


@dataclass(frozen=True)
class Cause:
    """Why a server ended."""

    text: str  # one line without a full stop
    hint: str | None = None  # the next step, where it is known
    by_parser: bool = False  # whether the parser of its flags said so, and nothing was started


KILLED = Cause(
    "it was killed (SIGKILL)",
    "look into the kernel's log (dmesg): a machine without free memory kills processes",
)
"""The cause where the engine's process was killed and its log has no error."""


def cause_in(log: Path) -> Cause:
    """Why the server that wrote `log` ended. A refusal of ours counts before anything that follows
    it in the log, because the rest is a consequence."""
    text = _tail(log).decode("utf-8", "replace")
    said = (BEHIND.sub("", line, count=1).strip() for line in text.splitlines())
    lines = [line for line in said if line]
    for place in reversed(range(len(lines))):
        own = OURS.fullmatch(lines[place])
        if own is not None:
            after = lines[place + 1] if place + 1 < len(lines) else ""
            hint = after.removeprefix(HINT) if after.startswith(HINT) else None
            return Cause(own["message"][:600].rstrip("."), hint)
    named = [line for line in lines if NAMES_ERROR.match(line)]
    roots = [line for line in named if not FOLLOWS.match(line)] or named
    if roots:
        refused = _refused(roots[-1], lines)
        text = OF_PYDANTIC.sub("", refused or roots[-1])
        return Cause(text[:400].rstrip("."), by_parser=refused is not None)
    crashes = [found for line in lines if (found := CRASHED.search(line))]
    return _crash(*crashes[0].groups()) if crashes else Cause(UNKNOWN)


def lost_port(log: Path) -> int | None:
    """The port that the server which writes `log` could not have, because another process was
    faster; SGLang goes on without one."""
    with contextlib.suppress(FileNotFoundError):
        found = TAKEN.search(_tail(log))
        return None if found is None else int(found["port"])
    return None


def _tail(log: Path) -> bytes:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return stream.read()


def _refused(line: str, lines: Sequence[str]) -> str | None:
    program, said, text = line.partition(PARSER_SAYS)
    usage = any(one.startswith(f"usage: {program} ") for one in lines)
    return text if said and usage else None


def _crash(name: str, code: str) -> Cause:
    """A process `name` of SGLang that ended with `code` (negative: the signal), and the next
    step."""
    if int(code) >= 0:
        return Cause(f"its process {name} ended with status {code}")
    if int(code) == -signal.SIGKILL:
        return Cause(f"its process {name} was killed", KILLED.hint)
    return Cause(f"its process {name} was ended by signal {-int(code)}")


FIRST = "starting the engine"
PHASES = (
    (r"server_args=|Using max model len", "starting the workers"),
    (r"Init (torch distributed|parallel) begin", "connecting the workers"),
    (r"Load weight begin|Starting to load model", "loading weights"),
    (r"Load weight end", "allocating the cache"),
    (r"Memory pool end|Model loading took", "preparing to run"),
    (r"INT2 KV cache: compiling kernels", "compiling kernels"),
    (r"INT2 KV cache: kernels ready", "preparing to run"),
    (r"Capture .*[Gg]raph begin|GPU KV cache size", "capturing CUDA graphs"),
    (r"max_total_num_tokens=|Graph capturing finished", "starting the HTTP server"),
    (r"(INFO: +)?Application startup complete", "warming up"),
)
"""The beginning of a line of SGLang or vLLM, behind time and rank, and the phase that it opens."""
_LINE = re.compile(r"\[[^\]\n]*\] (?P<text>.*)")
MOST_BYTES = 1 << 20
"""Bytes of the log that one look reads."""


class PhaseReader:
    """The phase of the server that writes to `log`; every call of `current` reads what is new."""

    def __init__(self, log: Path) -> None:
        self._log, self._offset, self._rest = log, 0, b""
        self._opens = [re.compile(pattern) for pattern, _ in PHASES]
        self._reached = -1

    def current(self) -> str:
        """The phase now; `FIRST` while there is no log, or none of its lines is known."""
        for line in self._new_lines():
            line = BEHIND.sub("", line, count=1)
            found = _LINE.match(line)
            text = found["text"] if found else line
            for place, pattern in enumerate(self._opens):
                if place > self._reached and pattern.match(text):
                    self._reached = place
        return FIRST if self._reached < 0 else PHASES[self._reached][1]

    def _new_lines(self) -> list[str]:
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read(MOST_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-4096:]
        return [line.decode("utf-8", "replace") for line in lines]
