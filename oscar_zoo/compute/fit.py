"""From moments to a pair of transforms: coverage first, then one method.

`METHODS` is the list of methods this version fits; the command line shows its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry, StatisticName
from oscar_zoo.artifact.transforms import is_power_of_two
from oscar_zoo.compute.methods import hadamard, oscar
from oscar_zoo.compute.methods.base import Matrix, Method
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import UnsupportedModel, UsageError

METHODS: Mapping[str, Method] = MappingProxyType(
    {method.name: method for method in (oscar.METHOD, hadamard.METHOD)},
)


@dataclass(frozen=True)
class FitResult:
    """A fitted pair and what it rests on.

    Attributes:
        method: that was used.
        k, v: float32 transforms of all layers.
        targets: the matrices behind the statistics fingerprint; empty without data.
        coverage: layers, heads and tokens observed; `None` without data.
    """

    method: Method
    k: RotationSet
    v: RotationSet
    targets: Mapping[StatisticName, Matrix]
    coverage: Coverage | None


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
        ComputeFailed: a layer or head was not observed, or not completely.
    """
    coverage = None
    if method.needs:
        moments.check_coverage(method.needs)
        coverage = Coverage(
            layers=len(moments.layers),
            q_heads=moments.geometry.num_q_heads,
            kv_heads=moments.geometry.num_kv_heads,
            tokens_min=moments.tokens,
            tokens_max=moments.tokens,
        )
    pair = method.fit(moments)
    return FitResult(method, pair.k, pair.v, pair.targets, coverage)
