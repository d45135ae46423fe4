"""The command line of `serve`: what an error suggests for it, and how a parsed one is written
again."""

from __future__ import annotations

import json
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import click
import pytest

from oscar_zoo.app.serve_request import PORT, TIMEOUT, ServeRequest
from oscar_zoo.app.server_start import with_next_step
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands.serve import command
from oscar_zoo.cli.main import run
from oscar_zoo.cli.parsing import parse_clip
from oscar_zoo.engines.sglang.launch.ports import check_port_free
from oscar_zoo.errors import ServerFailed
from oscar_zoo.registry.targets import parse

MEANT = {
    "X --tp 2": "X -- --tp=2",
    "X --tp=2 --context_length 8192": "X -- --tp=2 --context_length=8192",
    "--tp 2 X": "X -- --tp=2",
    "--context-length=8192 X --port 3 -- --dp=2": "X --port 3 -- --dp=2 --context-length=8192",
    "--enable-metrics X --clip 0.9,0.9": "X --clip 0.9,0.9 -- --enable-metrics",
    "X --chat-template 'a b'": "X -- '--chat-template=a b'",
    "X --host 0.0.0.0": "X --expose 0.0.0.0 --require-key",
    "X --host=0.0.0.0 --api-key-file key -- --tp=2": (
        "X --expose=0.0.0.0 --api-key-file key -- --tp=2"
    ),
    "X --daemon": "X --detach",
    "X --tp 2 --drafts": "X --drafts -- --tp=2",
    "X --model-path ./m": "X --model ./m",
}


@pytest.mark.parametrize("text", MEANT)
def test_the_line_that_was_meant(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *shlex.split(text)]) == 2
    line = capsys.readouterr().err.strip()
    assert line.endswith(f" oscar-zoo serve {MEANT[text]}") and "\n" not in line
    meant = shlex.split(MEANT[text])
    assert command.make_context("serve", meant).params["artifact"] == "X"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("X --prot 3", "--port"),
        ("X --kv-cache-dtype auto", "serve always runs the INT2 cache"),
        ("X --trust-remote-code", "it runs code from the model repository"),
        ("X --api-key secret-canary", "--api-key-file FILE"),
        ("X -x", "-x"),
        ("X --foo-bar 1", "serve has no --foo-bar"),
        ("X --tp 2 --foo-bar 1", "serve has no --foo-bar"),
    ],
)
def test_what_has_no_other_line(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *text.split()]) == 2
    line = capsys.readouterr().err.strip()
    assert words in line and "canary" not in line and " -- -" not in line


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("serve X 31015 --port 31015 --print", "31015"),
        ("serve --drafts X ngrams", "ngrams"),
        ("serve X 'a b' -- --tp=2 --dp 2", "'a b'"),
        ("eval ./x ./y --against all", "./y"),
        ("bench serve ./x ./y", "./y"),
        ("bench load ./x 9 --json", "9"),
    ],
)
def test_a_word_too_many_is_named(text: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be meant for anything, but SGLang gets only what is behind `--`."""
    assert run(shlex.split(text)) == 2
    out, err = capsys.readouterr()
    said = json.loads(out)["error"]["message"] if "--json" in text else err.strip()
    assert f"takes one argument in front of --, and {word} is another" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("X -- --tp 2", ("--tp", "2")),
        ("-- X 2", ("2",)),
        ("X --print -- a -- b", ("a", "--", "b")),
        ("X --", ()),
    ],
)
def test_words_behind_the_dashes_go_to_sglang(text: str, flags: tuple[str, ...]) -> None:
    values = command.make_context("serve", text.split()).params
    assert (values["artifact"], values["engine_flags"]) == ("X", flags)


def test_known_flags_are_none_of_ours() -> None:
    from oscar_zoo.cli.engine_flags import KNOWN, OURS

    ours = {
        name for param in command.params if isinstance(param, click.Option) for name in param.opts
    }
    assert not ours & (KNOWN | OURS.keys())


@pytest.mark.parametrize(
    "words", [["serve"], ["serve", "--print"], ["bench", "serve"]], ids=" ".join
)
def test_offline_asks_no_hub(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.setenv(variable, "")  # so that what the command sets is gone afterwards
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    for module in ("app.serve_checks", "app.bench"):
        monkeypatch.setattr(
            f"oscar_zoo.{module}.require_serve", lambda: None
        )  # not what this is about
    assert run([*words, "Qwen3-8B", "--offline", "--device", "cpu"]) == 5
    assert (
        "Qwen3-8B is not on this machine, and offline mode asks no hub" in capsys.readouterr().err
    )


def parsed(words: list[str]) -> ServeRequest:
    """The request of a command line without `serve`."""
    values = dict(command.make_context("serve", words).params)
    for name in ("print_only", "quiet", "as_json"):
        values.pop(name)
    clip, flags = parse_clip(values.pop("clip")), values.pop("engine_flags")
    return ServeRequest(parse(values.pop("artifact")), clip=clip, extra=flags, **values)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen3-8B",
        (
            "./a\\ b --model ./m --revision abc --port 31000 --clip 0.9,0.8 --device cuda:1 --"
            " --tp=2 --name='x y'"
        ),
        (
            "X --expose 0.0.0.0 --api-key-file key --timeout 60.5 --hub file:/a --hub hf:b/c --json"
            " --quiet"
        ),
        "X --compute --calib-data manuals --detach --offline",
        "X --drafts",
        "--drafts ngram X -- --tp=2",
        "X --engine-api --port 31000",
    ],
)
def test_a_request_as_a_command_line_again(text: str) -> None:
    request = parsed(shlex.split(text))
    assert parsed(request.arguments()[1:]) == request
    assert parsed(shlex.split(request.command_line())[2:]) == request
    other = parsed(request.arguments(port=4711, detach=None, json=True)[1:])
    assert other == replace(request, port=4711, detach=False)


def test_the_defaults_are_those_of_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSCAR_ZOO_PORT")
    request = parsed(["X"])
    assert (request.port, request.timeout) == (PORT, TIMEOUT)


def test_a_taken_port_shows_the_command_with_a_free_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "oscar_zoo.app.serve_checks.require_serve", lambda: None
    )  # not what this is about
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert (
            run(["serve", "Qwen3-8B", "--port", str(port), "--clip", "0.9,0.9", "--", "--tp=2"])
            == 7
        )
        line = capsys.readouterr().err.strip()
        assert f"port {port} on 127.0.0.1 is taken" in line
        again = parsed(shlex.split(line.rpartition("oscar-zoo serve ")[2]))
        check_port_free("127.0.0.1", again.port)
    assert (again.target.text, again.extra) == ("Qwen3-8B", ("--tp=2",))
    assert again.clip == Clip(k=0.9, v=0.9)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (
            "OSError: We couldn't connect to 'https://huggingface.co' to load the files",
            "if a/b lies in a folder: oscar-zoo serve X --model DIR --port 31000",
        ),
        (
            "OSError: a/b is not a local folder and is not a valid model identifier",
            "oscar-zoo serve X --model DIR --port 31000",
        ),
        (
            "OSError: You are trying to access a gated repo. 401 Client Error.",
            "hf download a/b, then serve it with --offline",
        ),
        (
            "GatedRepoError: 403 Client Error. Access to model a/b is restricted and you are not",
            "the server has no token of yours",
        ),
        ("ValueError: --frob", None),
    ],
)
def test_a_model_that_could_not_be_fetched_has_a_next_step(
    tmp_path: Path, said: str, step: str | None
) -> None:
    failed = ServerFailed(f"the server ended: {said}.", hint="log: x")
    again = parsed(["X", "--port", "31000"]).command_line(model="DIR")
    told = with_next_step(failed, "a/b", again)
    assert told.message == failed.message and str(told.hint).endswith("log: x")
    assert told.hint == failed.hint if step is None else step in str(told.hint)
    assert with_next_step(failed, str(tmp_path), again) is failed


def test_the_engine_s_own_interface_is_for_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for more in (["--expose", "0.0.0.0", "--require-key"], ["--print"]):
        assert run(["serve", "./nowhere", "--engine-api", *more]) == 2
        assert "--engine-api" in capsys.readouterr().err
