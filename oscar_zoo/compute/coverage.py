"""Checks that moments hold everything that a fit reads.

Every head of every layer must have seen all tokens, with finite energy. A head that was never
observed still gives a file that looks valid, so these checks come before every fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch

from oscar_zoo.artifact.manifest import Coverage
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.layer_moments import LayerMoments, Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed

_BROKEN = "the model computes nothing there that can be calibrated; try --dtype float32"


def check(moments: Moments, needs: Set[Need]) -> None:
    """Prove that every layer and head of the model saw the same tokens, with finite energy.

    Args:
        moments: of the whole model.
    """
    if not needs:
        return
    geometry = moments.geometry
    if tuple(sorted(moments.layers)) != geometry.attention_layers:
        missing = sorted(set(geometry.attention_layers) ^ set(moments.layers))
        raise ComputeFailed.incomplete(f"layers {missing} were captured or expected, not both")
    first = next(iter(moments.layers.values())).tokens
    for layer_id, layer in moments.layers.items():
        _check_counts(layer_id, layer, geometry, first, needs)
        _check_traces(layer_id, layer, needs)


def _check_counts(
    layer_id: int, layer: LayerMoments, geometry: Geometry, tokens: int, needs: Set[Need]
) -> None:
    """Refuse a layer in which a head missed tokens or queries, or a sum that `needs` names."""
    heads = geometry.num_kv_heads
    group = geometry.num_q_heads // heads
    if layer.heads != tuple(range(heads)):
        raise ComputeFailed.incomplete(
            f"layer {layer_id} has the KV heads {list(layer.heads)}, the model {heads}"
        )
    if layer.tokens == 0 or layer.tokens != tokens:
        raise ComputeFailed.incomplete(
            f"layer {layer_id} saw {layer.tokens} tokens, another layer {tokens}"
        )
    if layer.query_rows != group * tokens:
        raise ComputeFailed.incomplete(
            f"layer {layer_id} saw {layer.query_rows} query rows, expected {group} x {tokens}"
        )
    if "weighted" in needs and layer.weighted_tokens != tokens:
        raise ComputeFailed.incomplete(
            f"layer {layer_id} weighed {layer.weighted_tokens} of {tokens} tokens"
        )
    if "outputs" in needs and layer.output_rows != group * tokens:
        raise ComputeFailed.incomplete(
            f"layer {layer_id} saw {layer.output_rows} output rows, expected {group} x {tokens}"
        )
    if "weights" in needs and layer.wo is None:
        raise ComputeFailed.incomplete(f"layer {layer_id} has no output projection")


def _check_traces(layer_id: int, layer: LayerMoments, needs: Set[Need]) -> None:
    """Refuse a layer in which a head has no finite, positive energy in a sum of `needs`."""
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
    """Refuse a layer in which any sum has a NaN or infinite entry; raises `ComputeFailed`."""
    for name in ("qq", "kk", "vv", "oo", "sst_num", "sst_den", "wo"):
        tensor = getattr(layer, name)
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ComputeFailed(
                f"layer {layer_id}: {name} has NaN or infinite values.", hint=_BROKEN
            )


def needs_met(moments: Moments) -> frozenset[Need]:
    """Every kind of sum that at least one layer holds; `check` decides whether it is complete."""
    layers = moments.layers.values()
    met: dict[Need, bool] = {
        "rows": any(layer.tokens for layer in layers),
        "weighted": any(layer.weighted_tokens for layer in layers),
        "outputs": any(layer.output_rows for layer in layers),
        "weights": any(layer.wo is not None for layer in layers),
    }
    return frozenset(need for need, there in met.items() if there)


def observed(moments: Moments, *, tp: int = 1, pp: int = 1, dp: int = 1) -> Coverage:
    """The coverage block of a manifest.

    Args:
        moments: of the whole model.
        dp: ranks over which tokens were split.
    """
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
