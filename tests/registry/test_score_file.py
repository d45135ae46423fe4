"""Score files: one form, closed, and a measured score says what a person needs to repeat it.

Merged, whatever was claimed once stays, in the order in which it was claimed."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_artifacts import DIGEST, figure, gpqa, measured

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Harness, Score, TokenCounts
from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.score_file import SCHEMA, ScoreFile, binomial_error, joined, key, merged

LATER = set("thinking hardware tokens responses_sha256 calibrated_on values paired".split())
Change = Callable[[dict[str, Any]], object]


def file(score: Score) -> ScoreFile:
    return ScoreFile.of(ArtifactId("Qwen3-8B", "tag"), DIGEST, (score,))


def test_a_file_comes_back_from_its_bytes() -> None:
    data = file(measured()).to_bytes()
    again = ScoreFile.from_bytes(data)
    assert again == file(measured()) and again.to_bytes() == data
    assert json.loads(data)["schema"] == SCHEMA and data.endswith(b"\n")
    assert again.scores[0].baseline is not None and again.scores[0].paired is not None


def test_keys_that_older_readers_refuse_are_written_only_where_they_say_something() -> None:
    plain = Score(task="gpqa_diamond", value=55.56, kv_dtype="int2", reporter="upstream")
    said = plain.model_copy(update={"baseline": plain.model_copy(update={"kv_dtype": "bf16"})})
    value = json.loads(file(said).to_bytes())["scores"][0]
    assert not LATER & (value.keys() | value["baseline"].keys())
    assert "spread" in value, "keys of before stay, null or not"
    assert value["baseline"]["kv_dtype"] == "bf16"
    full = json.loads(file(measured()).to_bytes())["scores"][0]
    assert full.keys() & LATER == LATER - {"responses_sha256", "calibrated_on"}


def score_with(**changes: Any) -> Change:
    return lambda value: value["scores"][0].update(changes)


def baseline_with(**changes: Any) -> Change:
    return lambda value: value["scores"][0]["baseline"].update(changes)


BAD: dict[str, tuple[Change, str]] = {
    "unknown key": (lambda v: v.update(extra=1), "extra"),
    "unknown key of a score": (score_with(extra=1), "extra"),
    "no scores": (lambda v: v.update(scores=[]), "at least 1"),
    "no tag": (lambda v: v.update(artifact="Qwen3-8B"), "not an artifact id\\."),
    "twice": (lambda v: v["scores"].append(v["scores"][0]), "there twice"),
    "other bytes": (score_with(artifact_digest="sha256:" + "b" * 64), "measured with sha256:bbb"),
    "no digest": (score_with(artifact_digest=None), "needs artifact_digest"),
    "no harness": (score_with(harness=None, exhausted_rate=None), "needs harness, exhausted_rate"),
    "baseline without engine": (baseline_with(engine=None), "a measured score needs engine"),
    "seeds": (score_with(seeds=[0]), "1 seeds of 2 repeats"),
    "values": (score_with(values=[1.0]), "1 values of 2 repeats"),
    "more than all": (score_with(value=101.0), "101 percent"),
    "negative error": (score_with(stderr=-1.0), "standard error is -1"),
    "paired with nothing": (score_with(baseline=None), "not there"),
    "baseline of another task": (baseline_with(task="aime25"), "something else"),
    "baseline with INT2": (baseline_with(kv_dtype="int2"), "cache of int2"),
    "interval": (lambda v: v["scores"][0]["paired"].update(lower95=2.0), "above upper95"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_with_its_fault(name: str) -> None:
    change, said = BAD[name]
    value = json.loads(file(measured()).to_bytes())
    change(value)
    with pytest.raises(MalformedFile, match=said) as caught:
        ScoreFile.from_bytes(json.dumps(value).encode(), what="mine.json")
    assert caught.value.reason == "scores.schema" and "mine.json" in caught.value.message


@pytest.mark.parametrize("data", [b"[]", b'{"schema": "oscar-zoo.scores/2"}', b"{", b""])
def test_what_is_no_score_file_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedFile):
        ScoreFile.from_bytes(data)


def test_a_standard_error_must_follow_from_the_answers() -> None:
    independent, one_each = binomial_error(55.0, 396), binomial_error(55.0, 198)
    assert independent == pytest.approx(100 * math.sqrt(0.55 * 0.45 / (198 * 2)))
    for fits in (independent, (independent + one_each) / 2, one_each, round(independent, 2)):
        assert file(gpqa(stderr=fits)).scores[0].stderr == fits
    for wrong in (independent / 100, 0.9 * independent, 1.1 * one_each, 0.0):
        with pytest.raises(ValueError, match="standard error"):
            file(gpqa(stderr=wrong))
    assert file(gpqa(value=100.0, stderr=0.0)).scores[0].value == 100


def test_forced_answers_need_no_sampling() -> None:
    forced = {"sampling": None, "generation_cap": None, "exhausted_rate": None, "thinking": None}
    score = gpqa(task="perplexity", metric="perplexity", unit="perplexity", value=3.2, **forced)
    assert file(score).scores[0].unit == "perplexity"
    with pytest.raises(ValueError, match="needs sampling, generation_cap, exhausted_rate"):
        file(gpqa(**forced))


def test_upstream_may_leave_out_what_it_did_not_say() -> None:
    said = Score(task="gpqa_diamond", value=67.17, kv_dtype="int2", reporter="upstream")
    assert file(said).scores == (said,)


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


WHOLE = figure("perplexity", 10.0, 10.2)


@pytest.mark.parametrize(
    ("there", "change", "stands"),
    [
        (gpqa(), {"n": 10}, False),
        (gpqa(), {"n": 448}, True),
        (WHOLE, {"tokens": TokenCounts(prompt=2048, completion=0)}, False),
        (WHOLE, {"n": 6, "engine": Harness(name="transformers")}, True),
        (WHOLE, {"tokens": None, "artifact_digest": "sha256:" + "b" * 64}, True),
    ],
)
def test_what_was_asked_the_most_stands_and_the_rest_stays_listed(
    there: Score, change: dict[str, Any], stands: bool
) -> None:
    later = there.model_copy(update={"value": 12.0, **change})
    (found,) = merged((there,), (later,))
    assert found.value == (12.0 if stands else there.value)
    assert [entry.value for entry in found.history] == [there.value if stands else 12.0]
    assert merged((found,), (later,)) == merged((there,), (found,)) == (found,)


@pytest.mark.parametrize(("each", "counts"), [(640, True), (639, False)])
def test_texts_that_windows_mostly_hold_say_nothing(each: int, counts: bool) -> None:
    tokens = TokenCounts(prompt=4 * each, completion=0)
    score = figure("perplexity", 9.0, 8.9, n=4, tokens=tokens)
    assert (Measured.of_scores((score,)) is not None) == counts


def test_the_same_claim_is_no_change() -> None:
    there = (measured(), UPSTREAM)
    rerun = measured().model_copy(update={"date": "2027-01-01", "source": "oscar-zoo eval x"})
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
def test_claims_on_other_things_or_by_others_stand_side_by_side(change: dict[str, object]) -> None:
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
