"""Fitting the method that was asked for, or every method and choosing the best."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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
from oscar_zoo.compute.select.choose import choose
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.phases import Progress
from oscar_zoo.next_step import AddOption


def fit_or_choose(
    options: ComputeOptions,
    methods: tuple[Method, ...],
    model: RunningModel | None,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> tuple[FitResult, Choice | None]:
    """The fit of an artifact, and how it was chosen when the method is `auto`.

    Args:
        options: what to compute.
        methods: to fit.
        model: which has run its capture; `None` will do for a method that reads moments alone.
        data: the text.
        moments: of the capture.
        progress: called during the phases.

    Raises:
        UsageError: no text is held out to choose with.
        ComputeFailed: see `choose.choose`.
    """
    if model is None:
        return fit(moments, methods[0]), None
    if options.method in TUNED:
        rows = _rows(options, model, data, progress)
        return fit(moments, methods[0], rows, tick=_tuning(progress)), None
    if options.method != AUTO:
        return fit(moments, methods[0]), None
    choice = _choose(options, model, data, moments, progress)
    return choice.result, choice


def _choose(
    options: ComputeOptions,
    model: RunningModel,
    data: CalibrationData,
    moments: Moments,
    progress: Progress,
) -> Choice:
    if data.heldout is None:
        raise UsageError(
            "there is no held-out text to choose a method with.",
            hint="use more text",
            next_step=AddOption("--method", "wush"),
        )
    return choose(
        model,
        data.heldout,
        _fits(options, model, data, moments, progress),
        options.recipe,
        fixed_clip=options.fixed_clip,
        fast=options.fast,
        allow_poor=options.allow_poor,
        progress=progress,
    )


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
