"""Connections of the HTTP server: how many stay open, and how long the head of a request may take.

uvicorn waits for ever for a head, and its limit refuses requests because other connections idle.
Here the connection that has waited longest gives way, and a newcomer gets 503 only where every
other connection has a request under way.
"""

from __future__ import annotations

import asyncio
import functools
import resource
from typing import Any

from oscar_zoo.engines.sglang.front.answers import busy

MOST = 4096
"""Open connections. Each takes some 20 kB, and 80 kB with the beginnings of a head and a body."""
HEAD_SECONDS = 15.0
"""From the first byte of a connection, or of its next request, to the end of the head."""


def most_connections() -> int:
    """`MOST`, or half of the files that this process may open, if those are fewer."""
    return min(MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class Connections:
    """All connections of one HTTP server, as uvicorn's protocols.

    Args:
        seconds: for a head.
    """

    def __init__(self, most: int | None = None, seconds: float = HEAD_SECONDS) -> None:
        self._most, self._seconds = most or most_connections(), seconds
        self._open: set[Any] = set()
        self._waiting: dict[Any, asyncio.TimerHandle | None] = {}
        """Those without a request under way, the longest first, and when they are closed."""

    def bound(self, protocol: type[Any]) -> None:
        """Let every connection of this class of uvicorn be one of these."""

        def behind(name: str, then: Any) -> None:
            original = getattr(protocol, name)

            @functools.wraps(original)
            def both(connection: Any, *given: Any) -> None:
                original(connection, *given)
                then(connection)

            setattr(protocol, name, both)

        behind("connection_made", self._made)
        behind("data_received", self._received)
        behind("on_response_complete", self._answered)
        behind("connection_lost", self._gone)

    def _made(self, connection: Any) -> None:
        if len(self._open) >= self._most:
            longest = next(iter(self._waiting), None)
            if longest is None:
                connection.transport.write(BUSY)
                connection.transport.close()
                return
            self._close(longest)
        self._open.add(connection)
        self._wait(connection, timed=True)

    def _received(self, connection: Any) -> None:
        if _under_way(connection):
            self._stop_waiting(connection)
        elif connection in self._open and self._waiting.get(connection) is None:
            self._wait(connection, timed=True)

    def _answered(self, connection: Any) -> None:
        if connection in self._open and not _under_way(connection):
            self._wait(connection, timed=False)  # uvicorn closes it when it stays idle

    def _gone(self, connection: Any) -> None:
        self._stop_waiting(connection)
        self._open.discard(connection)

    def _wait(self, connection: Any, *, timed: bool) -> None:
        self._stop_waiting(connection)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, self._close, connection) if timed else None
        self._waiting[connection] = timer

    def _stop_waiting(self, connection: Any) -> None:
        timer = self._waiting.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _close(self, connection: Any) -> None:
        self._gone(connection)
        connection.transport.close()


def _under_way(connection: Any) -> bool:
    cycle = connection.cycle
    return cycle is not None and not cycle.response_complete


BUSY = busy("This server has no room for one more connection. Ask again later.")
