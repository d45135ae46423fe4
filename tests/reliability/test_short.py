"""Every promise on a sample that takes seconds; `make reliability` runs the whole."""

from pathlib import Path

import pytest
from experiment import Experiment, Found, Scale
from kept import keep, kept
from page import Row, page
from table import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
SHORT = [one for one in EXPERIMENTS if one.short_form is None]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", SHORT, ids=lambda one: f"{one.number} {one.name}")
def test_the_promise_holds(experiment: Experiment, tmp_path: Path) -> None:
    lacking = experiment.lacking()
    if lacking is not None:
        pytest.skip(lacking)
    found = experiment.run(Scale(tmp_path, whole=False))
    assert found.violations == ()
    assert found.figures


def test_every_promise_has_a_row_and_a_short_form() -> None:
    assert {one.number for one in EXPERIMENTS} == {f"S{number}" for number in range(1, 18)}
    assert len({one.name for one in EXPERIMENTS}) == len(EXPERIMENTS)
    elsewhere = [one.short_form for one in EXPERIMENTS if one.short_form is not None]
    assert all((ROOT / place).is_file() for place in elsewhere)


def test_the_page_says_what_held() -> None:
    first, second = EXPERIMENTS[:2]
    rows = [
        Row(first, Found({"points": 1234}), 90, "abc"),
        Row(second, Found({"points": 5}, tuple(f"line {i}" for i in range(25))), 1, "def"),
    ]
    text = page(rows, {"on": "2026-01-02", "cores": "2"})
    assert "Last run: on 2026-01-02, cores 2." in text
    assert f"| [{first.number} {first.name}](#s1-runs-nothing) | yes | 1.5 | abc |" in text
    assert "- points: 1,234" in text and "| no | 0.0 | def |" in text
    assert "did not hold:** line 19" in text and "- and 5 more" in text
    assert Row(first, "no C compiler", 0, "abc").held == "not run"


def test_a_run_that_stopped_can_go_on(tmp_path: Path) -> None:
    first, second, third = EXPERIMENTS[:3]
    file = tmp_path / "kept.jsonl"
    assert kept(file, EXPERIMENTS) == []
    rows = [
        Row(first, Found({"points": 1234}), 90.5, "abc"),
        Row(second, Found({"points": 5}, ("one line",)), 1.0, "abc"),
        Row(third, "no C compiler", 0.0, "abc"),
        Row(second, Found({"points": 6}), 2.0, "def"),
    ]
    for row in rows:
        keep(file, row)
    assert kept(file, EXPERIMENTS) == [rows[0], rows[3], rows[2]]
