"""A server that says exactly the bytes a test gives it: to be silent, slow, short, or to break off
at any byte."""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn, Self


@dataclass(frozen=True)
class Seen:
    """A request as it arrived; names of `headers` are lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Handler = Callable[[socket.socket, Seen], None]
"""Answers a request on its connection; when it raises `OSError` or `StopIteration`, the connection
is closed."""


class RawServer:
    """A server on loopback, as a context; `requests` is what arrived.

    Args:
        host: `127.0.0.1` or `localhost`, which are two origins; used in `url`.
    """

    def __init__(self, handler: Handler, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.ending = threading.Event()
        self.requests: list[Seen] = []
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://{host}:{self.port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        for each in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, StopIteration, ValueError),
            connection,
            connection.makefile("rb") as stream,
        ):
            while line := stream.readline():
                headers = {}
                while header := stream.readline().strip():
                    name, _, value = header.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                method, target, _ = line.decode("latin-1").split(" ")
                body = stream.read(int(headers.get("content-length", 0)))
                seen = Seen(method, target, headers, body)
                self.requests.append(seen)
                self._handler(connection, seen)

    def drip(self, connection: socket.socket, data: bytes, *, pause: float) -> None:
        """Send `data` byte by byte, `pause` seconds apart, until the server ends."""
        for byte in data:
            connection.sendall(bytes([byte]))
            if self.ending.wait(pause):
                hang_up(connection)


def answer(body: bytes = b"", *, status: str = "200 OK", **headers: object) -> bytes:
    """A whole answer; `_` in names of headers stands for `-`. `Content-Length` is the truth unless
    it is given."""
    named = {"Content-Length": len(body)} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    lines = [
        f"HTTP/1.1 {status}",
        *(f"{name}: {value}" for name, value in named.items() if value is not None),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def json_answer(value: object, **headers: object) -> bytes:
    """A whole answer with `value` as JSON."""
    return answer(json.dumps(value).encode(), **headers)  # type: ignore[arg-type]


def reset(connection: socket.socket) -> None:
    """Break the connection off in the rude way."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    hang_up(connection)


def hang_up(connection: socket.socket) -> NoReturn:
    """End the connection behind what was sent."""
    connection.close()
    raise StopIteration


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of loopback on which nobody listens, and which nobody gets while the block runs."""
    with socket.socket() as bound:  # never listening
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])
