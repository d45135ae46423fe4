"""How scores are shown: with errors, beside BF16, over time, and never as a bare difference."""

from dataclasses import replace

import pytest
from measured_artifacts import gpqa
from site_pages import HOSTILE, Page

from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.specs import HistoryEntry, Paired, Score
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.registry.index import Accepted
from oscar_zoo.site.pages import Exhibit, artifact_page, index_page


@pytest.fixture(scope="module")
def entry() -> Entry:
    """An artifact of the package, with a measured score beside the one of its authors."""
    found = {one.id.reference: one for one in collect(Catalog.packaged(), ())}
    known = found["Qwen3-8B:seq20000_prompt83_group128"]
    before = Score(
        task="gpqa_diamond", value=58.0, kv_dtype="bf16", reporter="measured", stderr=1.5,
        date="2026-11-20",
    )  # fmt: skip
    measured = before.model_copy(
        update={
            "value": 57.25,
            "kv_dtype": "int2",
            "stderr": 1.75,
            "n": 198,
            "hardware": "NVIDIA H200",
            "baseline": before,
            "calibrated_on": True,
            "paired": Paired(
                n=198, difference=-0.75, lower95=-2.5, upper95=1.0, no_worse_than=2.25
            ),
            "history": (HistoryEntry(value=56.0, source="first run", date="2026-10-01"),),
        }
    )
    return replace(known, scores=(*known.scores, measured))


def test_the_measured_score_is_shown_first_with_error_bars(entry: Entry) -> None:
    page = Page(index_page([Exhibit(entry)], ()).decode())
    (row,) = (text for text in page.inside["tr"] if "Qwen3-8B" in text)
    assert "58.00 ± 1.50" in row and "57.25 ± 1.75" in row and "measured" in row
    bars = [one["class"] for one in page.all("path") if "error" in one.get("class", "")]
    assert bars == ["bf16 error", "int2 error"]


def test_an_artifact_says_what_the_comparison_allows_to_say(entry: Entry) -> None:
    page = Page(artifact_page(Exhibit(entry)).decode())
    assert (
        "On the same 198 questions INT2 differs from BF16 by -0.75 points (95 % confidence: -2.50"
        " to +1.00), so it is no worse than 2.25 points." in page.words
    )
    assert "The calibration has seen questions of this set." in page.words
    assert "NVIDIA H200" in page.words and "RotationZoo model card" in page.words
    assert "Earlier value of INT2 in gpqa_diamond: 56 (2026-10-01), first run." in page.words
    drawn = [one["aria-label"] for one in page.all("svg") if "aria-label" in one]
    assert drawn == ["gpqa_diamond over time. 3 values from 2026-10-01 to 2026-11-20"]


def test_each_score_names_its_cache_and_how_it_was_measured(entry: Entry) -> None:
    changes = {"kv_dtype": "fp8", "artifact_digest": None, "recipe_changes": {"clip": "1,1"}}
    shown = replace(entry, scores=(gpqa(), gpqa(**changes)))
    page = Page(artifact_page(Exhibit(shown)).decode())
    rows = [text.split() for text in page.inside["tr"] if text.startswith("gpqa_diamond")]
    assert [row[:2] for row in rows] == [["gpqa_diamond", "INT2"], ["gpqa_diamond", "FP8"]]
    assert all(row[2:5] == ["55.00", "±", "2.50"] for row in rows)
    assert "gpqa_diamond, FP8 cache" in page.inside["h3"]
    assert "Not measured under the recipe, but with clip 1,1." in page.words
    facts = dict(zip(page.inside["dt"], page.inside["dd"], strict=False))
    assert page.inside["summary"] == ["How it was measured"] * 2 and "Engine" in facts
    for text in ("sglang 0.5.21", "temperature 0.6", "32,768 tokens", "INT2 11.0 %", "FP8 11.0 %"):
        assert text in page.inside["dd"], text


def test_texts_of_a_score_are_text(entry: Entry) -> None:
    texts = dict.fromkeys(("task", "who", "source", "hardware", "metric", "unit"), HOSTILE)
    old = HistoryEntry(value=56.0, source=HOSTILE, date="2026-10-01")
    changes = {"recipe_changes": {"clip": HOSTILE}, "kv_dtype": "fp8", "artifact_digest": None}
    score = gpqa().model_copy(update={**texts, **changes, "history": (old,)})
    engine = score.engine.model_copy(update={"name": HOSTILE}) if score.engine else None
    shown = replace(entry, scores=(score.model_copy(update={"engine": engine}),))
    page = Page(artifact_page(Exhibit(shown)).decode())
    assert page.words.count(HOSTILE.replace("\u202e", "")) >= 8
    assert "\u202e" not in page.text and "<img" not in page.text
    assert len(page.all("script")) == 2


@pytest.mark.parametrize(
    ("accepted", "said", "below"),
    [
        ("poor", "although its perplexity or recall is poor beside BF16", "poor quality"),
        ("unmeasured", "without measurements of perplexity and recall", "not measured"),
    ],
)
def test_what_was_published_in_spite_of_the_gate_says_so(
    entry: Entry, accepted: Accepted, said: str, below: str
) -> None:
    shown = Exhibit(replace(entry, accepted=(accepted,)))
    assert f"It was published {said}." in Page(artifact_page(shown).decode()).words
    index = Page(index_page([shown], ()).decode())
    assert f"active{below}" in index.words
    assert said not in Page(artifact_page(Exhibit(entry)).decode()).words


def test_what_is_yanked_has_no_command(entry: Entry) -> None:
    status = Status(state="yanked", reason="wrong data.")
    page = Page(artifact_page(Exhibit(replace(entry, status=status))).decode())
    assert "This version is yanked: wrong data. No name finds it any more." in page.words
    assert "oscar-zoo serve" not in page.words
