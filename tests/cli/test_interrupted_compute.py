"""Ctrl-C and SIGTERM in the middle of `compute`: what is kept, and the command that goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_output import parsed
from engines import needs_sglang

from oscar_zoo.cli.main import run
from oscar_zoo.compute.capture import checkpoint

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"


@pytest.fixture
def ends_at_first_save(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A capture that saves after every part; after the first, this process gets the signal in the
    dictionary, if there is one."""
    sent: dict[str, int] = {}
    save = checkpoint.Checkpoint.save

    def then_a_signal(self: checkpoint.Checkpoint, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        if "signal" in sent:
            os.kill(os.getpid(), sent["signal"])

    monkeypatch.setattr(checkpoint, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "SHARE", 0)
    monkeypatch.setattr(checkpoint.Checkpoint, "save", then_a_signal)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    yield sent
    signal.signal(signal.SIGTERM, before)


def test_what_is_kept_is_named_with_the_command_that_goes_on(
    ends_at_first_save: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "out.work"
    typed = ["compute", str(MODEL), "--method", "oscar", "--output-dir", str(tmp_path / "out")]
    typed += ["--calib-tokens", "600", "--seq-len", "200"]
    again: list[str] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        ends_at_first_save["signal"] = number
        assert run(typed) == 128 + number
        told = capsys.readouterr().err
        assert ("went on from" in told) is False  # it was interrupted again
        line = next(line for line in told.splitlines() if line.startswith("error: "))
        assert f"is kept in {work}; to go on from there: oscar-zoo " in line and work.is_dir()
        again = shlex.split(line.rpartition("oscar-zoo ")[2])
        assert again == [*typed, "--resume"]
    ends_at_first_save.clear()
    assert run(again) == 0
    assert "nothing to go on from" not in capsys.readouterr().err
    assert not work.exists()


def test_another_text_is_refused(
    ends_at_first_save: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["compute", str(MODEL), "--method", "oscar", "--output-dir", str(tmp_path / "out")]
    typed += ["--calib-tokens", "600", "--seq-len", "200"]
    ends_at_first_save["signal"] = signal.SIGINT
    assert run(typed) == 130
    kept = (tmp_path / "out.work/capture/state.json").read_bytes()
    ends_at_first_save.clear()
    capsys.readouterr()
    text = MODEL.parents[1] / "text/validation.txt"
    assert run([*typed, "--calib-data", str(text), "--resume"]) == 7
    told = capsys.readouterr().err
    assert "holds a capture of another calibration text" in told and "--no-resume" in told
    assert (tmp_path / "out.work/capture/state.json").read_bytes() == kept


def test_the_same_command_goes_on_and_another_one_begins_anew(
    ends_at_first_save: dict[str, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same bytes come out in all cases."""
    typed = ["compute", str(MODEL), "--method", "oscar", "--force", "--json"]
    typed += ["--calib-tokens", "600", "--seq-len", "200", "--output-dir", str(tmp_path / "out")]
    seed = ["--seed", "3"]
    told: list[str] = []
    cases = [(typed, typed), (typed, [*typed, "--no-resume"]), ([*typed, *seed], typed)]
    for interrupted, again in cases:
        ends_at_first_save["signal"] = signal.SIGINT
        assert run(interrupted) == 130
        ends_at_first_save.clear()
        capsys.readouterr()
        assert run(again) == 0
        found = parsed(capsys.readouterr().out)
        notes = " ".join(found["notes"])
        told.append(found["digest"])
        told.append(
            "went on from" if "went on from" in notes else "replaced" * ("replaced" in notes)
        )
    assert told[1::2] == ["went on from", "", "replaced"]
    assert len(set(told[::2])) == 1


TWICE = """
import atexit, sys, time
from oscar_zoo.cli import main

def interrupted(arguments):
    print("told")
    return main.INTERRUPTED

atexit.register(lambda: (print("ending", flush=True), time.sleep(60)))
main.run = interrupted
main.main()
"""


def test_what_was_interrupted_ends_without_what_libraries_do_at_exit() -> None:
    """A second Ctrl-C there would show a traceback of theirs, or abort in a thread of theirs."""
    ended = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "told\n", "")


@needs_sglang
@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_serve_computes_in_front_wherever_the_server_goes(
    ends_at_first_save: dict[str, int],
    own_state: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
) -> None:
    """Only the server goes into the background: the messages and Ctrl-C are the same."""
    ends_at_first_save["signal"] = signal.SIGINT
    typed = ["serve", str(MODEL), "--compute", "--offline", "--device", "cpu", *more]
    assert run([*typed, "--", "--oscar-k-clip=0.9x3"]) == 130  # no server starts with this flag
    told = capsys.readouterr().err
    assert "No artifact for tiny-qwen3-hard was found. Computing one: " in told
    assert "Ctrl-C stops it; the same command continues from there." in told
    assert "to go on from there, run the same command again" in told
    assert list(own_state.glob("cache/computing/*/rotation.work/*"))
    assert not list(own_state.glob("state/logs/*"))
