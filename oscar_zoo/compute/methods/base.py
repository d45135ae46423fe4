"""What a fitting method is, and fitting one or all of them: moments in, pairs of transforms out.

A new method is one `Method` in a file of this package, and one row of `table.TABLE`. The coverage
of moments is checked before every fit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import Role, RotationSet, hadamard
from oscar_zoo.artifact.manifest import Composition, Coverage, Estimators
from oscar_zoo.artifact.specs import Capability, StatisticName
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.errors import UsageError

Matrix = NDArray[np.float64]
Tick = Callable[[int, int], None]
"""Called with `(steps done, steps in all)` while a method is tuned."""


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
    """The result of a method: float32 transforms of all layers, without a calibration block; by
    statistics name (`qq`, `sst`, ..) the undamped float64 matrices that the fit used, `[layers, d,
    d]` or `[layers, num_kv_heads, d, d]`, none without data; and forecasts by side, where the
    method is not orthogonal."""

    k: RotationSet
    v: RotationSet
    targets: Mapping[StatisticName, Matrix]
    forecasts: Mapping[Role, Forecast] = field(default_factory=dict)


@dataclass(frozen=True)
class CalibrationRows:
    """Rows that a model caches of some of the calibration text, to tune on: by side and layer id
    `[num_kv_heads, T, d]`, kept in main memory and returned on `device`."""

    device: torch.device
    group_size: int
    kept: Mapping[tuple[Role, int], Tensor]

    def of(self, role: Role, layer_id: int) -> Tensor:
        """`[num_kv_heads, T, d]` in the model's dtype, before any transform, on `device`."""
        return self.kept[role, layer_id].to(self.device)


@dataclass(frozen=True)
class Method:
    """A fitting method; its `name` is a key of `table.TABLE`.

    Attributes:
        variant: last part of the artifact's tag; `None` for the default method.
        needs: kinds of sums that it reads; empty for a method without data.
        composition: how eigenvectors become matrices; `None` when that does not apply.
        fit: from moments with full coverage to transforms.
        tune: improves the result of `fit` with rows of the model; `None` when the method reads only
            moments.
        requires: what an engine must be able to do to serve the result.
        publishable: whether an artifact may hold the result; a baseline is only measured.
        variant_of: the method that it refines. Rule `auto` treats the two as one method.
    """

    name: str
    variant: str | None
    needs: frozenset[Need]
    estimators: Estimators | None
    composition: Composition | None
    fit: Callable[[Moments], FittedPair]
    tune: Callable[[FittedPair, CalibrationRows, Tick], FittedPair] | None = None
    requires: tuple[Capability, ...] = ()
    publishable: bool = True
    variant_of: str | None = None


def eigenbasis(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues `[..., d]` in ascending order and eigenvectors in columns of a symmetric `[...,
    d, d]`, all float64. Each eigenvector's entry of largest magnitude is positive (the first of
    equals), so that a refit repeats."""
    values, vectors = torch.linalg.eigh(matrix)
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return values, torch.where(largest < 0, -vectors, vectors)


def hadamard_matrix(d: int, device: torch.device) -> Tensor:
    """`artifact.hadamard.hadamard` as a new `[d, d]` float64 tensor on `device`."""
    return torch.tensor(hadamard(d), device=device)


T = TypeVar("T")
Arguments = TypeVar("Arguments")


def each_layer(function: Callable[[Arguments], T], layers: Sequence[Arguments]) -> list[T]:
    """`function` of every element of `layers`, in order, one layer per worker and one thread each.
    Threads inside a 128 x 128 factorization cost more than they save, and their number changes its
    last bits. With one thread each, a fit does not depend on the number of cores."""
    before, workers = torch.get_num_threads(), min(len(os.sched_getaffinity(0)), len(layers))
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(max(1, workers)) as pool:
            return list(pool.map(function, layers))
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, kw_only=True)
class FitResult(FittedPair):
    """A fitted pair, the method that made it, and the layers, heads and tokens that it rests on;
    `None` without data."""

    method: Method
    coverage: Coverage | None


@dataclass(frozen=True)
class Fits:
    """The fits of several methods to the same moments, and the reasons why others must not be
    used."""

    results: Mapping[str, FitResult]
    refused: Mapping[str, str]


def fit(
    moments: Moments,
    method: Method,
    rows: CalibrationRows | None = None,
    *,
    tick: Tick = lambda done, total: None,
) -> FitResult:
    """Fit one method."""
    moments.check(method.needs)
    pair = method.fit(moments)
    if method.tune is not None:
        if rows is None:
            raise needs_model(method)
        pair = method.tune(pair, rows, tick)
    coverage = moments.observed() if method.needs else None
    return FitResult(**vars(pair), method=method, coverage=coverage)


def needs_model(method: Method) -> UsageError:
    """The error for a method that needs the model, where only moments are given."""
    return UsageError(
        f"{method.name} is tuned on rows of the model; moments alone do not have them.",
        hint=f"run oscar-zoo compute MODEL --method {method.name}, or fit wush",
    )
