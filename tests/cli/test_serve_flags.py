"""The command line of `serve`: what an error suggests for it, and how a parsed one is written
again."""

from __future__ import annotations

import json
import shlex
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.cli.commands.serve import command
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.plan import check_port_free
from oscar_zoo.errors import ServerFailed
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.serving.serve import with_next_step


@pytest.mark.parametrize(
    "text",
    [
        "X --tp 2",
        "X --host=0.0.0.0",
        "X --kv-cache-dtype auto",
        "X --trust-remote-code",
        "X --api-key secret-canary",
        "X --api-key=secret-canary",
    ],
)
def test_flags_of_sglang_go_behind_the_dashes(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *text.split()]) == 2
    line = capsys.readouterr().err.strip()
    assert "goes behind --" in line and "canary" not in line and "\n" not in line


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
    assert (values["target"], values["flags"]) == ("X", flags)


@pytest.mark.parametrize(
    "words", [["serve"], ["serve", "--print"], ["bench", "serve"]], ids=" ".join
)
def test_offline_asks_no_hub(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.setenv(variable, "")  # so that what the command sets is gone afterwards
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    for module in ("serving.serve", "evaluate.bench.measuring"):
        monkeypatch.setattr(
            f"oscar_zoo.{module}.require_serve", lambda: None
        )  # not what this is about
    assert run([*words, "Qwen3-8B", "--offline", "--device", "cpu"]) == 5
    assert (
        "Qwen3-8B is not on this machine, and offline mode asks no hub" in capsys.readouterr().err
    )


def parsed(words: list[str]) -> ServeParams:
    """The parameters of a command line without `serve`."""
    values = command.make_context("serve", words).params
    return ServeParams(
        **{name: value for name, value in values.items() if name not in ("quiet", "as_json")}
    )


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
    other = parsed(request.arguments(port=4711, detach=False, json=True)[1:])
    assert other == replace(request, port=4711, detach=False)


def test_a_taken_port_shows_the_command_with_a_free_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "oscar_zoo.serving.serve.require_serve", lambda: None
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
    assert (again.target, again.flags) == ("Qwen3-8B", ("--tp=2",))
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
