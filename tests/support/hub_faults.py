"""Faults that a test switches on for some requests: each one stands between a request and its
honest answer.

The most recent fault that matches wins. Faults of content need no path: without one they leave
listings alone. They are not for redirects and refusals, which do not count as hits either.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from hub_repositories import Blob, HubState
from hub_wire import ReadFile, Reply, Request

Answer = Callable[[], Reply]
_READS = ("GET",)
_ALL = ("GET", "HEAD", "POST", "PUT", "DELETE")
_serial = itertools.count(1)


@dataclass(frozen=True)
class _Kind:
    """A fault: what it does and which requests it is for."""

    run: Callable[..., Reply]
    methods: tuple[str, ...]
    content: bool
    path: str


@dataclass(eq=False)
class Fault:
    """A fault that was switched on; `hits` counts the requests it changed."""

    kind: str
    path: str
    times: int | None
    methods: tuple[str, ...]
    arguments: dict[str, Any]
    files_only: bool
    owner: Faults = field(repr=False)
    hits: int = 0

    def matches(self, request: Request) -> bool:
        """Whether it is for this request."""
        if self.times is not None and self.hits >= self.times:
            return False
        if request.method not in self.methods or (self.files_only and request.file is None):
            return False
        names = (request.path, unquote(request.target), request.file or "")
        return any(fnmatch.fnmatchcase(name, self.path) for name in names)

    def remove(self) -> None:
        """Switch it off."""
        self.owner.remove(self)


class Faults:
    """The faults of one server."""

    def __init__(self, hub: HubState) -> None:
        self._hub, self._lock = hub, threading.Lock()
        self._active: list[Fault] = []

    def add(
        self,
        kind: str,
        path: str | None,
        times: int | None,
        method: str | None,
        arguments: dict[str, Any],
    ) -> Fault:
        """Switch a fault on."""
        if kind not in _KINDS:
            raise ValueError(f"no fault {kind!r}; there are {', '.join(sorted(_KINDS))}")
        what = _KINDS[kind]
        inspect.signature(what.run).bind(None, None, None, **arguments)
        methods = what.methods if method is None else (method.upper(),)
        everywhere = path in (None, "*")
        fault = Fault(
            kind,
            what.path if everywhere else str(path),
            times,
            methods,
            arguments,
            what.content and everywhere,
            self,
        )
        with self._lock:
            self._active.insert(0, fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Switch a fault off; twice is fine."""
        with self._lock:
            self._active = [other for other in self._active if other is not fault]

    def clear(self) -> None:
        """Switch all off."""
        with self._lock:
            self._active.clear()

    def around(self, request: Request, answer: Answer) -> Reply:
        """Answer a request, through the fault that is for it."""
        with self._lock:
            fault = next((one for one in self._active if one.matches(request)), None)
            if fault is not None:
                fault.hits += 1
        if fault is None:
            return answer()
        kind = _KINDS[fault.kind]
        try:
            checked = functools.partial(_with_content, answer) if kind.content else answer
            return kind.run(self._hub, request, checked, **fault.arguments)
        except _NoContent as none:
            with self._lock:
                fault.hits -= 1
            return none.reply


class _NoContent(Exception):
    """A reply that faults of content are not for: a redirect to the content, a refusal."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def _with_content(answer: Answer) -> Reply:
    reply = answer()
    if reply.status not in (200, 206):
        raise _NoContent(reply)
    return reply


_KINDS: dict[str, _Kind] = {}


def _fault(
    methods: tuple[str, ...] = _ALL, *, content: bool = False, path: str = "*"
) -> Callable[..., Any]:
    def register(run: Callable[..., Reply]) -> Callable[..., Reply]:
        _KINDS[run.__name__] = _Kind(run, methods, content, path)
        return run

    return register


@_fault(_READS, content=True)
def flip(hub: HubState, request: Request, answer: Answer, *, at: int = 0) -> Reply:
    """Invert the byte `at` (negative: from the end) of the content."""

    def flipped(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 0xFF
        return bytes(changed)

    return _content(request, answer, lambda data, read: flipped(data))


@_fault(_READS, content=True)
def lfs_pointer(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Serve the text of the pointer instead of the content."""
    return _content(request, answer, lambda data, read: Blob(data, lfs=True).pointer)


@_fault(_READS, content=True)
def empty(hub: HubState, request: Request, answer: Answer) -> Reply:
    """An empty body."""
    reply = answer()
    reply.body = b""
    return reply


@_fault(_READS, content=True)
def swap(hub: HubState, request: Request, answer: Answer, *, other: str) -> Reply:
    """Serve the content of the path `other` of the same revision."""
    return _content(request, answer, lambda data, read: read(other))


@_fault(_READS, content=True)
def hole(hub: HubState, request: Request, answer: Answer, *, at: int, n: int) -> Reply:
    """Bytes `at` to `at + n` of the content are zero."""
    return _content(request, answer, lambda data, read: data[:at] + bytes(n) + data[at + n :])


@_fault(_READS, content=True)
def exchange(hub: HubState, request: Request, answer: Answer, *, at: int, n: int) -> Reply:
    """The first `n` bytes of the content and those at `at` change places."""
    return _content(
        request,
        answer,
        lambda data, read: data[at : at + n] + data[n:at] + data[:n] + data[at + n :],
    )


@_fault(_READS, content=True)
def repeat(hub: HubState, request: Request, answer: Answer, *, at: int, n: int) -> Reply:
    """Bytes `at` to `at + n` of the content come twice."""
    return _content(request, answer, lambda data, read: data[: at + n] + data[at:])


@_fault(_READS, content=True)
def cut(hub: HubState, request: Request, answer: Answer, *, after: int = 0) -> Reply:
    """Close the connection after so many bytes of the body."""
    reply = answer()
    reply.cut = after
    return reply


@_fault(_READS, content=True)
def extra(
    hub: HubState, request: Request, answer: Answer, *, n: int = 1, honest: bool = True
) -> Reply:
    """Send `n` more bytes, with a Content-Length that counts them (`honest`) or without."""
    reply = answer()
    if honest:
        reply.body = bytes(reply.body) + b"\0" * n
    else:
        reply.extra = b"\0" * n
    return reply


@_fault(("GET", "HEAD"), content=True)
def wrong_length(hub: HubState, request: Request, answer: Answer, *, by: int = 1) -> Reply:
    """State a Content-Length that is off by so many bytes."""
    reply = answer()
    reply.length = len(reply.body) + by
    return reply


@_fault()
def status(
    hub: HubState,
    request: Request,
    answer: Answer,
    *,
    code: int,
    error_code: str | int | None = None,
    retry_after: int | str | None = None,
    body: bytes | str | None = None,
) -> Reply:
    """Answer with this status and nothing else; the request does nothing."""
    message = f"injected status {code}"
    reply = Reply(code, {"Content-Type": "application/json"})
    if request.segments[:2] == ("api", "v1"):
        reply.body = json.dumps(
            {"Code": error_code or code, "Success": False, "Message": message, "Data": None}
        ).encode()
    else:
        reply.body = json.dumps({"error": message}).encode()
        reply.headers["X-Error-Message"] = message
        if error_code is not None:
            reply.headers["X-Error-Code"] = str(error_code)
    if body is not None:
        reply.body = body.encode() if isinstance(body, str) else body
    if retry_after is not None:
        reply.headers["Retry-After"] = str(retry_after)
    return reply


@_fault(path="*/tag*", methods=("POST",))
def refuse_tag(hub: HubState, request: Request, answer: Answer, *, status: int = 403) -> Reply:
    """Take commits, but no tag."""
    return _KINDS["status"].run(hub, request, answer, code=status)


@_fault()
def html(hub: HubState, request: Request, answer: Answer) -> Reply:
    """A page for people with status 200, as captive portals and proxies send it."""
    page = (
        b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please sign"
        b" in</body></html>"
    )
    return Reply(200, {"Content-Type": "text/html; charset=utf-8"}, page)


@_fault()
def black_hole(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Take the request and never answer."""
    return Reply(hang=True)


@_fault()
def slow(
    hub: HubState,
    request: Request,
    answer: Answer,
    *,
    bytes_per_second: float,
    headers: bool = False,
) -> Reply:
    """Answer, but so many bytes of the body per second, or of the headers too."""
    reply = answer()
    reply.rate, reply.slow_head = bytes_per_second, headers
    return reply


@_fault()
def reset(hub: HubState, request: Request, answer: Answer, *, after: int | None = None) -> Reply:
    """End the connection with RST: at once, or after so many bytes of the body."""
    reply = answer() if after is not None else Reply()
    reply.reset, reply.cut = True, after
    return reply


@_fault()
def drop_header(hub: HubState, request: Request, answer: Answer, *, name: str) -> Reply:
    """Leave one header out."""
    reply = answer()
    reply.headers = {
        key: value for key, value in reply.headers.items() if key.lower() != name.lower()
    }
    if name.lower() == "content-length":
        reply.length = -1
    return reply


@_fault()
def redirect(
    hub: HubState, request: Request, answer: Answer, *, to: str = "same", code: int = 302
) -> Reply:
    """Send the client to the same path `same`: same port, `port`: same name, other port, `cdn`:
    other name, or a URL.

    `http` is the port that never speaks TLS. A request that was redirected is answered.
    """
    if request.query.get("redirected"):
        return answer()
    bases = {
        "same": hub.url,
        "cdn": hub.cdn_url,
        "port": hub.cdn_url.replace("localhost", "127.0.0.1"),
    }
    bases["http"] = hub.plain_url
    where = to
    if to in bases:
        where = f"{bases[to]}{request.target}{'&' if '?' in request.target else '?'}redirected=1"
    return Reply(code, {"Location": where})


@_fault()
def move(hub: HubState, request: Request, answer: Answer, *, call: Callable[[], object]) -> Reply:
    """Call `call`, which changes a repository, and answer from what it left."""
    call()
    return answer()


@_fault(path="*/commit/*", methods=("POST",))
def second_writer(
    hub: HubState, request: Request, answer: Answer, *, call: Callable[[], object]
) -> Reply:
    """Call `call` between a client's listing and its commit."""
    call()
    return answer()


@_fault()
def lose_reply(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Do the work and close the connection without a reply."""
    answer()
    return Reply(silent=True)


def _content(request: Request, answer: Answer, change: Callable[[bytes, ReadFile], bytes]) -> Reply:
    request.content = change
    return answer()
