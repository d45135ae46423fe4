"""The use case: a model and text become a verified artifact, its moments file and its report.

The steps are: load, read the text, capture, fit, choose, assemble in memory, verify these very
bytes, then write the folder in one step. An interrupt, a crash or a full disk at any point leaves
the target as it was. What a long capture has done until then is kept for `resume`. The same options
give the same digest on the same machine and versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, ModelBlock, MomentsFile
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.outcome import Outcome, Verified, why
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture import run
from oscar_zoo.compute.capture.base import no_progress
from oscar_zoo.compute.capture.run import Captured
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.fit import FitResult
from oscar_zoo.compute.fitting import fit_or_choose
from oscar_zoo.compute.folder import (
    MOMENTS_NAME,
    check_target,
    default_target,
    moments_beside,
    write_folder,
)
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import ComputeOptions, check_options
from oscar_zoo.compute.phases import CAPTURE, FIT, LOAD, WRITE
from oscar_zoo.compute.report.build import report_of, save_report
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.compute.select.width_choice import WidthChoice
from oscar_zoo.compute.subject import (
    ENOUGH_TOKENS,
    Subject,
    load_subject,
    read_data,
    read_subject,
    run_capture,
)
from oscar_zoo.compute.tags import calibration_tag
from oscar_zoo.compute.width_wish import bits_of
from oscar_zoo.errors import ComputeFailed, IntegrityError, OutputExists
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.memory import memory_errors

__all__ = ["ComputeOptions", "ComputeResult", "compute_artifact"]


@dataclass(frozen=True)
class ComputeResult:
    """A finished artifact.

    Attributes:
        path: its folder.
        artifact_id: `<Model>/<tag>`.
        manifest: content of its `oscar.json`.
        verified: outcome of the full verification.
        notes: remarks for the user, in sentences.
        seconds: duration by phase: `load`, `capture`, `fit` (with choice and verification),
            `write`.
        moments: the file from which every method can be fitted again, or `None` without data.
        report: the page, or `None` when it could not be drawn.
        choice: of `auto`, else `None`.
        widths: of bits per layer and side, when these were asked for.
    """

    path: Path
    artifact_id: ArtifactId
    manifest: Manifest
    verified: Verified
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    moments: Path | None = None
    report: Path | None = None
    choice: Choice | None = None
    widths: WidthChoice | None = None


@dataclass
class _Clock:
    """Measures seconds by phase, and reports the start of each phase."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(0, 0, name)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def compute_artifact(
    options: ComputeOptions,
    *,
    progress: Progress = no_progress,
    tell: Callable[[str], None] = lambda text: None,
) -> ComputeResult:
    """Calibrate a model and write the artifact.

    Args:
        options: what to compute.
        progress: called during the phases of `phases.expected_phases`.
        tell: called with remarks that the user should see at once, in sentences.

    Returns:
        The artifact.

    Raises:
        UsageError: options that make no sense together, or data that is no text.
        PathNotFound, InvalidModel, UnsupportedModel: from reading model and data.
        OutputExists: the folder is taken; see `folder.check_target`.
        NotEnoughMemory: the model is larger than the device; known before weights are read, or
            found in the middle.
        ComputeFailed: the capture was incomplete, the result failed verification, or it failed its
            gates and `options.allow_poor` is not set.
        StorageError: the disk refused.
    """
    methods = check_options(options)
    clock = _Clock(progress)
    with clock.phase(LOAD):
        _check_resume(options, methods)
        subject = load_subject(options)
    data = read_data(options, subject, methods)
    base = _base(options, subject, methods, data)
    if len(methods) == 1 and options.widths is None:  # else the tag is not known yet
        check_target(base, force=options.force)
    work = _work(base)
    if options.output_dir is None:
        tell(f"no --output-dir was given: the artifact goes into {path_text(base.parent)}.")
    for text in _about_tokens(data, methods):
        tell(text)
    loaded = subject.loaded
    device = loaded.device if loaded else torch.device("cpu")
    with run.kept_for_resume(work), memory_errors(subject.block.id, device):
        assert loaded is not None
        model = RunningModel(loaded)
        with clock.phase(CAPTURE):
            captured = _capture(model, options, methods, data, work, progress, tell)
        return _finish(options, subject, model, methods, data, captured, clock)


def _base(
    options: ComputeOptions,
    subject: Subject,
    methods: tuple[Method, ...],
    data: CalibrationData,
) -> Path:
    """The folder of the artifact; `auto` adds its method to the name later."""
    method = methods[0] if len(methods) == 1 else None
    return options.output_dir or default_target(
        _artifact_id(options, subject.block, options.recipe, method, data)
    )


def _work(base: Path) -> Path:
    """The folder beside `base` for what an interrupted capture needs to go on."""
    return base.with_name(base.name + ".work")


def _check_resume(options: ComputeOptions, methods: tuple[Method, ...]) -> None:
    """Refuse to go on from a capture of another text, before weights are loaded."""
    given = options.output_dir
    if options.resume is not True or (given is not None and not run.can_resume(_work(given))):
        return
    subject = read_subject(options)
    data = read_data(options, subject, methods)
    run.check_text(_work(_base(options, subject, methods, data)), data)


def _capture(
    model: RunningModel,
    options: ComputeOptions,
    methods: tuple[Method, ...],
    data: CalibrationData,
    work: Path,
    progress: Progress,
    tell: Callable[[str], None],
) -> Captured | None:
    """Capture, from what an interrupted run left where that is wanted and of the same command."""
    kept, place = run.can_resume(work), path_text(work)
    if options.resume and not kept:
        tell(f"there is nothing to go on from in {place}: the capture starts from the beginning.")
    if options.resume is not None or not kept:
        return run_capture(model, options, methods, data, work, progress)
    try:
        captured = run_capture(model, replace(options, resume=True), methods, data, work, progress)
    except (IntegrityError, OutputExists) as error:
        tell(f"{error.message.removesuffix('.')}, which is replaced.")
        return run_capture(model, options, methods, data, work, progress)
    tell(f"went on from what an interrupted run had captured in {place}; --no-resume does not.")
    return captured


def _finish(
    options: ComputeOptions,
    subject: Subject,
    model: RunningModel,
    methods: tuple[Method, ...],
    data: CalibrationData,
    captured: Captured | None,
    clock: _Clock,
) -> ComputeResult:
    """Fit, choose, verify and write, given the moments."""
    with clock.phase(FIT):
        moments = captured.moments if captured else Moments(subject.block, {})
        chosen, choice, widths = fit_or_choose(
            options, methods, model, data, moments, clock.progress
        )
        recipe = choice.recipe if choice else widths.recipe if widths else options.recipe
        facts = _facts(options, recipe, chosen, subject, data, captured)
        target = options.output_dir or default_target(facts.artifact_id)
        if choice is not None:
            facts = replace(facts, selection=choice.selection, quality=choice.quality)
        elif widths is not None and data.heldout is not None:
            facts = replace(
                facts,
                selection=widths.selection_of(chosen.method.name, data.heldout),
                quality=widths.quality,
            )
        verified = _require_verified(verify_files(assemble(chosen, facts), strict=True))
    with clock.phase(WRITE):
        check_target(target, force=options.force)
        saved = _save_moments(target, subject, data, captured)
        files = assemble(chosen, replace(facts, moments=saved))
        write_folder(target, files, force=options.force)
    manifest = Manifest.from_bytes(files[FILE_NAME])
    loading = subject.loaded.notes if subject.loaded else ()
    notes = (*loading, *data.notes, *_notes(data, subject.block, chosen.method, choice))
    report = None
    if captured is not None:
        told = report_of(manifest, captured.moments, choice, notes, clock.seconds)
        report, more = save_report(target, told)
        notes = (*notes, *more)
    place = moments_beside(target) if saved else None
    return ComputeResult(
        target,
        facts.artifact_id,
        manifest,
        verified,
        notes,
        clock.seconds,
        place,
        report,
        choice,
        widths,
    )


def _artifact_id(
    options: ComputeOptions,
    block: ModelBlock,
    recipe: ServingRecipe,
    method: Method | None,
    data: CalibrationData,
) -> ArtifactId:
    tag = calibration_tag(data.tokens_used, len(data.sequences), recipe, block, method)
    return ArtifactId(options.model_name, str(tag))


def _facts(
    options: ComputeOptions,
    recipe: ServingRecipe,
    chosen: FitResult,
    subject: Subject,
    data: CalibrationData,
    captured: Captured | None,
) -> Facts:
    return Facts(
        artifact_id=_artifact_id(options, subject.block, recipe, chosen.method, data),
        model=subject.block,
        recipe=recipe,
        calibration=data.facts() if chosen.method.needs else None,
        numerics=captured.numerics if captured and chosen.method.needs else None,
        created=options.created or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        coverage=captured.coverage if captured and chosen.method.needs else None,
    )


def _save_moments(
    target: Path, subject: Subject, data: CalibrationData, captured: Captured | None
) -> MomentsFile | None:
    """Write the moments beside the artifact; they are not part of it."""
    if captured is None:
        return None
    durable.make_folders(target.absolute().parent)
    saved = moments_file.save_moments(
        moments_beside(target), captured.moments, captured.info(subject.block, data)
    )
    return saved.model_copy(update={"location": MOMENTS_NAME})  # wherever the user keeps it


def _require_verified(outcome: Outcome) -> Verified:
    if isinstance(outcome, Verified):
        return outcome
    raise ComputeFailed(
        f"the result failed its own verification: {why(outcome)}.",
        hint="nothing was written; try more or other text",
    )


def _notes(
    data: CalibrationData, block: ModelBlock, method: Method, choice: Choice | None
) -> tuple[str, ...]:
    notes = []
    if choice is not None:
        notes += [
            f"{gate.name.replace('_', ' ')} is {gate.value:.2f}, beyond {gate.limit:g}: measure"
            " your own tasks."
            for gate in choice.gates
            if gate.result != "pass"
        ]
        notes += [f"{choice.questions.remark}."] if choice.questions.remark else []
        notes += [choice.worth_more_bits] if choice.worth_more_bits else []
        if choice.instead is not None:
            bits = bits_of(choice.recipe, block)
            notes.append(
                f"codes of 2 bits: the best fit {choice.instead}. So this artifact has {bits:.2f}"
                " bits an element; --bits 2 --allow-poor keeps 2 bits."
            )
        notes += [
            f"{name} was left out: {why_not.removesuffix('.')}."
            for name, why_not in choice.refused.items()
        ]
    if not method.needs:
        notes.append(f"{method.name} uses no data: the file was only counted for the tag.")
    return (*notes, *_about_tokens(data, (method,)))


def _about_tokens(data: CalibrationData, methods: tuple[Method, ...]) -> tuple[str, ...]:
    """Remarks where the text is short for fits by `methods`."""
    used, notes = data.tokens_used, []
    if used < data.tokens_requested:
        notes.append(f"the data ended after {used:,} of {data.tokens_requested:,} tokens.")
    if used < ENOUGH_TOKENS and any(method.needs for method in methods):
        notes.append(f"{used:,} tokens are few: fits settle near {ENOUGH_TOKENS:,}.")
    return tuple(notes)
