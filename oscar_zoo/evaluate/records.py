"""Perplexity and recall as score records: what was measured in this process, with all that a
person needs to repeat it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.evaluate.intervals import difference, standard_error
from oscar_zoo.evaluate.tasks.base import Measurement, Task
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.memory import hardware_name
from oscar_zoo.version import __version__

_SEED = 0
"""Of the errors; recall has its own for the questions."""


@dataclass(frozen=True)
class Compared:
    """One task under a BF16 cache and under that of an artifact."""

    task: Task
    bf16: Measurement
    int2: Measurement


@dataclass(frozen=True)
class Circumstances:
    """What a record says beside the numbers.

    Attributes:
        date: day of the measurement, `YYYY-MM-DD`.
        source: the command that repeats it.
        text_sha256: of the text.
        digest: of the artifact.
        recipe_changes: settings that were not those of the recipe.
    """

    date: str
    source: str
    text_sha256: str
    digest: str
    recipe_changes: Mapping[str, str]


def scores(
    compared: Sequence[Compared], model: LoadedModel, around: Circumstances
) -> tuple[Score, ...]:
    """A score with its baseline for every task whose numbers are finite."""
    finite = (one for one in compared if math.isfinite(one.int2.value + one.bf16.value))
    return tuple(_score(one, model, around) for one in finite)


def _score(one: Compared, model: LoadedModel, around: Circumstances) -> Score:
    task, described = one.task, one.task.describe()
    is_recall = task.name == "recall"
    scale = 100.0 if is_recall else 1.0
    shared: dict[str, Any] = {
        "task": task.name,
        "metric": "digit_accuracy" if is_recall else "perplexity",
        "unit": "percent" if is_recall else "perplexity",
        "reporter": "measured",
        "date": around.date,
        "source": around.source,
        "dataset_revision": f"sha256:{around.text_sha256}",
        "n": int(described["answers"] if is_recall else described["windows"]),
        "repeats": 1,
        "seeds": (int(described.get("seed", _SEED)),),
        "harness": Harness(name="oscar-zoo", version=__version__),
        "engine": Harness(name="transformers", version=version("transformers")),
        "hardware": hardware_name(model.device),
        "model_revision": model.block.revision,
        "tokens": TokenCounts(prompt=sum(len(p.ids) for p in task.prompts), completion=0),
    }
    base = Score(
        **shared,
        kv_dtype="bf16",
        value=scale * one.bf16.value,
        stderr=_error(task, one.bf16, shared["n"], scale),
    )
    return Score(
        **shared,
        kv_dtype="int2",
        value=scale * one.int2.value,
        stderr=_error(task, one.int2, shared["n"], scale),
        artifact_digest=around.digest,
        recipe_changes=dict(around.recipe_changes),
        baseline=base,
        paired=_paired(one, scale),
    )


def _paired(one: Compared, scale: float) -> Paired | None:
    """The difference over sequences; a higher perplexity is worse, and so is a lower recall."""
    found = difference(one.task, one.int2, one.bf16, seed=_SEED)
    if found is None or not math.isfinite(found.upper95):
        return None
    return Paired(
        n=len(one.int2.parts),
        difference=scale * found.value,
        lower95=scale * found.lower95,
        upper95=scale * found.upper95,
        no_worse_than=scale * (-found.lower90 if one.task.name == "recall" else found.upper90),
    )


def _error(task: Task, found: Measurement, n: int, scale: float) -> float | None:
    """Standard error; of one prompt of recall, that of its answers, and of one window none."""
    error = standard_error(task, found, seed=_SEED)
    if error is None and task.name == "recall":
        error = math.sqrt(found.value * (1 - found.value) / n)
    return None if error is None or not math.isfinite(error) else scale * error
