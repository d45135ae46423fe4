"""The wait for a server on a terminal: the phase of its start and the seconds so far."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from oscar_zoo.cli.render import terminal
from oscar_zoo.engines.sglang.launch.phases import PhaseReader

EVERY_SECONDS = 30.0
"""Without a terminal, a phase that lasts is told again after so long."""


@contextlib.contextmanager
def phases_of(log: Path, *, enabled: bool) -> Iterator[Callable[[float], None]]:
    """Show what the server that writes to `log` is doing; the callback takes the seconds so far.

    On a terminal one line changes. Elsewhere stderr gets a line for every phase, and one every
    `EVERY_SECONDS` while a phase lasts.

    Args:
        log: the server's; it need not exist yet.
        enabled: whether to show anything.
    """
    with telling(PhaseReader(log).current, enabled=enabled) as tick:
        yield tick


@contextlib.contextmanager
def telling(current: Callable[[], str], *, enabled: bool) -> Iterator[Callable[[float], None]]:
    """The same for any wait; `current` says what is waited for."""
    if not enabled:
        yield lambda seconds: None
        return
    if sys.stderr.isatty():
        with terminal.err().status(terminal.clean(current())) as status:
            yield lambda seconds: status.update(f"{terminal.clean(current())}  {seconds:.0f} s")
        return
    told: tuple[str, float] = ("", 0.0)

    def tell(seconds: float) -> None:
        nonlocal told
        what = current()
        if what != told[0] or seconds - told[1] >= EVERY_SECONDS:
            terminal.note(f"{what} ({seconds:.0f} s)")
            told = what, seconds

    yield tell


class Told:
    """The start of one server on a terminal, for `own_server`.

    Args:
        label: what to call the server.
        silent: show nothing.
    """

    def __init__(self, label: str, *, silent: bool) -> None:
        self._label = label
        self._silent = silent
        self._told: tuple[str, float] = ("", 0.0)

    def starting(self, log: Path) -> None:
        """See `StartNews`."""
        terminal.note(f"Starting SGLang: {self._label} (log: {log})", quiet=self._silent)

    def phase(self, name: str, seconds: float) -> None:
        """See `StartNews`."""
        if name != self._told[0] or seconds - self._told[1] >= EVERY_SECONDS:
            terminal.note(f"{name} ({seconds:.0f} s)", quiet=self._silent)
            self._told = name, seconds

    def warn(self, text: str) -> None:
        """See `StartNews`."""
        terminal.note(f"note: {text}", quiet=self._silent)
