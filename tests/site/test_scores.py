"""How scores are shown: with errors, beside BF16, over time, and never as a bare difference."""

from __future__ import annotations

from dataclasses import replace

import pytest
from site_pages import Page

from oscar_zoo.artifact.specs import HistoryEntry, Paired, Score
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.site.artifact_page import artifact_page
from oscar_zoo.site.exhibit import Exhibit
from oscar_zoo.site.index_page import index_page


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
        "on the same 198 questions INT2 differs from BF16 by -0.75 points (95 % confidence: -2.50"
        " to +1.00), so it is no worse than 2.25 points" in page.words
    )
    assert "the calibration has seen questions of this set" in page.words
    assert "NVIDIA H200" in page.words and "RotationZoo model card" in page.words
    assert "Earlier value of INT2 in gpqa_diamond: 56 (2026-10-01), first run." in page.words
    drawn = [one["aria-label"] for one in page.all("svg") if "aria-label" in one]
    assert drawn == ["gpqa_diamond over time. 3 values from 2026-10-01 to 2026-11-20"]
