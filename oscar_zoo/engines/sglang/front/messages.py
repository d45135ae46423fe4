"""What the front lets through: answers that it gives itself or changes, bodies of bounded size,
time and memory, each read whole before SGLang sees the request, and connections.

uvicorn waits for ever for a head, and its limit refuses requests because other connections idle.
Here the connection that has waited longest gives way, and a newcomer gets 503 only where every
other connection has a request under way.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import json
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
Headers = Sequence[tuple[bytes, bytes]]
Reason = tuple[int, str, str]
"""Status, message and code with which a body is refused."""
EVENT = b'data: {"error"'
RETRY_SECONDS = 5
"""When a client that was refused for want of room may ask again."""
MOST_BODY = 64 << 20
"""Bytes of a request."""
MOST_TOGETHER = 256 << 20
"""Bytes of all requests whose answer has not begun, but for `SMALL` of each."""
SMALL = 64 << 10
"""A body of so many bytes has always room. There are no more of them than connections."""
FIRST_SECONDS = 30.0
SLOWEST = 100_000
"""A body has `FIRST_SECONDS`, and one second more for each time so many bytes have come."""
MOST = 4096
"""Open connections. Each takes some 20 kB, and 80 kB with the beginnings of a head and a body."""
HEAD_SECONDS = 15.0
"""From the first byte of a connection, or of its next request, to the end of the head."""


class Refused(Exception):
    """Why the front answers a request itself, in one sentence; `param` is the field of its body
    that it is about."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Headers = ()
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param, self.headers = param, headers


async def refuse(send: Send, refused: Refused) -> None:
    error = _error(refused.message, refused.code, refused.param)
    await answer(send, refused.status, error, refused.headers)


def busy(message: str) -> bytes:
    """The same with 503 as it goes over the wire, for a connection that is closed behind it."""
    body = json.dumps(_error(message, "busy")).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: {RETRY_SECONDS}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


def _error(message: str, code: str, param: str | None = None) -> dict[str, Any]:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return {"error": error}


async def answer(send: Send, status: int, value: Any, headers: Headers = ()) -> None:
    body = b"" if value is None else json.dumps(value).encode()
    fixed = [(b"content-length", str(len(body)).encode())]
    if body:
        fixed.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def passing(
    send: Send,
    *,
    headers: Headers = (),
    begun: Callable[[], None] | None = None,
    ended: Callable[[], None] | None = None,
) -> Send:
    """Pass an answer on with more headers, and call `begun` for each part of it, and `ended` behind
    the last one: SGLang goes on for two seconds behind a stream."""

    async def forward(message: Message) -> None:
        if begun is not None:
            begun()
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)
        last = message["type"] == "http.response.body" and not message.get("more_body")
        if last and ended is not None:
            ended()

    return forward


def with_ids(send: Send, ids: Mapping[str, str]) -> Send:
    """Put the client's ids in the place of ours, which nothing else in an answer equals. SGLang
    sends an event of a stream, and another answer, in one piece each."""

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [one for one in message["headers"] if one[0].lower() != b"content-length"]
            message = {**message, "headers": kept}
        else:
            body = message.get("body", b"")
            for ours, theirs in ids.items():
                body = body.replace(ours.encode(), json.dumps(theirs)[1:-1].encode())
            message = {**message, "body": body}
        await send(message)

    return forward


def without(send: Send, secrets: Sequence[str]) -> Send:
    start: Message = {}
    parts: list[bytes] = []

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        parts.append(message.get("body", b""))
        if message.get("more_body"):
            return
        body = b"".join(parts)
        for secret in secrets:
            for form in {secret, json.dumps(secret)[1:-1]}:
                body = body.replace(form.encode(), b"***")
        kept = [one for one in start["headers"] if one[0].lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        await send({**start, "headers": [*kept, length]})
        await send({"type": "http.response.body", "body": body})

    return forward


def refused_stream(send: Send) -> Send:
    """Let a stream that begins with an error be an error: SGLang checks after it has sent 200."""
    start: Message | None = None
    refused = False

    async def forward(message: Message) -> None:
        nonlocal start, refused
        if message["type"] == "http.response.start":
            start = message
            return
        if start is not None:
            first, start = start, None
            error = _first_error(message.get("body", b"")) if first["status"] == 200 else None
            if error is not None:
                refused = True
                code = error.get("code")
                await answer(send, code if type(code) is int else 400, {"error": error})
                return
            await send(first)
        if not refused:
            await send(message)

    return forward


def _first_error(body: bytes) -> dict[str, Any] | None:
    if not body.startswith(EVENT):
        return None
    try:
        value = json.loads(body.partition(b"\n")[0].removeprefix(b"data: "))["error"]
    except (KeyError, ValueError):
        return None
    return value if isinstance(value, dict) else None


CLOSE = [(b"connection", b"close")]
"""The rest of a body that was refused is not read."""


TOO_LARGE = 413, f"A request has at most {MOST_BODY >> 20} MiB here.", "too_large"
TOO_SLOW = 408, f"A body must come with {SLOWEST:,} bytes a second.", "too_slow"
NO_ROOM = 503, "Too many large requests are under way. Ask again later.", "busy"
GONE = 400, "The connection was closed before the body had come.", "gone"


class Body:
    """The body of one request, and `receive` for SGLang, which gets it in one piece. `content` is
    what has come; `together` are all bodies of this server that are held now, and their bytes."""

    def __init__(self, receive: Receive, together: dict[Body, int]) -> None:
        self._receive, self._together = receive, together
        self._parts: list[bytes] = []
        self._length, self._began = 0, time.monotonic()
        self._coming: asyncio.Timeout | None = None
        self._handed_on = self._gave_way = False
        self.content = b""

    async def __call__(self) -> Message:
        if self._handed_on:
            return await self._receive()
        self._handed_on = True
        content, self.content = self.content, b""
        return {"type": "http.request", "body": content, "more_body": False}

    async def read(self) -> Reason | None:
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

    async def _read(self) -> Reason | None:
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


class Connections:
    def __init__(self, most: int | None = None, seconds: float = HEAD_SECONDS) -> None:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most, self._seconds = most or min(MOST, files // 2), seconds
        self._open: set[Any] = set()
        self._waiting: dict[Any, asyncio.TimerHandle | None] = {}
        """Those without a request under way, the longest first, and when they are closed."""

    def bound_all(self) -> None:
        """Change uvicorn's classes of connections, of which it uses one; the second needs a
        package."""
        for name, protocol in (("h11", "H11Protocol"), ("httptools", "HttpToolsProtocol")):
            if importlib.util.find_spec(name) is not None:
                module = importlib.import_module(f"uvicorn.protocols.http.{name}_impl")
                self.bound(getattr(module, protocol))

    def bound(self, protocol: type[Any]) -> None:

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
