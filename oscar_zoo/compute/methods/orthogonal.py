"""Orthogonal methods: the rotation U H P of the covariance of each layer, or of each head."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oscar_zoo.artifact import statistics
from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.compute.estimators import TARGETS, estimate
from oscar_zoo.compute.methods.base import FittedPair, Matrix
from oscar_zoo.compute.methods.compose import r_h_pbr
from oscar_zoo.compute.methods.parallel import each_layer
from oscar_zoo.compute.moments import Moments

_HESSIANS = {matrix: hessian for hessian, matrix in statistics.TARGETS.items()}
"""Name of a target matrix -> the word for it in the objective of a file."""


def fit_shared(moments: Moments, k: str, v: str) -> FittedPair:
    """Format 1: one matrix per layer, from the mean over KV heads of an estimator.

    `k` and `v` name the estimators, such as `qqt/1`; any but `wo/1`, which no file can name.
    """
    return _pair(moments, k, v, 1)


def fit_per_head(moments: Moments, k: str, v: str) -> FittedPair:
    """Format 2: one matrix per layer and KV head."""
    return _pair(moments, k, v, 2)


def _pair(moments: Moments, k: str, v: str, format_version: int) -> FittedPair:
    stacks = [
        estimate(moments, estimator, "layer" if format_version == 1 else "kv_head")
        for estimator in (k, v)
    ]
    layer_ids = tuple(sorted(moments.layers))
    targets = (TARGETS[k], TARGETS[v])
    sides = [
        _side(f"{_HESSIANS[target]}_r_h_pbr", layer_ids, stack, format_version)
        for target, stack in zip(targets, stacks, strict=True)
    ]
    return FittedPair(sides[0], sides[1], dict(zip(targets, stacks, strict=True)))


def _side(
    objective: str, layer_ids: tuple[int, ...], stack: Matrix, format_version: int
) -> RotationSet:
    found = each_layer(r_h_pbr, list(torch.from_numpy(stack)))
    return RotationSet(
        format_version=format_version,
        objective=objective,
        grouping="layer" if format_version == 1 else "kv_head",
        transform="oscar",
        orthogonal=True,
        centered=False,
        layers=tuple(
            _layer(layer_id, *one) for layer_id, one in zip(layer_ids, found, strict=True)
        ),
    )


def _layer(layer_id: int, rotation: Tensor, eigenvalues: Tensor) -> LayerTransform:
    stored = np.ascontiguousarray(rotation.numpy(), dtype=np.float32)
    return LayerTransform(
        layer_id, stored, stored, eigenvalues=eigenvalues.numpy().astype(np.float32)
    )
