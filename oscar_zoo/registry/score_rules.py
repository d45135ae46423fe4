"""What makes two scores claims about the same thing, and what a measured one has to say.

A measured score is believed because somebody else can repeat it. So it names the questions, the
runs, the tools, the settings and the bytes, and its standard error follows from the rest.
"""

from __future__ import annotations

import math
from typing import Final

from oscar_zoo.artifact.specs import Score

PERPLEXITY, RECALL = "perplexity", "recall"
FORCED: Final = (PERPLEXITY, RECALL)
"""Tasks whose answers are teacher-forced: nothing is generated, so nothing is sampled or cut."""

_ALWAYS: Final = (
    "value",
    "dataset_revision",
    "stderr",
    "n",
    "repeats",
    "seeds",
    "harness",
    "engine",
    "date",
)
_OF_GENERATED: Final = ("sampling", "generation_cap", "exhausted_rate")
RIGHT_OR_WRONG: Final = ("accuracy", "exact_match", "pass@1")
"""Metrics that average answers of which each is right or wrong."""
_ROUNDING: Final = 0.005
"""Half of the last digit of an error given with two decimals, in points."""

Key = tuple[str, str, str, tuple[tuple[str, str], ...], str, str | None]


def key(score: Score) -> Key:
    """What a score is about and who says it; a later claim with the same key replaces the value."""
    changes = tuple(sorted(score.recipe_changes.items()))
    return score.task, score.metric, score.kv_dtype, changes, score.reporter, score.who


def is_lower_better(score: Score) -> bool:
    """Whether a smaller value is the better one."""
    return score.unit == "perplexity"


def is_of_recipe(score: Score) -> bool:
    """Whether a score is a value of INT2 under the recipe of its artifact, and so speaks for it."""
    return score.value is not None and score.kv_dtype == "int2" and not score.recipe_changes


def faults(score: Score, digest: str) -> tuple[str, ...]:
    """What is wrong with a score as a record of the artifact `digest`; empty when nothing is.

    Each is a sentence without a full stop that begins with the task.
    """
    found = [*_faults(score, digest if score.kv_dtype == "int2" else None)]
    if score.baseline is not None:
        found += _baseline_faults(score, score.baseline)
    elif score.paired is not None:
        found.append("it is paired with a baseline that is not there")
    return tuple(f"{score.task} ({score.kv_dtype}): {fault}" for fault in found)


def binomial_error(percent: float, answers: int) -> float:
    """Standard error of the share of right answers, both in percent."""
    share = percent / 100
    return 100 * math.sqrt(share * (1 - share) / answers)


def _faults(score: Score, digest: str | None) -> list[str]:
    found = []
    if score.artifact_digest not in (None, digest) and digest is not None:
        found.append(f"it was measured with {score.artifact_digest}")
    if score.reporter == "measured":
        needed = _ALWAYS if score.task in FORCED else (*_ALWAYS, *_OF_GENERATED)
        needed = needed if digest is None else (*needed, "artifact_digest")
        single = score.task in FORCED and score.n == 1  # one text has no spread
        missing = [
            name
            for name in needed
            if getattr(score, name) is None and not (single and name == "stderr")
        ]
        if missing:
            found.append(f"a measured score needs {', '.join(missing)}")
    for name in ("seeds", "values"):
        given = getattr(score, name)
        if given is not None and score.repeats is not None and len(given) != score.repeats:
            found.append(f"it has {len(given)} {name} of {score.repeats} repeats")
    return [*found, *_error_faults(score)]


def _error_faults(score: Score) -> list[str]:
    """A standard error that cannot come from the value, the questions and the repeats.

    Answers to one question need not be independent. So the error lies between that of `n * repeats`
    independent answers and that of `n`.
    """
    value, error, n = score.value, score.stderr, score.n
    if error is not None and error < 0:
        return [f"its standard error is {error:g}"]
    if score.unit != "percent" or value is None:
        return []
    if not 0 <= value <= 100:
        return [f"its value is {value:g} percent"]
    if error is None or n is None or score.metric not in RIGHT_OR_WRONG:
        return []
    least = binomial_error(value, n * (score.repeats or 1))
    most = binomial_error(value, max(n - 1, 1))
    if 0.99 * least - _ROUNDING <= error <= 1.01 * most + _ROUNDING:
        return []
    return [
        f"its standard error is {error:.3g} points, but {n} questions of which {value:.4g} percent"
        f" are right give {least:.3g} to {most:.3g}"
    ]


def _baseline_faults(score: Score, baseline: Score) -> list[str]:
    found = [f"its baseline: {fault}" for fault in _faults(baseline, None)]
    if (baseline.task, baseline.metric, baseline.unit) != (score.task, score.metric, score.unit):
        found.append("its baseline measures something else")
    if baseline.kv_dtype != "bf16":
        found.append(f"its baseline has a cache of {baseline.kv_dtype}, not bf16")
    if baseline.baseline is not None or baseline.paired is not None:
        found.append("its baseline has a baseline")
    return found
