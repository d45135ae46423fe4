"""SIGINT and SIGTERM as exceptions, at moments when a child process can be ended in order."""

from __future__ import annotations

import signal
import threading


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
        """The handlers of before."""
        for name, handler in self._previous.items():
            signal.signal(name, handler)


def in_main_thread() -> bool:
    """Whether this thread is the one that Python runs signal handlers in."""
    return threading.current_thread() is threading.main_thread()
