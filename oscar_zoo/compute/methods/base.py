"""What a fitting method is: its name, the sums it reads, what it computes, and its function.

A new method is one file with one `Method` called `METHOD`, and one row of `table.TABLE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.manifest import Composition, Estimators
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """Forecasts from the moments for one side; each is `[layers, num_kv_heads]` float64.

    Attributes:
        headroom: tr M tr Hs / (sum sigma)^2, the largest gain in quantization error over any
            rotation; 1 is none.
        condition: of the transform, largest over smallest singular value.
        bf16_error: relative error of the logits (K) or outputs (V) once both matrices are rounded
            to bfloat16.
    """

    headroom: Matrix
    condition: Matrix
    bf16_error: Matrix


@dataclass(frozen=True)
class FittedPair:
    """The result of a method.

    Attributes:
        k, v: float32 transforms of all layers, without a calibration block.
        targets: statistics name (`qq`, `sst`, ..) -> the undamped float64 matrices the fit used,
            `[layers, d, d]` or `[layers, num_kv_heads, d, d]`; empty when no data was used.
        forecasts: by side, where the method is not orthogonal.
    """

    k: RotationSet
    v: RotationSet
    targets: Mapping[StatisticName, Matrix]
    forecasts: Mapping[Role, Forecast] = field(default_factory=dict)


class RowsOfText(Protocol):
    """Rows that a model caches of some of the calibration text."""

    @property
    def device(self) -> torch.device:
        """Where rows are returned."""

    @property
    def group_size(self) -> int:
        """Channels that will share a scale."""

    def of(self, role: Role, layer_id: int) -> Tensor:
        """`[num_kv_heads, T, d]` in the model's dtype, before any transform, on `device`."""


@dataclass(frozen=True)
class Method:
    """A fitting method.

    Attributes:
        name: its key in `table.TABLE`.
        variant: last part of the artifact's tag; `None` for the default method.
        needs: kinds of sums that it reads; empty for a method without data.
        estimators: ids of the matrices that it targets; `None` without data.
        composition: how eigenvectors become matrices; `None` when that does not apply.
        fit: from moments with full coverage to transforms.
        tune: improves the result of `fit` with rows of the model, and calls its last argument with
            `(steps done, steps in all)`; `None` when the method reads only moments.
    """

    name: str
    variant: str | None
    needs: frozenset[Need]
    estimators: Estimators | None
    composition: Composition | None
    fit: Callable[[Moments], FittedPair]
    tune: Callable[[FittedPair, RowsOfText, Callable[[int, int], None]], FittedPair] | None = None
