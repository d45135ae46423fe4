"""What a benchmark found: scores, remarks that they need, and where they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.benchmark_plan import PreparedTask, Subject, folder_of
from oscar_zoo.app.benchmark_request import BenchmarkRequest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.output_files import write_file
from oscar_zoo.artifact.specs import Harness, Score
from oscar_zoo.evaluate.benchmarks.tasks import SAMPLE, Benchmark
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import score_file
from oscar_zoo.registry.score_file import ScoreFile

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.answers import Answers
    from oscar_zoo.evaluate.benchmarks.run import ArmResult

MANY_CUT = 0.05
"""A larger share of answers that the cap has cut is told."""


@dataclass(frozen=True)
class TaskResult:
    """One benchmark.

    Attributes:
        name: of the benchmark.
        arms: what every cache answered, by cache.
        scores: of INT2, and of FP8 where it was asked; each holds BF16 as its baseline.
        answers: the file of kept answers.
    """

    name: str
    arms: dict[str, ArmResult]
    scores: tuple[Score, ...]
    answers: Path


def scores_of(
    one: PreparedTask, arms: dict[str, ArmResult], answers: Answers, subject: Subject
) -> tuple[Score, ...]:
    from oscar_zoo.evaluate.benchmarks.record import Circumstances, score

    changed = subject.artifact.recipe is not None and subject.recipe != subject.artifact.recipe
    around = Circumstances(
        date=answers.day,
        engine=Harness(name="sglang", version=subject.engine),
        hardware=subject.hardware,
        digest=subject.artifact.digest,
        model_revision=one.identity["model_revision"],
        recipe_changes=(
            {"clip": f"{subject.recipe.clip.k:g},{subject.recipe.clip.v:g}"} if changed else {}
        ),
        calibrated_on=_calibrated_on(subject.artifact, one.task.benchmark),
    )
    return tuple(
        score(arm, arms.get("bf16"), one.task, one.settings, around)
        for cache, arm in arms.items()
        if cache != "bf16"
    )


def _calibrated_on(artifact: Artifact, one: Benchmark) -> bool | None:
    """Whether calibration saw questions of a benchmark, as far as the manifest tells."""
    calibration = artifact.manifest and artifact.manifest.fit.calibration
    name = one.calibration_name
    if not calibration or name is None:
        return None
    family = "gpqa" if name.startswith("gpqa") else name  # its subsets hold each other's questions
    if any(known.startswith(family) for known in calibration.overlaps_with):
        return True
    apart = {known.dataset for known in calibration.disjoint_from or ()}
    return False if name in apart else None


def remark(one: TaskResult, subject: Subject, observer: Observer) -> None:
    """Tell what makes the figures of a task say less than they seem to."""
    arm, windows = one.arms["int2"], subject.recipe.windows
    exact = windows.sink + windows.recent
    longer = arm.longer_than(exact)
    if longer < 0.5:
        text = (
            f"{one.name}: only {100 * longer:.0f} % of the requests are longer than the {exact:,}"
            " tokens that stay in BF16, so most answers hardly read the INT2 cache."
        )
        observer.note(Note("benchmark.short", text, {"task": one.name, "share": longer}))
    if one.scores[0].calibrated_on:
        text = f"{one.name}: calibration saw questions of this set, so its score says less."
        observer.note(Note("benchmark.calibrated_on", text, {"task": one.name}))
    if arm.exhausted_rate > MANY_CUT:
        text = (
            f"{one.name}: the generation cap cut {100 * arm.exhausted_rate:.0f} % of the answers;"
            " a larger --max-new-tokens lets them end."
        )
        observer.note(Note("benchmark.cut", text, {"task": one.name}))


def keep(
    tasks: Sequence[TaskResult],
    prepared: Sequence[PreparedTask],
    request: BenchmarkRequest,
    subject: Subject,
    observer: Observer,
) -> Path | None:
    """Write the scores, and say where they are.

    Those of all questions of a public set get to the other scores of the artifact, which `publish`
    takes along. A part of a set, the sample and rows of the user get a file of their own.

    Returns:
        The file; `None` for an artifact that has no id, or was not made for this model.
    """
    from oscar_zoo.app.eval_record import made_for, place_of

    artifact = subject.artifact
    if artifact.id is None or not made_for(artifact, prepared[0].model):
        text = f"no scores are recorded: {artifact.label} has no manifest that names this model."
        observer.note(Note("benchmark.no_record", text))
        return None
    identity = ArtifactId.parse(artifact.id)
    scores = tuple(score for one in tasks for score in one.scores)
    record = ScoreFile.of(identity, artifact.digest, scores)
    if request.output is not None:
        write_file(request.output, record.to_bytes())
        return request.output
    trial = request.limit is not None or request.data is not None or SAMPLE in request.tasks
    if trial:
        path = folder_of(subject) / f"{'-'.join(one.name for one in tasks)[:80]}.scores.json"
        write_file(path, record.to_bytes())
        return path
    path = place_of(artifact, identity)
    score_file.keep(path, record)
    return path
