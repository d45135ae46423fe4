"""Fitting the method that was asked for, or every method and choosing the best, and its bits."""

from __future__ import annotations

import math
from dataclasses import replace

from oscar_zoo.compute.capture.rows import collect_rows
from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.compute.estimate import LONGEST_TUNING, ROWS, TUNE, tunes, tuning_seconds
from oscar_zoo.compute.methods.base import (
    CalibrationRows,
    FitResult,
    Fits,
    Tick,
    fit,
    fit_all,
    with_tuned,
)
from oscar_zoo.compute.methods.table import TUNED
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import Job
from oscar_zoo.compute.select.choose import choose, failure, refuse_poor
from oscar_zoo.compute.select.decision import Choice, WidthChoice
from oscar_zoo.compute.select.widths import choose_widths
from oscar_zoo.compute.width_wish import INSTEAD, WidthWish, bits_of
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.next_step import AddOption


def fit_or_choose(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments, progress: Progress
) -> tuple[FitResult, Choice | None, WidthChoice | None]:
    """The fit of an artifact, how it was chosen when the method is `auto`, and its bits."""
    if job.auto:
        choice = _choose(job, model, data, moments, progress)
        return choice.result, choice, choice.widths
    rows = _rows(job, model, data, progress) if job.method in TUNED else None
    result = fit(moments, job.methods[0], rows, tick=_ticks(progress, TUNE))
    return result, None, choose_bits(job, model, data, result, progress)


def choose_bits(
    job: Job, model: LoadedModel, data: CalibrationData, result: FitResult, progress: Progress
) -> WidthChoice | None:
    """The bits of every layer and side for a fit of a method that the user named, when these were
    asked for."""
    if job.wish is None:
        return None
    assert data.heldout is not None  # `read_data` refuses such text
    widths = choose_widths(model, data.heldout, result, job.recipe, job.wish, progress=progress)
    if not job.allow_poor:
        refuse_poor(result.method.name, widths.gates)
    return widths


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
        fixed_clip=job.clip is not None,
        fast=job.fast,
        progress=progress,
    )
    kept = choice.trials[choice.at]
    gates = () if choice.base is None else kept.gates(choice.base)
    failed = failure(gates)
    wishes: tuple[WidthWish, ...] = () if job.wish is None else (job.wish,)
    if job.wish is None and failed is not None and not job.allow_poor:
        wishes = INSTEAD
    widths = None
    for wish in wishes:
        widths = choose_widths(
            model,
            data.heldout,
            choice.result,
            choice.recipe,
            wish,
            known=choice,
            progress=progress,
        )
        if failure(widths.gates) is None:
            break
    choice = replace(choice, exact=None)  # which takes much memory
    if widths is None:
        return choice
    if not job.allow_poor:
        if job.wish is None and not job.raises:
            step = None
            if failure(widths.gates) is None:  # a budget by which the gates are passed
                bits = math.ceil(100 * bits_of(widths.recipe, model.block)) / 100
                step = AddOption("--bits", f"{bits:g}")
            refuse_poor(kept.method, gates, step)
        refuse_poor(kept.method, widths.gates)
    instead = failed if job.wish is None else None
    return replace(choice, recipe=widths.recipe, widths=widths, instead=instead)


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
