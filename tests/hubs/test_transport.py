"""How often a request is sent, how long a hub is waited for, and which error ends it."""

from __future__ import annotations

import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from raw_server import Handler, RawServer, Seen, answer, closed_port, reset

from oscar_zoo.errors import (
    Forbidden,
    HubTimeout,
    HubUnreachable,
    MalformedFile,
    OfflineError,
    OscarZooError,
    RateLimited,
)
from oscar_zoo.registry.hubs import http
from oscar_zoo.registry.hubs.http import HttpReply, Limits, Transport, asked_to_wait

CANARY = "hf_canaryCANARY"


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
def serve() -> Iterator[Callable[[Handler], RawServer]]:
    with ExitStack() as stack:
        yield lambda handler: stack.enter_context(RawServer(handler))


def refuse(reply: HttpReply, sent_token: bool) -> Exception:
    return Forbidden(f"{reply.status} {reply.headers.get('x-why')} {len(reply.body)} {sent_token}")


def hub(server: RawServer, *, token: str | None = None, limits: Limits | None = None) -> Transport:
    return Transport("Some Hub a/b", server.url, token=lambda: token, refusal=refuse, limits=limits)


def script(*steps: bytes | None) -> Handler:
    """Answers in order, the last one for ever; `None` breaks the connection off."""
    left = list(steps)

    def handle(connection: socket.socket, seen: Seen) -> None:
        step = left.pop(0) if len(left) > 1 else left[0]
        if step is None:
            reset(connection)
        else:
            connection.sendall(step)
            if step is CUT:
                reset(connection)

    return handle


BUSY = answer(status="503 Busy")
SLOW_DOWN = answer(status="429 Too Many")
CUT = answer(b"x" * 5, Content_Length=9)
GOOD = answer(b"content")


@pytest.mark.parametrize(
    "trouble", [BUSY, SLOW_DOWN, None, answer(status="500 Broken"), answer(status="408 Late")]
)
def test_passing_trouble_is_tried_again(
    serve: Callable[[Handler], RawServer], pauses: list[float], trouble: bytes | None
) -> None:
    server = serve(script(trouble, trouble, GOOD))
    assert hub(server).get(server.url, limit=99).body == b"content"
    assert len(server.requests) == 3
    assert [0.5 <= pauses[0] <= 1, 1 <= pauses[1] <= 2] == [True] * 2


@pytest.mark.parametrize(
    "trouble, error, words",
    [
        (BUSY, HubUnreachable, "Some Hub a/b cannot be reached: it answers with status 503."),
        (SLOW_DOWN, RateLimited, "Some Hub a/b limits the rate of requests."),
        (None, HubUnreachable, "Some Hub a/b cannot be reached: the connection broke off."),
    ],
)
def test_lasting_trouble_ends_after_three_tries(
    serve: Callable[[Handler], RawServer],
    pauses: list[float],
    trouble: bytes | None,
    error: type,
    words: str,
) -> None:
    server = serve(script(trouble))
    with pytest.raises(error) as caught:
        hub(server).get(server.url, limit=99)
    assert caught.value.message == words
    assert (len(server.requests), len(pauses)) == (3, 2)


def test_silence_is_not_tried_again(
    serve: Callable[[Handler], RawServer], pauses: list[float]
) -> None:
    server = serve(lambda connection, seen: server.ending.wait())
    limits = Limits(read=0.3)
    with pytest.raises(HubTimeout):
        hub(server, limits=limits).get(server.url, limit=9)
    assert (len(server.requests), pauses) == (1, [])


def test_refused_connections_are_not_tried_again(pauses: list[float]) -> None:
    refused = "Some Hub a/b cannot be reached: connection refused"
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}"
        closed = Transport("Some Hub a/b", url, token=lambda: None, refusal=refuse)
        with pytest.raises(HubUnreachable, match=refused):
            closed.get(url, limit=9)
    assert pauses == []


def test_a_client_that_somebody_closed_is_made_anew(
    serve: Callable[[Handler], RawServer], monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """huggingface_hub closes the client of all threads when one of them cannot connect."""
    server, make = serve(script(GOOD)), http.http_client
    closed = type(make())()
    closed.close()
    clients = iter([closed])
    monkeypatch.setattr(http, "http_client", lambda: next(clients, None) or make())
    assert hub(server).get(server.url, limit=9).body == b"content"


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 416, 451])
def test_refusals_are_not_tried_again(
    serve: Callable[[Handler], RawServer], pauses: list[float], status: int
) -> None:
    server = serve(script(answer(b"{}", status=f"{status} No", X_Why="because"), GOOD))
    with pytest.raises(Forbidden, match=f"{status} because 2 True"):
        hub(server, token=CANARY).get(server.url, limit=9)
    assert (len(server.requests), pauses) == (1, [])


def test_of_a_refusal_only_the_beginning_is_read(serve: Callable[[Handler], RawServer]) -> None:
    server = serve(script(answer(b"x" * (1 << 20), status="403 No")))
    with pytest.raises(Forbidden) as caught:
        hub(server).get(server.url, limit=9)
    assert 64 << 10 <= int(caught.value.message.split()[2]) < 256 << 10


def test_too_many_bytes_are_not_tried_again(
    serve: Callable[[Handler], RawServer], pauses: list[float]
) -> None:
    server = serve(script(answer(b"x" * 10), GOOD))
    with pytest.raises(MalformedFile):
        hub(server).get(server.url, limit=9)
    assert (len(server.requests), pauses) == (1, [])


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial", "201 Made", "304 Same"])
def test_only_a_full_answer_is_an_answer(
    serve: Callable[[Handler], RawServer], status: str
) -> None:
    server = serve(
        script(answer(status=status, Content_Length=None if status[:3] in ("204", "304") else 0))
    )
    with pytest.raises(HubUnreachable, match=f"status {status[:3]}"):
        hub(server).get(server.url, limit=9)


@pytest.mark.parametrize(
    "headers, seconds",
    [
        ({"Retry_After": "7"}, 7),
        ({"Retry_After": "0"}, 0),
        ({"RateLimit": '"api";r=0;t=12'}, 12),
        ({"Retry_After": "7", "RateLimit": '"api";r=0;t=12'}, 7),
    ],
)
def test_the_hub_is_waited_for_as_long_as_it_asks(
    serve: Callable[[Handler], RawServer],
    pauses: list[float],
    headers: dict[str, str],
    seconds: float,
) -> None:
    server = serve(script(answer(status="429 S", **headers), GOOD))
    assert hub(server).get(server.url, limit=99, seconds=5).body == b"content"
    assert pauses == [seconds]


@pytest.mark.parametrize("wait", ["61", "999999999999"])
def test_nobody_waits_longer_than_patience(
    serve: Callable[[Handler], RawServer], pauses: list[float], wait: str
) -> None:
    server = serve(script(answer(status="429 S", Retry_After=wait)))
    with pytest.raises(RateLimited) as caught:
        hub(server).get(server.url, limit=99)
    assert f"in {wait[:9]} s" in str(caught.value.hint)
    assert (len(server.requests), pauses) == (1, [])


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


def test_offline_mode_of_the_client_is_obeyed(
    serve: Callable[[Handler], RawServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(script(GOOD))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineError, match="Some Hub a/b is not asked: HF_HUB_OFFLINE"):
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
    serve: Callable[[Handler], RawServer],
    pauses: list[float],
    caplog: pytest.LogCaptureFixture,
    trouble: bytes | None,
) -> None:
    caplog.set_level(logging.WARNING)
    server = serve(script(trouble))
    with pytest.raises(OscarZooError) as caught:
        hub(server, token=CANARY).get(f"{server.url}/?X-Amz-Signature={CANARY}", limit=9)
    link: BaseException | None = caught.value
    while link is not None:
        shown = "".join(
            [repr(link), str(link), repr(vars(link)), *traceback.format_exception(link)]
        )
        assert CANARY not in shown and "127.0.0.1" not in shown
        assert not hasattr(link, "request") and not hasattr(link, "response")
        link = link.__cause__ or link.__context__
    assert CANARY not in caplog.text
    assert CANARY not in repr(HttpReply(200, {"location": CANARY}, CANARY.encode(), CANARY))
