"""Bodies of requests: how long they may be, and fields over which SGLang's own checks fall.

SGLang answers 500 where a field that it reads before it checks types is no object.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from oscar_zoo.engines.sglang.front.answers import Message

Receive = Callable[[], Awaitable[Message]]

MOST_BODY = 64 << 20
"""Bytes of a request."""
TOO_LARGE = f"A request has at most {MOST_BODY >> 20} MiB here."
OBJECTS = {"/v1/chat/completions": ("response_format",)}
"""Fields that must be objects, by path."""


class Body:
    """`receive` that ends a request whose body is longer than allowed."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._length, self.too_large = receive, 0, False
        self._read: list[Message] = []

    async def __call__(self) -> Message:
        """The next part."""
        return self._read.pop(0) if self._read else await self._next()

    async def wrong_field(self, path: str) -> str | None:
        """Read a request to `path` whole where it has such fields, and say what is wrong with one;
        `None` when nothing is. What was read is still handed on."""
        fields = OBJECTS.get(path)
        if fields is None:
            return None
        while not self._read or self._read[-1].get("more_body", False):
            self._read.append(await self._next())
        return wrong_object(b"".join(part.get("body", b"") for part in self._read), fields)

    async def _next(self) -> Message:
        message = await self._receive()
        self._length += len(message.get("body", b""))
        if self._length > MOST_BODY:
            self.too_large = True
            return {"type": "http.disconnect"}
        return message


def wrong_object(body: bytes, fields: tuple[str, ...]) -> str | None:
    """Which of `fields` is neither an object nor left out; `None` where that holds of none, and of
    a body that is no JSON object, about which SGLang says more."""
    named = [name for name in fields if f'"{name}"'.encode() in body]
    if not named:
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    wrong = (name for name in named if not isinstance(value.get(name), dict | None))
    return next((f"{name} must be an object." for name in wrong), None)
