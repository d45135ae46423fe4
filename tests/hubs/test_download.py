"""What happens during one try: silence, slowness, lengths, redirects, and where the token goes."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from raw_server import Handler, RawServer, Seen, answer, reset

from oscar_zoo.errors import HubTimeout, HubUnreachable, LoginRequired, MalformedFile
from oscar_zoo.registry.hubs import http
from oscar_zoo.registry.hubs.http import HttpReply, Limits, Transport

CANARY = "hf_canaryCANARY"
PLENTY = 3600.0
"""Longer than the time limit of a test, however slow the machine is."""


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def serve() -> Iterator[Callable[..., RawServer]]:
    with ExitStack() as stack:
        yield lambda handler, host="127.0.0.1": stack.enter_context(RawServer(handler, host))


def hub(server: RawServer, *, token: str | None = None, **limits: float) -> Transport:
    once = {"connect": PLENTY, "read": PLENTY, "tries": 1} | limits
    return Transport(
        "Some Hub a/b", server.url, token=lambda: token, refusal=refuse, limits=Limits(**once)
    )  # type: ignore[arg-type]


def refuse(reply: HttpReply, sent_token: bool) -> Exception:
    return LookupError(reply.status)


def saying(data: bytes) -> Handler:
    return lambda connection, seen: connection.sendall(data)


def ends_soon(call: Callable[[], object], error: type[Exception], match: str) -> None:
    """`call` must end with `error` by the one short limit: with the others this test would not
    end."""
    with pytest.raises(error, match=match):
        call()


def test_the_whole_body_arrives(serve: Callable[..., RawServer]) -> None:
    body = bytes(range(256)) * 4000
    server = serve(saying(answer(body, X_Commit="abc")))
    told: list[int] = []
    reply = hub(server).get(
        f"{server.url}/a%20b?c=d", limit=len(body), size=len(body), progress=told.append
    )
    assert reply.body == body
    assert (reply.status, reply.headers["x-commit"]) == (200, "abc")
    assert told == sorted(told) and told[-1] == len(body)
    assert server.requests[0].target == "/a%20b?c=d"
    assert server.requests[0].headers["accept-encoding"] == "identity"
    assert server.requests[0].headers["user-agent"].startswith("oscar-zoo/")


def test_a_hub_that_never_answers(serve: Callable[..., RawServer]) -> None:
    server = serve(lambda connection, seen: server.ending.wait())
    silent, late = hub(server, read=0.3), hub(server)
    ends_soon(lambda: silent.get(server.url, limit=9), HubTimeout, r"fell silent")
    ends_soon(lambda: late.get(server.url, limit=9, seconds=0.3), HubTimeout, r"was not done")


@pytest.mark.parametrize("part", ["header", "body", "chunk"])
def test_what_drips_ends(serve: Callable[..., RawServer], part: str) -> None:
    chunked = answer(Content_Length=None, Transfer_Encoding="chunked")
    head, slow = {
        "header": (b"", answer(b"x", X_Long="y" * 9999)),
        "body": (answer(b"x" * 4000, Content_Length=100_000), b"x" * 96_000),
        "chunk": (chunked, b"5;" + b"x" * 9999),
    }[part]

    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(head)
        server.drip(connection, slow, pause=0.02)

    server = serve(handle)
    dripped = lambda: hub(server).get(server.url, limit=100_000, seconds=0.5)  # noqa: E731
    ends_soon(dripped, HubTimeout, "was not done within 0 s")


def test_a_body_has_a_minute_and_its_bytes_at_the_least_rate(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(answer(b"x", Content_Length=1000))
        server.drip(connection, b"x" * 999, pause=0.02)

    server = serve(handle)
    monkeypatch.setattr(http, "LEAST_SECONDS", 0.1)
    slow = hub(server, min_rate=2000)
    ends_soon(lambda: slow.get(server.url, limit=5000, size=1000), HubTimeout, "within 1 s")


def test_a_name_that_is_never_resolved(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    server = serve(saying(answer()), "localhost")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(PLENTY))
    lost = lambda: hub(server).get(server.url, limit=9, seconds=0.3)  # noqa: E731
    ends_soon(lost, HubTimeout, "was not done")
    release.set()


def test_nobody_is_told_about_a_try_that_was_given_up(serve: Callable[..., RawServer]) -> None:
    more, closed = threading.Event(), threading.Event()

    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(answer(b"first", Content_Length=1 << 30))
        more.wait(PLENTY)
        try:
            while True:
                connection.sendall(b"later" * 20_000)
        finally:
            closed.set()

    server = serve(handle)
    told: list[int] = []
    with pytest.raises(HubTimeout):
        hub(server).get(server.url, limit=1 << 30, seconds=1.5, progress=told.append)
    more.set()
    assert closed.wait(PLENTY)  # the connection is given up, the gigabyte does not arrive
    assert told == [5]


@pytest.mark.parametrize(
    "data",
    [
        answer(b"x" * 11),
        answer(Content_Length=11),  # refused by its word: no byte of the body is needed
        answer(Content_Length=10**17),
        answer(
            b"b\r\n" + b"x" * 11 + b"\r\n0\r\n\r\n",
            Content_Length=None,
            Transfer_Encoding="chunked",
        ),
    ],
)
def test_more_than_expected_is_refused(serve: Callable[..., RawServer], data: bytes) -> None:
    server = serve(saying(data))
    with pytest.raises(
        MalformedFile, match=r"Some Hub a/b sends 11|Some Hub a/b sends 100,000,0"
    ) as caught:
        hub(server).get(server.url, limit=10)
    assert caught.value.reason == "file.size"


@pytest.mark.parametrize("size", [0, 1, 10])
def test_exactly_the_limit_is_taken(serve: Callable[..., RawServer], size: int) -> None:
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n" if size else b""
    bodies = [
        answer(b"x" * size),
        answer(chunk + b"0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked"),
    ]
    for data in bodies:
        server = serve(saying(data))
        assert hub(server).get(server.url, limit=size, size=size).body == b"x" * size


@pytest.mark.parametrize(
    "data",
    [
        answer(b"x" * 9, Content_Length=10),
        answer(
            b"x" * 9, Content_Length=None
        ),  # ends with the connection; only the listing says how much was due
        answer(b"a\r\n" + b"x" * 9, Content_Length=None, Transfer_Encoding="chunked"),
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("end", ["close", "reset"])
def test_less_than_expected_is_a_broken_connection(
    serve: Callable[..., RawServer], data: bytes, end: str
) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(data)
        if end == "close":
            connection.shutdown(socket.SHUT_RDWR)
        reset(connection)

    server = serve(handle)
    with pytest.raises(HubUnreachable, match="the connection broke off"):
        hub(server).get(server.url, limit=10, size=10)


def test_compressed_content_is_no_content(serve: Callable[..., RawServer]) -> None:
    server = serve(saying(answer(b"x", Content_Encoding="gzip")))
    with pytest.raises(HubUnreachable, match="it compresses"):
        hub(server).get(server.url, limit=10)


def has_token(seen: Seen) -> bool:
    return any(CANARY in value for value in seen.headers.values())


def test_the_token_goes_to_the_hub(serve: Callable[..., RawServer]) -> None:
    server = serve(saying(answer()))
    hub(server, token=CANARY).get(server.url, limit=9)
    assert server.requests[0].headers["authorization"] == f"Bearer {CANARY}"
    assert "cookie" not in server.requests[0].headers
    limits = Limits(tries=1)
    both = Transport(
        "T", server.url, token=lambda: CANARY, refusal=refuse, cookie="session", limits=limits
    )
    both.get(server.url, limit=9)
    assert server.requests[1].headers["authorization"] == f"Bearer {CANARY}"
    assert server.requests[1].headers["cookie"] == f"session={CANARY}"


def test_no_way_of_redirects_leaks_the_token(serve: Callable[..., RawServer]) -> None:
    """Every way of three hops over four origins of one machine: the token is seen at home, until
    home is left."""
    at: dict[str, str] = {}
    statuses = itertools.cycle(["301 A", "302 B", "303 C", "307 D", "308 E"])

    def handle(connection: socket.socket, seen: Seen) -> None:
        way = seen.target.strip("/")
        if not way:
            connection.sendall(answer(b"there", Set_Cookie="left=behind; Path=/"))
        else:
            there = f"{at[way[0]]}/{way[1:]}"
            connection.sendall(
                answer(status=next(statuses), Location=there, Set_Cookie="left=behind")
            )

    home, other = serve(handle), serve(handle)
    servers = {"h": home, "o": other}
    at |= {
        "h": home.url,
        "o": other.url,
        "H": f"http://localhost:{home.port}",
        "O": f"http://localhost:{other.port}",
    }
    transport = hub(home, token=CANARY)
    for way in itertools.product("hoHO", repeat=3):
        for server in servers.values():
            server.requests.clear()
        assert transport.get(f"{home.url}/{''.join(way)}", limit=9).body == b"there"
        stayed = len(list(itertools.takewhile(lambda hop: hop == "h", way)))
        at_home = [
            seen for seen in home.requests if seen.headers["host"] == f"127.0.0.1:{home.port}"
        ]
        assert [has_token(seen) for seen in at_home] == [True] * (1 + stayed) + [False] * (
            way[stayed:].count("h")
        )
        elsewhere = [
            seen for server in servers.values() for seen in server.requests if seen not in at_home
        ]
        assert not any(has_token(seen) for seen in elsewhere)
        assert not any(
            "left" in seen.headers.get("cookie", "") for seen in home.requests + other.requests
        )


def test_a_login_of_the_shared_client_itself_goes_nowhere(
    serve: Callable[..., RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may have set up the client for a proxy or a hub of its own."""
    make = type(http.http_client())
    with make(auth=("user", CANARY), headers={"Authorization": CANARY, "Cookie": CANARY}) as client:
        monkeypatch.setattr(http, "http_client", lambda: client)
        server = serve(saying(answer()))
        hub(server).get(server.url, limit=9)
        assert (
            not has_token(server.requests[0]) and "authorization" not in server.requests[0].headers
        )
        hub(server, token="own").get(server.url, limit=9)
        assert server.requests[1].headers["authorization"] == "Bearer own"


@pytest.mark.parametrize(
    "location",
    [
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "http://[::1/x",
        "http://",
        "http://127.0.0.1:0/",
        "http://a b/",
        "/",
    ],
)
def test_redirects_that_lead_nowhere(serve: Callable[..., RawServer], location: str) -> None:
    server = serve(saying(answer(status="302 Found", Location=location)))
    with pytest.raises(HubUnreachable):
        hub(server, token=CANARY).get(server.url, limit=9)
    assert len(server.requests) <= 6


def test_five_redirects_are_followed_and_no_more(serve: Callable[..., RawServer]) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        left = int(seen.target[1:])
        connection.sendall(
            answer(status="302 Found", Location=f"/{left - 1}") if left else answer(b"there")
        )

    server = serve(handle)
    assert hub(server).get(f"{server.url}/5", limit=9).body == b"there"
    with pytest.raises(HubUnreachable, match="redirects"):
        hub(server).get(f"{server.url}/6", limit=9)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "", "schlüssel", "null\0"])
def test_what_cannot_be_a_token_is_not_sent_and_not_shown(
    serve: Callable[..., RawServer], token: str
) -> None:
    server = serve(saying(answer()))
    with pytest.raises(LoginRequired) as caught:
        hub(server, token=token).get(server.url, limit=9)
    assert not token or token not in f"{caught.value}{caught.value.hint}"
    assert server.requests == []
