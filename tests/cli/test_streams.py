"""How the command line ends: help, bugs, signals, and streams that are closed or full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_output import TINY, refused

import oscar_zoo.site.scores  # noqa: F401 (it would keep what the tests put in place of describe)
from oscar_zoo.cli import main
from oscar_zoo.cli.main import COMMANDS, run


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    done = capsys.readouterr()
    assert (
        done.out == ""
        and done.err.startswith("Usage: oscar-zoo")
        and all(name in done.err for name in COMMANDS)
    )


def test_a_bug_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the first line\nthe second")

    monkeypatch.setattr("oscar_zoo.site.info.describe", broken)
    line = refused(capsys, 1, "info", TINY)
    assert "RuntimeError: the first line" in line and "OSCAR_ZOO_DEBUG=1" in line
    monkeypatch.setenv("OSCAR_ZOO_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(["info", TINY])


def test_sigterm_is_reported_and_other_exits_pass(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.site.info.describe", lambda *_, **__: sys.exit(main.TERMINATED))
    assert "SIGTERM" in refused(capsys, 143, "info", TINY)
    monkeypatch.setattr("oscar_zoo.site.info.describe", lambda *_, **__: sys.exit(5))
    with pytest.raises(SystemExit):
        run(["info", TINY])


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    ("words", "code", "seen"),
    [
        (["list"], 8, "error: no space left"),
        (["list", "--json"], 8, "error: no space left"),
        (["info", "Qwen3-9B", "--json"], 3, "error: no artifact is called"),
    ],
)
def test_output_that_cannot_be_written_is_an_error(
    words: list[str], code: int, seen: str, unbuffered: str
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from oscar_zoo.cli.main import main; main()", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            text=True,
        )
    assert done.returncode == code and done.stderr.startswith(seen) and done.stderr.count("\n") == 1


def test_closed_and_full_streams_are_no_tracebacks() -> None:
    program = f"{sys.executable} -c 'from oscar_zoo.cli.main import main; main()'"
    ends = {"list --json >/dev/full": 8, "chat <&-": 3}
    for words in ("list >&-", "list 2>&-", "list >&- 2>&-", "list --json >&-", *ends):
        done = subprocess.run(["bash", "-c", f"{program} {words}"], capture_output=True, text=True)
        assert "Traceback" not in done.stderr and "internal" not in done.stderr, (
            words,
            done.stderr,
        )
        assert done.returncode == ends.get(words, 0), words


def test_results_and_notes_in_one_file_keep_their_order() -> None:
    program = (
        "from oscar_zoo.cli.render.terminal import note, prose; prose('1'); note('2'); prose('3')"
    )
    both = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert both.stdout.split() == ["1", "2", "3"]


def test_a_reader_that_goes_ends_it_as_sigpipe_would() -> None:
    """As in `oscar-zoo list | head -1`: quietly, and with the exit code of other tools."""
    for more in ([], ["--json"]):
        ours, theirs = os.pipe()
        os.close(ours)
        command = [
            sys.executable,
            "-c",
            "from oscar_zoo.cli.main import main; main()",
            "list",
            *more,
        ]
        done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_HUB_ETAG_TIMEOUT", "x"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "1.5"),
        ("HF_ENDPOINT", "http://[::1"),
    ],
)
def test_a_setting_that_the_hub_s_client_cannot_read_is_named(name: str, value: str) -> None:
    words = [sys.executable, "-m", "oscar_zoo", "pull", "Qwen3-8B", "--hub", "hf:a/b", "--json"]
    env = {x: y for x, y in os.environ.items() if not x.startswith("HF_")}
    done = subprocess.run(words, env=env | {name: value}, capture_output=True, text=True)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (5, "network.environment")
    assert name in error["message"] and value not in error["message"]
