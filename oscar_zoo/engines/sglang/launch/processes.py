"""A process that is known by more than its number, so that a reused number is never signalled.

Linux: a process is its number, the time it was started, the boot, the namespace of its number and
the machine's name. Signals go through a file descriptor of the process, which means this process
for ever. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEAD = ("Z", "X")
"""States of a process that has ended and whose parent has not looked yet."""


@dataclass(frozen=True)
class Process:
    """One process of some machine."""

    pid: int
    start: int  # clock ticks from the boot to its start
    boot: str  # id of the boot; a restart of the machine changes it
    place: str  # name of the machine and namespace of the number

    @classmethod
    def of(cls, pid: int) -> Process | None:
        fields = _stat(pid)
        return None if fields is None else cls(pid, int(fields[19]), _boot(), _place())

    @property
    def elsewhere(self) -> bool:
        return self.place != _place()

    @property
    def this_boot(self) -> bool:
        """Whether the machine runs since its start without a restart."""
        return self.boot == _boot()

    @property
    def alive(self) -> bool:
        return not self.elsewhere and Process.of(self.pid) == self

    def send(self, number: signal.Signals) -> bool:
        with self._handle() as handle, contextlib.suppress(ProcessLookupError):
            if handle is not None:
                signal.pidfd_send_signal(handle, number)
                return True
        return False

    def wait(self, seconds: float) -> bool:
        """Wait for its end, but no longer than `seconds`; whether it has ended."""
        with self._handle() as handle:
            if handle is None:
                return True
            return bool(select.select([handle], [], [], seconds)[0])

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int | None]:
        """A descriptor of the process; `None` when it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            # The descriptor is open, so the number cannot change hands between look and use.
            yield handle if self.alive else None
        finally:
            os.close(handle)


def exit_words(status: int) -> str:
    """An exit status in words; `status` is negative for a signal."""
    if status >= 0:
        return f"status {status}"
    names = {one.value: one.name for one in signal.Signals}
    return names.get(-status, f"signal {-status}")


def in_group(group: int) -> set[int]:
    numbers = (int(place.name) for place in Path("/proc").glob("[0-9]*"))
    return {pid for pid in numbers if (fields := _stat(pid)) and int(fields[2]) == group}


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, behind its name; `None` when it is gone or has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(") ")[2].split()  # the name may hold spaces and parentheses itself
    return None if fields[0] in DEAD else fields


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()


def _place() -> str:
    return f"{os.uname().nodename}/{Path('/proc/self/ns/pid').stat().st_ino}"


class Signals:
    """Raises `KeyboardInterrupt` and `SystemExit` for signals, one after each `deliver`.

    A signal that comes earlier waits. So none falls between the start of a child and the moment
    from which it can be stopped, nor into what stops the child because of the signal before. Only
    the main thread of a process can take signals; in another one this does nothing.
    """

    def __init__(self) -> None:
        self._pending: int | None = None
        self._deliver = False
        names = (signal.SIGTERM, signal.SIGINT) if in_main_thread() else ()
        self._previous = {name: signal.signal(name, self._handle) for name in names}

    def _handle(self, number: int, frame: object) -> None:
        self._pending = number
        if self._deliver:
            self._raise()

    def _raise(self) -> None:
        number, self._pending, self._deliver = self._pending, None, False
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + int(number or 0))

    def deliver(self) -> None:
        """The next signal raises; one that came earlier raises now."""
        self._deliver = True
        if self._pending is not None:
            self._raise()

    def hold(self) -> None:
        """Signals wait again for `deliver`."""
        self._deliver = False

    def ignore(self) -> None:
        """Signals have no effect until `restore`."""
        for name in self._previous:
            signal.signal(name, signal.SIG_IGN)

    def restore(self) -> None:
        for name, handler in self._previous.items():
            signal.signal(name, handler)


def in_main_thread() -> bool:
    """Whether this thread is the one that Python runs signal handlers in."""
    return threading.current_thread() is threading.main_thread()
