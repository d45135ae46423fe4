"""`oscar-zoo chat` against a server that answers as SGLang does: events, turns, errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from oscar_zoo.app import server_records
from oscar_zoo.app.server_record import ServerRecord, now
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.processes import Process


class Handler(BaseHTTPRequestHandler):
    """Says back the last question in two parts, with a control character; `bad` is refused, and
    nothing follows the first part for `wait`."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body | {"key": self.headers["Authorization"], "path": self.path})
        text = body["messages"][-1]["content"]
        if text == "bad":
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"object": "error", "message": "too long\\n by far"}')
            return
        self.send_response(200)
        self.end_headers()
        for part in ("You said \x1b[2J", text):
            event: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": part}}]}
            if body["max_tokens"] < 5:
                event["choices"][0]["finish_reason"] = "length"
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            if text == "wait":
                self.wfile.flush()
                self.rfile.read(1)  # until the client hangs up
                return
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked() -> Iterator[list[dict[str, Any]]]:
    """What a server that is recorded as running here was asked."""
    Handler.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    me = Process.of(os.getpid())
    assert me is not None
    url = f"http://127.0.0.1:{server.server_port}/v1"
    one = ServerRecord(
        me, server.server_port, url, "org/a-model", "a:b", "/tmp/log", now(), "ready"
    )
    with server_records.registered(one):
        yield Handler.asked
    server.shutdown()
    server.server_close()


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(["chat", *arguments])


def test_a_server_that_starts_is_no_server_that_is_gone(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = server_records.running()
    with server_records.registered(replace(one, state="starting", port=one.port + 1)):
        assert chat(monkeypatch, "one", str(one.port + 1)) == 1
    said = capsys.readouterr().err
    assert f"org/a-model on port {one.port + 1} is still starting." in said
    assert f"oscar-zoo logs {one.port + 1}" in said and not asked


def test_every_line_is_a_turn_of_one_conversation(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one\n\ntwo\n/new\nthree", "a-model") == 0
    assert capsys.readouterr().out == "You said [2Jone\nYou said [2Jtwo\nYou said [2Jthree\n"
    assert [len(body["messages"]) for body in asked] == [1, 3, 1]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "You said \x1b[2Jone"}
    assert asked[0]["model"] == "org/a-model" and asked[0]["path"] == "/v1/chat/completions"
    assert asked[0]["key"] is None and asked[0]["max_tokens"] == 1024


def test_a_key_comes_from_its_file(
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Any,
) -> None:
    (tmp_path / "key").write_text("secret\n")
    assert (
        chat(monkeypatch, "one\n", "--api-key-file", str(tmp_path / "key"), "--max-tokens", "7")
        == 0
    )
    assert asked[0]["key"] == "Bearer secret" and asked[0]["max_tokens"] == 7
    assert chat(monkeypatch, "one\n", "--api-key-file", str(tmp_path / "nothing")) == 3


def test_an_answer_that_was_cut_off_is_told(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for most, told in ((3, 1), (7, 0)):
        assert chat(monkeypatch, "one\n", "--max-tokens", str(most)) == 0
        assert capsys.readouterr().err.count("--max-tokens N") == told


def test_a_refusal_is_one_line(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "bad\none\n") == 1
    captured = capsys.readouterr()
    assert (
        captured.err.strip() == "error: the server answered 400: too long by far"
        and not captured.out
    )
    assert len(asked) == 1


def test_nobody_to_talk_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one\n") == 3
    assert "oscar-zoo serve NAME" in capsys.readouterr().err


def test_an_unknown_command_is_not_sent_to_the_model(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe ends with it, as with any error; on a terminal the chat goes on."""
    line = "error: /exit is no command of the chat. /new starts another conversation"
    assert chat(monkeypatch, "/exit\none\n") == 2
    assert line in capsys.readouterr().err and not asked
    for question in ("/etc/hosts", "/tmp is full", "/ 2", "/"):
        assert chat(monkeypatch, question) == 0
        assert asked[-1]["messages"][-1]["content"] == question
    capsys.readouterr()
    ours, theirs = pty.openpty()
    os.write(ours, b"/exit\n/new\none\ntwo\n\x04")  # as somebody pastes lines, then Ctrl-D
    with os.fdopen(theirs) as people:
        monkeypatch.setattr(sys, "stdin", people)
        assert run(["chat"]) == 0
    os.close(ours)
    assert line in capsys.readouterr().err and len(asked) == 6


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", ["answer", "prompt"])
def test_the_error_of_a_signal_begins_a_line(
    asked: list[dict[str, Any]], number: signal.Signals, place: str
) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oscar_zoo", "chat"]
    typed = theirs if place == "prompt" else subprocess.PIPE
    with (
        subprocess.Popen(command, stdin=typed, stdout=theirs, stderr=theirs) as child,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(child.kill)  # what fails here must not wait for it
        os.close(theirs)
        if child.stdin is not None:
            child.stdin.write(b"wait\n")
            child.stdin.flush()
        seen, awaited = "", "> " if place == "prompt" else "You said"
        while awaited not in seen:
            assert select.select([ours], [], [], 60)[0], seen
            seen += os.read(ours, 4096).decode()
        child.send_signal(number)
        if place == "prompt" and number == signal.SIGINT:
            while "once more.\r\n> " not in seen:  # it ends a line, and only then the chat
                assert select.select([ours], [], [], 60)[0], seen
                seen += os.read(ours, 4096).decode()
            child.send_signal(number)
        assert child.wait(60) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        with contextlib.suppress(OSError):  # the other side is closed
            while part := os.read(ours, 4096):
                seen += part.decode()
    os.close(ours)
    (line,) = [line for line in seen.splitlines() if "nothing was left half-written" in line]
    assert line.startswith(("error:", "\x1b[1;31merror:")), seen
