"""How much error an INT2 cache puts into an attention layer, on held-out rows.

History is what a server reads from INT2: key position at or after the sink and at least `recent` before the query.
Everything else stays exact, in the model's own basis, and so does the side that is not looked at. Three numbers:

* output error `||Y^ - Y||^2 / ||Y||^2` after the output projection, over evenly spaced queries;
* logit error: the same ratio for the logits of the history, the mean of each query removed (softmax ignores it);
* retrieval error: the divergence KL(p || p^) of the attention weights, averaged with the square of the largest weight
  on a single row of the history, so that queries that fetch one row count and queries that look around hardly do.

The first two fall with stronger clipping long after perplexity and recall have begun to rise: clipping shrinks a key
along the very query that looks for it, which an average over all queries does not see and the third number does. Rows
are float32, sums over rows float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.heldout import SCORES_AT_ONCE, LayerRows, SequenceRows, history_mask
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.cache import Side

Pair = tuple[int | None, int | None]
"""Which K side and which V side are read from INT2; `None` for exact."""


@dataclass(frozen=True)
class LayerErrors:
    """Errors of one layer.

    Attributes:
        output: by pair, in the order asked for.
        logit, retrieval: by K side.
        focus: the sum of weights behind `retrieval`, to average over layers with.
    """

    output: tuple[float, ...]
    logit: tuple[float, ...]
    retrieval: tuple[float, ...]
    focus: float


def layer_errors(
    layer_id: int,
    rows: LayerRows,
    windows: Windows,
    sides: tuple[Sequence[Side], Sequence[Side]],
    pairs: Sequence[Pair],
) -> LayerErrors:
    """Measure caches of one layer, all on the same rows.

    Args:
        layer_id: for messages.
        rows: at least one query with history.
        windows: what stays exact.
        sides: K sides and V sides: transform, and quantizer with its clip.
        pairs: which of them to combine.

    Raises:
        ComputeFailed: rows or errors are not finite, or no query has history.
    """
    output = torch.zeros(len(pairs), dtype=torch.float64)
    of_keys = torch.zeros(len(sides[0]), 2, dtype=torch.float64)
    exact = torch.zeros(3, dtype=torch.float64)
    for sequence in rows.sequences:
        k_errors = [_through(side, sequence.key) for side in sides[0]]
        v_errors = [_through(side, sequence.value) for side in sides[1]]
        for block in _blocks(sequence, rows, windows):
            exact += torch.stack([block.output_energy(), block.logit_energy(block.logits), block.focus.sum().cpu()])
            for k in {k: None for k, _ in pairs} | dict.fromkeys(range(len(k_errors))):
                noise = None if k is None else block.logit_noise(k_errors[k])
                if k is not None and noise is not None:
                    of_keys[k] += torch.stack([block.logit_energy(noise), block.divergence(noise)])
                chosen = [n for n, pair in enumerate(pairs) if pair[0] == k]
                values = [None if (v := pairs[n][1]) is None else v_errors[v] for n in chosen]
                if chosen:
                    output[chosen] += block.output_errors(noise, values)
    if not bool((exact[:2] != 0).all()):
        raise ComputeFailed(
            f"layer {layer_id} has no held-out query that reads INT2 rows.",
            hint=f"held-out sequences must be longer than {windows.sink + windows.recent} tokens",
        )
    if not bool(torch.cat([exact, output, of_keys.flatten()]).isfinite().all()):
        raise ComputeFailed(
            f"attention of layer {layer_id} is not finite on held-out text.", hint="try --dtype float32"
        )
    logit, retrieval = of_keys[:, 0] / exact[1], of_keys[:, 1] / exact[2]
    return LayerErrors(
        tuple((output / exact[0]).tolist()), tuple(logit.tolist()), tuple(retrieval.tolist()), float(exact[2])
    )


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; 0 when any value is 0."""
    items = list(values)
    return 0.0 if min(items) <= 0.0 else math.exp(math.fsum(map(math.log, items)) / len(items))


@dataclass(frozen=True)
class _Block:
    """Some queries of a sequence and all that is exact about them; heads of a group are stacked as more queries.

    Attributes:
        query: `[num_kv_heads, g * n, d]`, scaled.
        logits, weights: `[num_kv_heads, g * n, T]`, causal; before and after softmax.
        history: `[g * n, T]` bool: what is read from INT2.
        even: `[n]` float: 1 for queries that output and logit errors count.
        value: `[num_kv_heads, T, dv]`.
        o_proj: `[hidden, num_q_heads * dv]`.
    """

    query: Tensor
    logits: Tensor
    weights: Tensor
    history: Tensor
    even: Tensor
    value: Tensor
    o_proj: Tensor

    @property
    def focus(self) -> Tensor:
        """`[num_kv_heads, g * n]` float64: square of the largest weight on one row of the history."""
        return self.weights.masked_fill(~self.history, 0.0).amax(-1).double() ** 2

    def logit_noise(self, k_error: Tensor) -> Tensor:
        """What an error of the keys `[num_kv_heads, T, d]` adds to the logits; 0 outside the history."""
        return (self.query @ k_error.mT).masked_fill_(~self.history, 0.0)

    def logit_energy(self, logits: Tensor) -> Tensor:
        """Sum over the history of squares of `logits`, each query's mean removed."""
        x = logits.masked_fill(~self.history, 0.0)
        count = self.history.sum(-1).clamp_min(1)
        centered = (x - x.sum(-1, keepdim=True) / count[:, None]).masked_fill_(~self.history, 0.0)
        per_query = (centered**2).sum(-1, dtype=torch.float64)
        return (per_query.unflatten(-1, (-1, len(self.even))) * self.even).sum().cpu()

    def divergence(self, noise: Tensor) -> Tensor:
        """Sum of KL(p || p^) under an error of the logits, times `focus`."""
        # KL = log sum exp(l + e) - log sum exp(l) - sum p e
        change = (self.logits + noise).logsumexp(-1) - self.logits.logsumexp(-1) - (self.weights * noise).sum(-1)
        return (change.double().clamp_min(0) * self.focus).sum().cpu()

    def output_energy(self) -> Tensor:
        """||Y||^2 of the exact output."""
        return self._energies((self.weights @ self.value)[None])[0]

    def output_errors(self, noise: Tensor | None, v_errors: Sequence[Tensor | None]) -> Tensor:
        """||Y^ - Y||^2 for some errors of the values (`None` for none), under one error of the logits."""
        weights, from_keys = self.weights, torch.zeros((), device=self.value.device)
        if noise is not None:
            weights = (self.logits + noise).softmax(-1)
            from_keys = (weights - self.weights) @ self.value
        history = weights.masked_fill(~self.history, 0.0)
        moved = [e for e in v_errors if e is not None]
        # one product for all: P (e_1, e_2, ..) = (P e_1, P e_2, ..)
        from_values = iter((history @ torch.cat(moved, -1)).split(self.value.shape[-1], -1) if moved else ())
        shape = (*self.logits.shape[:2], self.value.shape[-1])
        changes = [(from_keys if e is None else from_keys + next(from_values)).expand(shape) for e in v_errors]
        return self._energies(torch.stack(changes))

    def _energies(self, heads: Tensor) -> Tensor:
        """Squared norms after the output projection: `[m, num_kv_heads, g * n, dv]` to `[m]`."""
        rows = heads.unflatten(2, (-1, len(self.even))).flatten(1, 2).transpose(1, 2).flatten(2)
        squares = ((rows @ self.o_proj.mT) ** 2).sum(-1, dtype=torch.float64)
        return (squares * self.even).sum(-1).cpu()


def _blocks(sequence: SequenceRows, rows: LayerRows, windows: Windows) -> Iterator[_Block]:
    if not len(sequence.positions):
        return
    key, value, o_proj = sequence.key.float(), sequence.value.float(), rows.o_proj.float()
    kv_heads, tokens, _ = key.shape
    group = sequence.query.shape[0] // kv_heads
    s = torch.arange(tokens, device=key.device)
    size = max(1, SCORES_AT_ONCE // (sequence.query.shape[0] * tokens))
    parts = (sequence.positions.split(size), sequence.even.split(size), sequence.query.split(size, 1))
    for at, even, query in zip(*parts, strict=True):
        query = query.float().unflatten(0, (kv_heads, group)).flatten(1, 2) * rows.scaling
        logits = (query @ key.mT).masked_fill_((s > at[:, None]).repeat(group, 1), -math.inf)
        history = history_mask(at, tokens, windows).repeat(group, 1)
        yield _Block(query, logits, logits.softmax(-1), history, even.float(), value, o_proj)


def _through(side: Side, x: Tensor) -> Tensor:
    """What the cache adds to rows `[num_kv_heads, T, d]` that go through INT2, in the model's own basis."""
    return side.restored(fake_quantize(side.rows(x), side.spec)) - x.float()
