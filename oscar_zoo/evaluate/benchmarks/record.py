"""Scores of a run, as records have them."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.specs import Harness, Paired, Score, TokenCounts
from oscar_zoo.evaluate import statistics
from oscar_zoo.evaluate.benchmarks.answers import responses_bytes
from oscar_zoo.evaluate.benchmarks.harness import ArmResult, LoadedTask, Settings, harness_version

_PROMPT = {True: ", prompt of oscar-zoo", False: ""}
_DIGITS = 4
"""Of numbers in points."""


@dataclass(frozen=True)
class Circumstances:
    """What a record says beside the answers: the day of the run, `YYYY-MM-DD`, settings that were
    not those of the recipe, and whether calibration saw questions of this set (`None` when nobody
    knows)."""

    date: str
    engine: Harness
    hardware: str | None
    digest: str
    model_revision: str | None
    recipe_changes: dict[str, str]
    calibrated_on: bool | None


def score(
    arm: ArmResult,
    baseline: ArmResult | None,
    task: LoadedTask,
    settings: Settings,
    around: Circumstances,
) -> Score:
    """The score of one cache, with that of BF16 over the same questions, and the paired comparison,
    inside it."""
    found, benchmark = arm.mean, task.benchmark
    generated = benchmark.kind == "generated"
    read_by = f"{', '.join(task.parts) if len(task.parts) == 1 else f'{len(task.parts)} tasks'}"
    quantized, ours = arm.arm == "int2", benchmark.prompt is not None
    return Score(
        task=benchmark.name,
        metric=benchmark.measures,
        value=_points(found.value),
        kv_dtype=arm.arm,  # type: ignore[arg-type]
        reporter="measured",
        date=around.date,
        source=f"{read_by}, {benchmark.metric}, filter {benchmark.filter}{_PROMPT[ours]}",
        dataset_revision=task.revision,
        stderr=_points(found.stderr),
        n=found.n,
        repeats=len(settings.seeds),
        seeds=settings.seeds,
        values=tuple(_points(value) for value in found.by_repeat),
        harness=harness_version(),
        engine=around.engine,
        hardware=around.hardware,
        recipe_changes=around.recipe_changes if quantized else {},
        model_revision=around.model_revision,
        sampling=settings.generation.sampling if generated else {"temperature": 0.0},
        thinking=settings.generation.thinking,
        generation_cap=settings.generation.max_new_tokens if generated else 1,
        exhausted_rate=arm.exhausted_rate,
        tokens=TokenCounts(prompt=arm.prompt_tokens, completion=arm.completion_tokens),
        responses_sha256=sha256_hex(responses_bytes(arm.used)),
        artifact_digest=around.digest if quantized else None,
        calibrated_on=around.calibrated_on if quantized else None,
        baseline=None if baseline is None else score(baseline, None, task, settings, around),
        paired=None if baseline is None else _paired(arm, baseline),
    )


def _paired(arm: ArmResult, baseline: ArmResult) -> Paired:
    found = statistics.compare(arm.values, baseline.values)
    return Paired(
        n=found.n,
        difference=_points(found.value),
        lower95=_points(found.lower95),
        upper95=_points(found.upper95),
        p_value=found.p_value,
        no_worse_than=_points(found.no_worse_than),
    )


def _points(share: float) -> float:
    return round(100 * share, _DIGITS)
