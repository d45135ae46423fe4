"""Attention over the INT2 cache in plain PyTorch, one request after the other, on any device.

It defines what every other executor must compute. Transforms, scores and sums are float32; a token
is rounded to the type of the model only where it is kept in a ring or among the sinks.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import torch
from torch import Tensor

from oscar_zoo.runtime.slot_store import SlotStore
from oscar_zoo.runtime.step import Step, StepRequest
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowStore


def attend(q: Tensor, k: Tensor, v: Tensor, *, scaling: float, first: int) -> Tensor:
    """Causal attention of queries at positions `first`, `first + 1`, ... over keys at positions 0,
    1, ...

    Args:
        q: `[queries, num_q_heads, d]` float32; consecutive heads share a KV head.
        k, v: `[keys, num_kv_heads, ...]` float32.
        scaling: factor of the logits.
        first: position of the first query.

    Returns:
        `[queries, num_q_heads, v_head_dim]` float32.
    """
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scaling
    positions = torch.arange(first, first + q.shape[0], device=q.device)
    hidden = torch.arange(k.shape[0], device=q.device) > positions[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


class TorchExecutor:
    """The `Executor` in force without kernels.

    Args:
        slots, side: the two tiers of one pool.
        transforms: of the layers of this worker.
        mutant: a deliberate bug of the test suite.
    """

    def __init__(
        self, slots: SlotStore, side: WindowStore, transforms: TransformTable, mutant: str = ""
    ) -> None:
        self.slots = slots
        self.side = side
        self.transforms = (
            transforms.with_partner_as_forward() if mutant == "partner_is_forward" else transforms
        )
        self.ring_first = mutant == "ring_before_attention"
        self.reads: Counter[str] = Counter(extend=0, decode=0, sink=0, ring=0, slot=0, slot_sink=0)
        """Calls, and cached tokens read per tier, over all layers; `slot_sink` are those among the
        first tokens."""

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, *, scaling: float
    ) -> Tensor:
        """See `step.Executor`."""
        self.reads["extend"] += 1
        q_rows, k_rows, v_rows = self._transform(layer, q, k, v, step)
        ends = list(accumulate(request.new for request in step.requests))
        spans = [
            slice(end - request.new, end) for request, end in zip(step.requests, ends, strict=True)
        ]
        if self.ring_first:
            self._record(layer, step, spans, k_rows, v_rows)
        out = []
        for request, own in zip(step.requests, spans, strict=True):
            k_old, v_old = self._cached(layer, request)
            k_all, v_all = torch.cat([k_old, k_rows[own]]), torch.cat([v_old, v_rows[own]])
            out.append(attend(q_rows[own], k_all, v_all, scaling=scaling, first=request.prefix))
        self._record(layer, step, spans, k_rows, v_rows)
        return self.transforms.v[layer].output(torch.cat(out)).to(q.dtype)

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, *, scaling: float
    ) -> Tensor:
        """See `step.Executor`."""
        self.reads["decode"] += 1
        q_rows, k_rows, v_rows = self._transform(layer, q, k, v, step)
        out = []
        for i, request in enumerate(step.requests):
            own = slice(i, i + 1)
            self.side.record(layer, request.row, request.prefix, k_rows[own], v_rows[own])
            k_all, v_all = self._cached(layer, request)
            out.append(attend(q_rows[own], k_all, v_all, scaling=scaling, first=request.prefix))
        return self.transforms.v[layer].output(torch.cat(out)).to(q.dtype)

    def _record(
        self, layer: int, step: Step, spans: list[slice], k_rows: Tensor, v_rows: Tensor
    ) -> None:
        for request, own in zip(step.requests, spans, strict=True):
            self.side.record(layer, request.row, request.prefix, k_rows[own], v_rows[own])

    def _transform(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the transformed basis, float32; the cached two are in their slots when this
        returns."""
        pair_k, pair_v = self.transforms.k[layer], self.transforms.v[layer]
        k_rows, v_rows = pair_k.cached(k), pair_v.cached(v)
        self.slots.write(layer, step.out_slots, k_rows, v_rows)
        return pair_k.query(q), k_rows, v_rows

    def _cached(self, layer: int, request: StepRequest) -> tuple[Tensor, Tensor]:
        """K and V of the tokens a request finds in the cache: INT2 first, the uncompressed tier
        laid over it."""
        k, v = self.slots.read(layer, request.slots)
        self.side.overlay(layer, request.row, request.cached, k, v)
        cover = request.cached
        self.reads["sink"] += len(cover.sink)
        self.reads["ring"] += len(cover.ring)
        self.reads["slot"] += cover.compressed
        self.reads["slot_sink"] += cover.compressed_sinks(self.side.shape.sink)
        return k, v
