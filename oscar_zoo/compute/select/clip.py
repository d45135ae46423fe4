"""The clip ratio a fit is served with: a small grid, and the error of each layer at each point.

The quantizer clips a row at an index into its sorted absolute values, so the grid is one of
indices. A ratio is stored as `(index + 0.5) / d`, the middle of the ratios that mean that index.
The last index clips nothing and is stored as 0. Runtimes take one ratio per side, so the best one
over all layers is served, and the best one of each layer is only reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from oscar_kernels.spec import QuantSpec
from oscar_zoo.compute.select.layer_errors import geometric_mean

RATIOS = (0.98, 0.96, 0.94, 0.92, 0.90, 0.88)
TIE = 1.02
"""Errors up to this factor above the least count as equal: held-out rows tell no more apart."""


def clip_indices(head_dim: int, *also: int | None) -> tuple[int, ...]:
    """The grid for rows of `head_dim` channels, as ascending indices.

    It holds those of `RATIOS`, that of no clipping, and `also`.
    """
    grid = {math.floor(ratio * head_dim) for ratio in RATIOS} | {head_dim - 1}
    return tuple(sorted(grid | {index for index in also if index is not None}))


def ratio_of(index: int, head_dim: int) -> float:
    """The ratio that a recipe states for an index: 0 for the last one, which clips nothing."""
    return 0.0 if index >= head_dim - 1 else (index + 0.5) / head_dim


def ratio_text(ratio: float) -> str:
    """A ratio for people, with two decimals or as many as it needs, four at most; `0` for none."""
    exact = f"{ratio:.4f}".rstrip("0")
    return "0" if ratio == 0 else max(exact, f"{ratio:.2f}", key=len)


def index_of(spec: QuantSpec) -> int:
    """The index at which `spec` clips; `head_dim - 1` for none."""
    return spec.head_dim - 1 if spec.clip_index is None else spec.clip_index


@dataclass(frozen=True)
class ClipCurve:
    """Errors of one side of one fit.

    Attributes:
        head_dim: channels of a row.
        indices: ascending; more clipping first.
        layers: per layer, one error per index.
        weights: of the layers in the mean, or `None` for a geometric mean.
    """

    head_dim: int
    indices: tuple[int, ...]
    layers: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...] | None = None

    @property
    def mean(self) -> tuple[float, ...]:
        """Over layers, per index."""
        columns = zip(*self.layers, strict=True)
        if self.weights is None:
            return tuple(geometric_mean(column) for column in columns)
        total = math.fsum(self.weights)
        if total <= 0:
            return tuple(math.fsum(column) / len(column) for column in columns)
        return tuple(
            math.fsum(w * e for w, e in zip(self.weights, column, strict=True)) / total
            for column in columns
        )

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio that a recipe states for each index."""
        return tuple(ratio_of(index, self.head_dim) for index in self.indices)

    @property
    def best(self) -> int:
        """The index to serve.

        Of the indices whose error is within `TIE` of the least, it is the one that clips least.
        """
        return self.indices[_best(self.mean)]

    @property
    def best_by_layer(self) -> tuple[int, ...]:
        """The best index of every layer on its own."""
        return tuple(self.indices[_best(layer)] for layer in self.layers)

    def at(self, index: int) -> tuple[float, ...]:
        """Error of every layer at an index of the grid."""
        position = self.indices.index(index)
        return tuple(layer[position] for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Ratios, mean error and the best ratio, overall and by layer; plain JSON values."""
        return {
            "ratios": list(self.ratios),
            "errors": list(self.mean),
            "best": ratio_of(self.best, self.head_dim),
            "best_by_layer": [ratio_of(index, self.head_dim) for index in self.best_by_layer],
        }


def _best(errors: Iterable[float]) -> int:
    listed = list(errors)
    return max(position for position, error in enumerate(listed) if error <= TIE * min(listed))
