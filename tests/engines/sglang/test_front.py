"""The rules of the front, without a server."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from oscar_zoo.engines.sglang.bounds import request as bounds
from oscar_zoo.engines.sglang.front import fields, messages
from oscar_zoo.engines.sglang.front.access import (
    OPEN,
    FrontSettings,
    Routes,
    is_named,
    may_ask,
    open_routes,
    parse_origin,
)
from oscar_zoo.engines.sglang.front.messages import Connections
from oscar_zoo.engines.sglang.front.middleware import Front
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
    assert is_named(header, host, has_key=has_key) is known


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
    for origin, site in (
        ("https://127.0.0.1:30000", b"same-site"),
        ("ftp://127.0.0.1:30000", None),
        ("127.0.0.1:30000", None),
        ("http://127.0.0.1:3000", b"same-site"),
        ("null", None),
        ("", None),
    ):
        assert not may_ask(origin, site, here, ())
    assert not may_ask(None, b"cross-site", here, ("http://page.example",))


def test_a_release_between_two_gets_the_list_of_the_earlier_one() -> None:
    for release, following in pairwise(OPEN):
        major, minor, patch = following.split(".")
        for between in (f"{release}.post1", f"{major}.{minor}.{int(patch) - 1}"):
            assert open_routes(between) == open_routes(release)
            assert open_routes(release) == Routes.of(OPEN[release])
    routes = Routes.of({"/v1/models/{model:path}": frozenset({"GET"})})
    assert routes.has("/v1/models/a/b", "GET") and not routes.has("/v1/models/", "GET")
    assert not routes.has("/v1/models/a", "POST")


def test_who_has_a_key_is_told_how_many_requests_are_answered() -> None:
    key = [(b"authorization", b"Bearer the key of tools")]
    told: list[Any] = []

    async def ask(method: str, path: str, headers: Any) -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await front(scope | {"client": ("127.0.0.1", 1)}, receive, send)
        return json.loads(sent[-1]["body"]) if sent else None

    async def application(scope: Any, receive: Any, send: Any) -> None:
        told.extend([await ask("GET", "/oscar_front", one) for one in (key, [])])
        if len(told) < 4:
            await ask("POST", "/generate", [])
            raise ConnectionError  # one that fails is over, too
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for last in (False, True):  # SGLang goes on behind a stream
            await send({"type": "http.response.body", "body": b"1", "more_body": not last})
            told.append(await ask("GET", "/oscar_front", key))

    async def all_of_it() -> None:
        with contextlib.suppress(ConnectionError):
            await ask("POST", "/generate", [])
        told.append(await ask("GET", "/oscar_front", key))

    front = Front(application, ADMINISTRATION, open_routes("0.5.21"), {})
    asyncio.run(all_of_it())
    assert told[:4] == [{"requests": 1}, {}, {"requests": 2}, {}]
    assert told[4:] == [{"requests": 2}, {"requests": 1}, {"requests": 0}]


def test_administration_is_for_this_machine_only() -> None:
    for peer, wanted in (("127.0.0.1", 200), ("10.0.0.1", 404)):
        key = {b"authorization": b"Bearer the key of tools"}
        assert asked(ADMINISTRATION, "POST", "/flush_cache", key, peer=peer)[0] == wanted


def test_a_body_too_long_or_too_slow_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_BODY", 10)
    assert asked(ADMINISTRATION, "POST", "/generate", body=[b"{     ", b"   }"])[0] == 200
    assert asked(ADMINISTRATION, "POST", "/generate", body=[b"{     ", b"    }"])[0] == 413
    monkeypatch.setattr(messages, "MOST_BODY", 1000)
    monkeypatch.setattr(messages, "FIRST_SECONDS", 0.1)
    assert coming([b"1" * 500, None]) == [messages.TOO_SLOW]
    monkeypatch.setattr(messages, "SLOWEST", 1)
    assert coming([b"1" * 500, None, b""]) == [None]


def test_the_slowest_of_many_bodies_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MOST_TOGETHER", 1000)
    monkeypatch.setattr(messages, "SMALL", 10)
    large, small, little = [b"1" * 500, b""], [b"1" * 10, None, b""], [b"1" * 300, None, b""]
    assert coming(little, large, small) == [None, None, None]
    assert coming(little, large, large, small) == [messages.NO_ROOM, None, None, None]
    # where the others have come whole, it is the newcomer
    assert coming(large, large, [b"1" * 400, b""]) == [None, None, messages.NO_ROOM]


def coming(*several: list[bytes | None]) -> list[messages.Reason | None]:
    """What becomes of bodies, each begun behind the one before. An empty part ends one. At `None`
    a body waits until all others have been begun, and 0.2 seconds more."""
    begun = 0

    async def read(together: dict[messages.Body, int], parts: list[bytes | None]) -> Any:
        nonlocal begun
        begun += 1
        left = iter(parts)

        async def receive() -> Any:
            part = next(left)
            while part is None:
                await asyncio.sleep(0.2 if begun == len(several) else 0)
                part = next(left, b"") if begun == len(several) else None
            return {"type": "http.request", "body": part, "more_body": part != b""}

        return await messages.Body(receive, together).read()

    async def all_of_them() -> list[Any]:
        together: dict[messages.Body, int] = {}
        return list(await asyncio.gather(*(read(together, parts) for parts in several)))

    return asyncio.run(all_of_them())


CHAT = "/v1/chat/completions"
DEEP = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, '{"response_format": [[2047]]}', "response_format"),
        (CHAT, '{"response_format": "json"}', "response_format"),
        (CHAT, f'{{"response_format": {DEEP}}}', None),
        (CHAT, '{"a":' * 10_000 + "1" + "}" * 10_000, None),
        (CHAT, "[" * 100 + "]" * 100, None),
        (CHAT, '["response_format"]', None),
        (CHAT, '{"response_format"', None),
        (CHAT, '{"temperature": NaN}', None),
        (CHAT, '{"temperature": Infinity}', None),
        (CHAT, "\xff", None),
        (CHAT, '{"chat_template_kwargs": [1]}', "chat_template_kwargs"),
        (CHAT, '{"chat_template_kwargs": {"tokenize": true}}', "chat_template_kwargs"),
        (CHAT, '{"chat_template_kwargs": {"chat_template": "{{"}}', "chat_template_kwargs"),
        (CHAT, '{"chat_template_kwargs": {"a": [1]}}', "chat_template_kwargs"),
        (CHAT, '{"chat_template_kwargs": {"a b": 1}}', "chat_template_kwargs"),
        (CHAT, '{"http_worker_ipc": "ipc:///x"}', "http_worker_ipc"),
        (CHAT, '{"bootstrap_host": null}', "bootstrap_host"),
        (CHAT, '{"guided_json": {}}', "guided_json"),
        (CHAT, json.dumps({"model": "a" * 5000}), "model"),
        ("/v1/completions", '{"extra_key": ["a"]}', "extra_key"),
        ("/v1/completions", '{"messages": []}', "messages"),
        ("/generate", '{"session_params": {}}', "session_params"),
        ("/generate", '{"http_worker_ipc": "x"}', "http_worker_ipc"),
        ("/generate", '{"rid": 5}', "rid"),
        ("/generate", '{"rid": ["a", 5]}', "rid"),
        ("/generate", json.dumps({"rid": ["a"] * 2000}), "rid"),
        ("/generate", '{"input_ids": [' + "[]," * 600_000 + "[]]}", None),
        ("/generate", '{"input_ids": [' + "1," * 2_100_000 + "1]}", None),
        (CHAT, '{"chat_template_kwargs": {"self": 1}}', "chat_template_kwargs"),
        ("/tokenize", '{"chat_template_kwargs": {}}', "chat_template_kwargs"),
        ("/v1/responses", '{"request_id": "a"}', "request_id"),
        ("/v1/models", '{"a": 1}', "a"),
    ],
)
def test_what_no_client_may_ask_is_refused_by_name(path: str, body: str, field: str | None) -> None:
    method = "GET" if path == "/v1/models" else "POST"
    parts = [body[:9].encode("latin-1"), body[9:].encode("latin-1")]
    status, said = asked(ADMINISTRATION, method, path, body=parts)
    assert (status, said["error"]["param"]) == (400, field)
    assert "\n" not in said["error"]["message"] and len(said["error"]["message"]) < 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"response_format": {"type": "json_object"}, "messages": [], "metadata": {}}),
        (CHAT, {"response_format": None, "chat_template_kwargs": {"enable_thinking": False}}),
        ("/v1/completions", {"prompt": "a" * 10_000, "stream_options": {"include_usage": True}}),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "system": "a", "tools": []}),
        ("/generate", {"text": "a", "sampling_params": {"top_k": 1}}),
    ],
)
def test_what_clients_ask_reaches_the_engine(path: str, body: dict[str, Any]) -> None:
    status, said = asked(ADMINISTRATION, "POST", path, body=[json.dumps(body).encode()], tells=True)
    assert status == 200 and said == body


def test_the_engine_s_own_interface_is_open_where_that_was_asked_for() -> None:
    body = [b'{"session_params": {"id": "a"}}']
    own = replace(ADMINISTRATION, engine_api=True)
    routes = open_routes("0.5.21", engine_api=True)
    given = {"body": body, "tells": True, "routes": routes}
    for path in ("/generate", "/encode"):
        assert asked(own, "POST", path, **given)[0] == 200
        assert asked(own, "POST", path, **given | {"body": [DEEP.encode()]})[0] == 400
    assert asked(ADMINISTRATION, "POST", "/encode", body=body)[0] == 404


def test_every_field_of_a_client_has_bounds() -> None:
    assert fields.FIELDS["/generate"] == bounds.ROWS.keys()
    assert fields.FIELDS.keys() <= {*open_routes("0.5.21").exact}


@pytest.mark.parametrize("given", ["1", ["1", "12", 'a"ä\n'], "x" * 512])
def test_ids_of_clients_never_reach_the_engine(given: Any) -> None:
    """And come back as they were sent; no id of ours is the beginning of another."""
    status, said = asked(
        ADMINISTRATION, "POST", "/generate", body=[json.dumps({"rid": given}).encode()], tells=True
    )
    assert status == 200 and said == {"rid": given}
    seen: list[list[str]] = []
    for _ in range(2):
        body = {"rid": given}
        ours = fields.own_ids(body)
        assert [*ours.values()] == (given if isinstance(given, list) else [given])
        seen.append([body["rid"]] if isinstance(body["rid"], str) else body["rid"])
        assert seen[-1] == [*ours] and {len(one) for one in ours} == {32}
    assert not set(seen[0]) & set(seen[1])


@pytest.mark.parametrize(
    "name", ["origin", "host", "authorization", "x-api-key", "content-length", "content-type"]
)
def test_a_header_that_decides_stands_once(name: str) -> None:
    twice = [(name.encode(), b"5"), (name.encode(), b"5")]
    assert asked(ADMINISTRATION, "POST", "/generate", twice)[0] == 400


def test_sglang_sees_its_own_key_and_no_origin() -> None:
    settings = FrontSettings("127.0.0.1", ("http://a.example",), "client", "engine")
    given = {b"authorization": b"Bearer client", b"origin": b"http://a.example", b"accept": b"b"}
    given |= {b"x-data-parallel-rank": b"1", b"content-length": b"10", b"content-encoding": b"gzip"}
    body = [b'{"rid":"a"}']
    status, said = asked(settings, "POST", "/generate", given, body=body)
    length = str(len('{"rid": ""}') + 32)
    assert status == 200
    assert said == {"accept": "b", "authorization": "Bearer engine", "content-length": length}


def asked(
    settings: FrontSettings,
    method: str,
    path: str,
    headers: Any = None,
    *,
    body: Sequence[bytes] = (b"",),
    peer: str = "127.0.0.1",
    routes: Routes | None = None,
    tells: bool = False,
) -> tuple[int, Any]:
    """Status and JSON of what the front answers before an application that tells its headers, or
    with `tells` the body that it got."""

    async def application(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert not message["more_body"]
        told = {name.decode(): value.decode() for name, value in scope["headers"]}
        answer = message["body"] if tells else json.dumps(told).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

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
        "headers": headers if isinstance(headers, list) else [*(headers or {}).items()],
        "client": (peer, 1),
    }
    front = Front(application, settings, routes or open_routes("0.5.21"), {})
    asyncio.run(front(scope, receive, send))
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
    with (
        listening(Connections(10, 2.0 if second else 0.2), threading.Event()) as port,
        sent(port, b"") as waiting,
    ):
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
