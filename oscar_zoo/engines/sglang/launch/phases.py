"""What a starting server is doing, told from its log. Standard library only.

A phase begins with a line that a tested release of SGLang or this plugin writes. A release that
writes other lines shows fewer phases. Phases never go back, because the workers of a server write
to one log.
"""

from __future__ import annotations

import re
from pathlib import Path

FIRST = "starting SGLang"
PHASES = (
    (r"server_args=", "starting the workers"),
    (r"Init (torch distributed|parallel) begin", "connecting the workers"),
    (r"Load weight begin", "loading weights"),
    (r"Load weight end", "allocating the cache"),
    (r"Memory pool end", "preparing to run"),
    (r"INT2 KV cache: compiling kernels", "compiling kernels"),
    (r"INT2 KV cache: kernels ready", "preparing to run"),
    (r"Capture .*[Gg]raph begin", "capturing CUDA graphs"),
    (r"max_total_num_tokens=", "starting the HTTP server"),
    (r"(INFO: +)?Application startup complete", "warming up"),
)
"""The beginning of a line, behind the time and the rank, and the phase that it opens."""
_LINE = re.compile(r"\[[^\]\n]*\] (?P<text>.*)")
_OPENS = [(re.compile(pattern), phase) for pattern, phase in PHASES]
MOST_BYTES = 1 << 20
"""Bytes of the log that one look reads."""


class PhaseReader:
    """The phase of the server that writes to `log`; every call of `current` reads what is new."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self._rest = b""
        self._reached = -1

    def current(self) -> str:
        """The phase now; `FIRST` while there is no log, or none of its lines is known."""
        for line in self._new_lines():
            found = _LINE.match(line)
            text = found["text"] if found else line
            for place, (pattern, _) in enumerate(_OPENS):
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
