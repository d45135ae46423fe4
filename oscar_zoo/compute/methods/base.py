"""What a fitting method is: a name, what it needs to see, what it claims to compute, and one
function of moments.

A new method is one file with one `Method` value, entered in `fit.METHODS`, or in `fit.TUNED` where
moments are not all that it reads; nothing else changes.
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
from oscar_zoo.compute.moments import Moments, Need

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Forecast:
    """What the moments say about the transforms of one side; each `[layers, num_kv_heads]` float64.

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
    """What a method makes.

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
        """Where rows are wanted."""

    @property
    def group_size(self) -> int:
        """Channels that will share a scale."""

    def of(self, role: Role, layer_id: int) -> Tensor:
        """`[num_kv_heads, T, d]` in the model's dtype, before any transform, on `device`."""


@dataclass(frozen=True)
class Method:
    """A fitting method.

    Attributes:
        name: as on the command line and in `fit.method`.
        variant: last part of the artifact's tag; `None` for the default method.
        needs: what it reads of the capture; empty for a method without data.
        estimators: ids of what it targets; `None` without data.
        composition: how eigenvectors become matrices; `None` where that does not apply.
        fit: moments with full coverage to transforms.
        publishable: whether an artifact may hold the result; baselines are only measured.
        tune: what it makes of that with rows, told `(steps done, steps in all)`; `None` where
            moments are all it reads.
    """

    name: str
    variant: str | None
    needs: frozenset[Need]
    estimators: Estimators | None
    composition: Composition | None
    fit: Callable[[Moments], FittedPair]
    publishable: bool = True
    tune: Callable[[FittedPair, RowsOfText, Callable[[int, int], None]], FittedPair] | None = None
