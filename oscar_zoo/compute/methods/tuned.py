"""`wush-tuned`: WUSH's transforms, tuned to the real quantizer on rows of the calibration text.

WUSH is optimal for a model of the quantizer in which an error depends on the mean energy of rows.
The real error is a rounding residue times a scale, and the largest and the smallest entry of each
row set that scale. So this method starts from WUSH's transform F0 and finds F = F0 N with Adam,
starting at N = I. With rows x0 = k F0, and Hs0 = F0^-1 Hs F0^-T, it minimizes

    loss = mean of e Hs' e^T,    where    x = x0 N,    Hs' = N^-1 Hs0 N^-T,
    e = r s,    s = (max - min) / 3 of each group of x.

The rounding residue r, in units of s, is treated as a constant: a straight-through gradient sees
how s depends on N, and how N^-1 carries e back. With E = mean of e^T e, and with G the gradient by
x, which is 0 except at the two entries that set a scale,

    d loss / d N = x0^T G - 2 N^-T E Hs'.

Keys are rounded with feedback (`feedback`), which leaves D of Hs' = (I + U) D (I + U)^T of the cost
of an error. Residues are about uniform then, whatever the rows, so the loss of keys is

    (mean of s^2) (sum of D),

and its gradient is found by autograd. Transforms that were tuned for it have a fifth less
divergence on SmolLM2-135M than those that were tuned for rounding to nearest.

Nothing is clipped during the tuning. We measured that a transform tuned without a clip is as good
with a clip as one that was tuned for it. A head keeps WUSH's transform when the tuned one is no
better on rows that were kept apart, or is less exact to serve. Rows are drawn in a fixed order, the
same for all heads, so results repeat bit for bit on one machine. Files have the format of WUSH's,
with the eigenvalues of the start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_kernels.spec import LEVELS, MIN_RANGE, QuantSpec, group_channels
from oscar_zoo.artifact.checks import CONDITION_LIMIT, FP32_LIMIT
from oscar_zoo.artifact.formats import LayerTransform, Role, RotationSet
from oscar_zoo.artifact.manifest import Estimator, Estimators
from oscar_zoo.artifact.specs import StatisticName
from oscar_zoo.compute.methods import feedback, wush
from oscar_zoo.compute.methods.base import CalibrationRows, FittedPair, Forecast, each_layer
from oscar_zoo.errors import ComputeFailed

STEPS, BATCH, RATE, SEED = 300, 2048, 2e-2, 0
"""Steps of Adam, rows per step, step size (it falls linearly to 0), seed of the order of rows."""
CHECKED = 8
"""The last 1/8 of the rows is kept apart, and the result is checked on it."""
SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the way from WUSH's transform to the tuned one; the best that can be served is kept."""
LEAST_ROWS = 16
"""With fewer rows per channel, tuning would fit noise."""
AT_ONCE = {"cpu": 0, "cuda": 1 << 28}
"""Numbers of rows whose layers are tuned together, if there is more than one. A GPU needs many
small products at once to be busy; 1 GB of float32."""
_MATRICES: dict[Role, tuple[StatisticName, StatisticName]] = {"k": ("kk", "qq"), "v": ("vv", "wo")}


@dataclass(frozen=True)
class _Heads:
    """Heads of one side of some layers, `n` in all; each `[n, d, d]` float64 on the device where to
    compute: transform and partner of WUSH, and the undamped matrices."""

    forward: Tensor
    partner: Tensor
    gram: Tensor
    hessian: Tensor


def tune(pair: FittedPair, rows: CalibrationRows, tick: Callable[[int, int], None]) -> FittedPair:
    """Improve WUSH's transforms on rows. A tick is one step for all heads of a layer's side."""
    total, done, one_at_a_time = 2 * len(pair.k.layers) * STEPS, 0, Lock()

    def told(layers: int) -> None:
        nonlocal done
        with one_at_a_time:
            done += layers
            tick(done, total)

    sides = {role: _side(role, pair, rows, told) for role in ("k", "v")}
    (k, k_forecast), (v, v_forecast) = sides["k"], sides["v"]
    tuned = replace(pair, k=k, v=v, forecasts={"k": k_forecast, "v": v_forecast})
    return feedback.with_feedback(tuned)


def minimise(
    rows: Tensor,
    hessian: Tensor,
    group_size: int,
    tick: Callable[[], None] = lambda: None,
    *,
    fed_back: bool = False,
) -> Tensor:
    """N after all steps, `[n, d, d]` float32, for x0 of n heads, `[n, T, d]` float32, and Hs0, `[n,
    d, d]` float32, whose scale does not matter; for rows that are rounded to nearest, or with
    feedback."""
    slope = fed_back_gradient if fed_back else gradient
    identity = torch.eye(rows.shape[-1], device=rows.device)
    found = identity.expand_as(hessian).clone()
    hessian = hessian / ((rows @ hessian) * rows).sum(-1).mean(-1)[:, None, None]
    adam = torch.optim.Adam([found], lr=RATE)
    draw = torch.Generator("cpu").manual_seed(SEED)  # the same order on every device
    order = torch.randint(rows.shape[1], (STEPS, BATCH), generator=draw, device="cpu").to(
        rows.device
    )
    for step in range(STEPS):
        adam.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        found.grad = slope(rows[:, order[step]], hessian, found, group_size)
        adam.step()
        tick()
    return found


def gradient(rows: Tensor, hessian: Tensor, n: Tensor, group_size: int) -> Tensor:
    """d loss / d N at `n`, `[n, d, d]`; arguments as of `minimise`."""
    inverse = torch.linalg.inv_ex(n).inverse
    x = (rows @ n).unflatten(-1, (-1, group_size))
    (high, at_high), (low, at_low) = x.max(-1, keepdim=True), x.min(-1, keepdim=True)
    scale = (high - low).clamp_min(MIN_RANGE) / (LEVELS - 1)
    codes = (x - low) / scale
    residue = (codes + 0.5).floor().sub_(codes)
    error = (residue * scale).flatten(-2)
    seen = inverse @ hessian @ inverse.mT
    share = 2 / rows.shape[1]
    by_error = ((error @ seen) * share).unflatten(-1, (-1, group_size))
    by_scale = (by_error * residue).sum(-1, keepdim=True) / (LEVELS - 1)
    by_x = torch.zeros_like(x).scatter_(-1, at_high, by_scale)
    # the same entry twice in a constant group only, where nothing is lost
    by_x.scatter_(-1, at_low, -by_scale)
    return rows.mT @ by_x.flatten(-2) - share * (inverse.mT @ (error.mT @ error) @ seen)


def fed_back_gradient(rows: Tensor, hessian: Tensor, n: Tensor, group_size: int) -> Tensor:
    """The gradient of the logarithm of the loss with feedback; arguments as of `minimise`."""
    with torch.enable_grad():
        at = n.detach().requires_grad_()
        inverse = torch.linalg.inv_ex(at).inverse
        kept = torch.diagonal(feedback.roots(inverse @ hessian @ inverse.mT), dim1=-2, dim2=-1)
        x = (rows @ at).unflatten(-1, (-1, group_size))
        ranges = x.amax(-1) - x.amin(-1)
        cost = ranges.square().mean((-2, -1)) * kept.square().sum(-1)
        (found,) = torch.autograd.grad(cost.log().sum(), at)
    return found


def loss(
    rows: Tensor,
    forward: Tensor,
    partner: Tensor,
    hessian: Tensor,
    group_size: int,
    *,
    fed_back: bool = False,
) -> Tensor:
    """Cost of INT2 without a clip, as served: mean of e Hs e^T over rows `[n, T, d]` as they are
    cached, `[n]` float32. The matrices are `[n, d, d]` float64."""
    x = rows.float() @ forward.float()
    carried = feedback.matrices(partner, hessian) if fed_back else None
    error = fake_quantize(x, QuantSpec(x.shape[-1], group_size), carried) - x
    return ((error @ (partner.mT @ hessian @ partner).float()) * error).sum(-1).mean(-1)


def layers_at_once(device: torch.device, numel: int) -> int:
    """Layers that are tuned together, if each has so many numbers in its rows."""
    return max(1, AT_ONCE[device.type] // numel)


def _side(
    role: Role, pair: FittedPair, rows: CalibrationRows, tick: Callable[[int], None]
) -> tuple[RotationSet, Forecast]:
    side, forecast = (pair.k, pair.forecasts["k"]) if role == "k" else (pair.v, pair.forecasts["v"])
    gram, hessian = (torch.from_numpy(pair.targets[name]) for name in _MATRICES[role])

    def some_layers(at: range) -> tuple[list[LayerTransform], Tensor]:
        some, device = [side.layers[n] for n in at], rows.device
        matrices = (
            torch.from_numpy(np.stack([one.forward for one in some])),
            torch.from_numpy(np.stack([one.partner for one in some])),
            gram[list(at)],
            hessian[list(at)],
        )
        heads = _Heads(*(one.to(device).double().flatten(0, 1) for one in matrices))
        kept = torch.cat([rows.of(role, one.layer_id) for one in some])
        group_size = group_channels(kept.shape[-1], rows.group_size)
        tuned = _tuned(heads, kept, group_size, lambda: tick(len(at)), fed_back=role == "k")
        forward, partner = (
            x.unflatten(0, (len(at), -1)).cpu().numpy() for x in (tuned.forward, tuned.partner)
        )
        numbers = torch.stack(_served(tuned)).unflatten(1, (len(at), -1)).cpu()
        layers = []
        for before, *pair in zip(some, forward, partner, strict=True):
            mine, theirs = (np.ascontiguousarray(x, dtype=np.float32) for x in pair)
            layers.append(replace(before, forward=mine, partner=theirs))
        return layers, numbers

    number = len(side.layers)
    size = layers_at_once(rows.device, rows.of(role, side.layers[0].layer_id).numel())
    chunks = [range(first, min(first + size, number)) for first in range(0, number, size)]
    found = (
        each_layer(some_layers, chunks)
        if rows.device.type == "cpu"
        else [some_layers(at) for at in chunks]
    )
    layers = tuple(layer for some, _ in found for layer in some)
    condition, bf16_error = torch.cat([numbers for _, numbers in found], 1).numpy()
    return replace(side, layers=layers), Forecast(forecast.headroom, condition, bf16_error)


def _tuned(
    heads: _Heads, rows: Tensor, group_size: int, tick: Callable[[], None], *, fed_back: bool
) -> _Heads:
    """The heads, tuned where that is better."""
    width, held = rows.shape[-1], rows.shape[1] // CHECKED
    if rows.shape[1] < LEAST_ROWS * width:
        raise ComputeFailed(
            f"{rows.shape[1]:,} tokens are too few to tune {width} channels with.",
            hint=f"use at least {LEAST_ROWS * width:,} tokens",
        )
    learn, check = rows[:, :-held], rows[:, -held:]
    before = heads.partner.mT @ heads.hessian @ heads.partner
    starts = learn.float() @ heads.forward.float()
    n = minimise(starts, before.float(), group_size, tick, fed_back=fed_back).double()
    identity = torch.eye(width, dtype=n.dtype, device=n.device)

    def lost(some: _Heads) -> Tensor:
        matrices = some.forward, some.partner, some.hessian
        return loss(check, *matrices, group_size, fed_back=fed_back)

    best, least = heads, lost(heads)
    for share in SHARES:  # of the way, where all of it cannot be served
        forward, partner = wush.as_stored(heads.forward @ torch.lerp(identity, n, share))
        some = replace(heads, forward=forward, partner=partner)
        condition, bf16_error = _served(some)
        miss = (forward @ partner.mT - identity).abs().amax((-2, -1))
        found = lost(some)
        better = (found < least) & (condition < CONDITION_LIMIT) & (bf16_error <= wush.BF16_LIMIT)
        better &= miss < FP32_LIMIT / 2  # half of what is verified
        least = torch.where(better, found, least)
        chosen = better[:, None, None]
        best = replace(
            best,
            forward=torch.where(chosen, forward, best.forward),
            partner=torch.where(chosen, partner, best.partner),
        )
    return best


def _served(heads: _Heads) -> tuple[Tensor, Tensor]:
    """Condition and error of bfloat16 copies, `[n]` each; infinite where a matrix is not finite."""
    norms = [torch.linalg.matrix_norm(x.nan_to_num(), 2) for x in (heads.forward, heads.partner)]
    finite = heads.partner.isfinite().all(-1).all(-1)
    error = wush.rounding_error(heads.forward, heads.partner, heads.gram, heads.hessian)
    return torch.where(finite, norms[0] * norms[1], torch.inf), torch.where(
        finite, error, torch.inf
    )


_PARAMS: Mapping[str, float | int | str | bool] = {
    **wush.PARAMS,
    "steps": STEPS,
    "batch": BATCH,
    "rate": RATE,
    "seed": SEED,
}
METHOD = replace(
    wush.METHOD,
    name="wush-tuned",
    variant="wush-tuned",
    estimators=Estimators(
        k=Estimator(id="wush-tuned-k/1", params={**_PARAMS, **wush.FEEDBACK}),
        v=Estimator(id="wush-tuned-v/1", params=dict(_PARAMS)),
    ),
    composition=None,  # of the start only
    tune=tune,
    variant_of="wush",
)
