"""Merging scores: whatever was claimed once stays, in the order in which it was claimed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_artifacts import gpqa, measured

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.score_file import joined, key, merged

UPSTREAM = Score(
    task="gpqa_diamond", value=55.56, kv_dtype="int2", reporter="upstream", source="its card"
)


def test_another_value_takes_the_place_and_the_earlier_one_stays_in_the_history() -> None:
    again = gpqa(value=57.0, date="2026-12-01", dataset_revision="b" * 40)
    (score,) = merged((measured(),), (again,))
    (earlier,) = score.history
    assert score.model_copy(update={"history": ()}) == again
    assert (earlier.value, earlier.date) == (55.0, "2026-11-20")
    for part in ("lm-evaluation-harness 0.4.9", "± 2.5", "n 198", "2 runs", "sha256:dddd"):
        assert part in earlier.source
    (third,) = merged((score,), (gpqa(value=58.0),))
    assert [entry.value for entry in third.history] == [55.0, 57.0]


def test_the_same_claim_is_no_change() -> None:
    there = (measured(), UPSTREAM)
    rerun = measured().model_copy(update={"date": "2027-01-01"})
    assert merged(there, (rerun, UPSTREAM)) == there
    assert merged(tuple(reversed(there)), ()) == tuple(reversed(there)), "not even the order"


@pytest.mark.parametrize(
    "change",
    [
        {"task": "aime25"},
        {"metric": "exact_match"},
        {"kv_dtype": "fp8"},
        {"recipe_changes": {"clip": "0.9,0.9"}},
        {"reporter": "third_party"},
        {"who": "somebody"},
    ],
)
def test_claims_about_other_things_or_by_others_stand_side_by_side(
    change: dict[str, object],
) -> None:
    found = merged((gpqa(),), (gpqa(value=50.0).model_copy(update=change),))
    assert len(found) == 2 and all(not score.history for score in found)


def test_what_was_measured_comes_first_and_upstream_last() -> None:
    other = UPSTREAM.model_copy(update={"reporter": "third_party"})
    assert [s.reporter for s in merged((UPSTREAM,), (other, gpqa()))] == [
        "measured",
        "third_party",
        "upstream",
    ]


@given(st.lists(st.sampled_from([50.0, 51.0, 52.0]), min_size=1, max_size=8))
def test_no_value_is_ever_lost(values: list[float]) -> None:
    scores: tuple[Score, ...] = ()
    for value in values:
        before = scores[0].history if scores else ()
        scores = merged(scores, (gpqa(value=value),))
        assert scores[0].history[: len(before)] == before, "history only grows at its end"
    distinct = [v for i, v in enumerate(values) if i == 0 or v != values[i - 1]]
    assert [*(entry.value for entry in scores[0].history), scores[0].value] == distinct


def test_two_sources_are_joined_and_the_first_one_wins() -> None:
    changed = UPSTREAM.model_copy(update={"value": 1.0})
    assert joined((gpqa(),), (UPSTREAM,)) == (gpqa(), UPSTREAM)
    assert joined((UPSTREAM,), (changed, gpqa())) == (gpqa(), UPSTREAM)
    assert len({key(score) for score in (gpqa(), UPSTREAM, changed)}) == 2
