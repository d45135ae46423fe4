"""The start of a server as people see it: a line per phase, warnings, and where the log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_zoo.app.server_start import StartObserver
from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.engines.sglang.launch.own_server import follow_start

TIME = "[2026-11-20 10:00:00"


def test_without_a_terminal_there_is_a_line_per_phase_and_one_while_it_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, now = tmp_path / "log", 0.0
    with TerminalObserver(clock=lambda: now) as observer:
        tick = follow_start(log, StartObserver("a model", observer))
        for now in (0.0, 1.0, 2.0):
            tick(now)
        log.write_text(f"{TIME}] Load weight begin.\n")
        for now in (3.0, 32.0, 33.0):
            tick(now)
    lines = ["starting SGLang (0 s)", "loading weights (3 s)", "loading weights (33 s)"]
    captured = capsys.readouterr()
    assert captured.err.splitlines() == lines and not captured.out


@pytest.mark.parametrize("silent", [{"quiet": True}, {"as_json": True}], ids=str)
def test_nothing_is_said_where_nobody_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: dict[str, bool]
) -> None:
    with TerminalObserver(**silent) as observer:
        news = StartObserver("a model", observer)
        news.starting(tmp_path / "log")
        news.warn("a variable has no effect.")
        follow_start(tmp_path / "log", news)(1.0)
    assert not capsys.readouterr().err


def test_the_log_and_warnings_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with TerminalObserver() as observer:
        news = StartObserver("a model", observer)
        news.warn("a variable has no effect.")
        news.starting(tmp_path / "log")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "note: a variable has no effect."
    assert "".join(lines[1:]).startswith("Starting SGLang for a model")
