"""Measurements as score records, with all that a person needs to repeat them: perplexity and recall
of this process, and benchmarks that servers answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.evaluate.benchmarks.answers import responses_bytes
from oscar_zoo.evaluate.measure import Measurement, Task
from oscar_zoo.evaluate.statistics import compare, difference, mean_error, standard_error
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.memory import hardware_name
from oscar_zoo.version import __version__

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.harness import ArmResult, LoadedTask, Settings

Fields = Mapping[str, Any]
"""Fields that the caller knows: those shared with the baseline, or those of INT2 alone."""
Compared = tuple[Task, Measurement, Measurement]
"""One task under a BF16 cache and under that of an artifact."""
PERCENT = 100.0


def scores(
    compared: Sequence[Compared], model: LoadedModel, shared: Fields, int2: Fields
) -> tuple[Score, ...]:
    """A score with its baseline for every task whose numbers are finite."""
    finite = [one for one in compared if math.isfinite(one[1].value + one[2].value)]
    return tuple(_score(one, model, shared, int2) for one in finite)


def _score(compared: Compared, model: LoadedModel, said: Fields, int2: Fields) -> Score:
    task, bf16, found = compared
    described, is_recall = task.describe(), task.name == "recall"
    n = int(described["answers"] if is_recall else described["windows"])
    scale = PERCENT if is_recall else 1.0
    shared: dict[str, Any] = {
        **said,
        "task": task.name,
        "metric": "digit_accuracy" if is_recall else "perplexity",
        "unit": "percent" if is_recall else "perplexity",
        "reporter": "measured",
        "n": n,
        "repeats": 1,
        "seeds": (int(described.get("seed", 0)),),
        "harness": Harness(name="oscar-zoo", version=__version__),
        "engine": Harness(name="transformers", version=version("transformers")),
        "hardware": hardware_name(model.device),
        "model_revision": model.block.revision,
        "tokens": TokenCounts(prompt=sum(len(p.ids) for p in task.prompts), completion=0),
    }

    def numbers(one: Measurement) -> dict[str, Any]:
        error = standard_error(task.result, one)
        if error is None and is_recall:  # of one prompt, that of its answers
            error = math.sqrt(one.value * (1 - one.value) / n)
        known = error is not None and math.isfinite(error)
        return {"value": scale * one.value, "stderr": scale * (error or 0.0) if known else None}

    paired = difference(task.result, found, bf16, more_is_worse=not is_recall)
    return Score(
        **shared,
        **numbers(found),
        kv_dtype="int2",
        baseline=Score(**shared, **numbers(bf16), kv_dtype="bf16"),
        paired=None if paired is None else _scaled(paired, scale),
        **int2,
    )


def _scaled(paired: Paired, scale: float, digits: int | None = None) -> Paired:
    """A comparison in the unit of its score, rounded where `digits` say so."""
    names = ("difference", "lower95", "upper95", "no_worse_than")
    values = {name: scale * getattr(paired, name) for name in names}
    if digits is not None:
        values = {name: round(value, digits) for name, value in values.items()}
    return paired.model_copy(update=values)


def benchmark_score(
    arm: ArmResult,
    baseline: ArmResult | None,
    task: LoadedTask,
    settings: Settings,
    shared: Fields,
    int2: Fields,
) -> Score:
    """The score of one cache, with that of BF16 over the same questions, and the paired comparison,
    inside it."""
    benchmark, answers = task.benchmark, [answer for _, answer in arm.used]
    generated = benchmark.kind == "generated"
    read_by = ", ".join(task.parts) if len(task.parts) == 1 else f"{len(task.parts)} tasks"
    prompt = "" if benchmark.prompt is None else ", prompt of oscar-zoo"
    base, paired = None, None
    if baseline is not None:
        base = benchmark_score(baseline, None, task, settings, shared, int2)
        paired = _scaled(compare(arm.values, baseline.values), PERCENT, digits=4)
    return Score(
        task=benchmark.name,
        metric=benchmark.measures,
        value=_points(arm.values.mean(axis=1).mean()),
        kv_dtype=arm.arm,  # type: ignore[arg-type]
        reporter="measured",
        source=f"{read_by}, {benchmark.metric}, filter {benchmark.filter}{prompt}",
        dataset_revision=task.revision,
        stderr=_points(mean_error(arm.values)),
        n=len(arm.values),
        repeats=len(settings.seeds),
        seeds=settings.seeds,
        values=tuple(map(_points, arm.values.mean(axis=0))),
        harness=harness_version(),
        sampling=settings.generation.sampling if generated else {"temperature": 0.0},
        thinking=settings.generation.thinking,
        generation_cap=settings.generation.max_new_tokens if generated else 1,
        exhausted_rate=arm.exhausted_rate,
        tokens=TokenCounts(
            prompt=sum(one.prompt_tokens for one in answers),
            completion=sum(one.completion_tokens for one in answers),
        ),
        responses_sha256=sha256_hex(responses_bytes(arm.used)),
        baseline=base,
        paired=paired,
        **shared,
        **(int2 if arm.arm == "int2" else {}),
    )


def _points(share: Any) -> float:
    return round(PERCENT * float(share), 4)


def harness_version() -> Harness:
    return Harness(name="lm-evaluation-harness", version=version("lm_eval"))
