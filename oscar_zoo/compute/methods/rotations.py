"""Orthogonal methods: a rotation R = U H P per layer and side, or per KV head and side.

U makes the error weight diagonal. H makes it flat: every diagonal entry of (U H)^T C (U H) is
tr(C)/d. P alternates strong and weak columns, which matters only when a row has several
quantization groups. Everything is float64. `hadamard` and `identity`, the baselines, use no data.

Source: OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization (arXiv
2605.17757), composition `r_h_pbr`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from oscar_zoo.artifact import statistics
from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard_set, pbr_permutation
from oscar_zoo.artifact.manifest import Composition, Estimator, Estimators
from oscar_zoo.artifact.specs import Capability
from oscar_zoo.compute.methods.base import (
    FittedPair,
    Method,
    each_layer,
    eigenbasis,
    hadamard_matrix,
)
from oscar_zoo.compute.moments import TARGETS, Moments, Need, estimate

_HESSIANS = {matrix: hessian for hessian, matrix in statistics.TARGETS.items()}
"""Name of a target matrix -> the word for it in the objective of a file."""


def rotate(moments: Moments, k: str, v: str, format_version: Literal[1, 2] = 1) -> FittedPair:
    """Rotations that diagonalize the estimators `k` and `v`, such as `qqt/1`; any but `wo/1`, which
    no file can name. Format 1 has one matrix per layer, of the mean over KV heads, format 2 one per
    layer and KV head."""
    grouping: Literal["layer", "kv_head"] = "layer" if format_version == 1 else "kv_head"
    layer_ids = tuple(sorted(moments.layers))
    sides, targets = [], {}
    for estimator in (k, v):
        stack = targets[TARGETS[estimator]] = estimate(moments, estimator, grouping)
        layers = []
        found = each_layer(r_h_pbr, list(torch.from_numpy(stack)))
        for layer_id, (rotation, eigenvalues) in zip(layer_ids, found, strict=True):
            stored = np.ascontiguousarray(rotation.numpy(), dtype=np.float32)
            values = eigenvalues.numpy().astype(np.float32)
            layers.append(LayerTransform(layer_id, stored, stored, eigenvalues=values))
        side = RotationSet(
            format_version=format_version,
            objective=f"{_HESSIANS[TARGETS[estimator]]}_r_h_pbr",
            grouping=grouping,
            transform="oscar",
            orthogonal=True,
            centered=False,
            layers=tuple(layers),
        )
        sides.append(side)
    return FittedPair(sides[0], sides[1], targets)


def r_h_pbr(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The rotations U H P of symmetric matrices, and their ascending eigenvalues. `[..., d, d]`
    float64 in; `[..., d, d]` and `[..., d]` out."""
    d = covariance.shape[-1]
    flat = hadamard_matrix(d, covariance.device)
    values, vectors = eigenbasis(covariance)
    order = pbr_permutation(np.arange(d))  # eigenvalues ascend, so P is always the same
    return (vectors @ flat)[..., torch.tensor(order, device=covariance.device)], values


def _hadamard(moments: Moments) -> FittedPair:
    """The same Hadamard matrix in every layer: every comparison uses it as the baseline."""
    geometry = moments.geometry
    return FittedPair(hadamard_set(geometry, "k"), hadamard_set(geometry, "v"), {})


def _identity(moments: Moments) -> FittedPair:
    """R = I, the cache as the model makes it: a baseline to measure against that no artifact
    holds."""

    def side(width: int) -> RotationSet:
        matrix = np.eye(width, dtype=np.float32)
        layers = [LayerTransform(i, matrix, matrix) for i in moments.geometry.attention_layers]
        return RotationSet(
            1,
            "identity",
            "layer",
            "identity",
            orthogonal=True,
            centered=False,
            layers=tuple(layers),
        )

    return FittedPair(side(moments.geometry.head_dim), side(moments.geometry.v_head_dim), {})


def _oscar(
    name: str,
    variant: str | None,
    needs: set[Need],
    *,
    v: str = "sst/1",
    format_version: Literal[1, 2] = 1,
    requires: tuple[Capability, ...] = (),
) -> Method:
    """A method whose keys target `qqt/1`."""
    return Method(
        name=name,
        variant=variant,
        needs=frozenset(needs),
        estimators=Estimators(k=Estimator(id="qqt/1"), v=Estimator(id=v)),
        composition=Composition(
            id="r_h_pbr", hadamard="sylvester", permutation="bit-reversal", signs="max-abs-positive"
        ),
        fit=partial(rotate, k="qqt/1", v=v, format_version=format_version),
        requires=requires,
    )


IDENTITY = Method("identity", "identity", frozenset(), None, None, _identity, publishable=False)
HADAMARD = Method(
    "hadamard",
    "hadamard",
    frozenset(),
    None,
    Composition(id="hadamard", hadamard="sylvester"),
    _hadamard,
)
OSCAR = _oscar("oscar", None, {"rows", "weighted"})
"""What the published code computes: the mean over KV heads of `qqt/1` and of `sst/1`."""
LATENT = replace(
    OSCAR,
    needs=frozenset({"rows"}),
    estimators=Estimators(k=Estimator(id="kk/1"), v=Estimator(id="kk/1")),
    fit=partial(rotate, k="kk/1", v="kk/1"),
)
"""Of latents, the second moment of the rows themselves, as OSCAR's authors publish it for GLM."""
OSCAR_EXACT = _oscar("oscar-exact", "exact", {"rows", "outputs"}, v="oo/1")
"""Values target the covariance that the paper defines, V^T S^T S V with the causal softmax scores
S. The rows of S V are the outputs of the heads, so it streams like any other second moment."""
OSCAR_PER_HEAD = _oscar(
    "oscar-per-head", "per-head", {"rows", "weighted"}, format_version=2, requires=("per_head",)
)
"""When the heads of a layer attend to different channels, their mean covariance is nearly flat and
a shared rotation gains nothing. One matrix per head costs memory, and formats that share one matrix
cannot hold it."""
