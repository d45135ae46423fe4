"""Scores and score files, for tests of everything that keeps or shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hub_folders import HARD

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.registry.score_file import ScoreFile

DIGEST = "sha256:" + "a" * 64
FORCED: dict[str, Any] = dict.fromkeys(
    ("sampling", "thinking", "generation_cap", "exhausted_rate", "stderr", "values")
)
"""What a measurement without generated answers does not say."""


def gpqa(digest: str = DIGEST, **more: Any) -> Score:
    """A measured score of INT2 that says all that it must; `more` replaces fields."""
    facts: dict[str, Any] = {
        "task": "gpqa_diamond",
        "value": 55.0,
        "kv_dtype": "int2",
        "reporter": "measured",
        "date": "2026-11-20",
        "dataset_revision": "sha256:" + "d" * 64,
        "stderr": 2.5,
        "n": 198,
        "repeats": 2,
        "seeds": (0, 1),
        "values": (54.0, 56.0),
        "harness": Harness(name="lm-evaluation-harness", version="0.4.9"),
        "engine": Harness(name="sglang", version="0.5.21"),
        "hardware": "NVIDIA H200",
        "sampling": {"temperature": 0.6},
        "thinking": True,
        "generation_cap": 32768,
        "exhausted_rate": 0.11,
        "tokens": TokenCounts(prompt=1, completion=2),
        "artifact_digest": digest,
    }
    return Score(**(facts | more))


def measured(digest: str = DIGEST) -> Score:
    """The same with its baseline, compared question by question."""
    before = gpqa(digest, kv_dtype="bf16", value=56.5, artifact_digest=None, values=(56.0, 57.0))
    compared = Paired(n=198, difference=-1.5, lower95=-4, upper95=1, p_value=0.3, no_worse_than=3.6)
    return gpqa(digest, baseline=before, paired=compared)


def figure(task: str, before: float, after: float, *, digest: str = DIGEST, **more: Any) -> Score:
    """Perplexity or recall as `eval` records it."""
    unit = "perplexity" if task == "perplexity" else "percent"
    metric = "perplexity" if task == "perplexity" else "digit_accuracy"
    facts = FORCED | {"task": task, "metric": metric, "unit": unit, "n": 1, "repeats": 1}
    facts |= {"seeds": (0,)} | more
    base = gpqa(**facts, kv_dtype="bf16", value=before, artifact_digest=None)
    return gpqa(digest, **facts, value=after, baseline=base)


def write_scores(
    path: Path, *scores: Score, digest: str = DIGEST, artifact: ArtifactId = HARD
) -> Path:
    """A score file at `path`, which is returned."""
    path.write_bytes(ScoreFile.of(artifact, digest, scores).to_bytes())
    return path
