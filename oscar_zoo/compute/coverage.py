"""Whether moments hold all that a fit reads: every head of every layer, all tokens, finite energy.

A head that was never observed still gives a file that looks valid, so nothing is fitted before these checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ComputeFailed

if TYPE_CHECKING:
    from oscar_zoo.compute.moments import LayerMoments, Need


def check_counts(layer_id: int, layer: LayerMoments, geometry: Geometry, tokens: int, needs: Set[Need]) -> None:
    """Every head of a layer saw `tokens` tokens of all its queries, and everything that `needs` names; raises."""
    heads = geometry.num_kv_heads
    group = geometry.num_q_heads // heads
    if layer.heads != tuple(range(heads)):
        raise uncovered(f"layer {layer_id} has the KV heads {list(layer.heads)}, the model {heads}")
    if layer.tokens == 0 or layer.tokens != tokens:
        raise uncovered(f"layer {layer_id} saw {layer.tokens} tokens, another layer {tokens}")
    if layer.query_rows != group * tokens:
        raise uncovered(f"layer {layer_id} saw {layer.query_rows} query rows, expected {group} x {tokens}")
    if "weighted" in needs and layer.weighted_tokens != tokens:
        raise uncovered(f"layer {layer_id} weighed {layer.weighted_tokens} of {tokens} tokens")
    if "outputs" in needs and layer.output_rows != group * tokens:
        raise uncovered(f"layer {layer_id} saw {layer.output_rows} output rows, expected {group} x {tokens}")
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
                hint="the model computes nothing there that can be calibrated; try --dtype float32",
            )


def uncovered(what: str) -> ComputeFailed:
    """The error that says what is missing."""
    return ComputeFailed(f"the capture is incomplete: {what}.", hint="nothing was written; report the model")
