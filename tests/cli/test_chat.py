"""`oscar-zoo chat` against a server that answers as SGLang does: events, turns, errors."""

import io
import json
import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from raw_server import RawServer, Seen, answer, hang_up
from terminal import Terminal

from oscar_zoo.engines.sglang.launch.processes import Process
from oscar_zoo.serving import records
from oscar_zoo.serving.records import ServerRecord, now

Asked = list[dict[str, Any]]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@pytest.fixture
def asked() -> Iterator[Asked]:
    """What a server that is recorded as running here was asked. It says back the last question in
    two parts, with a control character, and counts two tokens; `bad` is refused, nothing follows
    the first part for `wait`, and `think` has a thought."""
    found: Asked = []

    def handle(connection: socket.socket, seen: Seen) -> None:
        body = json.loads(seen.body)
        found.append(body | {"key": seen.headers.get("authorization"), "path": seen.target})
        text = body["messages"][-1]["content"]
        if text == "bad":
            refusal = b'{"object": "error", "message": "too long\\n by far"}'
            connection.sendall(answer(refusal, status="400 Bad"))
            return
        connection.sendall(answer(Content_Length=None))
        for part in ("You said \x1b[2J", text):
            choice: dict[str, Any] = {"delta": {"role": "assistant", "content": part}}
            if text == "think":
                name = "reasoning" if part == text else "reasoning_content"  # of either engine
                choice["delta"][name] = "Hm."
            if body["max_tokens"] < 5:
                choice["finish_reason"] = "length"
            connection.sendall(event({"choices": [choice]}))
            if text == "wait":
                connection.recv(1)  # until the client hangs up
                hang_up(connection)
        if body["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": len(text), "completion_tokens": 2, "total_tokens": 0}
            connection.sendall(event({"choices": [], "usage": usage}))
        connection.sendall(b"data: [DONE]\n\n")
        hang_up(connection)

    me = Process.of(os.getpid())
    assert me is not None
    with RawServer(handle) as server:
        told = (server.port, f"{server.url}/v1", "org/a-model", "a:b", "/tmp/log", now(), "ready")
        with records.registered(ServerRecord(me, *told)):
            yield found


@pytest.fixture
def chat(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Gives a text to `chat` on its standard input; the answer."""

    def say(code: int, text: str, *words: object) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return cli(code, "chat", *words)

    return say


CHAT = ("-m", "oscar_zoo", "chat")


class Typist(Terminal):
    def type(self, keys: bytes, answer: str) -> None:
        """Type at the next prompt, and wait for what comes behind it."""
        self.see("> ")
        self.seen = self.seen.rpartition("> ")[2]
        self.press(keys)
        self.see(answer)


def test_a_server_that_starts_is_no_server_that_is_gone(asked: Asked, cli: Cli) -> None:
    (one,) = records.running()
    port = one.port + 1
    with records.registered(replace(one, state="starting", port=port)):
        said = cli.refused(1, "chat", port, "one")
    assert f"org/a-model on port {port} is still starting." in said
    assert f"oscar-zoo logs {port}" in said and not asked


@pytest.mark.parametrize(
    ("words", "text", "question"),
    [
        (("a-model",), "  one\n\ntwo\n/new\n", "  one\n\ntwo\n/new"),
        ((), "/exit\n", "/exit"),
        (("Why so?",), "not read", "Why so?"),
        (("a-model", "Why"), "not read", "Why"),
        (("\u4f60\u597d",), "not read", "\u4f60\u597d"),
    ],
)
def test_a_pipe_or_an_argument_is_one_question(
    asked: Asked,
    chat: Callable[..., str],
    cli: Cli,
    words: tuple[str, ...],
    text: str,
    question: str,
) -> None:
    assert chat(0, text, *words) == f"You said [2J{question}\n" and cli.err == ""
    (body,) = asked
    assert body["messages"] == [{"role": "user", "content": question}]
    assert body["model"] == "org/a-model" and body["path"] == "/v1/chat/completions"
    assert body["key"] is None and body["max_tokens"] == 1024


def test_an_answer_as_json(asked: Asked, cli: Cli) -> None:
    told = cli.json(0, "chat", "a-model", "think", "--max-tokens", 3)
    assert (told["answer"], told["reasoning"]) == ("You said \x1b[2Jthink", "Hm.Hm.")
    assert told["cut"] is True and told["model_id"] == "org/a-model"
    assert told["usage"] == {"prompt_tokens": 5, "completion_tokens": 2}
    assert 0 < told["first_seconds"] <= told["seconds"]
    refused = cli.refused(1, "chat", "a-model", "bad")
    assert refused == "error: the server answered 400: too long by far\n" and len(asked) == 3


def test_without_a_question_nothing_is_asked(
    asked: Asked, chat: Callable[..., str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat(2, " \n", "--model", "Qwen3-8B", "hi")
    assert "chat --model Qwen3-8B Qwen3-8B hi\n" in cli.err
    chat(2, " \n")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    cli.json(2, "chat")
    assert not asked


@pytest.mark.parametrize("words", [["hi"], ["hi", "there"]])
def test_words_that_name_no_server_may_ask(asked: Asked, words: list[str], cli: Cli) -> None:
    hint = cli.json(3, "chat", *words, "--max-tokens", 8)["error"]["hint"]
    assert not asked
    assert cli(0, *shlex.split(hint[hint.index("oscar-zoo chat") :])[1:])[0] == "{"
    assert asked[0]["messages"][-1]["content"] == " ".join(words) and asked[0]["max_tokens"] == 8


def test_every_line_at_a_terminal_is_a_turn_of_one_conversation(asked: Asked) -> None:
    with Typist(CHAT) as typist:
        for keys, answer in (
            (b"one\r", "You said [2Jone"),
            (b"\r", "> "),
            (b"two\r", "You said [2Jtwo"),
            (b"/what\r", "/what is no command of the chat. /new starts another conversation"),
            (b"/new\r", "> "),
            (b"/etc/hosts\r", "You said [2J/etc/hosts"),
            (b"/bye\r", ""),
        ):
            typist.type(keys, answer)
        assert typist.end() == 0
    assert [len(body["messages"]) for body in asked] == [1, 3, 1]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "You said \x1b[2Jone"}


def test_lines_are_edited_and_come_back(asked: Asked) -> None:
    with Typist(CHAT) as typist:
        typist.type(b"ac\x1b[Db\r", "You said")  # left
        typist.type(b"\x1b[A\x7fd\r", "You said")  # up, backspace
        typist.type(b"\x04", "")
        assert typist.end() == 0
    assert [body["messages"][-1]["content"] for body in asked] == ["abc", "abd"]


@pytest.mark.parametrize(
    "pasted",
    [b"\x1b[200~one\ntwo\n  three\x1b[201~\r", b"one\ntwo\n  three\n", b"one\ntwo\n  three\n\x04"],
    ids=["bracketed", "plain", "with-end"],
)
def test_a_pasted_text_is_one_question(asked: Asked, pasted: bytes) -> None:
    with Typist(CHAT) as typist:
        typist.type(pasted, "You said")
        if not pasted.endswith(b"\x04"):
            typist.type(b"\x04", "")
        assert typist.end() == 0
    assert [body["messages"][-1]["content"] for body in asked] == ["one\ntwo\n  three"]


def test_a_key_comes_from_its_file(asked: Asked, chat: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    chat(0, "one\n", "--api-key-file", tmp_path / "key", "--max-tokens", "7")
    assert asked[0]["key"] == "Bearer secret" and asked[0]["max_tokens"] == 7
    chat(3, "one\n", "--api-key-file", tmp_path / "nothing")


INTO_A_THREAD = """
import signal, sys, threading, time
threading.Thread(target=time.sleep, args=(90,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
from oscar_zoo.cli.main import main
sys.argv = ["oscar-zoo", "chat"]
main()
"""
"""A chat in which a signal is as one that comes just before a read: it interrupts no read."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    "command",
    [(*CHAT, "a-model", "wait"), CHAT, ("-c", INTO_A_THREAD)],
    ids=["answer", "prompt", "before-a-read"],
)
def test_the_error_of_a_signal_begins_a_line(
    asked: Asked, number: signal.Signals, command: tuple[str, ...]
) -> None:
    with Typist(command) as typist:
        typist.see("You said" if "wait" in command else "> ")
        typist.child.send_signal(number)
        if "wait" not in command and number == signal.SIGINT:
            typist.see("once more.")  # it ends a line, and only then the chat
            typist.see("> ", times=2)
            typist.child.send_signal(number)
        assert typist.end() == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], typist.seen
        (line,) = [one for one in typist.seen.splitlines() if "error:" in one]
    assert line.startswith(("error:", "\x1b[1;31merror:")) and "half-written" not in line, line
