"""What is said about work that takes long: real units, a total that is known at the start, lines
without a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_output import PHASES, Clock

from oscar_zoo.cli.render.course import EVERY_SECONDS
from oscar_zoo.cli.render.progress import TerminalObserver, question_of
from oscar_zoo.observer import SILENT, Note


def test_the_silent_observer_takes_everything_and_says_no() -> None:
    SILENT.begin((), timed=False)
    SILENT.advance("capture", 1, 2, "tokens")
    SILENT.note(Note("pull.yanked", "This version was yanked.", {"name": "A/b"}))
    assert SILENT.confirm(Note("compute.start", "Compute it now?")) is False


def test_a_line_for_every_later_phase_and_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with TerminalObserver(clock=clock) as observer:
        observer.begin(PHASES, timed=True)
        observer.advance("load", 0, 0)
        for done in range(5):
            clock.now += 10
            observer.advance("capture", 100 * done, 400)
        for _ in range(2):
            observer.note(Note("test.remark", "this is a remark."))
        observer.advance("perplexity", 2, 8)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "capture (2 of 3): 0 of 400 tokens, 10 % of all, about 2 minutes left",
        "capture (2 of 3): 300 of 400 tokens, 32 % of all, about 2 minutes left",
        "note: this is a remark.",
        "perplexity (3 of 3): 2 of 8 sequences, 55 % of all, about 1 minute left",
    ]


def test_quiet_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with TerminalObserver(quiet=True) as observer:
        observer.begin(PHASES, timed=True)
        observer.advance("load", 0, 0)
        observer.note(Note("test.remark", "this is a remark."))
    assert capsys.readouterr() == ("", "")


def test_a_question_is_a_no_where_nobody_can_answer() -> None:
    with TerminalObserver() as observer:
        assert observer.confirm(Note("test.question", "Go on?")) is False


def test_a_wait_is_a_line_for_every_label_and_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with TerminalObserver(clock=clock) as observer:
        for seconds in range(0, 50, 10):
            observer.advance("loading weights", seconds, 0, "s")
            clock.now += 10
        observer.advance("capturing graphs", 50, 0, "s")
        observer.advance("no seconds are counted", 0, 0)
    assert capsys.readouterr().err.splitlines() == [
        "loading weights (0 s)",
        "loading weights (30 s)",
        "capturing graphs (50 s)",
    ]


def test_files_that_are_fetched_are_told_of_rarely(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with TerminalObserver(clock=clock) as observer:
        for done in (0, 4_000_000, 8_000_000):
            observer.advance("k.pt", done, 8_000_000, "bytes")
            clock.now += 0.6 * EVERY_SECONDS
    assert capsys.readouterr().err == "k.pt: 8.0 MB of 8.0 MB\n"


CHILD = """
import time
from oscar_zoo.observer import SILENT, Note
from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.evaluate.shared import Phase
phases = (Phase("load", "", 10), Phase("capture", "tokens", 30), Phase("perplexity", "sequences", 60))
with TerminalObserver() as observer:
    observer.begin(phases, timed=True)
    observer.advance("load", 0, 0)
    observer.advance("capture", 200, 400)
    observer.note(Note("test.remark", "this is a remark."))
    input()
"""  # noqa: E501


def test_on_a_terminal_there_is_one_bar_with_the_unit_of_the_phase(tmp_path: Path) -> None:
    words = ("remark", "capture (2 of 3)", "200 of 400 tokens", "about 2 minutes left")
    seen = on_terminal(
        [sys.executable, "-c", CHILD], lambda text: all(word in text for word in words)
    )
    assert "-:--" not in seen


def test_json_keeps_the_bar_on_a_terminal_and_no_remarks() -> None:
    """stdout has one object, and a person who waits for it looks at stderr."""
    child = CHILD.replace("TerminalObserver()", "TerminalObserver(as_json=True)")
    seen = on_terminal([sys.executable, "-c", child], lambda text: "200 of 400 tokens" in text)
    assert "capture (2 of 3)" in seen and "remark" not in seen


def test_json_says_nothing_where_stderr_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TerminalObserver(as_json=True) as observer:
        observer.begin(PHASES, timed=True)
        observer.advance("load", 0, 0)
        observer.advance("capture", 1, 4)
        observer.note(Note("test.remark", "this is a remark."))
    assert capsys.readouterr() == ("", "")


LONG = """
from oscar_zoo.cli.render.progress import TerminalObserver
from oscar_zoo.evaluate.shared import Phase
names = "capture", "perplexity", "perplexity of bits", "perplexity of the bits that were chosen"
phases = [Phase(name, "tokens", 600) for name in names]
with TerminalObserver() as observer:
    observer.begin(phases, timed=True)
    observer.advance(names[NAME], 0, 1_310_720, "tokens")
    input()
"""


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("name", [0, 2, 3])
def test_a_bar_fits_into_one_line_of_a_narrow_terminal(columns: int, name: int) -> None:
    """The label is cut, never the time left."""
    child = LONG.replace("NAME", str(name))
    seen = on_terminal(
        [sys.executable, "-c", child],
        lambda text: bool(re.search(r"tokens.*\sleft", text, re.DOTALL)),
        columns=columns,
    )
    line, *_ = [line for line in re.split("[\r\n]+", seen) if "tokens" in line]
    assert len(line.rstrip()) <= columns
    assert re.match(r"  (capt|perp).* 0 of 1,310,720 tokens about \d\d minutes left\s*$", line)


def on_terminal(command: list[str], enough: Callable[[str], bool], *, columns: int = 120) -> str:
    """What a child draws on a terminal until it is enough, without control sequences."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    child = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = ""
    try:
        while not enough(seen):
            assert select.select([ours], [], [], 300)[0], f"it says no more than: {seen}"
            seen += re.sub(
                r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(ours, 4096).decode("utf-8", "replace")
            )
        os.write(ours, b"\n")
        assert child.wait(timeout=300) == 0
    finally:
        child.kill()
        child.wait()
        os.close(ours)
    return seen


def test_what_a_plan_says_is_worded_with_its_costs(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"model": "M", "tokens": 16384, "data": "text", "device": "cpu"}
    facts |= {"seconds": 100.0, "fetched_bytes": 16_400_000_000}
    start = Note("compute.start", "No artifact for M was found. Computing one.", facts, kind="step")
    with TerminalObserver() as observer:
        observer.note(start)
        observer.note(Note("server.failed", "chunk 64: it died.", {"hint": "see the log"}))
    assert capsys.readouterr().err.splitlines() == [
        "No artifact for M was found. Computing one: 16,384 tokens of text on cpu: about 2 minutes."
        " Its weights, 16.4 GB, are fetched first unless they are here.",
        "error: chunk 64: it died. See the log",
    ]
    question = Note("compute.question", "Compute one now?", facts | {"seconds": None})
    assert question_of(question) == "Compute one now (nobody can say how long)?"
