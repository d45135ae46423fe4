from typing import Any

import pytest
from hub_uses import HARD
from measured_artifacts import SELECTION, measured_files, measured_manifest
from tiny_artifacts import artifact_files

from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.measured import Measured


@pytest.mark.parametrize(
    "selection",
    [
        None,
        {},
        {"chosen": "oscar"},
        SELECTION | {"chosen": {"perplexity": 9, "change_percent": None, "recall": None}},
        SELECTION | {"chosen": SELECTION["chosen"] | {"recall": 7}},
        SELECTION | {"chosen": SELECTION["chosen"] | {"perplexity": -1}},
        SELECTION | {"heldout": {"tokens": "many"}},
        SELECTION | {"bf16_perplexity": True, "chosen": {"recall": True}},
    ],
)
def test_a_manifest_that_says_nothing_or_nonsense_has_no_figures(selection: Any) -> None:
    assert Measured.of(measured_manifest(selection)) is None


def test_the_index_carries_figures_and_spares_older_readers_the_empty_ones() -> None:
    for files, there in ((measured_files(), True), (artifact_files(), False)):
        index = Index.empty().with_entry(Version.of(HARD, files).entry())
        data = index.to_bytes()
        assert Index.from_bytes(data) == index
        assert (b"measured" in data) is there
