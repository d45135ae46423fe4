"""Answers that the front gives itself, and what it changes in answers of SGLang."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Send = Callable[[Message], Awaitable[None]]
EVENT = b'data: {"error"'
RETRY_SECONDS = 5
"""When a client that was refused for want of room may ask again."""


async def refuse(
    send: Send,
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Answer with an error in the form of OpenAI; `param` is the field that it is about."""
    await answer(send, status, _error(message, code, param), headers)


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


async def answer(
    send: Send, status: int, value: Any, headers: Sequence[tuple[bytes, bytes]] = ()
) -> None:
    """Answer with JSON; with nothing for `None`."""
    body = b"" if value is None else json.dumps(value).encode()
    fixed = [(b"content-length", str(len(body)).encode())]
    if body:
        fixed.append((b"content-type", b"application/json"))
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body})


def with_headers(send: Send, headers: Sequence[tuple[bytes, bytes]]) -> Send:
    """Add headers to the answer."""

    async def forward(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return forward


def when_begun(send: Send, call: Callable[[], None]) -> Send:
    """Call `call` when the answer begins."""

    async def forward(message: Message) -> None:
        call()
        await send(message)

    return forward


def when_ended(send: Send, call: Callable[[], None]) -> Send:
    """Call `call` when the answer has ended. SGLang goes on for two seconds behind a stream."""

    async def forward(message: Message) -> None:
        await send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            call()

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
    """Remove secrets from an answer that is sent as a whole."""
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
