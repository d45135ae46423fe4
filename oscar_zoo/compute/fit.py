"""From moments to pairs of transforms: coverage first, then one method or all.

`METHODS` are the methods that need moments only, `TUNED` those that read rows of the model, too;
the command line shows the keys of both. The order is that of `auto`: of two equally good methods,
the one that asks less of an engine comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.hadamard import is_power_of_two
from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry, StatisticName
from oscar_zoo.compute.coverage import needs_met, observed
from oscar_zoo.compute.methods import (
    hadamard,
    identity,
    oscar,
    oscar_exact,
    oscar_per_head,
    tuned,
    wush,
)
from oscar_zoo.compute.methods.base import Forecast, Matrix, Method, RowsOfText
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UnsupportedModel, UsageError

METHODS: Mapping[str, Method] = MappingProxyType(
    {
        module.METHOD.name: module.METHOD
        for module in (identity, hadamard, oscar, oscar_exact, oscar_per_head, wush)
    }
)
TUNED: Mapping[str, Method] = MappingProxyType({tuned.METHOD.name: tuned.METHOD})
Tick = Callable[[int, int], None]
"""`(steps done, steps in all)` of a method that is tuned."""


@dataclass(frozen=True)
class FitResult:
    """A fitted pair and what it rests on.

    Attributes:
        method: that was used.
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
    """What several methods made of the same moments.

    Attributes:
        results: by method, in the order asked for.
        refused: method -> why its result must not be used.
    """

    results: Mapping[str, FitResult]
    refused: Mapping[str, str]


def find_method(name: str) -> Method:
    """The method called `name`; raises `UsageError`."""
    known = {**METHODS, **TUNED}
    if name not in known:
        raise UsageError(f"no method is called {name!r}.", hint=f"methods: {', '.join(known)}")
    return known[name]


def check_model(geometry: Geometry) -> None:
    """Refuse a model whose head width no transform here fits; raises `UnsupportedModel`."""
    for width in (geometry.head_dim, geometry.v_head_dim):
        if not is_power_of_two(width):
            raise UnsupportedModel(
                f"head_dim {width} is not a power of two; no Hadamard transform is defined for it.",
                hint="choose a model with head_dim 64, 128 or 256",
            )


def fit(
    moments: Moments,
    method: Method,
    rows: RowsOfText | None = None,
    *,
    tick: Tick = lambda done, total: None,
) -> FitResult:
    """Fit one method.

    Args:
        moments: of the whole calibration set; for a method that needs nothing, only the geometry
            counts.
        rows: of that text, for a method of `TUNED`.
        tick: told how far the tuning is.

    Raises:
        ComputeFailed: a layer or head was not observed, or not completely; or the result cannot be
            served.
        UsageError: a method of `TUNED` without rows.
    """
    moments.check_coverage(method.needs)
    pair = method.fit(moments)
    if method.tune is not None:
        if rows is None:
            raise needs_model(method)
        pair = method.tune(pair, rows, tick)
    coverage = observed(moments) if method.needs else None
    return FitResult(method, pair.k, pair.v, pair.targets, coverage, pair.forecasts)


def needs_model(method: Method) -> UsageError:
    """The error for a method that moments are not enough for."""
    return UsageError(
        f"{method.name} is tuned on rows of the model; moments alone do not have them.",
        hint=f"run oscar-zoo compute MODEL --method {method.name}, or fit wush",
    )


def fit_all(moments: Moments, names: Sequence[str] | None = None) -> Fits:
    """Fit several methods of the same moments.

    Args:
        moments: of the whole calibration set.
        names: keys of `METHODS`; `None` for all that the moments allow, see `possible_methods`.

    Returns:
        One result per method; a method whose own result is refused is among `refused`.

    Raises:
        UsageError: a name that is no method.
        ComputeFailed: the moments lack what a method reads.
    """
    methods = [
        find_method(name) for name in (possible_methods(moments) if names is None else names)
    ]
    for method in methods:
        moments.check_coverage(method.needs)
    results: dict[str, FitResult] = {}
    refused: dict[str, str] = {}
    for method in methods:
        try:
            results[method.name] = fit(moments, method)
        except ComputeFailed as error:
            refused[method.name] = error.message
    return Fits(results, refused)


def with_tuned(fits: Fits, moments: Moments, rows: RowsOfText, *, tick: Tick) -> Fits:
    """`fits` and one result, or refusal, of each method of `TUNED`; arguments as of `fit`."""
    results, refused = dict(fits.results), dict(fits.refused)
    for name, method in TUNED.items():
        try:
            results[name] = fit(moments, method, rows, tick=tick)
        except ComputeFailed as error:
            refused[name] = error.message
    return Fits(results, refused)


def possible_methods(moments: Moments) -> tuple[str, ...]:
    """The methods whose sums the moments have at all; `check_coverage` decides whether they are
    complete."""
    met = needs_met(moments)
    return tuple(name for name, method in METHODS.items() if method.needs <= met)
