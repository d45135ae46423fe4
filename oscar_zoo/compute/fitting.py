"""Fitting the method that was asked for, or every method and choosing the best, and its bits."""

from __future__ import annotations

import math
from dataclasses import replace

from oscar_zoo.artifact.specs import ServingRecipe
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
from oscar_zoo.next_step import AddOption, NextStep


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
    widths = _widths(job.wish, model, data, result, job.recipe, None, progress)
    if not job.allow_poor:
        refuse_poor(result.method.name, widths.gates)
    return widths


def _choose(
    job: Job, model: LoadedModel, data: CalibrationData, moments: Moments, progress: Progress
) -> Choice:
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
    failed = None if choice.base is None else failure(kept.gates(choice.base))
    wishes: tuple[WidthWish, ...] = () if job.wish is None else (job.wish,)
    if job.wish is None and failed is not None and not job.allow_poor:
        wishes = INSTEAD
    widths = None
    for wish in wishes:
        widths = _widths(wish, model, data, choice.result, choice.recipe, choice, progress)
        if failure(widths.gates) is None:
            break
    choice = replace(choice, exact=None)  # which takes much memory
    if job.allow_poor or (widths is None and failed is None):
        return choice if widths is None else replace(choice, recipe=widths.recipe, widths=widths)
    if job.wish is None and not job.raises:
        refuse_poor(kept.method, kept.gates(choice.base), _budget(model, widths))
    if widths is None:
        refuse_poor(kept.method, kept.gates(choice.base))
        return choice
    refuse_poor(kept.method, widths.gates)
    instead = failed if job.wish is None else None
    return replace(choice, recipe=widths.recipe, widths=widths, instead=instead)


def _budget(model: LoadedModel, widths: WidthChoice | None) -> NextStep | None:
    """The option by which a computation passes its gates; `None` where none is known."""
    if widths is None or failure(widths.gates) is not None:
        return None
    bits = bits_of(widths.recipe, model.block)
    return AddOption("--bits", f"{math.ceil(100 * bits) / 100:g}")


def _widths(
    wish: WidthWish,
    model: LoadedModel,
    data: CalibrationData,
    result: FitResult,
    recipe: ServingRecipe,
    known: Choice | None,
    progress: Progress,
) -> WidthChoice:
    """The bits of every layer and side."""
    assert data.heldout is not None  # `read_data` refuses such text
    return choose_widths(model, data.heldout, result, recipe, wish, known=known, progress=progress)


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
    def told(done: int, total: int) -> None:
        progress(done, total, phase)

    return told
