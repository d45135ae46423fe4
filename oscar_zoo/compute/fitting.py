"""Fitting the method that was asked for, or every method and choosing the best."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.compute.capture.calibration_rows import CalibrationRows
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.estimate import LONGEST_TUNING, tuning_seconds
from oscar_zoo.compute.fit import FitResult, Fits, Tick, fit, fit_all, with_tuned
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.compute.methods.table import TUNED
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.options import AUTO, ComputeOptions
from oscar_zoo.compute.phases import ROWS, TUNE, tunes
from oscar_zoo.compute.select.choose import choose, failure, refuse_poor
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.compute.select.width_choice import Verified, WidthChoice
from oscar_zoo.compute.select.width_runner import Known
from oscar_zoo.compute.select.widths import choose_widths
from oscar_zoo.compute.width_wish import INSTEAD, WidthWish, bits_of
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.next_step import AddOption, NextStep


def fit_or_choose(
    options: ComputeOptions,
    methods: tuple[Method, ...],
    model: RunningModel,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> tuple[FitResult, Choice | None, WidthChoice | None]:
    """The fit of an artifact, how it was chosen when the method is `auto`, and its bits."""
    if options.method == AUTO:
        choice = _choose(options, model, data, moments, progress)
        return choice.result, choice, choice.widths
    rows = _rows(options, model, data, progress) if options.method in TUNED else None
    result = fit(moments, methods[0], rows, tick=_tuning(progress))
    return result, None, choose_bits(options, model, data, result, progress)


def choose_bits(
    options: ComputeOptions,
    model: RunningModel,
    data: CalibrationData,
    result: FitResult,
    progress: Progress,
) -> WidthChoice | None:
    """The bits of every layer and side for a fit of a method that the user named, when these were
    asked for; arguments as for `fit_or_choose`.
    """
    widths = _widths(options, model, data, result, options.recipe, None, progress)
    if widths is not None and not options.allow_poor:
        refuse_poor(result.method.name, widths.gates)
    return widths


def _choose(
    options: ComputeOptions,
    model: RunningModel,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> Choice:
    assert data.heldout is not None  # `heldout_check` refuses such text
    choice = choose(
        model,
        data.heldout,
        _fits(options, model, data, moments, progress),
        options.recipe,
        fixed_clip=options.fixed_clip,
        fast=options.fast,
        progress=progress,
    )
    kept = choice.trials[choice.at]
    failed = None if choice.base is None else failure(kept.gates(choice.base))
    wishes: tuple[WidthWish, ...] = () if options.widths is None else (options.widths,)
    if options.widths is None and failed is not None and not options.allow_poor:
        wishes = INSTEAD
    widths = None
    for wish in wishes:
        asked = replace(options, widths=wish)
        known = _known(choice)
        widths = _widths(asked, model, data, choice.result, choice.recipe, known, progress)
        if widths is not None and failure(widths.gates) is None:
            break
    choice = replace(choice, exact=None)  # which takes much memory
    if options.allow_poor or (widths is None and failed is None):
        return choice if widths is None else replace(choice, recipe=widths.recipe, widths=widths)
    if options.widths is None and not options.raises:
        refuse_poor(kept.method, kept.gates(choice.base), _budget(model, widths))
    if widths is None:
        refuse_poor(kept.method, kept.gates(choice.base))
        return choice
    refuse_poor(kept.method, widths.gates)
    instead = failed if options.widths is None else None
    return replace(choice, recipe=widths.recipe, widths=widths, instead=instead)


def _budget(model: RunningModel, widths: WidthChoice | None) -> NextStep | None:
    """The option by which a computation passes its gates; `None` where none is known."""
    if widths is None or failure(widths.gates) is not None:
        return None
    bits = bits_of(widths.recipe, model.block)
    return AddOption("--bits", f"{math.ceil(100 * bits) / 100:g}")


def _widths(
    options: ComputeOptions,
    model: RunningModel,
    data: CalibrationData,
    result: FitResult,
    recipe: ServingRecipe,
    known: Known | None,
    progress: Progress,
) -> WidthChoice | None:
    """The bits of every layer and side, when they were asked for."""
    if options.widths is None:
        return None
    assert data.heldout is not None  # `heldout_check` refuses such text
    return choose_widths(
        model, data.heldout, result, recipe, options.widths, known=known, progress=progress
    )


def _known(choice: Choice) -> Known | None:
    """What need not be measured again; `None` when only errors were measured."""
    kept = choice.trials[choice.at]
    if choice.base is None:
        return None
    two_bits = Verified(kept.divergence, kept.perplexity, kept.recall)
    return Known(choice.base, choice.questions, two_bits, choice.exact)


def _fits(
    options: ComputeOptions,
    model: RunningModel,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> Fits:
    """The fits of every method; tuned methods are included when they do not take too long."""
    fits = fit_all(moments)
    if not tunes(options):
        return fits
    cost = tuning_seconds(model.block, str(model.device))
    if cost > LONGEST_TUNING:
        why_not = (
            f"tuning takes about {cost / 60:.0f} minutes on this device; to wait for it, name it"
            " with --method"
        )
        return replace(fits, refused={**fits.refused, **dict.fromkeys(TUNED, why_not)})
    return with_tuned(fits, moments, _rows(options, model, data, progress), tick=_tuning(progress))


def _rows(
    options: ComputeOptions, model: RunningModel, data: CalibrationData, progress: Progress
) -> CalibrationRows:
    tick = partial(_told, progress, ROWS)
    return model.calibration_rows(data.sequences, options.recipe.group_size, tick=tick)


def _tuning(progress: Progress) -> Tick:
    return partial(_told, progress, TUNE)


def _told(progress: Progress, phase: str, done: int, total: int) -> None:
    progress(done, total, phase)
