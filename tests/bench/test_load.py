"""Clients and verdicts of a load test, against a server on loopback that streams, refuses, stalls
or breaks off."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_output import check
from raw_server import RawServer, Seen, answer, closed_port, hang_up, json_answer

from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.server import Server
from oscar_zoo.evaluate.bench import load
from oscar_zoo.evaluate.bench.load import Call, Drain, FreeTokens, Load, LoadReport, Usage
from oscar_zoo.verb import as_json

LOAD = Load(clients=4, seconds=0.5, longest=50, new_tokens=6, aborts=0.4)
Events = Callable[[dict[str, Any]], Iterator[bytes]]
DONE = b"data: [DONE]\n\n"
PLENTY = 300.0
"""Seconds that no answer takes, however busy the machine is."""


def event(count: int, reason: str | None) -> bytes:
    meta = {"completion_tokens": count, "finish_reason": reason and {"type": reason}}
    return (
        b"data: "
        + json.dumps({"output_ids": list(range(count)), "meta_info": meta}).encode()
        + b"\n\n"
    )


def good(body: dict[str, Any]) -> Iterator[bytes]:
    wanted = body["sampling_params"]["max_new_tokens"]
    for count in range(1, wanted + 1):
        yield event(count, "length" if count == wanted else None)
    yield DONE


@pytest.fixture
def stream() -> Iterator[Callable[..., ServerClient]]:
    """Starts a server that answers `/generate` with these events, or with a status. It has 100 free
    slots, and always says the same where no stream is wanted."""
    facts = {"loads": [{"max_total_num_tokens": 100, "num_used_tokens": 0}]}
    plain = {"output_ids": [1], "meta_info": {"cached_tokens": 0}}
    with ExitStack() as stack:

        def start(events: Events | int, timeout: float = PLENTY) -> ServerClient:
            def handle(connection: socket.socket, seen: Seen) -> None:
                body = json.loads(seen.body or "{}")
                if not body.get("stream"):
                    connection.sendall(json_answer(facts if seen.method == "GET" else plain))
                    return
                status = f"{events} Status" if isinstance(events, int) else "200 OK"
                connection.sendall(answer(status=status, Content_Length=None))
                for part in () if isinstance(events, int) else events(body):
                    connection.sendall(part)
                hang_up(connection)

            server = stack.enter_context(RawServer(handle))
            return ServerClient(server.url, timeout=timeout)

        yield start


def test_a_stream_is_whole_or_hung_up_on_anywhere(stream: Callable[..., ServerClient]) -> None:
    client = stream(good)
    done = Call((1, 2), 5).run(client)
    assert (done.tokens, done.hung_up, done.error) == (5, False, None)
    assert done.first_token_s is not None
    for at in (0, 1, 3):
        outcome = Call((1, 2), 5, hang_up=at).run(client)
        assert (outcome.tokens, outcome.hung_up, outcome.error) == (at, True, None)


@pytest.mark.parametrize(
    ("events", "seen"),
    [
        (503, "status 503"),
        ((event(1, None),), "the stream ended before its end"),
        ((event(1, "abort"), DONE), "finished by abort"),
        ((event(4, "length"), DONE), "4 of 5 tokens came"),
        ((b'data: {"error": {"message": "out of memory"}}\n\n', DONE), "out of memory"),
    ],
)
def test_everything_else_is_an_error(
    stream: Callable[..., ServerClient], events: tuple[bytes, ...] | int, seen: str
) -> None:
    given = events if isinstance(events, int) else lambda body: iter(events)
    assert seen in str(Call((1, 2), 5).run(stream(given)).error)


@pytest.fixture
def silence() -> Iterator[Events]:
    over = threading.Event()

    def events(body: dict[str, Any]) -> Iterator[bytes]:
        over.wait()
        yield b""

    yield events
    over.set()


def test_silence_and_nobody_are_told(stream: Callable[..., ServerClient], silence: Events) -> None:
    assert Call((1, 2), 5).run(stream(silence, 0.3)).error == "no answer in time"
    with closed_port() as port:
        client = ServerClient(f"http://127.0.0.1:{port}")
        assert "ConnectionRefusedError" in str(Call((1,), 1).run(client).error)


def test_clients_work_until_time_is_over_and_everything_is_counted(
    stream: Callable[..., ServerClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here every look at the clock takes a millisecond, and nothing else takes any time."""
    looks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(looks) / 1000)
    monkeypatch.setattr(load, "time", clock)
    seen: list[float] = []
    tally = load.run_load(
        stream(good), LoadReport(LOAD), lambda tally, seconds: seen.append(seconds)
    )
    assert not tally.errors and tally.finished > LOAD.clients and tally.aborted > 0
    assert tally.new_tokens > tally.finished
    assert tally.requests == tally.finished + tally.aborted and seen == sorted(seen)
    failing = load.run_load(stream(500), LoadReport(replace(LOAD, aborts=0.0)))
    assert failing.finished == 0 and list(failing.errors) == ["status 500: "]


def test_prompts_share_prefixes_of_every_length_and_come_again_with_the_same_seed() -> None:
    long = replace(LOAD, longest=400)
    first, again, second = ([*itertools.islice(load.calls(long, n), 60)] for n in (1, 1, 2))
    assert first == again
    asked = first + second
    assert all(2 <= len(one.prompt) <= 400 and 1 <= one.new_tokens <= 6 for one in asked)
    assert all(one.hang_up is None or 0 <= one.hang_up < one.new_tokens for one in asked)
    assert 0.2 < sum(one.hang_up is not None for one in asked) / len(asked) < 0.6
    shared = [max(common(a.prompt, b.prompt) for b in second) for a in first]
    assert sum(n >= 8 for n in shared) > 30 and len(set(shared)) > 20


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_memory_is_flat_or_not() -> None:
    assert load.usage([]) is None
    warming = [10, 50, 90, 100, *[100] * 8]
    assert load.usage(warming) == Usage(100, 100, 100)
    leaking = load.usage([100 + 10 * i for i in range(60)])
    assert leaking is not None and leaking.late - leaking.early > 250 and leaking.peak == 690


def test_memory_of_a_group_is_that_of_all_its_processes() -> None:
    hold = (
        "import subprocess, sys; data = bytearray(b'x' * (40 << 20)); print('up', flush=True);"
        " sys.stdin.read()"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hold!r}])"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"up\n"
    with load.watched(child.pid, pause=0.01) as (host, _):
        assert load.group_memory(child.pid) > 40 << 20
    child.stdin.close()
    child.wait()
    child.stdout.close()
    assert max(host) > 40 << 20
    assert load.group_memory(child.pid) == 0


@pytest.mark.parametrize(
    ("counts", "found"),
    [([1358, 1400, 1500], 1500), ([1358], 1358)],
    ids=["begun after its client hung up", "leaked"],
)
def test_slots_are_missing_only_when_they_stay_missing(
    counts: list[int], found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def free_tokens() -> tuple[int, ...]:
        return (counts.pop(0) if len(counts) > 1 else counts[0],)

    monkeypatch.setattr(load, "LEAKED", 1.0)
    monkeypatch.setattr(load, "PAUSE", 0.01)
    client = cast(ServerClient, SimpleNamespace(flush=lambda: None, free_tokens=free_tokens))
    assert load.free_when_idle(client, (1500,)) == (found,)


@pytest.mark.parametrize(
    ("visible", "numbers", "used"), [("0,1,2,3", range(1, 3), 1100), ("2,0", range(1, 2), 900)]
)
def test_only_the_gpus_of_the_server_are_looked_at(
    visible: str, numbers: range, used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = (100, 300, 600, 1000)
    cards = [SimpleNamespace(memory=1000 << 20, free=one << 20) for one in free]
    chosen = [cards[int(n)] for n in visible.split(",")]
    monkeypatch.setattr(load.hardware, "gpus", lambda: cards)
    monkeypatch.setattr(load.hardware, "visible", lambda _: chosen)
    assert load.gpu_memory(numbers) == used << 20 and load.gpu_memory(range(4, 5)) is None


def server_of_this_process(tmp_path: Path) -> Server:
    """Stands for the process of a server: what a run under load reads of it."""
    return cast(Server, SimpleNamespace(group=os.getpgrp(), returncode=None, log=tmp_path / "log"))


@pytest.mark.parametrize("signalled", [KeyboardInterrupt(), SystemExit(143)], ids=["INT", "TERM"])
def test_a_signal_keeps_what_was_measured(
    stream: Callable[..., ServerClient], signalled: BaseException, tmp_path: Path
) -> None:
    """Clients send nothing more then, so that the counts stay as they are."""

    def tell(done: int, total: int, label: str) -> None:
        if label != "0 requests":
            raise signalled

    report = LoadReport(replace(LOAD, seconds=60.0))
    load.measure(server_of_this_process(tmp_path), stream(good), report, tell)
    counted = report.requests
    assert counted > 0 and report.seconds < 50 and report.violations == []
    facts = as_json(report)
    check(facts)
    assert facts["free_tokens"] == {"before": [100], "after": None}
    kind = "SIGINT" if isinstance(signalled, KeyboardInterrupt) else "SIGTERM"
    assert (facts["stopped"], facts["drain"], facts["same_answers"]) == (kind, None, None)
    time.sleep(0.3)
    assert report.requests == counted


def test_a_signal_before_the_first_answer_is_raised(
    stream: Callable[..., ServerClient], silence: Events, tmp_path: Path
) -> None:
    def tell(done: int, total: int, label: str) -> None:
        raise KeyboardInterrupt

    child, quiet = server_of_this_process(tmp_path), LoadReport(replace(LOAD, aborts=0.0))
    with pytest.raises(KeyboardInterrupt):
        load.measure(child, stream(silence), quiet, tell)


@pytest.fixture
def report() -> LoadReport:
    made = LoadReport(LOAD, seconds=1.0, same_answers=True, growth=64 << 20)
    made.add(Call((1,), 5, tokens=5, first_token_s=0.1))
    made.add(Call((1,), 5, tokens=2, first_token_s=0.2, hung_up=True))
    made.host_memory = Usage(1000 << 20, 1001 << 20, 1002 << 20)
    made.free_tokens = FreeTokens((100,), (100,))
    made.drain = Drain(2, 2, 6.0, True, "status 0", True, "refused")
    return made


def test_every_violation_has_its_line(report: LoadReport) -> None:
    assert report.violations == [] and report.exit_code == 0
    facts = as_json(report)
    check(facts)
    assert (facts["finished"], facts["aborted"], facts["new_tokens"]) == (1, 1, 7)
    grown, drain = Usage(1 << 30, 2 << 30, 2 << 30), report.drain
    assert drain is not None
    broken: list[tuple[dict[str, Any], str]] = [
        ({"host_memory": grown}, "memory of the processes grew by 1,074 MB"),
        ({"gpu_memory": grown}, "memory of the GPUs grew by 1,074 MB"),
        ({"free_tokens": FreeTokens((100,), (93,))}, "7 token slots were not given back"),
        ({"free_tokens": FreeTokens((100,))}, "requests of clients that are gone still ran"),
        ({"same_answers": False}, "the same prompts have other answers"),
        ({"finished": 0}, "no request finished"),
        ({"errors": {"status 500": 1}}, "1 requests failed: status 500"),
        ({"drain": replace(drain, finished=1)}, "SIGTERM cut off 1 of 2 running requests"),
        ({"drain": replace(drain, ended=False)}, "the server still ran 6 s after SIGTERM"),
        ({"drain": replace(drain, status="status 1")}, "ended with status 1 after SIGTERM"),
        ({"drain": replace(drain, turned_away=False)}, "/health still invited requests"),
    ]
    for change, line in broken:
        (found,) = replace(report, **change).violations
        assert line in found
