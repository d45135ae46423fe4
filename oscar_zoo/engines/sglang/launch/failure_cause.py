"""Why a server ended, as its log tells."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo import errors

TAIL_BYTES = 1 << 18
NAMES_ERROR = re.compile(
    r"[\w.]*(Error|Exception|Mismatch): |[\w .-]{0,60}: error: |error: |\S*/python[\d.]*: "
)
"""Lines of a log that name an error: the end of a traceback, and what an argument parser or Python
itself says."""
OURS = re.compile(rf"(?:{re.escape(errors.__name__)}(?:\.\w+)+|error): (?P<message>.+)")
"""Lines that this library wrote, at the end of a traceback or in its place (`worker_errors`)."""
FOLLOWS = re.compile(
    r"(EOFError|BrokenPipeError|Connection\w*Error)\b|RuntimeError: (Rank \d+|Initialization"
    r" failed)"
)
"""What other processes say because one of them failed."""
WORDLESS = re.compile(r"[\w.]*(Error|Exception)")
"""The end of a traceback that gives no reason, such as that of a bare `assert`."""
FRAME = re.compile(
    r'File "(?:.*/site-packages/)?(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)'
)
CRASHED = re.compile(r"Subprocess (?P<name>\S+) \(pid=\d+\) crashed with exit code (?P<code>-?\d+)")
"""What SGLang says of a process of its own that ended without a word."""
TAKEN = re.compile(
    rb"attempting to bind on address \([^)]*?, (?P<port>\d+)[^)]*\): address already in use"
)
"""What Python's asyncio says of a port where another process listens."""
HINT = "hint: "
PARSER_SAYS = ": error: "
"""What stands between the name of a program and what is wrong with its arguments."""
UNKNOWN = "no error in its log"
"""The cause that `cause_in` tells when it finds none."""


@dataclass(frozen=True)
class Cause:
    """Why a server ended.

    Attributes:
        text: one line without a full stop.
        hint: the next step, where it is known.
        by_parser: whether the parser of its flags said so, and nothing was started.
    """

    text: str
    hint: str | None = None
    by_parser: bool = False


KILLED = Cause(
    "it was killed (SIGKILL)",
    "look into the kernel's log (dmesg): a machine without free memory kills processes",
)
"""The cause where the engine's process was killed and its log has no error."""


def cause_in(log: Path) -> Cause:
    """Why the server that wrote `log` ended.

    A refusal of ours counts before anything that follows it in the log, because the rest is a
    consequence.
    """
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = [
            line.strip()
            for line in stream.read().decode("utf-8", "replace").splitlines()
            if line.strip()
        ]
    for place in reversed(range(len(lines))):
        own = OURS.fullmatch(lines[place])
        if own is not None:
            after = lines[place + 1] if place + 1 < len(lines) else ""
            hint = after.removeprefix(HINT) if after.startswith(HINT) else None
            return Cause(own["message"][:600].rstrip("."), hint)
    seen = zip(lines, _frames(lines), strict=True)
    named = [
        _reason(*one) for one in seen if NAMES_ERROR.match(one[0]) or WORDLESS.fullmatch(one[0])
    ]
    roots = [line for line in named if not FOLLOWS.match(line)] or named
    if roots:
        refused = _refused(roots[-1], lines)
        return Cause((refused or roots[-1])[:400].rstrip("."), by_parser=refused is not None)
    crashes = [found for line in lines if (found := CRASHED.search(line))]
    return _crash(*crashes[0].groups()) if crashes else Cause(UNKNOWN)


def lost_port(log: Path) -> int | None:
    """The port that the server which writes `log` could not have, because another process was
    faster; SGLang goes on without one."""
    with contextlib.suppress(FileNotFoundError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        found = TAKEN.search(stream.read())
        return None if found is None else int(found["port"])
    return None


def _refused(line: str, lines: Sequence[str]) -> str | None:
    """What an argument parser says in `line`, after its usage; `None` of any other line."""
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


def _frames(lines: Sequence[str]) -> Iterator[str]:
    """For every line of a log: the last frame of the traceback above it, as place and code, or
    `""`."""
    frame, number = "", -1
    for place, line in enumerate(lines):
        yield frame
        found = FRAME.fullmatch(line)
        if found is not None:
            frame, number = "{file}:{line} in {function}".format_map(found.groupdict()), place
        elif place == number + 1 and frame:
            frame += f": {line}"


def _reason(line: str, frame: str) -> str:
    """A line of a log, with the place of the error where the line gives no reason."""
    return f"{line} at {frame}" if frame and WORDLESS.fullmatch(line) else line
