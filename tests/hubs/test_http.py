"""One request to a hub: how often it is sent, how long it may take, what arrives, where redirects
and the token go, and which error ends it."""

import itertools
import logging
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from raw_server import Handler, RawServer, Seen, answer, closed_port, reset

from oscar_zoo import errors
from oscar_zoo.registry.hubs import http
from oscar_zoo.registry.hubs.base import Limits
from oscar_zoo.registry.hubs.http import HttpReply, Origin, Transport, asked_to_wait

CANARY = "hf_canaryCANARY"
PLENTY = 3600.0
"""Longer than the time limit of a test: a call that must end does so by the one short limit."""
ONCE = {"connect": PLENTY, "read": PLENTY, "tries": 1}
Serve = Callable[..., RawServer]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was slept, without sleeping it."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server with a handler, or with answers: in order, the last one for ever; `None`
    breaks the connection off."""
    with ExitStack() as stack:

        def start(*steps: Handler | bytes | None, host: str = "127.0.0.1") -> RawServer:
            handler = steps[0] if callable(steps[0]) else script(*steps)  # type: ignore[arg-type]
            return stack.enter_context(RawServer(handler, host))

        yield start


def script(*steps: bytes | None) -> Handler:
    left = list(steps)

    def handle(connection: socket.socket, seen: Seen) -> None:
        step = left.pop(0) if len(left) > 1 else left[0]
        if step is not None:
            connection.sendall(step)
        if step in (None, CUT):
            reset(connection)

    return handle


def refuse(got: HttpReply, sent_token: bool) -> Exception:
    return errors.Forbidden(f"{got.status} {got.headers.get('x-why')} {len(got.body)} {sent_token}")


def hub(server: RawServer, *, token: str | None = None, **limits: float) -> Transport:
    given = Limits(**limits)  # type: ignore[arg-type]
    return Transport("Some Hub a/b", server.url, token=lambda: token, refusal=refuse, limits=given)


BUSY = answer(status="503 Busy")
SLOW_DOWN = answer(status="429 Too Many")
CUT = answer(b"x" * 5, Content_Length=9)
GOOD = answer(b"content")


@pytest.mark.parametrize(
    "trouble", [BUSY, SLOW_DOWN, None, answer(status="500 Broken"), answer(status="408 Late")]
)
def test_passing_trouble_is_tried_again(
    serve: Serve, pauses: list[float], trouble: bytes | None
) -> None:
    server = serve(trouble, trouble, GOOD)
    assert hub(server).get(server.url, limit=99).body == b"content"
    assert len(server.requests) == 3
    assert 0.5 <= pauses[0] <= 1 <= pauses[1] <= 2


@pytest.mark.parametrize(
    ("trouble", "error", "requests"),
    [
        (BUSY, errors.HubUnreachable, 3),
        (SLOW_DOWN, errors.RateLimited, 3),
        (None, errors.HubUnreachable, 3),
        (answer(b"x" * 100), errors.MalformedFile, 1),
        (answer(status="429 S", Retry_After="61"), errors.RateLimited, 1),
        (answer(status="429 S", Retry_After="999999999999"), errors.RateLimited, 1),
        (answer(status="204 No Content", Content_Length=None), errors.HubUnreachable, 1),
        (answer(status="206 Partial"), errors.HubUnreachable, 1),
        (answer(b"x", Content_Encoding="gzip"), errors.HubUnreachable, 1),
        (answer(status="304 Same", Content_Length=None), errors.HubUnreachable, 1),
        *(
            (answer(status=f"{s} No"), errors.Forbidden, 1)
            for s in (400, 401, 403, 404, 410, 416, 451)
        ),
    ],
)
def test_lasting_trouble_ends_after_three_tries_and_other_trouble_at_once(
    serve: Serve, pauses: list[float], trouble: bytes | None, error: type, requests: int
) -> None:
    server = serve(trouble)
    with pytest.raises(error):
        hub(server).get(server.url, limit=99)
    assert (len(server.requests), len(pauses)) == (requests, requests - 1)


def test_a_refusal_is_that_of_the_hub_and_only_its_beginning_is_read(serve: Serve) -> None:
    server = serve(answer(b"x" * (1 << 20), status="403 No", X_Why="because"))
    with pytest.raises(errors.Forbidden, match=r"403 because .* True") as caught:
        hub(server, token=CANARY).get(server.url, limit=9)
    assert 64 << 10 <= int(caught.value.message.split()[2]) < 256 << 10


def test_silent_and_refused_connections_are_not_repeated(serve: Serve, pauses: list[float]) -> None:
    server = serve(lambda connection, seen: server.ending.wait())
    with pytest.raises(errors.HubTimeout):
        hub(server, read=0.3).get(server.url, limit=9)
    with closed_port() as port:
        server.url = f"http://127.0.0.1:{port}"
        with pytest.raises(errors.HubUnreachable):
            hub(server).get(server.url, limit=9)
    assert (len(server.requests), pauses) == (1, [])


def test_a_client_that_somebody_closed_is_made_anew(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """huggingface_hub closes the client of all threads when one of them cannot connect."""
    server, make = serve(GOOD), http.http_client
    closed = type(make())()
    closed.close()
    clients = iter([closed])
    monkeypatch.setattr(http, "http_client", lambda: next(clients, None) or make())
    assert hub(server).get(server.url, limit=9).body == b"content"


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry_After": "7"}, 7),
        ({"Retry_After": "0"}, 0),
        ({"RateLimit": '"api";r=0;t=12'}, 12),
        ({"Retry_After": "7", "RateLimit": '"api";r=0;t=12'}, 7),
    ],
)
def test_the_hub_is_waited_for_as_long_as_it_asks(
    serve: Serve, pauses: list[float], headers: dict[str, str], seconds: float
) -> None:
    server = serve(answer(status="429 S", **headers), GOOD)
    assert hub(server).get(server.url, limit=99, seconds=5).body == b"content"
    assert pauses == [seconds]


@pytest.mark.parametrize(
    "text",
    [
        "soon",
        "-5",
        "9" * 5000 + "x",
        "21 Oct 99 1:2:3 -9999999999999999",
        "Wed, 21 Oct 29999999999915 07:28:00 GMT",
        "1.5",
        "",
        "Mon, 99 Foo 2020 00:00:00 GMT",
        "٣",
    ],
)
def test_a_wait_that_is_none(text: str) -> None:
    assert asked_to_wait({"retry-after": text}) is None


def test_offline_mode_of_a_client_is_obeyed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(GOOD)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(errors.OfflineError):
        hub(server).get(server.url, limit=9)
    assert server.requests == []


@pytest.mark.parametrize(
    "trouble",
    [
        BUSY,
        SLOW_DOWN,
        CUT,
        None,
        b"nonsense\r\n\r\n",
        answer(b"x" * 99),
        answer(status="403 No"),
        answer(status="204 No"),
        answer(status="302 F", Location="/?signature=hf_canaryCANARY"),
        answer(status="302 F", Location="gopher://x/?signature=hf_canaryCANARY"),
        answer(status="302 F", Location="http://[hf_canaryCANARY/"),
        answer(b"x", Content_Encoding="hf_canaryCANARY"),
    ],
)
def test_no_error_holds_the_token_or_an_address(
    serve: Serve, pauses: list[float], caplog: pytest.LogCaptureFixture, trouble: bytes | None
) -> None:
    caplog.set_level(logging.WARNING)
    server = serve(trouble)
    with pytest.raises(errors.OscarZooError) as caught:
        hub(server, token=CANARY).get(f"{server.url}/?X-Amz-Signature={CANARY}", limit=9)
    link: BaseException | None = caught.value
    while link is not None:
        lines = traceback.format_exception(link)
        shown = "".join([repr(link), str(link), repr(vars(link)), *lines])
        assert CANARY not in shown and "127.0.0.1" not in shown
        assert not hasattr(link, "request") and not hasattr(link, "response")
        link = link.__cause__ or link.__context__
    assert CANARY not in caplog.text
    assert CANARY not in repr(HttpReply(200, {"location": CANARY}, CANARY.encode()))


def test_the_whole_body_arrives(serve: Serve) -> None:
    body = bytes(range(256)) * 4000
    server = serve(answer(body, X_Commit="abc"))
    told: list[int] = []
    address = f"{server.url}/a%20b?c=d"
    reply = hub(server).get(address, limit=len(body), size=len(body), progress=told.append)
    assert (reply.status, reply.headers["x-commit"], reply.body) == (200, "abc", body)
    assert told == sorted(told) and told[-1] == len(body)
    (seen,) = server.requests
    assert (seen.target, seen.headers["accept-encoding"]) == ("/a%20b?c=d", "identity")


@pytest.mark.parametrize("part", ["nothing", "header", "body", "chunk"])
def test_what_drips_ends(serve: Serve, part: str) -> None:
    chunked = answer(Content_Length=None, Transfer_Encoding="chunked")
    head, slow = {
        "nothing": (b"", b""),
        "header": (b"", answer(b"x", X_Long="y" * 9999)),
        "body": (answer(b"x" * 4000, Content_Length=100_000), b"x" * 96_000),
        "chunk": (chunked, b"5;" + b"x" * 9999),
    }[part]

    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(head)
        server.drip(connection, slow, pause=0.02)
        server.ending.wait()

    server = serve(handle)
    with pytest.raises(errors.HubTimeout, match="was not done within 0 s"):
        hub(server, **ONCE).get(server.url, limit=100_000, seconds=0.5)


def test_a_body_has_a_minute_and_a_rate(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(answer(b"x", Content_Length=1000))
        server.drip(connection, b"x" * 999, pause=0.02)

    server = serve(handle)
    monkeypatch.setattr(http, "LEAST_SECONDS", 0.1)
    with pytest.raises(errors.HubTimeout, match="within 1 s"):
        hub(server, **ONCE, min_rate=2000).get(server.url, limit=5000, size=1000)


def test_a_name_that_is_never_resolved(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    server = serve(answer(), host="localhost")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: release.wait(PLENTY))
    with pytest.raises(errors.HubTimeout, match="was not done"):
        hub(server, **ONCE).get(server.url, limit=9, seconds=0.3)
    release.set()


def test_nobody_is_told_about_a_try_that_was_given_up(serve: Serve) -> None:
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
    with pytest.raises(errors.HubTimeout):
        hub(server, **ONCE).get(server.url, limit=1 << 30, seconds=1.5, progress=told.append)
    more.set()
    assert closed.wait(PLENTY)  # the connection is given up, the gigabyte does not arrive
    assert told == [5]


def chunked(size: int, end: bytes = b"0\r\n\r\n") -> bytes:
    chunk = b"%x\r\n" % size + b"x" * size + b"\r\n" if size else b""
    return answer(chunk + end, Content_Length=None, Transfer_Encoding="chunked")


@pytest.mark.parametrize(
    "data",
    [
        answer(b"x" * 11),
        answer(Content_Length=11),  # refused by its word: no byte of the body is needed
        answer(Content_Length=10**17),
        chunked(11),
    ],
)
def test_more_than_expected_is_refused(serve: Serve, data: bytes) -> None:
    server = serve(data)
    with pytest.raises(errors.MalformedFile) as caught:
        hub(server).get(server.url, limit=10)
    assert caught.value.reason == "file.size"


@pytest.mark.parametrize("size", [0, 1, 10])
@pytest.mark.parametrize("say", [lambda size: answer(b"x" * size), chunked])
def test_exactly_the_limit_is_taken(serve: Serve, size: int, say: Callable[[int], bytes]) -> None:
    server = serve(say(size))
    assert hub(server).get(server.url, limit=size, size=size).body == b"x" * size


@pytest.mark.parametrize(
    "data",
    [
        answer(b"x" * 9, Content_Length=10),
        # ends with the connection; only the listing says how much was due
        answer(b"x" * 9, Content_Length=None),
        answer(b"a\r\n" + b"x" * 9, Content_Length=None, Transfer_Encoding="chunked"),
        b"HTTP/1.1 200",
        b"nonsense\r\n\r\n",
        b"",
    ],
)
@pytest.mark.parametrize("end", ["close", "reset"])
def test_less_than_expected_is_a_broken_connection(serve: Serve, data: bytes, end: str) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        connection.sendall(data)
        if end == "close":
            connection.shutdown(socket.SHUT_RDWR)
        reset(connection)

    server = serve(handle)
    with pytest.raises(errors.HubUnreachable, match="the connection broke off"):
        hub(server, **ONCE).get(server.url, limit=10, size=10)


def has_token(seen: Seen) -> bool:
    return any(CANARY in value for value in seen.headers.values())


def test_the_token_goes_to_the_hub(serve: Serve) -> None:
    server = serve(answer())
    hub(server, token=CANARY).get(server.url, limit=9)
    both = Transport("T", server.url, token=lambda: CANARY, refusal=refuse, cookie="session")
    both.get(server.url, limit=9)
    plain, cookie = (seen.headers for seen in server.requests)
    assert plain["authorization"] == cookie["authorization"] == f"Bearer {CANARY}"
    assert "cookie" not in plain and cookie["cookie"] == f"session={CANARY}"


def test_no_way_of_redirects_leaks_the_token(serve: Serve) -> None:
    """Every way of three hops over four origins of one machine: the token is seen at home, until
    home is left."""
    at: dict[str, str] = {}
    statuses = itertools.cycle(["301 A", "302 B", "303 C", "307 D", "308 E"])

    def handle(connection: socket.socket, seen: Seen) -> None:
        way, left = seen.target.strip("/"), {"Set_Cookie": "left=behind; Path=/"}
        if way:
            where = f"{at[way[0]]}/{way[1:]}"
            connection.sendall(answer(status=next(statuses), Location=where, **left))
        else:
            connection.sendall(answer(b"there", **left))

    home, other = serve(handle), serve(handle)
    at |= {"h": home.url, "o": other.url}
    at |= {"H": f"http://localhost:{home.port}", "O": f"http://localhost:{other.port}"}
    transport = hub(home, token=CANARY)
    for way in itertools.product("hoHO", repeat=3):
        home.requests.clear()
        other.requests.clear()
        assert transport.get(f"{home.url}/{''.join(way)}", limit=9).body == b"there"
        stayed = len(list(itertools.takewhile(lambda hop: hop == "h", way)))
        here = f"127.0.0.1:{home.port}"
        at_home = [seen for seen in home.requests if seen.headers["host"] == here]
        later = way[stayed:].count("h")
        assert [has_token(seen) for seen in at_home] == [True] * (1 + stayed) + [False] * later
        everywhere = home.requests + other.requests
        assert not any(has_token(seen) for seen in everywhere if seen not in at_home)
        assert not any("left" in seen.headers.get("cookie", "") for seen in everywhere)


def test_a_login_of_the_client_goes_nowhere(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have set up the client for a proxy or a hub of its own."""
    make = type(http.http_client())
    with make(auth=("user", CANARY), headers={"Authorization": CANARY, "Cookie": CANARY}) as client:
        monkeypatch.setattr(http, "http_client", lambda: client)
        server = serve(answer())
        hub(server).get(server.url, limit=9)
        hub(server, token="own").get(server.url, limit=9)
    first, second = server.requests
    assert not has_token(first) and "authorization" not in first.headers
    assert second.headers["authorization"] == "Bearer own"


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
def test_redirects_that_lead_nowhere(serve: Serve, location: str) -> None:
    server = serve(answer(status="302 Found", Location=location))
    with pytest.raises(errors.HubUnreachable):
        hub(server, token=CANARY, **ONCE).get(server.url, limit=9)
    assert len(server.requests) <= 6


def test_five_redirects_are_followed_and_no_more(serve: Serve) -> None:
    def handle(connection: socket.socket, seen: Seen) -> None:
        left = int(seen.target[1:])
        there = answer(status="302 Found", Location=f"/{left - 1}")
        connection.sendall(there if left else answer(b"there"))

    server = serve(handle)
    assert hub(server).get(f"{server.url}/5", limit=9).body == b"there"
    with pytest.raises(errors.HubUnreachable, match="redirects"):
        hub(server).get(f"{server.url}/6", limit=9)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "", "schlüssel", "null\0"])
def test_what_cannot_be_a_token_is_not_sent_and_not_shown(serve: Serve, token: str) -> None:
    server = serve(answer())
    with pytest.raises(errors.LoginRequired) as caught:
        hub(server, token=token).get(server.url, limit=9)
    assert not token or token not in f"{caught.value}{caught.value.hint}"
    assert server.requests == []


class Url(NamedTuple):
    scheme: str
    host: str
    port: int | None


ORIGINS = {
    "hub": Url("https", "hub.example", None),
    "hub, port spelled": Url("https", "HUB.example", 443),
    "hub, other port": Url("https", "hub.example", 8443),
    "hub in clear": Url("http", "hub.example", None),
    "other host": Url("https", "cdn.hub.example", None),
    "hub, final dot": Url("https", "hub.example.", None),
    "loopback": Url("http", "127.0.0.1", 8000),
    "loopback, other port": Url("http", "127.0.0.1", 8001),
    "loopback by name": Url("http", "localhost", 8000),
    "loopback, IPv6": Url("http", "::1", 8000),
    "loopback with TLS": Url("https", "127.0.0.1", 8000),
    "private network": Url("http", "10.0.0.7", 8000),
}
SEES = {
    ("hub", "hub"),
    ("hub", "hub, port spelled"),
    ("hub, port spelled", "hub"),
    ("hub, port spelled", "hub, port spelled"),
    *((name, name) for name in ORIGINS if name not in ("hub in clear", "private network")),
}


@pytest.mark.parametrize("hub", ORIGINS)
def test_a_token_goes_to_its_own_origin_in_private_and_nowhere_else(hub: str) -> None:
    home = Origin.of(ORIGINS[hub])
    seen = {target for target, url in ORIGINS.items() if Origin.of(url).may_see_token_of(home)}
    assert seen == {target for target in ORIGINS if (hub, target) in SEES}


@pytest.mark.parametrize("source", ORIGINS)
def test_redirects_never_leave_tls(source: str) -> None:
    here = Origin.of(ORIGINS[source])
    allowed = {target for target, url in ORIGINS.items() if here.may_redirect_to(Origin.of(url))}
    assert allowed == {
        target for target, url in ORIGINS.items() if (here.scheme, url.scheme) != ("https", "http")
    }


@pytest.mark.parametrize("scheme", ["ftp", "file", "data", "", "HTTPS+unix", "javascript"])
def test_redirects_lead_to_http_only(scheme: str) -> None:
    for url in (Url(scheme, "a", None), Url("https", "", None), Url("https", "a", 443 + (1 << 16))):
        for source in ("loopback", "hub"):
            assert not Origin.of(ORIGINS[source]).may_redirect_to(Origin.of(url))


@pytest.mark.parametrize(
    "host", ["127.0.0.1.evil.example", "localhost.evil.example", "0.0.0.0", "2130706433", "127.1"]
)
def test_names_that_look_like_loopback_are_not(host: str) -> None:
    origin = Origin.of(Url("http", host, 80))
    assert not origin.may_see_token_of(origin)
