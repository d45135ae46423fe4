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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.fit_block import MomentsFile
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.artifact.names import ArtifactId, CalibrationTag
from oscar_zoo.artifact.outcome import Outcome, Verified, why
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture import run
from oscar_zoo.compute.capture.base import no_progress
from oscar_zoo.compute.capture.calibration_rows import CalibrationRows, collect_rows
from oscar_zoo.compute.capture.run import (
    Captured,
    CaptureRequest,
    EngineRequest,
    is_main_process,
)
from oscar_zoo.compute.data import CalibrationData, check_overlap, load_calibration
from oscar_zoo.compute.estimate import LONGEST_TUNING, tuning_seconds
from oscar_zoo.compute.fit import FitResult, Fits, Tick, fit, fit_all, with_tuned
from oscar_zoo.compute.folder import check_target, write_folder
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.methods.table import METHODS, TUNED
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import (
    AUTO,
    LONGEST_DEFAULT,
    ComputeOptions,
    check_options,
    sequence_length,
)
from oscar_zoo.compute.phases import CAPTURE, FIT, LOAD, ROWS, TUNE, WRITE, tunes
from oscar_zoo.compute.report.build import report_of, save_report
from oscar_zoo.compute.select.choose import choose
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.phases import Progress
from oscar_zoo.models.inspect import inspect_model
from oscar_zoo.models.loading import LoadedModel, load_model, load_tokenizer
from oscar_zoo.models.memory import Workload, memory_errors
from oscar_zoo.next_step import AddOption

__all__ = ["ComputeOptions", "ComputeResult", "compute_artifact"]

ENOUGH_TOKENS = 5000
"""Published fits stop changing near this number of tokens; fewer give a remark."""


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


@dataclass(frozen=True)
class _Subject:
    """The model of a job; `loaded` is `None` when an engine of its own runs it."""

    block: ModelBlock
    tokenizer: Any
    loaded: LoadedModel | None


def compute_artifact(
    options: ComputeOptions,
    *,
    progress: Progress = no_progress,
    tell: Callable[[str], None] = lambda text: None,
) -> ComputeResult | None:
    """Calibrate a model and write the artifact.

    Args:
        options: what to compute.
        progress: called during the phases of `phases.expected_phases`.
        tell: called with remarks that the user should see at once, in sentences.

    Returns:
        The artifact; `None` in all processes of `torchrun` but the first.

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
        subject = _load(options)
    data = _read_data(options, subject, methods)
    base = options.output_dir or _place(options, methods[0] if len(methods) == 1 else None, data)
    if len(methods) == 1:
        check_target(base, force=options.force)
    work = base.with_name(base.name + ".work")
    if options.resume and is_main_process() and not run.can_resume(work):
        tell(f"there is nothing to go on from in {work}: the capture starts from the beginning.")
    loaded = subject.loaded
    device = loaded.device if loaded else torch.device("cpu")
    with run.kept_for_resume(work), memory_errors(subject.block.id, device):
        with clock.phase(CAPTURE):
            captured = _capture(options, subject, methods, data, work, progress)
        if not is_main_process():
            return None
        return _finish(options, subject, methods, data, captured, clock)


def _finish(
    options: ComputeOptions,
    subject: _Subject,
    methods: tuple[Method, ...],
    data: CalibrationData,
    captured: Captured | None,
    clock: _Clock,
) -> ComputeResult:
    """Fit, choose, verify and write, given the moments."""
    with clock.phase(FIT):
        moments = captured.moments if captured else Moments(subject.block, {})
        choice = None
        if options.method in TUNED:
            rows = _rows(options, subject, data, clock.progress)
            chosen = fit(moments, methods[0], rows, tick=_tuning(clock.progress))
        elif options.method != AUTO:
            chosen = fit(moments, methods[0])
        else:
            choice = _choose(options, subject, data, moments, clock.progress)
            chosen = choice.result
        target = options.output_dir or _place(options, chosen.method, data)
        facts = _facts(options, chosen, subject, data, captured)
        if choice is not None:
            facts = replace(
                facts, recipe=choice.recipe, selection=choice.selection, quality=choice.quality
            )
        verified = _require_verified(verify_files(assemble(chosen, facts), strict=True))
    with clock.phase(WRITE):
        check_target(target, force=options.force)
        saved = _save_moments(target, subject, data, captured)
        files = assemble(chosen, replace(facts, moments=saved))
        write_folder(target, files, force=options.force)
    manifest = Manifest.from_bytes(files[FILE_NAME])
    loading = subject.loaded.notes if subject.loaded else ()
    notes = (*loading, *data.notes, *_notes(data, chosen.method, choice))
    report = None
    if captured is not None:
        told = report_of(manifest, captured.moments, choice, notes, clock.seconds)
        report, more = save_report(target, told)
        notes = (*notes, *more)
    place = _moments_path(target) if saved else None
    return ComputeResult(
        target, facts.artifact_id, manifest, verified, notes, clock.seconds, place, report, choice
    )


def _choose(
    options: ComputeOptions,
    subject: _Subject,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> Choice:
    if subject.loaded is None or data.heldout is None:
        raise UsageError(
            "there is no held-out text to choose a method with.",
            hint="use more text",
            next_step=AddOption("--method", "wush"),
        )
    return choose(
        subject.loaded,
        data.heldout,
        _fits(options, subject, data, moments, progress),
        options.recipe,
        fixed_clip=options.fixed_clip,
        fast=options.fast,
        allow_poor=options.allow_poor,
        progress=progress,
    )


def _fits(
    options: ComputeOptions,
    subject: _Subject,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> Fits:
    """The fits of every method; tuned methods are included when they do not take too long."""
    fits = fit_all(moments)
    if not tunes(options) or subject.loaded is None:
        return fits
    cost = tuning_seconds(subject.block, str(subject.loaded.device))
    if cost > LONGEST_TUNING:
        why_not = (
            f"tuning takes about {cost / 60:.0f} minutes on this device; to wait for it, name it"
            " with --method"
        )
        return replace(fits, refused={**fits.refused, **dict.fromkeys(TUNED, why_not)})
    return with_tuned(
        fits, moments, _rows(options, subject, data, progress), tick=_tuning(progress)
    )


def _rows(
    options: ComputeOptions, subject: _Subject, data: CalibrationData, progress: Progress
) -> CalibrationRows:
    assert subject.loaded is not None  # `check_options` asks for transformers
    tick = partial(_told, progress, ROWS)
    return collect_rows(subject.loaded, data.sequences, options.recipe.group_size, tick=tick)


def _tuning(progress: Progress) -> Tick:
    return partial(_told, progress, TUNE)


def _told(progress: Progress, phase: str, done: int, total: int) -> None:
    progress(done, total, phase)


def _load(options: ComputeOptions) -> _Subject:
    if options.engine == "sglang":
        block = inspect_model(options.model, revision=options.revision, model_id=options.model_id)
        return _Subject(block, load_tokenizer(options.model, revision=options.revision), None)
    loaded = load_model(
        options.model,
        revision=options.revision,
        dtype=options.dtype,
        device=options.device,
        model_id=options.model_id,
        stream=options.stream_weights,
        workload=Workload(
            min(options.seq_len or LONGEST_DEFAULT, options.calib_tokens), options.calib_tokens
        ),
    )
    return _Subject(loaded.block, loaded.tokenizer, loaded)


def _read_data(
    options: ComputeOptions, subject: _Subject, methods: tuple[Method, ...]
) -> CalibrationData:
    auto = options.method == AUTO
    data = load_calibration(
        options.calib_data,
        subject.tokenizer,
        tokens=options.calib_tokens,
        seq_len=sequence_length(options, subject.block),
        seed=options.seed,
        chat_template=options.chat_template,
        heldout_tokens=options.heldout_tokens if auto else 0,
    )
    if any(method.needs for method in methods) and data.tokens_used < subject.block.head_dim:
        raise ComputeFailed(
            f"{options.calib_data} gives {data.tokens_used} tokens for {subject.block.head_dim}"
            " channels per head.",
            hint=f"use more text: fits settle near {ENOUGH_TOKENS:,} tokens",
        )
    return check_overlap(data, allow_overlap=options.allow_overlap)


def _artifact_id(
    options: ComputeOptions, method: Method | None, data: CalibrationData
) -> ArtifactId:
    variant = method.variant if method else None
    tag = CalibrationTag(data.tokens_used, len(data.sequences), options.recipe.group_size, variant)
    return ArtifactId(options.model_name, str(tag))


def _place(options: ComputeOptions, method: Method | None, data: CalibrationData) -> Path:
    """The folder when the user named none."""
    artifact = _artifact_id(options, method, data)
    return Path(artifact.model) / artifact.tag


def _capture(
    options: ComputeOptions,
    subject: _Subject,
    methods: tuple[Method, ...],
    data: CalibrationData,
    work: Path,
    progress: Progress,
) -> Captured | None:
    if not any(method.needs for method in methods):
        return None
    # Everything a fit can ask for costs little more than what one does, and the moments then serve
    # them all.
    needs = frozenset(need for method in METHODS.values() for need in method.needs)

    def told(done: int, total: int, where: str) -> None:
        progress(done, total, CAPTURE)

    request = CaptureRequest(data, needs, work, options.resume, told)
    if subject.loaded is not None:
        return run.capture(subject.loaded, request)
    assert options.program is not None  # `check_options` refuses an engine without its program
    engine = EngineRequest(
        program=options.program,
        model=options.model,
        revision=options.revision,
        device=options.device,
        dtype=options.dtype,
        tensor_parallel=options.tensor_parallel,
    )
    return run.capture_in_engine(subject.block, request, engine)


def _facts(
    options: ComputeOptions,
    chosen: FitResult,
    subject: _Subject,
    data: CalibrationData,
    captured: Captured | None,
) -> Facts:
    return Facts(
        artifact_id=_artifact_id(options, chosen.method, data),
        model=subject.block,
        recipe=options.recipe,
        calibration=data.facts() if chosen.method.needs else None,
        numerics=captured.numerics if captured and chosen.method.needs else None,
        created=options.created or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        coverage=captured.coverage if captured and chosen.method.needs else None,
    )


def _moments_path(target: Path) -> Path:
    return target.with_name(f"{target.name}.{moments_file.FILE_NAME}")


def _save_moments(
    target: Path, subject: _Subject, data: CalibrationData, captured: Captured | None
) -> MomentsFile | None:
    """Write the moments beside the artifact; they are not part of it."""
    if captured is None:
        return None
    durable.make_folders(target.absolute().parent)
    saved = moments_file.save_moments(
        _moments_path(target), captured.moments, captured.info(subject.block, data)
    )
    return saved.model_copy(
        update={"location": moments_file.FILE_NAME}
    )  # wherever the user keeps it


def _require_verified(outcome: Outcome) -> Verified:
    if isinstance(outcome, Verified):
        return outcome
    raise ComputeFailed(
        f"the result failed its own verification: {why(outcome)}.",
        hint="nothing was written; try more or other text",
    )


def _notes(data: CalibrationData, method: Method, choice: Choice | None) -> tuple[str, ...]:
    notes = []
    if choice is not None:
        notes += [
            f"{gate.name.replace('_', ' ')} is {gate.value:.2f}, beyond {gate.limit:g}: measure"
            " your own tasks."
            for gate in choice.gates
            if gate.result != "pass"
        ]
        notes += [f"{choice.questions.remark}."] if choice.questions.remark else []
        notes += [
            f"{name} was left out: {why_not.removesuffix('.')}."
            for name, why_not in choice.refused.items()
        ]
    if data.tokens_used < data.tokens_requested:
        notes.append(
            f"the data ended after {data.tokens_used:,} of {data.tokens_requested:,} tokens."
        )
    if not method.needs:
        notes.append(f"{method.name} uses no data: the file was only counted for the tag.")
    elif data.tokens_used < ENOUGH_TOKENS:
        notes.append(f"{data.tokens_used:,} tokens are few: fits settle near {ENOUGH_TOKENS:,}.")
    return tuple(notes)
