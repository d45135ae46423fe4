"""The rules of the front, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from oscar_zoo.engines.sglang.compat.releases import TESTED
from oscar_zoo.engines.sglang.front import bodies
from oscar_zoo.engines.sglang.front.addresses import Names, is_loopback, may_ask, parse_origin
from oscar_zoo.engines.sglang.front.connections import Connections
from oscar_zoo.engines.sglang.front.middleware import Front
from oscar_zoo.engines.sglang.front.routes import OPEN, TYPED, Routes, open_routes
from oscar_zoo.engines.sglang.front.settings import FrontSettings
from oscar_zoo.errors import UsageError

ADMINISTRATION = FrontSettings("127.0.0.1", administration_key="the key of tools")


@pytest.mark.parametrize(
    ("host", "header", "has_key", "known"),
    [
        ("127.0.0.1", "127.0.0.1:30000", False, True),
        ("127.0.0.1", "localhost", False, True),
        ("127.0.0.1", "[::1]:30000", False, True),
        ("127.0.0.1", "rebound.example:30000", False, False),
        ("127.0.0.1", "127.0.0.1.example", False, False),
        ("127.0.0.1", "127.0.0.1@rebound.example", False, False),
        ("127.0.0.1", "192.168.1.5", False, False),
        ("127.0.0.1", "[::1", False, False),
        ("192.168.1.5", "192.168.1.5:30000", True, True),
        ("192.168.1.5", "rebound.example", True, False),
        ("llm.local", "LLM.local:1", True, True),
        ("0.0.0.0", "192.168.1.5", False, True),
        ("0.0.0.0", "rebound.example", False, False),
        ("0.0.0.0", "a-container:30000", True, True),
    ],
)
def test_a_server_knows_its_names(host: str, header: str, has_key: bool, known: bool) -> None:
    assert Names(host, has_key).has(header) is known


def test_origins_are_written_as_browsers_send_them() -> None:
    assert parse_origin("http://Page.example:80/") == "http://page.example"
    assert parse_origin("https://[::1]:8443") == "https://[::1]:8443"
    for wrong in ("*", "page.example", "http://page.example/path", "file:///x", "http://x:99999"):
        with pytest.raises(UsageError):
            parse_origin(wrong)


def test_pages_of_the_server_itself_may_ask_and_requests_without_a_page() -> None:
    here = "127.0.0.1:30000"
    assert may_ask("http://127.0.0.1:30000", b"same-origin", here, ())
    assert may_ask(None, None, here, ()) and may_ask(None, b"none", here, ())
    for origin, site in (("http://127.0.0.1:3000", b"same-site"), ("null", None), ("", None)):
        assert not may_ask(origin, site, here, ())
    assert not may_ask(None, b"cross-site", here, ("http://page.example",))


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_addresses_of_this_machine(peer: str) -> None:
    assert is_loopback(peer) and not is_loopback("10.0.0.1") and not is_loopback(None)


def test_every_tested_release_has_a_list() -> None:
    assert [*OPEN] == [*TESTED]


def test_a_release_between_two_gets_the_list_of_the_earlier_one() -> None:
    for release, following in pairwise(OPEN):
        major, minor, patch = following.split(".")
        for between in (f"{release}.post1", f"{major}.{minor}.{int(patch) - 1}"):
            assert open_routes(between) == open_routes(release)
            assert replace(open_routes(release), typed={}) == Routes.of(OPEN[release])
    routes = Routes.of({"/v1/models/{model:path}": frozenset({"GET"})})
    assert routes.has("/v1/models/a/b", "GET") and not routes.has("/v1/models/", "GET")
    assert not routes.has("/v1/models/a", "POST")


def test_administration_is_for_this_machine_only() -> None:
    for peer, wanted in (("127.0.0.1", 200), ("10.0.0.1", 404)):
        key = {b"authorization": b"Bearer the key of tools"}
        assert asked(ADMINISTRATION, "POST", "/flush_cache", key, peer=peer)[0] == wanted


def test_a_body_that_grows_too_long_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_BODY", 10)
    assert asked(ADMINISTRATION, "POST", "/generate", body=[b"123456", b"1234"])[0] == 200
    assert asked(ADMINISTRATION, "POST", "/generate", body=[b"123456", b"12345"])[0] == 413


def test_a_body_that_comes_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FIRST_SECONDS", 0.1)
    assert coming([b"1" * 500, None]) == [bodies.TOO_SLOW]
    monkeypatch.setattr(bodies, "SLOWEST", 1)
    assert coming([b"1" * 500, None, b""]) == [None]


def test_the_slowest_of_many_bodies_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_TOGETHER", 1000)
    monkeypatch.setattr(bodies, "SMALL", 10)
    large, small, little = [b"1" * 500, b""], [b"1" * 10, None, b""], [b"1" * 300, None, b""]
    assert coming(little, large, small) == [None, None, None]
    assert coming(little, large, large, small) == [bodies.NO_ROOM, None, None, None]
    # where the others have come whole, it is the newcomer
    assert coming(large, large, [b"1" * 400, b""]) == [None, None, bodies.NO_ROOM]


def coming(*several: list[bytes | None]) -> list[bodies.Refusal | None]:
    """What becomes of bodies, each begun behind the one before. An empty part ends one. At `None`
    a body waits until all others have been begun, and 0.2 seconds more."""
    begun = 0

    async def read(together: dict[bodies.Body, int], parts: list[bytes | None]) -> Any:
        nonlocal begun
        begun += 1
        left = iter(parts)

        async def receive() -> Any:
            part = next(left)
            while part is None:
                await asyncio.sleep(0.2 if begun == len(several) else 0)
                part = next(left, b"") if begun == len(several) else None
            return {"type": "http.request", "body": part, "more_body": part != b""}

        return await bodies.Body(receive, together).read()

    async def all_of_them() -> list[Any]:
        together: dict[bodies.Body, int] = {}
        return list(await asyncio.gather(*(read(together, parts) for parts in several)))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"response_format": [[2047]]}', 400),
        ('{"response_format": "json"}', 400),
        ('{"response_format": {"type": "json_object"}}', 200),
        ('{"response_format": null}', 200),
        ('{"messages": "response_format"}', 200),
        ('["response_format"]', 200),
        ('{"response_format"', 200),
    ],
)
def test_a_field_that_must_be_an_object_is_named(body: str, status: int) -> None:
    """And what was read is handed on whole, also in parts; other routes are not read."""
    parts = [body[:9].encode(), body[9:].encode()]
    found = asked(ADMINISTRATION, "POST", "/v1/chat/completions", body=parts)
    assert found[0] == status
    if status == 400:
        assert found[1]["error"]["message"] == "response_format must be an object."
    assert asked(ADMINISTRATION, "POST", "/generate", body=parts)[0] == 200


def test_types_of_fields_are_those_of_the_release() -> None:
    body = [b'{"extra_key": ["a"]}']
    for release, status in (("0.5.17", 400), ("0.5.21", 200)):
        found = asked(
            ADMINISTRATION, "POST", "/v1/completions", body=body, routes=open_routes(release)
        )
        assert found[0] == status
    assert TYPED.keys() == OPEN.keys()


def test_sglang_sees_its_own_key_and_no_origin() -> None:
    settings = FrontSettings("127.0.0.1", ("http://a.example",), "client", "engine")
    given = {b"authorization": b"Bearer client", b"origin": b"http://a.example", b"x-a": b"b"}
    status, said = asked(settings, "POST", "/generate", given)
    assert status == 200 and said == {"x-a": "b", "authorization": "Bearer engine"}


def asked(
    settings: FrontSettings,
    method: str,
    path: str,
    headers: dict[bytes, bytes] | None = None,
    *,
    body: Iterable[bytes] = (b"",),
    peer: str = "127.0.0.1",
    routes: Routes | None = None,
) -> tuple[int, Any]:
    """Status and JSON of what the front answers before an application that tells its headers."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen = b""
        while (message := await receive()).get("more_body"):
            seen += message["body"]
        assert message["type"] == "http.disconnect" or seen + message["body"] == b"".join(body)
        if message["type"] == "http.disconnect":
            return
        told = {name.decode(): value.decode() for name, value in scope["headers"]}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(told).encode()})

    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    parts[-1]["more_body"] = False
    left, sent = iter(parts), []

    async def receive() -> Any:
        return next(left)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [*(headers or {}).items()],
        "client": (peer, 1),
    }
    asyncio.run(
        Front(application, settings, routes or open_routes("0.5.21"), {})(scope, receive, send)
    )
    return sent[0]["status"], json.loads(sent[-1]["body"])


def test_no_key_looks_like_a_flag() -> None:
    """SGLang makes arguments of keys; one random base64 text in 64 begins with a hyphen."""
    for _ in range(500):
        made = FrontSettings.make("127.0.0.1", (), "key")
        assert made.engine_key and made.engine_key.isalnum() and made.administration_key.isalnum()


@contextlib.contextmanager
def listening(connections: Connections, began: threading.Event) -> Iterator[int]:
    """The port of a uvicorn whose connections are bounded; `/slow` says that it began, and waits
    for more of a body."""

    class Bounded(H11Protocol):
        pass

    connections.bound(Bounded)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/slow":
            began.set()
            while (await receive()).get("more_body"):
                pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        application, http=Bounded, lifespan="off", log_level="critical", timeout_keep_alive=600
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


def sent(port: int, data: bytes) -> socket.socket:
    """A connection that has sent `data`."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(data)
    return connection


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nHost: a"])
@pytest.mark.parametrize("second", [False, True])
def test_a_head_that_does_not_end_ends_its_connection(head: bytes, *, second: bool) -> None:
    with listening(Connections(10, 0.2), threading.Event()) as port, sent(port, b"") as waiting:
        if second:
            waiting.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert waiting.recv(4096).startswith(b"HTTP/1.1 200")
            head = head or b"G"
        waiting.sendall(head)
        assert waiting.recv(4096) == b""


def test_connections_that_wait_give_way_and_those_at_work_do_not() -> None:
    """The oldest that has asked nothing goes first, and a newcomer only where all are at work."""
    slow = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n1"
    began = threading.Event()
    with listening(Connections(3, 600), began) as port, contextlib.ExitStack() as stack:
        first = stack.enter_context(sent(port, slow))
        assert began.wait(60)
        idle = [stack.enter_context(sent(port, b"GET")) for _ in range(2)]
        asking = stack.enter_context(sent(port, slow.replace(b"/slow", b"/")))
        assert idle[0].recv(1) == b""  # the oldest of the two
        began.clear()
        second = stack.enter_context(sent(port, slow))
        assert began.wait(60)
        assert idle[1].recv(1) == b""
        asking.sendall(b"2")
        assert asking.recv(4096).startswith(b"HTTP/1.1 200")
        began.clear()
        third = stack.enter_context(sent(port, slow))  # in place of `asking`, which is idle now
        assert began.wait(60)
        assert asking.recv(1) == b""
        refused = stack.enter_context(sent(port, slow))
        assert refused.recv(4096).startswith(b"HTTP/1.1 503")
        for working in (first, second, third):
            working.sendall(b"2")
            assert working.recv(4096).startswith(b"HTTP/1.1 200")
