"""The start of a server as people see it: a line per phase, warnings, and where the log is."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.serving.running import StartObserver


def test_without_a_terminal_there_is_a_line_per_phase_and_one_while_it_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    with TerminalObserver(clock=lambda: now) as observer:
        news = StartObserver("a model", observer)
        news.warn("a variable has no effect.")
        news.starting(tmp_path / "log")
        for now in (0.0, 1.0, 2.0):
            news.phase("starting SGLang", now)
        for now in (3.0, 32.0, 33.0):
            news.phase("loading weights", now)
    first, *start, one, two, three = capsys.readouterr().err.splitlines()
    assert first == "note: a variable has no effect."
    assert "".join(start).startswith("Starting SGLang for a model")
    assert [one, two, three] == [
        "starting SGLang (0 s)",
        "loading weights (3 s)",
        "loading weights (33 s)",
    ]


@pytest.mark.parametrize("silent", [{"quiet": True}, {"as_json": True}], ids=str)
def test_nothing_is_said_where_nobody_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], silent: dict[str, bool]
) -> None:
    with TerminalObserver(**silent) as observer:
        news = StartObserver("a model", observer)
        news.starting(tmp_path / "log")
        news.warn("a variable has no effect.")
        news.phase("loading weights", 1.0)
    assert not capsys.readouterr().err
