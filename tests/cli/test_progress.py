"""What is said about work that takes long: real units, a total that is known at the start, lines
without a terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oscar_zoo.cli.render import progress, terminal
from oscar_zoo.cli.render.course import EVERY_SECONDS, Course, Rarely
from oscar_zoo.evaluate.phases import Phase

PHASES = (
    Phase("load", "", 10),
    Phase("capture", "tokens", 30),
    Phase("perplexity", "sequences", 60),
)


@dataclass
class Clock:
    """Time that passes when somebody says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_share_of_all_work_never_falls_and_ends_at_all() -> None:
    clock = Clock()
    course = Course(PHASES, clock)
    shares = []
    for news in [
        (0, 0, "load"),
        (0, 50, "capture"),
        (25, 50, "capture"),
        (0, 0, "nobody's"),
        (1, 4, "perplexity"),
    ]:
        course.update(*news)
        clock.now += 1
        shares.append(course.share)
    assert shares == pytest.approx([0.01, 0.1, 0.25, 0.25, 0.55])
    course.update(0, 50, "capture")
    assert course.share == pytest.approx(0.55)
    course.update(4, 4, "perplexity")
    assert (course.share, course.count) == (1.0, "4 of 4 sequences")


def test_a_phase_that_counts_nothing_moves_with_time_and_never_ends_by_it() -> None:
    clock = Clock()
    course = Course(PHASES, clock)
    course.update(0, 0, "load")
    assert (course.share, course.count, course.left) == (0, "", "about 2 minutes left")
    clock.now += 5
    assert course.share == pytest.approx(0.05)
    clock.now += 1000
    assert course.share == pytest.approx(0.09)


def test_the_time_left_follows_what_was_seen() -> None:
    clock = Clock()
    course = Course(PHASES, clock)
    course.update(15, 30, "capture")
    clock.now += 250
    assert course.left == "about 5 minutes left"  # a quarter took 250 seconds, 25 were expected
    untold = Course(PHASES, clock, timed=False)
    untold.update(0, 0, "load")
    assert untold.left == ""
    clock.now += 60
    untold.update(15, 30, "capture")
    assert untold.left == "about 3 minutes left"


def test_a_line_for_every_later_phase_and_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with progress.course(PHASES, timed=True, enabled=True, clock=clock) as shown:
        shown(0, 0, "load")
        for done in range(5):
            clock.now += 10
            shown(100 * done, 400, "capture")
        shown.note("a remark")
        shown(2, 8, "perplexity")
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "capture (2 of 3): 0 of 400 tokens, 10 % of all, about 2 minutes left",
        "capture (2 of 3): 300 of 400 tokens, 32 % of all, about 2 minutes left",
        "a remark",
        "perplexity (3 of 3): 2 of 8 sequences, 55 % of all, about 50 s left",
    ]


def test_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.course(PHASES, timed=True, enabled=False) as shown:
        shown(0, 0, "load")
        shown.note("a remark")
    assert capsys.readouterr() == ("", "")


def test_files_that_are_fetched_are_told_of_rarely(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(terminal, "Rarely", lambda _: Rarely(clock))
    with terminal.progress("bytes", enabled=True) as advance:
        for done in (0, 4_000_000, 8_000_000):
            advance(done, 8_000_000, "k.pt")
            clock.now += 0.6 * EVERY_SECONDS
    assert capsys.readouterr().err == "k.pt: 8.0 MB of 8.0 MB\n"


CHILD = """
import time
from oscar_zoo.cli import watching
from oscar_zoo.evaluate.phases import Phase
phases = (Phase("load", "", 10), Phase("capture", "tokens", 30), Phase("perplexity", "sequences", 60))
with watching.course(phases, timed=True, enabled=True) as shown:
    shown(0, 0, "load")
    shown(200, 400, "capture")
    shown.note("a remark")
    input()
"""  # noqa: E501


def test_on_a_terminal_there_is_one_bar_with_the_unit_of_the_phase(tmp_path: Path) -> None:
    seen = on_terminal(
        [sys.executable, "-c", CHILD], lambda text: "remark" in text and "tokens" in text
    )
    assert (
        "capture (2 of 3)" in seen
        and "200 of 400 tokens" in seen
        and "about 2 minutes left" in seen
    )
    assert "-:--" not in seen


def on_terminal(command: list[str], enough: Callable[[str], bool]) -> str:
    """What a child draws on a terminal of 120 columns until it is enough, without control
    sequences."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
    child = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = ""
    try:
        while not enough(seen):
            seen += re.sub(
                r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(ours, 4096).decode("utf-8", "replace")
            )
        os.write(ours, b"\n")
        assert child.wait(timeout=60) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    return seen
