"""Promises on a sample that takes seconds; `make reliability` runs the whole."""

from pathlib import Path

import pytest
from experiment import Experiment, Scale
from table import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[2]
SHORT = [one for one in EXPERIMENTS if one.instead is None]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", SHORT, ids=lambda one: f"{one.number} {one.name}")
def test_the_promise_holds(experiment: Experiment, tmp_path: Path) -> None:
    lacking = experiment.lacking()
    if lacking is not None:
        pytest.skip(lacking)
    found = experiment.run(Scale(tmp_path, whole=False))
    assert found.violations == ()
    assert found.figures


def test_every_promise_has_a_row_and_tests() -> None:
    assert {one.number for one in EXPERIMENTS} == {f"S{number}" for number in range(1, 18)}
    assert len({one.name for one in EXPERIMENTS}) == len(EXPERIMENTS)
    elsewhere = [one.instead for one in EXPERIMENTS if one.instead is not None]
    assert all((ROOT / place).is_file() for place in elsewhere)
