"""A model and text become a verified artifact, its moments file and its report.

The steps are: load, read the text, capture, fit, choose, assemble in memory, verify these very
bytes, then write the folder in one step. An interrupt, a crash or a full disk at any point leaves
the target as it was. What a long capture has done until then is kept for `resume`. The same job
gives the same digest on the same machine and versions. `refit` makes another artifact of a moments
file, without a new capture.
"""

from __future__ import annotations

import math
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
from oscar_zoo.artifact.outcome import Verified, why
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble, calibration_tag
from oscar_zoo.compute.capture.checkpoint import can_resume, kept_for_resume
from oscar_zoo.compute.capture.rows import collect_rows
from oscar_zoo.compute.capture.transformers import capture, numerics
from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.compute.estimate import (
    CAPTURE,
    FIT,
    LOAD,
    LONGEST_TUNING,
    ROWS,
    TUNE,
    WRITE,
    tunes,
    tuning_seconds,
)
from oscar_zoo.compute.folder import (
    MOMENTS_NAME,
    check_target,
    default_target,
    moments_beside,
    write_folder,
)
from oscar_zoo.compute.methods.base import (
    CalibrationRows,
    FitResult,
    Fits,
    Method,
    Tick,
    fit,
    needs_model,
)
from oscar_zoo.compute.methods.table import (
    TABLE,
    TUNED,
    find_method,
    fit_all,
    methods_for,
    possible_methods,
    with_tuned,
)
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord
from oscar_zoo.compute.options import (
    ENOUGH_TOKENS,
    INSTEAD,
    Job,
    bits_of,
    load,
    read_data,
)
from oscar_zoo.compute.outcome import ComputeResult
from oscar_zoo.compute.report.build import report_of, save_report
from oscar_zoo.compute.select.choose import choose, failure, refuse_poor
from oscar_zoo.compute.select.decision import Choice, WidthChoice
from oscar_zoo.compute.select.rule import DIVERGENCE_PASS, typical, worst
from oscar_zoo.compute.select.widths import choose_widths
from oscar_zoo.errors import ComputeFailed, IntegrityError, OutputExists
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.memory import memory_errors
from oscar_zoo.next_step import AddOption


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
        model = load(job)
    data = read_data(job, model.block, model.tokenizer)
    method = None if job.auto else job.methods[0]  # `auto` adds its method to the name later
    base = job.output or default_target(_artifact_id(job, model.block, job.recipe, method, data))
    if not job.auto and job.wish is None:  # else the tag is not known yet
        check_target(base, force=job.force)
    work = base.with_name(base.name + ".work")  # what an interrupted capture needs to go on
    if job.output is None:
        tell(f"no --output-dir was given: the artifact goes into {path_text(base.parent)}.")
    for text in (*data.notes, *_about_tokens(data, needed=job.needs_data)):
        tell(text)
    with kept_for_resume(work, job.resume is False), memory_errors(model.block.id, model.device):
        moments = None
        if job.needs_data:
            with clock.phase(CAPTURE):
                moments = _capture(job, model, data, work, progress, tell)
        return _finish(job, model, data, moments, clock)


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
    needs = frozenset(n for method in methods_for(model.block).values() for n in method.needs)
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
            selection = widths.selection_of(chosen.method.name, data.heldout)
            facts = replace(facts, selection=selection, quality=widths.quality)
        verified = _verified(chosen, facts)
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
    job: Job, block: ModelBlock, recipe: ServingRecipe, method: Method | None, data: CalibrationData
) -> ArtifactId:
    tag = calibration_tag(data.tokens_used, len(data.sequences), recipe, block, method)
    return ArtifactId(job.model_name, str(tag))


def now() -> str:
    """The time of creation, as manifests have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _verified(chosen: FitResult, facts: Facts) -> Verified:
    """The outcome of verifying the artifact in memory, which must have passed."""
    outcome = verify_files(assemble(chosen, facts), strict=True)
    if isinstance(outcome, Verified):
        return outcome
    raise ComputeFailed(
        f"the result failed its own verification: {why(outcome)}.",
        hint="nothing was written; try other text, if the method reads text, or another --method",
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
        notes += _about_bits(choice, block)
        notes += [
            f"{name} was left out: {why_not.removesuffix('.')}."
            for name, why_not in choice.refused.items()
        ]
    if not method.needs:
        notes.append(f"{method.name} uses no data: the file was only counted for the tag.")
    return notes + _about_tokens(data, needed=bool(method.needs))


def _about_bits(choice: Choice, block: ModelBlock) -> list[str]:
    """What codes of 2 bits cost where they do not pass the gates, and what was done about it."""
    cost = choice.two_bits
    if cost is None or (choice.widths is not None and not choice.raised):
        return []
    two = bits_of(choice.recipe.with_widths(None), block)
    if not choice.raised:
        return [f"codes of 2 bits {cost}: --bits auto finds the fewest bits that pass the gates."]
    bits = bits_of(choice.recipe, block)
    if bits == two:
        return []
    return [
        f"{bits:.2f} bits an element were chosen, because codes of 2 bits ({two:.2f}) {cost};"
        f" the same memory holds {1 - two / bits:.0%} fewer tokens than with 2 bits."
    ]


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
    sums: Moments,
    info: MomentsInfo,
    method: str,
    recipe: ServingRecipe,
    *,
    model_name: str,
    target: Path | None,
    force: bool = False,
    progress: Progress = lambda done, total, phase: None,
) -> tuple[Path, Manifest]:
    """Fit `method` to the moments of a file and write the artifact, by default to
    `folder.default_target`."""
    chosen = find_method(method, info.model)
    if chosen.tune is not None:
        raise needs_model(chosen)
    if method not in possible_methods(sums):
        allowed = ", ".join(name for name in possible_methods(sums) if TABLE[name].publishable)
        raise ComputeFailed(
            f"{moments} lacks sums that {method} reads.", hint=f"it allows {allowed}"
        )
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
    progress(0, 0, FIT)
    result = fit(sums, chosen)
    _verified(result, facts)
    progress(0, 0, WRITE)
    data = read_file(moments, max_bytes=moments_file.MAX_BYTES)
    source = MomentsFile(sha256=sha256_hex(data), size=len(data), location=MOMENTS_NAME)
    return target, _write(target, result, facts, source, force=force)


def fit_or_choose(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments, progress: Progress
) -> tuple[FitResult, Choice | None, WidthChoice | None]:
    """The fit of an artifact, how it was chosen when the method is `auto`, and its bits."""
    if job.auto:
        choice = _choose(job, model, data, moments, progress)
        return choice.result, choice, choice.widths
    rows = _rows(job, model, data, progress) if job.method in TUNED else None
    result = fit(moments, job.methods[0], rows, tick=_ticks(progress, TUNE))
    if job.wish is None:
        return result, None, None
    assert data.heldout is not None  # `read_data` refuses such text
    widths = choose_widths(model, data.heldout, result, job.recipe, job.wish, progress=progress)
    if not job.allow_poor:
        refuse_poor(result.method.name, widths.gates)
    return result, None, widths


def _choose(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments, progress: Progress
) -> Choice:
    """The best method, with the bits that were asked for, or more than 2 where 2 fail their gates
    and nobody asked for them."""
    assert data.heldout is not None  # `read_data` refuses such text
    choice = choose(
        model,
        data.heldout,
        _fits(job, model, data, moments, progress),
        job.recipe,
        fixed_clip=job.clip is not None or job.latent,
        fast=job.fast,
        progress=progress,
    )
    kept = choice.trials[choice.at]
    gates = () if choice.base is None else kept.gates(choice.base)
    wish = job.wish
    if wish is None and gates and not job.allow_poor:
        doubtful = worst(gates) != "pass" or typical(kept.divergence) > DIVERGENCE_PASS
        if doubtful if job.raises else failure(gates):
            wish = INSTEAD
    widths = None
    if wish is not None:
        widths = choose_widths(
            model, data.heldout, choice.result, choice.recipe, wish, known=choice, progress=progress
        )
    if widths is None:
        return choice
    if not job.allow_poor:
        if job.wish is None and not job.raises:
            step = None
            if worst(widths.gates) == "pass":  # a budget by which the gates are passed
                bits = math.ceil(100 * bits_of(widths.recipe, model.block)) / 100
                step = AddOption("--bits", f"{bits:g}")
            refuse_poor(kept.method, gates, step)
        refuse_poor(kept.method, widths.gates)
    return replace(choice, recipe=widths.recipe, widths=widths, raised=job.wish is None)


def _fits(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments, progress: Progress
) -> Fits:
    """The fits of every method; tuned methods are included when they do not take too long."""
    fits = fit_all(moments)
    if not tunes(job):
        return fits
    cost = tuning_seconds(model.block, str(model.device))
    if cost > LONGEST_TUNING:
        why_not = (
            f"tuning takes about {cost / 60:.0f} minutes on this device; to wait for it, name it"
            " with --method"
        )
        return replace(fits, refused={**fits.refused, **dict.fromkeys(TUNED, why_not)})
    rows = _rows(job, model, data, progress)
    return with_tuned(fits, moments, rows, tick=_ticks(progress, TUNE))


def _rows(
    job: Job, model: LoadedModel, data: CalibrationData, progress: Progress
) -> CalibrationRows:
    tick = _ticks(progress, ROWS)
    return collect_rows(model, data.sequences, job.recipe.group_size, tick=tick)


def _ticks(progress: Progress, phase: str) -> Tick:
    return lambda done, total: progress(done, total, phase)
