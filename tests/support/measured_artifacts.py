"""Small artifacts whose manifest says what was measured when they were made."""

from __future__ import annotations

from typing import Any

from hub_folders import HARD
from tiny_artifacts import FILE_NAME, manifest, payload

from oscar_zoo.artifact.manifest import Manifest

SELECTION: dict[str, Any] = {
    "rule": "auto/3",
    "heldout": {"prompts_sha256": "a" * 64, "tokens": 4096},
    "bf16_perplexity": 9.468,
    "bf16_recall": 0.992,
    "candidates": [],
    "chosen": {
        "method": "wush",
        "perplexity": 9.553,
        "change_percent": 0.9,
        "standard_error": 0.11,
        "recall": 0.984,
    },
    "reason": "lowest",
    "refused": {},
}
"""What `compute` writes into `fit.selection`."""


def measured_manifest(
    selection: Any = SELECTION, *, artifact: str = str(HARD), seed: int = 0
) -> Manifest:
    """The manifest of `payload()` with a selection."""
    made = manifest(payload(seed=seed), artifact=artifact)
    return made.model_copy(update={"fit": made.fit.model_copy(update={"selection": selection})})


def measured_files(
    selection: Any = SELECTION, *, artifact: str = str(HARD), seed: int = 0
) -> dict[str, bytes]:
    """Every file of such an artifact, which may be published."""
    made = measured_manifest(selection, artifact=artifact, seed=seed)
    return {**payload(seed=seed), FILE_NAME: made.to_bytes()}
