"""A model and text become a verified artifact, its moments file and its report.

The steps are: load, read the text, capture, fit, choose, assemble in memory, verify these very
bytes, then write the folder in one step. An interrupt, a crash or a full disk at any point leaves
the target as it was. What a long capture has done until then is kept for `resume`. The same job
gives the same digest on the same machine and versions. `refit` makes another artifact of a moments
file, without a new capture; the model is needed only where bits are chosen per layer and side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, ModelBlock, MomentsFile
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.outcome import Outcome, Verified, why
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble, calibration_tag
from oscar_zoo.compute.capture.checkpoint import can_resume, check_text, kept_for_resume
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.data.calibration import CalibrationData, HeldOut
from oscar_zoo.compute.estimate import CAPTURE, FIT, LOAD, WRITE
from oscar_zoo.compute.fitting import choose_bits, fit_or_choose
from oscar_zoo.compute.folder import (
    MOMENTS_NAME,
    check_target,
    default_target,
    moments_beside,
    write_folder,
)
from oscar_zoo.compute.methods.base import FitResult, Method, fit, needs_model, possible_methods
from oscar_zoo.compute.methods.table import METHODS, TABLE, find_method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.compute.options import ENOUGH_TOKENS, Job, load, read_data
from oscar_zoo.compute.outcome import ComputeResult
from oscar_zoo.compute.report.build import report_of, save_report
from oscar_zoo.compute.select.decision import Choice, WidthChoice
from oscar_zoo.compute.width_wish import bits_of
from oscar_zoo.errors import ComputeFailed, GeometryMismatch, IntegrityError, OutputExists
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.loading import LoadedModel, load_tokenizer
from oscar_zoo.models.memory import memory_errors
from oscar_zoo.models.model_source import inspect_model


class _Clock:
    """Measures seconds by phase, and reports the start of each phase."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.seconds = progress, dict[str, float]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.progress(0, 0, name)
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start


def compute_artifact(
    job: Job,
    *,
    progress: Progress = lambda done, total, phase: None,
    tell: Callable[[str], None] = lambda text: None,
) -> ComputeResult:
    """Calibrate a model and write the artifact. `progress` is called during the phases of
    `estimate.expected_phases`, `tell` with sentences that the user should see at once."""
    job.check()
    clock = _Clock(progress)
    with clock.phase(LOAD):
        _check_resume(job)
        model = load(job)
    data = read_data(job, model.block, model.tokenizer)
    base = _base(job, model.block, data)
    if not job.auto and job.wish is None:  # else the tag is not known yet
        check_target(base, force=job.force)
    work = _work(base)
    if job.output is None:
        tell(f"no --output-dir was given: the artifact goes into {path_text(base.parent)}.")
    for text in _about_tokens(data, needed=job.needs_data):
        tell(text)
    with kept_for_resume(work), memory_errors(model.block.id, model.device):
        moments = None
        if job.needs_data:
            with clock.phase(CAPTURE):
                moments = _capture(job, model, data, work, progress, tell)
        return _finish(job, model, data, moments, clock)


def _base(job: Job, block: ModelBlock, data: CalibrationData) -> Path:
    """The folder of the artifact; `auto` adds its method to the name later."""
    method = None if job.auto else job.methods[0]
    return job.output or default_target(_artifact_id(job, block, job.recipe, method, data))


def _work(base: Path) -> Path:
    """The folder beside `base` for what an interrupted capture needs to go on."""
    return base.with_name(base.name + ".work")


def _check_resume(job: Job) -> None:
    """Refuse to go on from a capture of another text, before weights are loaded."""
    if job.resume is not True or (job.output is not None and not can_resume(_work(job.output))):
        return
    block = inspect_model(job.model, revision=job.revision, model_id=job.model_id)
    data = read_data(job, block, load_tokenizer(job.model, revision=job.revision))
    check_text(_work(_base(job, block, data)), data.prompts_sha256)


def _capture(
    job: Job,
    model: LoadedModel,
    data: CalibrationData,
    work: Path,
    progress: Progress,
    tell: Callable[[str], None],
) -> Moments:
    """Capture, from what an interrupted run left where that is wanted and of the same command."""
    # Everything a fit can ask for costs little more than what one does, and the moments then serve
    # them all.
    needs = frozenset(need for method in METHODS.values() for need in method.needs)
    kept, place = can_resume(work), path_text(work)

    def captured(*, resume: bool) -> Moments:
        moments = capture(
            model,
            data,
            needs=needs,
            progress=lambda done, total: progress(done, total, CAPTURE),
            work=work,
            resume=resume,
        )
        moments.check(needs)
        return moments

    if job.resume and not kept:
        tell(f"there is nothing to go on from in {place}: the capture starts from the beginning.")
    if job.resume is not None or not kept:
        return captured(resume=bool(job.resume))
    try:
        moments = captured(resume=True)
    except (IntegrityError, OutputExists) as error:
        tell(f"{error.message.removesuffix('.')}, which is replaced.")
        return captured(resume=False)
    tell(f"went on from what an interrupted run had captured in {place}; --no-resume does not.")
    return moments


def _finish(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments | None, clock: _Clock
) -> ComputeResult:
    """Fit, choose, verify and write, given the moments; `None` where no method needs data."""
    with clock.phase(FIT):
        sums = moments or Moments(model.block, {})
        chosen, choice, widths = fit_or_choose(job, model, data, sums, clock.progress)
        recipe = choice.recipe if choice else widths.recipe if widths else job.recipe
        needed = bool(chosen.method.needs)
        facts = Facts(
            artifact_id=_artifact_id(job, model.block, recipe, chosen.method, data),
            model=model.block,
            recipe=recipe,
            calibration=data.facts() if needed else None,
            numerics=numerics(model) if needed else None,
            created=job.created or now(),
        )
        if choice is not None:
            facts = replace(facts, selection=choice.selection, quality=choice.quality)
        elif widths is not None and data.heldout is not None:
            facts = _with_bits(facts, chosen, widths, data.heldout)
        verified = require_verified(verify_files(assemble(chosen, facts), strict=True))
    target = job.output or default_target(facts.artifact_id)
    with clock.phase(WRITE):
        check_target(target, force=job.force)
        saved = None
        if moments is not None:
            info = MomentsInfo(
                model=model.block,
                calibration=data.facts(),
                coverage=moments.observed(),
                numerics=numerics(model),
                sequences=tuple(map(SequenceRecord.of, data.sequences)),
            )
            durable.make_folders(target.absolute().parent)
            saved = moments_file.save_moments(moments_beside(target), moments, info)
        manifest = _write(target, chosen, facts, saved, force=job.force)
    notes = (*model.notes, *data.notes, *_notes(data, model.block, chosen.method, choice))
    report = None
    if moments is not None:
        told = report_of(manifest, moments, choice, notes, clock.seconds)
        report, more = save_report(target, told)
        notes = (*notes, *more)
    return ComputeResult.of(
        target,
        manifest,
        verified=verified,
        notes=notes,
        seconds=clock.seconds,
        moments=moments_beside(target) if saved else None,
        report=report,
        selection=manifest.fit.selection,
        quality=manifest.quality,
        choice=choice,
        widths=widths,
    )


def _with_bits(facts: Facts, chosen: FitResult, widths: WidthChoice, heldout: HeldOut) -> Facts:
    selection = widths.selection_of(chosen.method.name, heldout)
    return replace(facts, selection=selection, quality=widths.quality)


def _write(
    target: Path, chosen: FitResult, facts: Facts, moments: MomentsFile | None, *, force: bool
) -> Manifest:
    """Write the folder; its moments lie wherever the user keeps them."""
    if moments is not None:
        moments = moments.model_copy(update={"location": MOMENTS_NAME})
    files = assemble(chosen, replace(facts, moments=moments))
    write_folder(target, files, force=force)
    return Manifest.from_bytes(files[FILE_NAME])


def _artifact_id(
    job: Job,
    block: ModelBlock,
    recipe: ServingRecipe,
    method: Method | None,
    data: CalibrationData,
) -> ArtifactId:
    tag = calibration_tag(data.tokens_used, len(data.sequences), recipe, block, method)
    return ArtifactId(job.model_name, str(tag))


def now() -> str:
    """The time of creation, as manifests have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def require_verified(outcome: Outcome) -> Verified:
    """The outcome of verifying a result, which must have passed."""
    if isinstance(outcome, Verified):
        return outcome
    raise ComputeFailed(
        f"the result failed its own verification: {why(outcome)}.",
        hint="nothing was written; try more or other text",
    )


def _notes(
    data: CalibrationData, block: ModelBlock, method: Method, choice: Choice | None
) -> list[str]:
    notes = []
    if choice is not None:
        notes += [
            f"{gate.name.replace('_', ' ')} is {gate.value:.2f}, beyond {gate.limit:g}: measure"
            " your own tasks."
            for gate in choice.gates
            if gate.result != "pass"
        ]
        notes += [f"{choice.base.remark}."] if choice.base and choice.base.remark else []
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
    return notes + _about_tokens(data, needed=bool(method.needs))


def _about_tokens(data: CalibrationData, *, needed: bool) -> list[str]:
    """Remarks where the text ended early, or is short for fits that need it."""
    used, notes = data.tokens_used, []
    if used < data.tokens_requested:
        notes.append(f"the data ended after {used:,} of {data.tokens_requested:,} tokens.")
    if used < ENOUGH_TOKENS and needed:
        notes.append(f"{used:,} tokens are few: fits settle near {ENOUGH_TOKENS:,}.")
    return notes


def refit(
    moments: Path,
    method: str,
    recipe: ServingRecipe,
    *,
    model_name: str,
    target: Path | None,
    force: bool = False,
    job: Job | None = None,
    progress: Progress = lambda done, total, phase: None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Path, Manifest]:
    """Fit `method` to a moments file and write the artifact, by default to `folder.default_target`.
    Where bits are to be chosen, `job` is what `compute` would do."""
    chosen = find_method(method)
    if chosen.tune is not None:
        raise needs_model(chosen)
    sums, info = moments_file.load_moments(moments)
    if method not in possible_methods(sums):
        allowed = ", ".join(name for name in possible_methods(sums) if TABLE[name].publishable)
        raise ComputeFailed(
            f"{moments} lacks sums that {method} reads.", hint=f"it allows {allowed}"
        )
    if target is not None:
        check_target(target, force=force)
    progress(0, 0, FIT)
    result = fit(sums, chosen)
    found = None if job is None else _bits(job, info, result, progress, tell)
    recipe = recipe if found is None else found[0].recipe
    used, needed = info.calibration, bool(chosen.needs)
    tokens = (used.tokens_used if used else None) or sums.tokens
    tag = calibration_tag(tokens, len(info.sequences), recipe, info.model, chosen)
    facts = Facts(
        artifact_id=ArtifactId(model_name, str(tag)),
        model=info.model,
        recipe=recipe,
        calibration=used if needed else None,
        numerics=info.numerics if needed else None,
        created=now(),
        coverage=info.coverage if needed else None,
    )
    target = target or default_target(facts.artifact_id)
    check_target(target, force=force)
    if found is not None:
        facts = _with_bits(facts, result, *found)
    require_verified(verify_files(assemble(result, facts), strict=True))
    progress(0, 0, WRITE)
    data = read_file(moments, max_bytes=moments_file.MAX_BYTES)
    source = MomentsFile(sha256=sha256_hex(data), size=len(data), location=MOMENTS_NAME)
    return target, _write(target, result, facts, source, force=force)


def _bits(
    job: Job,
    info: MomentsInfo,
    result: FitResult,
    progress: Progress,
    tell: Callable[[str], None],
) -> tuple[WidthChoice, HeldOut]:
    """The bits of every layer and side, and the text that they were chosen with."""
    job.check()
    progress(0, 0, LOAD)
    model = load(job)
    difference = info.model.geometry.difference(model.block.geometry)
    if difference is not None:
        raise GeometryMismatch(
            f"the moments are of {info.model.id}, and {job.model} is another model: {difference}.",
            hint="give the model that they were captured from",
        )
    data = read_data(job, model.block, model.tokenizer)
    if info.calibration is None or data.prompts_sha256 != info.calibration.prompts_sha256:
        tell(
            f"the moments were not captured from {data.source} with this budget, so text that they"
            " were captured from may be among the text that bits are chosen with."
        )
    with memory_errors(model.block.id, model.device):
        widths = choose_bits(job, model, data, result, progress)
    assert widths is not None and data.heldout is not None  # the job has a wish
    return widths, data.heldout
