"""Fit one method or all of them: moments in, pairs of transforms out.

Coverage is checked before every fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.compute import coverage
from oscar_zoo.compute.methods.base import Forecast, Matrix, Method, RowsOfText
from oscar_zoo.compute.methods.table import METHODS, TUNED, find_method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UsageError

Tick = Callable[[int, int], None]
"""Called with `(steps done, steps in all)` while a method is tuned."""


@dataclass(frozen=True)
class FitResult:
    """A fitted pair and what it rests on.

    Attributes:
        method: the method that made it.
        k, v: float32 transforms of all layers.
        targets: the matrices behind the statistics fingerprint; empty without data.
        coverage: layers, heads and tokens observed; `None` without data.
        forecasts: by side, headroom and condition of transforms that are not orthogonal.
    """

    method: Method
    k: RotationSet
    v: RotationSet
    targets: Mapping[StatisticName, Matrix]
    coverage: Coverage | None
    forecasts: Mapping[Role, Forecast] = field(default_factory=dict)


@dataclass(frozen=True)
class Fits:
    """The fits of several methods to the same moments.

    Attributes:
        results: by method, in the order asked for.
        refused: method -> the reason why its result must not be used.
    """

    results: Mapping[str, FitResult]
    refused: Mapping[str, str]


def fit(
    moments: Moments,
    method: Method,
    rows: RowsOfText | None = None,
    *,
    tick: Tick = lambda done, total: None,
) -> FitResult:
    """Fit one method.

    Args:
        moments: of the whole calibration set. A method that needs no data reads only the geometry.
        rows: of the same text; required for a method of `TUNED`.
        tick: called after every step of the tuning.

    Raises:
        ComputeFailed: a layer or head was not observed completely, or the result cannot be served.
        UsageError: a method of `TUNED` got no rows.
    """
    coverage.check(moments, method.needs)
    pair = method.fit(moments)
    if method.tune is not None:
        if rows is None:
            raise needs_model(method)
        pair = method.tune(pair, rows, tick)
    seen = coverage.observed(moments) if method.needs else None
    return FitResult(method, pair.k, pair.v, pair.targets, seen, pair.forecasts)


def needs_model(method: Method) -> UsageError:
    """The error for a method that needs the model, where only moments are given."""
    return UsageError(
        f"{method.name} is tuned on rows of the model; moments alone do not have them.",
        hint=f"run oscar-zoo compute MODEL --method {method.name}, or fit wush",
    )


def fit_all(moments: Moments, names: Sequence[str] | None = None) -> Fits:
    """Fit several methods of the same moments.

    Args:
        moments: of the whole calibration set.
        names: keys of `METHODS`; `None` for `possible_methods(moments)`.

    Returns:
        One result, or the reason of one refusal, per method.
    """
    methods = [
        find_method(name) for name in (possible_methods(moments) if names is None else names)
    ]
    for method in methods:
        coverage.check(moments, method.needs)
    results: dict[str, FitResult] = {}
    refused: dict[str, str] = {}
    for method in methods:
        try:
            results[method.name] = fit(moments, method)
        except ComputeFailed as error:
            refused[method.name] = error.message
    return Fits(results, refused)


def with_tuned(fits: Fits, moments: Moments, rows: RowsOfText, *, tick: Tick) -> Fits:
    """Add one result, or one refusal, of each method of `TUNED`; arguments as for `fit`."""
    results, refused = dict(fits.results), dict(fits.refused)
    for name, method in TUNED.items():
        try:
            results[name] = fit(moments, method, rows, tick=tick)
        except ComputeFailed as error:
            refused[name] = error.message
    return Fits(results, refused)


def possible_methods(moments: Moments) -> tuple[str, ...]:
    """The methods whose sums the moments hold; `coverage.check` tells whether they are complete."""
    met = coverage.needs_met(moments)
    return tuple(name for name, method in METHODS.items() if method.needs <= met)
