"""What a fitting method is: a name, what it needs to see, what it claims to compute, and one function of moments.

A new method is one file with one `Method` value, entered in `fit.METHODS`; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import Composition, Estimators
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.compute.moments import Moments, Need

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class FittedPair:
    """What a method makes.

    Attributes:
        k, v: float32 transforms of all layers, without a calibration block.
        targets: statistics name (`qq`, `sst`, ..) -> the undamped float64 matrices the fit used, `[layers, d, d]` or
            `[layers, num_kv_heads, d, d]`; empty when no data was used.
    """

    k: RotationSet
    v: RotationSet
    targets: Mapping[StatisticName, Matrix]


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
    """

    name: str
    variant: str | None
    needs: frozenset[Need]
    estimators: Estimators | None
    composition: Composition | None
    fit: Callable[[Moments], FittedPair]
