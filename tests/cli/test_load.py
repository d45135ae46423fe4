"""`oscar-zoo bench load` for real: clients that hang up, an INT2 server on the CPU, and SIGTERM
while it works."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from cli_output import parsed
from engines import MODEL, environment, needs_sglang
from forked_commands import ForkedCli, running_in
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.evaluate.bench import measuring
from oscar_zoo.evaluate.bench.load import FreeTokens, Load, LoadReport


@pytest.mark.sglang
@pytest.mark.timeout(900)
@needs_sglang
def test_a_server_holds_under_load_and_ends_without_cutting_anybody_off(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    cli = ForkedCli(environment(TMPDIR=str(tmp_path / "tmp"), HF_HUB_OFFLINE="1"), tmp_path)
    artifact = write_folder(tmp_path / "rotation", artifact_files())
    # Short windows, so that prompts of 200 tokens reach INT2, and few slots, so that prefixes are
    # evicted.
    flags = ["--oscar-sink-size=16", "--oscar-recent-size=32", "--max-total-tokens=1500"]
    flags += ["--max-running-requests=4"]
    sizes = ["--clients=8", "--seconds=5", "--context=200", "--new-tokens=16", "--aborts=0.4"]
    words = ("bench", "load", str(artifact), "--model", str(MODEL), *sizes, "--json", "--", *flags)
    done = cli(*words, timeout=800)
    report = done.json
    assert (done.code, report.get("violations"), report.get("errors")) == (0, [], {}), (
        report,
        done.err,
    )
    assert (
        report["finished"] > 0
        and report["aborted"] > 0
        and report["new_tokens"] > report["finished"]
    )
    assert report["free_tokens"] == {"before": [1500], "after": [1500]}
    assert report["same_answers"] and report["host_memory"]["peak"] > 100e6
    assert (
        report["drain"]["running"] == report["drain"]["finished"] == 8 and report["drain"]["ended"]
    )
    assert not running_in(tmp_path) and not list((tmp_path / "tmp").glob("oscar-zoo-*"))


@pytest.mark.parametrize(("name", "called"), [("SIGINT", "Ctrl-C"), ("SIGTERM", "SIGTERM")])
def test_what_a_signal_left_is_shown(
    name: Any, called: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = LoadReport(Load(8, 600, 200, 16, 0.4), "m", 41.0, 1, new_tokens=5, stopped=name)
    left.free_tokens = FreeTokens((1500,))
    monkeypatch.setattr(measuring, "load", lambda *_: left)
    code = 128 + signal.Signals[name]
    line = f"error: stopped by {called} after 41 s of load; the result is what was measured until"
    line += " then\n"
    assert run(["bench", "load", "any", "--json"]) == code
    seen = capsys.readouterr()
    facts = parsed(seen.out)
    assert (facts["stopped"], facts["finished"], seen.err) == (name, 1, line)
    assert run(["bench", "load", "any"]) == code
    seen = capsys.readouterr()
    assert "1 finished, 0 hung up" in seen.out and seen.err == line


@pytest.mark.parametrize(
    ("arguments", "seen", "code"),
    [
        ([], "nothing to measure was named", 2),
        (["--dummy-weights", "tiny-qwen3-hard", "--model", "m"], "exclude each other", 2),
        (["--dummy-weights", "tiny-qwen3-hard", "--clients", "0"], "--clients", 2),
        (["--dummy-weights", "tiny-qwen3-hard", "--", "--host=0.0.0.0"], "--host is not", 2),
        (["FOLDER", "--model", str(MODEL)], "reads up to 2,048 tokens, 4,256 are wanted", 2),
        (["Qwen3-8B", "--offline", "--device", "cpu"], "offline mode asks no hub", 5),
    ],
)
def test_what_cannot_work_is_refused(
    arguments: list[str], seen: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_folder(tmp_path / "rotation", artifact_files()))
    assert run(["bench", "load", *(folder if x == "FOLDER" else x for x in arguments)]) == code
    assert seen in capsys.readouterr().err
