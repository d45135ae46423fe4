"""Every fitting method, and fitting several of them.

A new method is one `Method` in a file beside this one, and one row here. The
order is that of `auto`: of two equally good methods, the earlier one asks less of an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.methods import rotations, tuned, wush
from oscar_zoo.compute.methods.base import CalibrationRows, Fits, Method, Tick, fit
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UsageError

TABLE: Mapping[str, Method] = {
    method.name: method
    for method in (
        rotations.IDENTITY,
        rotations.HADAMARD,
        rotations.OSCAR,
        rotations.OSCAR_EXACT,
        rotations.OSCAR_PER_HEAD,
        wush.METHOD,
        tuned.METHOD,
    )
}
METHODS = {name: method for name, method in TABLE.items() if method.tune is None}
"""Methods that need only moments."""
TUNED = {name: method for name, method in TABLE.items() if method.tune is not None}
"""Methods that also read rows of the model."""
LATENTS = {
    method.name: method
    for method in (rotations.IDENTITY, rotations.HADAMARD, rotations.LATENT, wush.LATENT)
}
"""Methods of models with latents, whose keys and values have one transform."""


def methods_for(geometry: Geometry) -> Mapping[str, Method]:
    """The methods of a model that need only moments."""
    return METHODS if geometry.rotary_key is None else LATENTS


def find_method(name: str, geometry: Geometry | None = None) -> Method:
    """The method called `name`, as it is for a model; raises `UsageError`."""
    if name not in TABLE:
        raise UsageError(f"no method is called {name!r}.", hint=f"methods: {', '.join(TABLE)}")
    if geometry is None or geometry.rotary_key is None:
        return TABLE[name]
    if name not in LATENTS:
        message = f"{name} is not for latents (MLA), which are keys and values at once."
        offered = ", ".join(name for name, one in LATENTS.items() if one.publishable)
        raise UsageError(message, hint=f"methods: {offered}")
    return LATENTS[name]


def main_method(name: str) -> str:
    """The method that `name` refines, or `name` itself."""
    return TABLE[name].variant_of or name


def fit_all(moments: Moments, names: Sequence[str] | None = None) -> Fits:
    """Fit several methods of the same moments; `None` stands for all `possible_methods`."""
    wanted = possible_methods(moments) if names is None else names
    methods = [find_method(name, moments.geometry) for name in wanted]
    for method in methods:
        moments.check(method.needs)
    return _fitted(Fits({}, {}), moments, methods, None, lambda done, total: None)


def with_tuned(fits: Fits, moments: Moments, rows: CalibrationRows, *, tick: Tick) -> Fits:
    """Add one result, or one refusal, of each method of `TUNED`."""
    return _fitted(fits, moments, TUNED.values(), rows, tick)


def _fitted(
    fits: Fits,
    moments: Moments,
    methods: Iterable[Method],
    rows: CalibrationRows | None,
    tick: Tick,
) -> Fits:
    results, refused = dict(fits.results), dict(fits.refused)
    for method in methods:
        try:
            results[method.name] = fit(moments, method, rows, tick=tick)
        except ComputeFailed as error:
            refused[method.name] = error.message
    return Fits(results, refused)


def possible_methods(moments: Moments) -> tuple[str, ...]:
    """The methods whose sums the moments hold; `Moments.check` tells whether they are complete."""
    met = moments.needs_met()
    offered = methods_for(moments.geometry)
    return tuple(name for name, method in offered.items() if method.needs <= met)
