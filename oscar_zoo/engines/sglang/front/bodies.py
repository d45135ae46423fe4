"""Bodies of requests: how long they may be, and fields over which SGLang's own checks fall.

SGLang answers 500 where a field has another type than the one that it takes for granted.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping

from oscar_zoo.engines.sglang.front.answers import Message

Receive = Callable[[], Awaitable[Message]]

MOST_BODY = 64 << 20
"""Bytes of a request."""
TOO_LARGE = f"A request has at most {MOST_BODY >> 20} MiB here."
Fields = Mapping[str, type]
"""Fields of a request that must have a type, if they are there."""
NAMES: Mapping[type, str] = {dict: "an object", str: "a string"}


class Body:
    """`receive` that ends a request whose body is longer than allowed."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._length, self.too_large = receive, 0, False
        self._read: list[Message] = []

    async def __call__(self) -> Message:
        """The next part."""
        return self._read.pop(0) if self._read else await self._next()

    async def wrong_field(self, fields: Fields) -> str | None:
        """Read the body whole, if there are such fields, and say what is wrong with one of them;
        `None` when nothing is. What was read is still handed on."""
        if not fields:
            return None
        while not self._read or self._read[-1].get("more_body", False):
            self._read.append(await self._next())
        return wrong_type(b"".join(part.get("body", b"") for part in self._read), fields)

    async def _next(self) -> Message:
        message = await self._receive()
        self._length += len(message.get("body", b""))
        if self._length > MOST_BODY:
            self.too_large = True
            return {"type": "http.disconnect"}
        return message


def wrong_type(body: bytes, fields: Fields) -> str | None:
    """Which of `fields` has another type; `None` where none has, and of a body that is no JSON
    object, about which SGLang says more."""
    named = [name for name in fields if f'"{name}"'.encode() in body]
    if not named:
        return None
    try:
        value = json.loads(body)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    wrong = (name for name in named if not isinstance(value.get(name), fields[name] | None))
    return next((f"{name} must be {NAMES[fields[name]]}." for name in wrong), None)
