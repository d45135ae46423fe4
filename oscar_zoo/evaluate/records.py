"""Measurements as score records, with all that a person needs to repeat them: perplexity and recall
of this process, and benchmarks that servers answered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.evaluate.benchmarks.answers import responses_bytes
from oscar_zoo.evaluate.measure import Measurement, Task
from oscar_zoo.evaluate.statistics import compare, difference, standard_error
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.memory import hardware_name
from oscar_zoo.version import __version__

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.harness import ArmResult, LoadedTask, Settings

Fields = Mapping[str, Any]
"""Fields of scores that the caller knows: those that a score shares with its baseline, and those
that only the INT2 cache has."""
_SEED = 0
"""Of the errors; recall has its own for the questions."""


@dataclass(frozen=True)
class Compared:
    """One task under a BF16 cache and under that of an artifact."""

    task: Task
    bf16: Measurement
    int2: Measurement


def scores(
    compared: Sequence[Compared], model: LoadedModel, shared: Fields, int2: Fields
) -> tuple[Score, ...]:
    """A score with its baseline for every task whose numbers are finite."""
    finite = (one for one in compared if math.isfinite(one.int2.value + one.bf16.value))
    return tuple(_score(one, model, shared, int2) for one in finite)


def _score(one: Compared, model: LoadedModel, said: Fields, int2: Fields) -> Score:
    task, described = one.task, one.task.describe()
    is_recall = task.name == "recall"
    scale = 100.0 if is_recall else 1.0
    shared: dict[str, Any] = {
        **said,
        "task": task.name,
        "metric": "digit_accuracy" if is_recall else "perplexity",
        "unit": "percent" if is_recall else "perplexity",
        "reporter": "measured",
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
        baseline=base,
        paired=_paired(one, scale),
        **int2,
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
    found, benchmark = arm.mean, task.benchmark
    generated = benchmark.kind == "generated"
    read_by = f"{', '.join(task.parts) if len(task.parts) == 1 else f'{len(task.parts)} tasks'}"
    prompt = "" if benchmark.prompt is None else ", prompt of oscar-zoo"
    under = settings, shared, int2
    return Score(
        task=benchmark.name,
        metric=benchmark.measures,
        value=_points(found.value),
        kv_dtype=arm.arm,  # type: ignore[arg-type]
        reporter="measured",
        source=f"{read_by}, {benchmark.metric}, filter {benchmark.filter}{prompt}",
        dataset_revision=task.revision,
        stderr=_points(found.stderr),
        n=found.n,
        repeats=len(settings.seeds),
        seeds=settings.seeds,
        values=tuple(_points(value) for value in found.by_repeat),
        harness=harness_version(),
        sampling=settings.generation.sampling if generated else {"temperature": 0.0},
        thinking=settings.generation.thinking,
        generation_cap=settings.generation.max_new_tokens if generated else 1,
        exhausted_rate=arm.exhausted_rate,
        tokens=TokenCounts(prompt=arm.prompt_tokens, completion=arm.completion_tokens),
        responses_sha256=sha256_hex(responses_bytes(arm.used)),
        baseline=None if baseline is None else benchmark_score(baseline, None, task, *under),
        paired=None if baseline is None else _paired_points(arm, baseline),
        **shared,
        **(int2 if arm.arm == "int2" else {}),
    )


def _paired_points(arm: ArmResult, baseline: ArmResult) -> Paired:
    found = compare(arm.values, baseline.values)
    return Paired(
        n=found.n,
        difference=_points(found.value),
        lower95=_points(found.lower95),
        upper95=_points(found.upper95),
        p_value=found.p_value,
        no_worse_than=_points(found.no_worse_than),
    )


def _points(share: float) -> float:
    return round(100 * share, 4)


def harness_version() -> Harness:
    """Name and version of the harness."""
    return Harness(name="lm-evaluation-harness", version=version("lm_eval"))
