"""HTTP of the loopback hubs: one request in, one reply out, everything on record.

A reply says what is sent and how: at which pace, how much of it, and how the connection ends. Lies
are made there, so that routes only know the truth.
"""

import contextlib
import hashlib
import json
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

from hub_repositories import Commit, HubState, Kind, Repository

ReadFile = Callable[[str], bytes]
ContentFilter = Callable[[bytes, ReadFile], bytes]
"""Takes a file's content, and a function that reads other files of the same revision; gives what is
served."""


@dataclass
class Record:
    """One request as it arrived; `status` stays 0 while, or when, no reply was sent."""

    method: str
    path: str
    host: str
    credentials: bool
    status: int = 0


@dataclass
class Request:
    """A request, its path split before unquoting, so that `%2F` stays inside one segment.

    Attributes:
        host: `origin`, `cdn` or `plain`: which port it came to.
        content: a fault's filter for the content of the file that is asked for.
    """

    method: str
    target: str
    host: str
    headers: Message
    body: bytes
    content: ContentFilter | None = None
    segments: tuple[str, ...] = field(init=False)
    query: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.target)
        self.segments = tuple(unquote(part) for part in parts.path.split("/")[1:])
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))

    @property
    def verb(self) -> str:
        """The method; HEAD is answered like GET, and the body left out."""
        return "GET" if self.method == "HEAD" else self.method

    @property
    def path(self) -> str:
        """The path, unquoted, without the query."""
        return "/" + "/".join(self.segments)

    @property
    def file(self) -> str | None:
        """Path inside the repository of the file whose bytes are asked for, on any of the hubs."""
        match self.segments:
            case ("cdn", _, _, _, _, *rest) | (_, _, "resolve", _, *rest):
                return "/".join(rest)
        return self.query.get("FilePath")

    @property
    def token(self) -> str | None:
        """What came as `Authorization: Bearer` or as the cookie of ModelScope."""
        scheme, _, token = (self.headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer" and token:
            return token
        cookie = SimpleCookie(self.headers.get("Cookie") or "").get("m_session_id")
        return cookie.value if cookie else None

    @property
    def json(self) -> Any:
        """The body as JSON; an empty one is an empty object."""
        return json.loads(self.body or b"{}")

    def form(self, name: str) -> list[str]:
        return parse_qs(self.body.decode()).get(name, [])


@dataclass
class Reply:
    """What is sent, and how.

    Attributes:
        length: Content-Length to state instead of the body's; `-1` states none and ends the body by
            closing.
        cut: close after so many bytes of the body.
        extra: bytes sent after the body, beyond the stated length.
        rate: bytes per second of the body, and of the head with `slow_head`.
        reset: end with RST instead of FIN.
        hang: send nothing until the server stops.
        silent: send nothing and close.
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    length: int | None = None
    cut: int | None = None
    extra: bytes = b""
    rate: float | None = None
    slow_head: bool = False
    reset: bool = False
    hang: bool = False
    silent: bool = False

    @property
    def closes(self) -> bool:
        """Whether the connection cannot be used again."""
        lies = self.length not in (None, len(self.body)) or self.extra or self.cut is not None
        return bool(self.silent or self.hang or self.reset or lies)


class Refused(Exception):
    """Carries the reply to a request that is not granted."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def as_json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Reply:
    return Reply(
        status,
        {"Content-Type": "application/json; charset=utf-8"} | (headers or {}),
        json.dumps(value).encode(),
    )


def serve_content(request: Request, data: bytes, read: ReadFile, headers: dict[str, str]) -> Reply:
    """The content of a file, or the range of it that was asked for."""
    if request.content is not None:
        data = request.content(data, read)
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"} | headers
    total, view = len(data), memoryview(data)
    asked = request.headers.get("Range") or ""
    if not asked.startswith("bytes="):
        return Reply(200, headers, view)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    at = int(first) if first else max(total - int(last), 0)
    end = min(int(last), total - 1) if first and last else total - 1
    if at > end:
        return Reply(416, headers | {"Content-Range": f"bytes */{total}"})
    return Reply(206, headers | {"Content-Range": f"bytes {at}-{end}/{total}"}, view[at : end + 1])


class Port(ThreadingHTTPServer):
    """One listening port; closes its connections when it stops."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, hub: Any, host: str, context: ssl.SSLContext | None = None) -> None:
        self.hub, self.host = hub, host
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        if context is not None:
            # The handshake is left to the thread of the connection, so that no client can hold up
            # the others.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Wake every thread that waits for a client."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go at any time; errors of routes are answered and kept by the hub."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Port

    def _serve(self) -> None:
        body = self._read_body()
        if body is None:  # the client went away while it was sending: nothing of it counts
            self.close_connection = True
            return
        request = Request(self.command, self.path, self.server.host, self.headers, body)
        known = request.token is not None or self.headers.get("Authorization") is not None
        record = Record(request.method, request.target, request.host, known)
        self.server.hub.arrive(record)
        reply = self.server.hub.answer(request)
        if reply.closes:
            self.close_connection = True
        with contextlib.suppress(OSError):
            self._send(reply, record)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def log_message(self, *args: object) -> None:
        """Requests are on record; nothing is printed."""

    def _read_body(self) -> bytes | None:
        size = int(self.headers.get("Content-Length") or 0)
        try:
            data = self.rfile.read(size)
        except OSError:
            return None
        return data if len(data) == size else None

    def _send(self, reply: Reply, record: Record) -> None:
        if reply.hang:
            self.server.hub.pause(None)
        if not (reply.hang or reply.silent or (reply.reset and reply.cut is None)):
            body = memoryview(b"" if self.command == "HEAD" else reply.body)
            record.status = reply.status  # before it leaves: who has read it may read the record
            self._pour(memoryview(self._head(reply)), reply.rate if reply.slow_head else None)
            self._pour(body if reply.cut is None else body[: reply.cut], reply.rate)
            self.connection.sendall(reply.extra)
        if reply.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

    def _head(self, reply: Reply) -> bytes:
        headers = dict(reply.headers)
        if reply.length != -1:
            length = len(reply.body) if reply.length is None else reply.length
            headers.setdefault("Content-Length", str(length))
        if self.close_connection:
            headers["Connection"] = "close"
        lines = [f"HTTP/1.1 {reply.status} Status", *(f"{k}: {v}" for k, v in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _pour(self, data: memoryview, rate: float | None) -> None:
        if rate is None:
            self.connection.sendall(data)
            return
        step = max(int(rate / 20), 1)
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            self.connection.sendall(piece)
            if self.server.hub.pause(len(piece) / rate):
                break


_SIGNED = "X-Amz-Signature=test"


def batch_objects(
    repo: Repository, base: str, wanted: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The answer to an LFS batch request: where each object is to be put; no actions for one that
    is stored."""
    objects: list[dict[str, Any]] = []
    for one in wanted:
        entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] not in repo.objects:
            address = f"{base}/lfs/{repo.kind}/{repo.id}/{one['oid']}?{_SIGNED}"
            entry["actions"] = {"upload": {"href": address, "header": {}}}
        objects.append(entry)
    return objects


def signed_address(hub: HubState, repo: Repository, commit: Commit, path: str) -> str:
    """Where the content of a large file can be had without a token."""
    base = hub.cdn_url if hub.lfs_redirect == "cdn" else hub.url
    return (
        f"{base}/cdn/{repo.kind}/{repo.id}/{commit.oid}/{quote(path)}?X-Amz-Expires=3600&{_SIGNED}"
    )


def answer(hub: HubState, request: Request) -> Reply:
    """Answer one request for stored content."""
    if "X-Amz-Signature" not in request.query:
        return _error(403, "AccessDenied")
    match (request.verb, *request.segments):
        case ("PUT", "lfs", ("hf" | "ms") as kind, owner, name, oid):
            return _store(hub.find(kind, f"{owner}/{name}"), oid, request.body)
        case ("GET", "cdn", ("hf" | "ms") as kind, owner, name, oid, *path):
            return _serve(hub, request, kind, f"{owner}/{name}", oid, "/".join(path))
    return _error(404, "NoSuchKey")


def _store(repo: Repository | None, oid: str, data: bytes) -> Reply:
    if repo is None or hashlib.sha256(data).hexdigest() != oid:
        return _error(400, "BadDigest")
    repo.objects[oid] = data
    return Reply()


def _serve(hub: HubState, request: Request, kind: Kind, repo_id: str, oid: str, path: str) -> Reply:
    """Content; this host knows nothing of commits, and two ways to identify oneself are one too
    many."""
    repo = hub.find(kind, repo_id)
    commit = repo.history.get(oid) if repo else None
    blob = commit.blobs.get(path) if commit else None
    if commit is None or blob is None:
        return _error(404, "NoSuchKey")
    headers = {"ETag": f'"{blob.sha256}"'}
    if request.host == "origin":
        headers |= {
            "X-Repo-Commit": oid,
            "X-Linked-Etag": headers["ETag"],
            "X-Linked-Size": str(len(blob.data)),
        }
    elif request.headers.get("Authorization"):
        return _error(400, "InvalidArgument")
    return serve_content(request, blob.data, lambda other: commit.blobs[other].data, headers)


def _error(status: int, code: str) -> Reply:
    return Reply(
        status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode()
    )


OPENSSL = shutil.which("openssl")
CERTIFICATE, _KEY = "hub.crt", "hub.key"


def server_context(folder: Path) -> ssl.SSLContext:
    """Make a certificate for the names of this machine in `folder`; clients are to trust
    `folder / CERTIFICATE`."""
    assert OPENSSL is not None
    certificate, key = folder / CERTIFICATE, folder / _KEY
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    usage = "keyUsage=critical,digitalSignature,keyCertSign"
    command = (
        "req -x509 -nodes -days 2 -subj /CN=localhost -newkey ec -pkeyopt"
        " ec_paramgen_curve:prime256v1"
    )
    more = ["-addext", names, "-addext", usage, "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([OPENSSL, *command.split(), *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
