"""What is said about work that takes long: the share that is done and the time left, a total that
is known at the start, bars on a terminal and lines without one."""

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_output import PHASES, Clock
from terminal import Terminal

from oscar_zoo.cli.render.course import EVERY_SECONDS, Course
from oscar_zoo.cli.render.progress import TerminalObserver, question_of
from oscar_zoo.evaluate.shared import Phase
from oscar_zoo.observer import SILENT, Note


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
    course.update(0, 30, "capture")
    clock.now += 250
    course.update(15, 30, "capture")
    assert course.left == "about 16 minutes left"  # 15 seconds were expected, it took 250
    untold = Course(PHASES, clock, timed=False)
    untold.update(0, 0, "load")
    assert untold.left == ""
    clock.now += 60
    untold.update(15, 30, "capture")
    assert untold.left == "about 3 minutes left"


def test_a_slow_machine_shows_at_a_tenth_of_the_work() -> None:
    clock = Clock()
    course = Course(PHASES, clock)
    course.update(0, 0, "load")
    clock.now += 10
    course.update(0, 100, "capture")
    clock.now += 60  # six times as long as expected
    course.update(34, 100, "capture")
    assert course.percent == 20
    assert course.left == "about 6 minutes left"  # 8 minutes in truth
    clock.now += 120
    course.update(100, 100, "capture")
    course.update(0, 6, "perplexity")
    assert (course.percent, course.left) == (40, "about 6 minutes left")
    clock.now += 180
    course.update(3, 6, "perplexity")
    assert (course.percent, course.left) == (70, "about 3 minutes left")


def minutes_left(course: Course, clock: Clock, steps: int, seconds: float) -> list[int]:
    """The minutes that are told every ten seconds of a phase whose steps take `seconds` each."""
    told = []
    for done in range(steps):
        course.update(done, steps, "capture")
        for _ in range(0, int(seconds), 10):
            told.append(int(re.findall(r"\d+", course.left)[0]) if "minute" in course.left else 0)
            clock.now += 10
    return told


@pytest.mark.parametrize("timed", [True, False])
def test_it_falls_during_steps_that_take_as_long_as_expected(timed: bool) -> None:
    """However long they are: a step that goes on says nothing yet."""
    clock = Clock()
    phases = (Phase("before", "tokens", 600), Phase("capture", "sequences", 1200))
    course = Course(phases, clock, timed=timed)
    for done in range(11):
        course.update(done, 10, "before")
        clock.now += 60 if done < 10 else 0
    told = minutes_left(course, clock, steps=4, seconds=300)
    assert told == sorted(told, reverse=True) and 19 <= told[0] <= 21 and told[-1] <= 2


def test_a_slower_machine_is_told_without_exaggeration() -> None:
    clock = Clock()
    course = Course((Phase("capture", "sequences", 1200),), clock)
    told = minutes_left(course, clock, steps=8, seconds=300)  # twice as long as expected
    truth = [-(-(2400 - 10 * place) // 60) for place in range(len(told))]
    assert all(one <= 1.1 * right + 1 for one, right in zip(told, truth, strict=True))
    later = told[len(told) // 8 :]
    assert all(after - before <= 1 for before, after in itertools.pairwise(later))


def test_steps_that_were_done_before_say_nothing_about_the_pace() -> None:
    clock = Clock()
    course = Course((Phase("capture", "sequences", 1200),), clock)
    course.update(6, 12, "capture")
    clock.now += 100
    course.update(7, 12, "capture")
    assert course.left == "about 9 minutes left"


def test_it_is_never_at_all_of_the_work_while_a_phase_is_left() -> None:
    clock = Clock()
    course = Course((Phase("fit", "layers", 1000), Phase("write", "", 0)), clock)
    course.update(4, 4, "fit")
    assert "99 % of all, about 10 s left" in course.line
    course.update(0, 0, "write")
    assert "99 % of all, about 10 s left" in course.line
    counted = Course(PHASES, clock)
    counted.update(8, 8, "perplexity")
    assert counted.line == "perplexity (3 of 3): 8 of 8 sequences, 100 % of all"


def test_a_slow_start_says_little_about_the_rest() -> None:
    clock = Clock()
    course = Course(PHASES, clock)
    course.update(0, 0, "load")
    clock.now += 600  # a slow disk
    course.update(0, 50, "capture")
    assert course.left == "about 2 minutes left"


def test_the_silent_observer_takes_everything_and_says_no() -> None:
    SILENT.begin((), timed=False)
    SILENT.advance("capture", 1, 2, "tokens")
    SILENT.note(Note("pull.yanked", "This version was yanked.", {"name": "A/b"}))
    assert SILENT.confirm(Note("compute.start", "Compute it now?")) is False


def test_a_line_for_each_later_phase_and_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize("more", [{"quiet": True}, {"as_json": True}])
def test_quiet_work_says_nothing(more: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does work for programs where stderr is no terminal."""
    with TerminalObserver(**more) as observer:
        observer.begin(PHASES, timed=True)
        observer.advance("load", 0, 0)
        observer.advance("capture", 1, 4)
        observer.note(Note("test.remark", "this is a remark."))
    assert capsys.readouterr() == ("", "")


def test_a_question_is_a_no_where_nobody_can_answer() -> None:
    with TerminalObserver() as observer:
        assert observer.confirm(Note("test.question", "Go on?")) is False


def test_a_wait_is_a_line_per_label_and_thirty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_files_that_are_fetched_are_told_of_rarely(capsys: pytest.CaptureFixture[str]) -> None:
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
    seen = drawn(CHILD, lambda text: all(word in text for word in words))
    assert "-:--" not in seen


def test_json_keeps_the_bar_on_a_terminal_and_no_remarks() -> None:
    """stdout has one object, and a person who waits for it looks at stderr."""
    child = CHILD.replace("TerminalObserver()", "TerminalObserver(as_json=True)")
    seen = drawn(child, lambda text: "200 of 400 tokens" in text)
    assert "capture (2 of 3)" in seen and "remark" not in seen


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
    seen = drawn(
        child, lambda text: bool(re.search(r"tokens.*\sleft", text, re.DOTALL)), columns=columns
    )
    line, *_ = [line for line in re.split("[\r\n]+", seen) if "tokens" in line]
    assert len(line.rstrip()) <= columns
    assert re.match(r"  (capt|perp).* 0 of 1,310,720 tokens about \d\d minutes left\s*$", line)


def drawn(code: str, enough: Callable[[str], bool], *, columns: int = 120) -> str:
    """What a child draws on a terminal until it is enough, without control sequences."""
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    with Terminal(["-c", code], environment) as terminal:
        terminal.see(enough)
        seen = terminal.text
        terminal.press(b"\n")
        assert terminal.end() == 0
    return seen


def test_what_is_not_known_is_said_in_a_question_and_a_hint_ends_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with TerminalObserver() as observer:
        observer.note(Note("server.failed", "chunk 64: it died.", {"hint": "see the log"}))
    assert capsys.readouterr().err == "error: chunk 64: it died. See the log\n"
    facts = {"model": "M", "tokens": 16384, "data": "text", "device": "cpu", "seconds": None}
    question = Note("compute.question", "Compute one now?", facts | {"fetched_bytes": 16 * 10**9})
    assert question_of(question) == "Compute one now (nobody can say how long)?"
