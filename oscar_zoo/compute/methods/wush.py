"""`wush`: per head and side the invertible transform that makes quantization errors cost least.

Quantizing the rows x T^T of a tensor with Gram matrix M under a loss with Hessian Hs costs about
tr(T M T^T) tr(T^-T Hs T^-1), which no invertible T brings below (sum sigma)^2, sigma the singular
values of M^(1/2) Hs^(1/2). With L L^T = Hs and U diag(lambda) U^T = L^T M L, both damped,

    T = c H diag(lambda)^(-1/4) U^T L^T,    c = sqrt((1 + gamma) tr M / tr lambda^(1/2))

attains it at gamma = 0; a rotation leaves tr M tr Hs. Keys: M = `kk/1`, Hs = 2 sum over the group's
queries of q^T q. Values: M = `vv/1`, Hs = 2 sum over the group's heads of W_j^T W_j, from weights
only. All in float64. In the row form of files `rotation` is T^T and its partner T^-1.

Two choices differ from the paper. First, eigenvectors meet the rows of H in descending order. The
constant row of H then turns the strongest direction into a shift of the whole row, and the offset
of an asymmetric quantizer stores that shift without error. Second, damping adds a share of the
diagonal instead of the identity, so rescaled channels (k by D and q by D^-1) store the same rows.
With the identity, outlier channels drown the weak ones on which the loss depends. A channel that is
zero in all rows, such as one that the norm of keys switches off, has no diagonal to add a share of:
it gets `WUSH_EMPTY` of the mean.

Source: WUSH-KV: KV Cache Quantization with Data-Adaptive Transforms (sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet
from oscar_zoo.artifact.manifest import Composition, Estimator, Estimators
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.artifact.statistics import WUSH_EMPTY, WUSH_NOTHING
from oscar_zoo.compute.methods.base import (
    FittedPair,
    Forecast,
    Matrix,
    Method,
    each_layer,
    eigenbasis,
    hadamard_matrix,
)
from oscar_zoo.compute.methods.feedback import DAMPING, with_feedback
from oscar_zoo.compute.moments import LOSS_WINDOWS, Moments, estimate
from oscar_zoo.errors import ComputeFailed

GAMMA = 1e-2
"""Damping of both matrices: the share of its diagonal that is added (WUSH-KV, default)."""
PARAMS: Mapping[str, float | int | str | bool] = {"damping": "diagonal", "gamma": GAMMA}
FEEDBACK: Mapping[str, float | int | str | bool] = {"feedback": "keys", "feedback_damping": DAMPING}
LOSS: Mapping[str, float | int | str | bool] = {
    "loss": "latent-loss/1",
    "sink": LOSS_WINDOWS.sink,
    "recent": LOSS_WINDOWS.recent,
}
BF16_LIMIT = 2e-2
"""Largest error of logits or outputs from matrices in bfloat16; plain bfloat16 rows have 2e-3."""


Stored = NDArray[np.float32]


def transform(
    gram: Tensor, hessian: Tensor, *, gamma: float = GAMMA
) -> tuple[Tensor, Tensor, Tensor]:
    """The transforms of M = `gram` and Hs = `hessian`; scales do not matter. Both are `[heads, d,
    d]` float64 and symmetric, and so are T^T = c L U diag(lambda)^(-1/4) J H and its partner T^-1 =
    c^-1 L^-T U diag(lambda)^(1/4) J H, J the reversal of order; with them lambda, `[heads, d]`,
    ascending."""
    # flipped, so that the strongest direction meets the constant row
    flat = hadamard_matrix(gram.shape[-1], gram.device).flip(0)
    lower, failed = torch.linalg.cholesky_ex(_damped(hessian, gamma))
    values, vectors = eigenbasis(lower.mT @ _damped(gram, gamma) @ lower)
    if bool(failed.any()) or not bool((values[..., 0] > 0).all()):
        raise ComputeFailed(
            "a matrix of the statistics is singular or not finite.",
            hint="use another method, such as oscar-per-head",
        )
    trace = torch.diagonal(gram, dim1=-2, dim2=-1).sum(-1)
    c = ((1 + gamma) * trace / values.sqrt().sum(-1)).sqrt()[..., None, None]
    forward = c * (lower @ vectors * values[..., None, :] ** -0.25) @ flat
    partner = (
        torch.linalg.solve_triangular(lower.mT, vectors * values[..., None, :] ** 0.25, upper=True)
        @ flat
        / c
    )
    return forward, partner, values


def as_stored(forward: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 copies of `forward`, `[.., d, d]` float64, and of its partner, as float64. Their
    product is as close to the identity as float32 allows.

    Where outlier channels give a matrix rows of very different size, plain rounding of both makes a
    product that verification refuses. So the partner is that of the rounded `forward`, and rounded
    one column after the other, each making up for what the ones before did to the product (Babai's
    nearest plane): an error 3 to 10 times smaller.
    """
    stored = forward.float().double()
    exact = torch.linalg.inv_ex(stored).inverse.mT
    upper, partner = torch.linalg.qr(stored).R, exact.clone()
    for at in reversed(range(forward.shape[-1])):
        done = (partner - exact)[..., at + 1 :] @ upper[..., at, at + 1 :, None]
        partner[..., at] = (
            (exact[..., at] - done[..., 0] / upper[..., at, at, None]).float().double()
        )
    return stored, partner


def headroom(gram: Tensor, hessian: Tensor) -> Tensor:
    """The largest gain of any transform over the best rotation, `[heads]`: tr M tr Hs / (sum
    sigma)^2, at least 1. Both matrices are `[heads, d, d]` float64, undamped."""
    d = gram.shape[-1]
    traces = [torch.diagonal(matrix, dim1=-2, dim2=-1).sum(-1) for matrix in (gram, hessian)]
    # sigma^2 are the eigenvalues of M Hs; a relative shift far below float32 lets Cholesky take a
    # singular Hs
    shift = torch.eye(d, dtype=hessian.dtype, device=hessian.device)
    lower = torch.linalg.cholesky(hessian + (1e-12 / d * traces[1])[..., None, None] * shift)
    squares = torch.linalg.eigvalsh(lower.mT @ gram @ lower)
    return traces[0] * traces[1] / squares.clamp_min(0).sqrt().sum(-1) ** 2


def rounding_error(forward: Tensor, partner: Tensor, gram: Tensor, hessian: Tensor) -> Tensor:
    """Relative error that bfloat16 copies of both matrices make in logits or outputs: `[heads]`,
    from `[heads, d, d]` float64 each. A row x becomes x (I + E), E = forward partner^T - I of the
    copies; the loss sees tr(E Hs E^T M) of tr(M Hs)."""
    copies = [matrix.bfloat16().double() for matrix in (forward, partner)]
    error = copies[0] @ copies[1].mT - torch.eye(
        gram.shape[-1], dtype=gram.dtype, device=gram.device
    )
    lost = (error @ hessian @ error.mT * gram).sum((-2, -1))
    seen = (gram * hessian).sum((-2, -1))  # nothing, where keys and queries use other channels
    return torch.where(seen > 0, lost / seen, 0.0).clamp_min(0).sqrt()


def fit(moments: Moments, *, gamma: float = GAMMA) -> FittedPair:
    """Transforms of all layers and heads, float32, with the undamped matrices they come from."""
    names = ("qqt/1", "kk/1", "vv/1", "wo/1")
    qq, kk, vv, wo = (estimate(moments, name, "kv_head") for name in names)
    group = moments.geometry.num_q_heads // moments.geometry.num_kv_heads
    layer_ids = tuple(sorted(moments.layers))
    sides: dict[Role, RotationSet] = {}
    forecasts: dict[Role, Forecast] = {}
    pairs: tuple[tuple[Role, Tensor, Tensor], ...] = (
        ("k", torch.from_numpy(kk), 2 * group * torch.from_numpy(qq)),
        ("v", torch.from_numpy(vv), 2 * torch.from_numpy(wo)),
    )
    for role, gram, hessian in pairs:
        sides[role], forecasts[role] = _fit_side(role, layer_ids, gram, hessian, gamma)
    targets: dict[StatisticName, Matrix] = {"qq": qq, "kk": kk, "vv": vv, "wo": wo}
    return with_feedback(FittedPair(sides["k"], sides["v"], targets, forecasts))


def fit_latents(moments: Moments, *, gamma: float = GAMMA) -> FittedPair:
    """The same for latents: the transforms of keys, whose loss is that of the row, are those of
    values, too."""
    kk, loss = (estimate(moments, name, "kv_head") for name in ("kk/1", "latent-loss/1"))
    layer_ids, hessian = tuple(sorted(moments.layers)), 2 * moments.geometry.num_q_heads * loss
    side, forecast = _fit_side(
        "k", layer_ids, torch.from_numpy(kk), torch.from_numpy(hessian), gamma
    )
    pair = with_feedback(FittedPair(side, side, {"qq": loss, "kk": kk}, {"k": forecast}))
    return replace(pair, v=pair.k)


def _fit_side(
    role: Role, layer_ids: Sequence[int], gram: Tensor, hessian: Tensor, gamma: float
) -> tuple[RotationSet, Forecast]:
    found = each_layer(lambda both: _fit_layer(*both, gamma), list(zip(gram, hessian, strict=True)))
    numbers = torch.stack([numbers for _, numbers in found], 1).numpy()
    forecast = Forecast(*map(np.asarray, numbers))
    _check_rounding(role, layer_ids, forecast)
    layers = tuple(
        LayerTransform(layer, forward, partner, eigenvalues=values)
        for layer, ((forward, partner, values), _) in zip(layer_ids, found, strict=True)
    )
    side = RotationSet(3, f"wush_{role}", "kv_head", "wush", False, False, layers, role=role)
    return side, forecast


def _fit_layer(gram: Tensor, hessian: Tensor, gamma: float) -> tuple[list[Stored], Tensor]:
    """Transforms and eigenvalues of one layer in float32, and `[3, heads]`: headroom, condition,
    bfloat16 error."""
    gram, hessian = _not_zero(gram), _not_zero(hessian)
    forward, partner, values = transform(gram, hessian, gamma=gamma)
    norms = [torch.linalg.eigvalsh(one @ one.mT)[..., -1].sqrt() for one in (forward, partner)]
    numbers = (
        headroom(gram, hessian),
        norms[0] * norms[1],
        rounding_error(forward, partner, gram, hessian),
    )
    stored = [
        np.ascontiguousarray(tensor.numpy(), dtype=np.float32)
        for tensor in (*as_stored(forward), values)
    ]
    return stored, torch.stack(numbers)


def _check_rounding(role: Role, layer_ids: Sequence[int], forecast: Forecast) -> None:
    worst = np.unravel_index(forecast.bf16_error.argmax(), forecast.bf16_error.shape)
    error, condition = forecast.bf16_error[worst], forecast.condition[worst]
    if not error <= BF16_LIMIT:
        raise ComputeFailed(
            f"wush: bfloat16 would change {role.upper()} of layer {layer_ids[int(worst[0])]}, KV"
            f" head {worst[1]} by {error:.1%} (condition {condition:.0f}); at most {BF16_LIMIT:.0%}"
            " is served.",
            hint="use another method, such as oscar-per-head",
        )


def _damped(matrix: Tensor, gamma: float) -> Tensor:
    diagonal = torch.diagonal(matrix, dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    added = torch.where(
        diagonal > WUSH_NOTHING * mean, gamma * diagonal, bool(gamma) * WUSH_EMPTY * mean
    )
    return matrix + torch.diag_embed(added)


def _not_zero(matrices: Tensor) -> Tensor:
    """The identity for a head whose rows are all zero, where every transform does as well."""
    zero = (torch.diagonal(matrices, dim1=-2, dim2=-1).sum(-1) == 0)[..., None, None]
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    return torch.where(zero, identity, matrices)


METHOD = Method(
    name="wush",
    variant="wush",
    needs=frozenset({"rows", "weights"}),
    estimators=Estimators(
        k=Estimator(id="wush-k/1", params={**PARAMS, **FEEDBACK}),
        v=Estimator(id="wush-v/1", params=dict(PARAMS)),
    ),
    composition=Composition(
        id="wush", hadamard="sylvester", permutation="descending", signs="max-abs-positive"
    ),
    fit=fit,
    requires=("per_head", "k_partner", "v_partner", "k_feedback"),
)
LATENT = replace(
    METHOD,
    needs=frozenset({"rows"}),
    estimators=Estimators(
        k=Estimator(id="wush-k/1", params={**PARAMS, **FEEDBACK, **LOSS}),
        v=Estimator(id="wush-k/1", params={**PARAMS, **FEEDBACK, **LOSS}),
    ),
    fit=fit_latents,
    requires=("per_head", "k_partner", "k_feedback"),
)
