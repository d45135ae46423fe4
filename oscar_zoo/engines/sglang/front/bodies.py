"""Bodies of requests: how long one may be and how long it may take, and how much memory all of them
have. A body is read whole before SGLang sees the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from oscar_zoo.engines.sglang.front.answers import Message

Receive = Callable[[], Awaitable[Message]]

MOST_BODY = 64 << 20
"""Bytes of a request."""
MOST_TOGETHER = 256 << 20
"""Bytes of all requests whose answer has not begun, but for `SMALL` of each."""
SMALL = 64 << 10
"""A body of so many bytes has always room. There are no more of them than connections."""
FIRST_SECONDS = 30.0
SLOWEST = 100_000
"""A body has `FIRST_SECONDS`, and one second more for each time so many bytes have come."""


@dataclass(frozen=True)
class Refusal:
    """Why a body was not taken, as the front answers it."""

    status: int
    message: str
    code: str


TOO_LARGE = Refusal(413, f"A request has at most {MOST_BODY >> 20} MiB here.", "too_large")
TOO_SLOW = Refusal(408, f"A body must come with {SLOWEST:,} bytes a second.", "too_slow")
NO_ROOM = Refusal(503, "Too many large requests are under way. Ask again later.", "busy")
GONE = Refusal(400, "The connection was closed before the body had come.", "gone")


class Body:
    """The body of one request, and `receive` for SGLang, which gets it in one piece.

    Args:
        together: all bodies of this server that are held now, and their bytes.

    Attributes:
        content: what has come.
    """

    def __init__(self, receive: Receive, together: dict[Body, int]) -> None:
        self._receive, self._together = receive, together
        self._parts: list[bytes] = []
        self._length, self._began = 0, time.monotonic()
        self._coming: asyncio.Timeout | None = None
        self._handed_on = self._gave_way = False
        self.content = b""

    async def __call__(self) -> Message:
        """The whole body first, and then what happens to the connection."""
        if self._handed_on:
            return await self._receive()
        self._handed_on = True
        content, self.content = self.content, b""
        return {"type": "http.request", "body": content, "more_body": False}

    async def read(self) -> Refusal | None:
        """Read it whole; why it is not taken, or `None`."""
        try:
            async with asyncio.timeout(FIRST_SECONDS) as self._coming:
                refusal = await self._read()
        except TimeoutError:
            refusal = NO_ROOM if self._gave_way else TOO_SLOW
        self._coming = None
        if refusal is None:
            self.content = b"".join(self._parts)
        self._parts.clear()
        return refusal

    def release(self) -> None:
        """Its memory is not needed any longer."""
        self._together.pop(self, None)

    async def _read(self) -> Refusal | None:
        assert self._coming is not None
        first, more = self._coming.when(), True
        assert first is not None
        self._together[self] = 0
        while more:
            message = await self._receive()
            if self._gave_way:
                return NO_ROOM
            if message["type"] != "http.request":
                return GONE
            part, more = message.get("body", b""), message.get("more_body", False)
            self._parts.append(part)
            self._length += len(part)
            if self._length > MOST_BODY:
                return TOO_LARGE
            if not self._has_room():
                return NO_ROOM
            self._coming.reschedule(first + self._length / SLOWEST)
        return None

    def _has_room(self) -> bool:
        """Take room for what has come. The slowest body that has not yet come whole gives way,
        which may be this one."""
        if self._length <= SMALL:
            return True
        self._together[self] = self._length - SMALL
        while sum(self._together.values()) > MOST_TOGETHER:
            coming = [body for body in self._together if body._coming and self._together[body]]
            slowest = min(coming, key=Body._speed)
            slowest._give_way()
        return not self._gave_way

    def _give_way(self) -> None:
        self._gave_way = True
        self.release()
        self._parts.clear()
        if self._coming is not None:
            self._coming.reschedule(0.0)

    def _speed(self) -> float:
        return self._length / (time.monotonic() - self._began)
