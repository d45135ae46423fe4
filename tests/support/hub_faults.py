"""Faults that a test switches on for some requests: each one stands between a request and its
honest answer.

The most recent fault that matches wins. Faults of content need no path: without one they leave
listings alone. They are not for redirects and refusals, which do not count as hits either.
"""

import fnmatch
import inspect
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from hub_repositories import Blob, HubState
from hub_wire import ReadFile, Refused, Reply, Request

Answer = Callable[[], Reply]
_READS = ("GET",)
_ALL = ("GET", "HEAD", "POST", "PUT", "DELETE")


@dataclass(eq=False)
class Fault:
    """A fault that was switched on; `hits` counts the requests it changed."""

    kind: str
    path: str
    times: int | None
    methods: tuple[str, ...]
    arguments: dict[str, Any]
    files_only: bool
    hits: int = 0

    def matches(self, request: Request) -> bool:
        """Whether it is for this request."""
        if self.times is not None and self.hits >= self.times:
            return False
        if request.method not in self.methods or (self.files_only and request.file is None):
            return False
        names = (request.path, unquote(request.target), request.file or "")
        return any(fnmatch.fnmatchcase(name, self.path) for name in names)


class Faults:
    """The faults of one server."""

    def __init__(self, hub: HubState) -> None:
        self._hub, self._lock = hub, threading.Lock()
        self._active: list[Fault] = []

    def add(
        self,
        kind: str,
        path: str | None = None,
        times: int | None = None,
        *,
        method: str | None = None,
        **arguments: Any,
    ) -> Fault:
        """Switch a fault on for requests whose unquoted path matches the glob `path`, so many times
        or until removed.

        The glob is also tried on path and query together, and on the path of the file inside the
        repository. The kinds and their arguments are the functions below.
        """
        inspect.signature(_KINDS[kind]).bind(None, None, None, **arguments)
        of_content = kind in _OF_CONTENT
        methods = (method.upper(),) if method else _READS if of_content else _ALL
        everywhere = path in (None, "*")
        where = "*" if path is None else path
        fault = Fault(kind, where, times, methods, arguments, of_content and everywhere)
        with self._lock:
            self._active.insert(0, fault)
        return fault

    def clear(self) -> None:
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
        checked = _with_content(answer) if fault.kind in _OF_CONTENT else answer
        try:
            return _KINDS[fault.kind](self._hub, request, checked, **fault.arguments)
        except _NoContent as none:
            with self._lock:
                fault.hits -= 1
            return none.reply


class _NoContent(Refused):
    """Carries a reply that faults of content are not for: a redirect to it, a refusal."""


def _with_content(answer: Answer) -> Answer:
    def checked() -> Reply:
        reply = answer()
        if reply.status not in (200, 206):
            raise _NoContent(reply)
        return reply

    return checked


_KINDS: dict[str, Callable[..., Reply]] = {}
_OF_CONTENT: set[str] = set()


def _fault(run: Callable[..., Reply]) -> Callable[..., Reply]:
    _KINDS[run.__name__] = run
    return run


def _of_content(run: Callable[..., Reply]) -> Callable[..., Reply]:
    _OF_CONTENT.add(run.__name__)
    return _fault(run)


def _changed(request: Request, answer: Answer, change: Callable[[bytes, ReadFile], bytes]) -> Reply:
    request.content = change
    return answer()


@_of_content
def edit(
    hub: HubState, request: Request, answer: Answer, *, change: Callable[[bytes], bytes]
) -> Reply:
    """Serve what `change` makes of the content."""
    return _changed(request, answer, lambda data, read: change(data))


@_of_content
def flip(hub: HubState, request: Request, answer: Answer, *, at: int = 0) -> Reply:
    """Invert the byte `at` (negative: from the end) of the content."""

    def flipped(data: bytes, read: ReadFile) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 0xFF
        return bytes(changed)

    return _changed(request, answer, flipped)


@_of_content
def lfs_pointer(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Serve the text of the pointer instead of the content."""
    return _changed(request, answer, lambda data, read: Blob(data, lfs=True).pointer)


@_of_content
def empty(hub: HubState, request: Request, answer: Answer) -> Reply:
    """An empty body."""
    reply = answer()
    reply.body = b""
    return reply


@_of_content
def swap(hub: HubState, request: Request, answer: Answer, *, other: str) -> Reply:
    """Serve the content of the path `other` of the same revision."""
    return _changed(request, answer, lambda data, read: read(other))


@_of_content
def cut(hub: HubState, request: Request, answer: Answer, *, after: int = 0) -> Reply:
    """Close the connection after so many bytes of the body."""
    reply = answer()
    reply.cut = after
    return reply


@_of_content
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


@_of_content
def wrong_length(hub: HubState, request: Request, answer: Answer, *, by: int = 1) -> Reply:
    """State a Content-Length that is off by so many bytes."""
    reply = answer()
    reply.length = len(reply.body) + by
    return reply


@_fault
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
    headers = {"Content-Type": "application/json"}
    told: dict[str, object] = {"error": message}
    if request.segments[:2] == ("api", "v1"):
        told = {"Code": error_code or code, "Success": False, "Message": message, "Data": None}
    else:
        headers["X-Error-Message"] = message
        if error_code is not None:
            headers["X-Error-Code"] = str(error_code)
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    content = json.dumps(told) if body is None else body
    return Reply(code, headers, content.encode() if isinstance(content, str) else content)


@_fault
def html(hub: HubState, request: Request, answer: Answer) -> Reply:
    """A page for people with status 200, as captive portals and proxies send it."""
    page = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>Please</body></html>"
    return Reply(200, {"Content-Type": "text/html; charset=utf-8"}, page)


@_fault
def black_hole(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Take the request and never answer."""
    return Reply(hang=True)


@_fault
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


@_fault
def reset(hub: HubState, request: Request, answer: Answer, *, after: int | None = None) -> Reply:
    """End the connection with RST: at once, or after so many bytes of the body."""
    reply = answer() if after is not None else Reply()
    reply.reset, reply.cut = True, after
    return reply


@_fault
def drop_header(hub: HubState, request: Request, answer: Answer, *, name: str) -> Reply:
    """Leave one header out."""
    reply = answer()
    kept = {key: value for key, value in reply.headers.items() if key.lower() != name.lower()}
    reply.headers = kept
    if name.lower() == "content-length":
        reply.length = -1
    return reply


@_fault
def redirect(
    hub: HubState, request: Request, answer: Answer, *, to: str = "same", code: int = 302
) -> Reply:
    """Send the client to the same path `same`: same port, `port`: same name, other port, `cdn`:
    other name, `http`: the port that never speaks TLS, or to a URL. A request that was redirected
    is answered."""
    if request.query.get("redirected"):
        return answer()
    bases = {
        "same": hub.url,
        "cdn": hub.cdn_url,
        "port": hub.cdn_url.replace("localhost", "127.0.0.1"),
        "http": hub.plain_url,
    }
    if to in bases:
        to = f"{bases[to]}{request.target}{'&' if '?' in request.target else '?'}redirected=1"
    return Reply(code, {"Location": to})


@_fault
def move(hub: HubState, request: Request, answer: Answer, *, call: Callable[[], object]) -> Reply:
    """Call `call`, which changes a repository, and answer from what it left."""
    call()
    return answer()


@_fault
def lose_reply(hub: HubState, request: Request, answer: Answer) -> Reply:
    """Do the work and close the connection without a reply."""
    answer()
    return Reply(silent=True)
