"""The share that is done and the time left of long work."""

from __future__ import annotations

import itertools
import re

import pytest
from cli_output import PHASES, Clock

from oscar_zoo.cli.render.course import Course
from oscar_zoo.evaluate.shared import Phase


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
