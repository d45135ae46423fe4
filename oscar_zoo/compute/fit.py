"""From moments to pairs of transforms: coverage first, then one method or all.

`METHODS` is the list of methods this version fits; the command line shows its keys. The order is that of `auto`: of
two equally good methods, the one that asks less of an engine comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry, StatisticName
from oscar_zoo.artifact.transforms import is_power_of_two
from oscar_zoo.compute.coverage import needs_met, observed
from oscar_zoo.compute.methods import hadamard, identity, oscar, oscar_exact, oscar_per_head, wush
from oscar_zoo.compute.methods.base import Forecast, Matrix, Method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UnsupportedModel, UsageError

METHODS: Mapping[str, Method] = MappingProxyType(
    {module.METHOD.name: module.METHOD for module in (identity, hadamard, oscar, oscar_exact, oscar_per_head, wush)}
)


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
    if name not in METHODS:
        raise UsageError(f"no method is called {name!r}.", hint=f"methods: {', '.join(METHODS)}")
    return METHODS[name]


def check_model(geometry: Geometry) -> None:
    """Refuse a model whose head width no transform here fits; raises `UnsupportedModel`."""
    for width in (geometry.head_dim, geometry.v_head_dim):
        if not is_power_of_two(width):
            raise UnsupportedModel(
                f"head_dim {width} is not a power of two; no Hadamard transform is defined for it.",
                hint="choose a model with head_dim 64, 128 or 256",
            )


def fit(moments: Moments, method: Method) -> FitResult:
    """Fit one method.

    Args:
        moments: of the whole calibration set; for a method that needs nothing, only the geometry counts.

    Raises:
        ComputeFailed: a layer or head was not observed, or not completely; or the result cannot be served.
    """
    moments.check_coverage(method.needs)
    pair = method.fit(moments)
    coverage = observed(moments) if method.needs else None
    return FitResult(method, pair.k, pair.v, pair.targets, coverage, pair.forecasts)


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
    methods = [find_method(name) for name in (possible_methods(moments) if names is None else names)]
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


def possible_methods(moments: Moments) -> tuple[str, ...]:
    """The methods whose sums the moments have at all; `check_coverage` decides whether they are complete."""
    met = needs_met(moments)
    return tuple(name for name, method in METHODS.items() if method.needs <= met)
