"""Whether moments hold all that a fit reads: every head of every layer, all tokens, finite energy.

A head that was never observed still gives a file that looks valid, so nothing is fitted before
these checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch

from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ComputeFailed

if TYPE_CHECKING:
    from oscar_zoo.compute.moments import LayerMoments, Moments, Need
_BROKEN = "the model computes nothing there that can be calibrated; try --dtype float32"


def check_counts(
    layer_id: int, layer: LayerMoments, geometry: Geometry, tokens: int, needs: Set[Need]
) -> None:
    """Every head of a layer saw `tokens` tokens of all its queries, and everything that `needs`
    names; raises."""
    heads = geometry.num_kv_heads
    group = geometry.num_q_heads // heads
    if layer.heads != tuple(range(heads)):
        raise uncovered(f"layer {layer_id} has the KV heads {list(layer.heads)}, the model {heads}")
    if layer.tokens == 0 or layer.tokens != tokens:
        raise uncovered(f"layer {layer_id} saw {layer.tokens} tokens, another layer {tokens}")
    if layer.query_rows != group * tokens:
        raise uncovered(
            f"layer {layer_id} saw {layer.query_rows} query rows, expected {group} x {tokens}"
        )
    if "weighted" in needs and layer.weighted_tokens != tokens:
        raise uncovered(f"layer {layer_id} weighed {layer.weighted_tokens} of {tokens} tokens")
    if "outputs" in needs and layer.output_rows != group * tokens:
        raise uncovered(
            f"layer {layer_id} saw {layer.output_rows} output rows, expected {group} x {tokens}"
        )
    if "weights" in needs and layer.wo is None:
        raise uncovered(f"layer {layer_id} has no output projection")


def check_traces(layer_id: int, layer: LayerMoments, needs: Set[Need]) -> None:
    """Every head has finite energy in every sum that `needs` names; raises."""
    optional: Mapping[Need, str] = {"weighted": "sst_num", "outputs": "oo", "weights": "wo"}
    for name in ("qq", "kk", "vv", *(optional[need] for need in optional if need in needs)):
        trace = torch.diagonal(getattr(layer, name), dim1=-2, dim2=-1).sum(-1)
        bad = ~(torch.isfinite(trace) & (trace > 0))
        if bool(bad.any()):
            head = int(bad.nonzero()[0])
            value = float(trace[head])
            raise ComputeFailed(
                f"layer {layer_id}, KV head {layer.heads[head]}: trace of {name} is {value:.3g}.",
                hint=_BROKEN,
            )


def check_finite(layer_id: int, layer: LayerMoments) -> None:
    """No sum of a layer has a NaN or infinite entry; raises."""
    for name in ("qq", "kk", "vv", "oo", "sst_num", "sst_den", "wo"):
        tensor = getattr(layer, name)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ComputeFailed(
                f"layer {layer_id}: {name} has NaN or infinite values.", hint=_BROKEN
            )


def needs_met(moments: Moments) -> frozenset[Need]:
    """Every kind of sum that at least one layer holds; whether it is complete, `check_coverage`
    says."""
    layers = moments.layers.values()
    met: dict[Need, bool] = {
        "rows": any(layer.tokens for layer in layers),
        "weighted": any(layer.weighted_tokens for layer in layers),
        "outputs": any(layer.output_rows for layer in layers),
        "weights": any(layer.wo is not None for layer in layers),
    }
    return frozenset(need for need, there in met.items() if there)


def observed(moments: Moments, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Coverage:
    """The coverage block of a manifest; heads were split over `tp` ranks, layers over `pp`, tokens
    over `dp`."""
    counts = [layer.tokens for layer in moments.layers.values()]
    heads = len(next(iter(moments.layers.values())).heads)
    return Coverage(
        layers=len(moments.layers),
        q_heads=heads * (moments.geometry.num_q_heads // moments.geometry.num_kv_heads),
        kv_heads=heads,
        tokens_min=min(counts),
        tokens_max=max(counts),
        tp=tp,
        pp=pp,
        dp=dp,
    )


def uncovered(what: str) -> ComputeFailed:
    """The error that says what is missing."""
    return ComputeFailed(
        f"the capture is incomplete: {what}.", hint="nothing was written; report the model"
    )
