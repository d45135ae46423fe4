"""How much error an INT2 cache puts into an attention layer, on held-out rows.

The history is the part that a server reads from INT2: key positions at or after the sink and at
least `recent` before the query. Everything else stays exact, in the model's own basis; so does the
side that is not being measured. There are three numbers:

* output error `||Y^ - Y||^2 / ||Y||^2` after the output projection, over evenly spaced queries;
* logit error: the same ratio for the logits of the history, the mean of each query removed (softmax
  ignores it);
* retrieval error: the divergence KL(p || p^) of the attention weights of focused queries, averaged
  with the square of the largest weight on a single row of the history: queries that fetch one row
  count, others hardly do.

With stronger clipping the first two keep falling long after perplexity and recall have begun to
rise. Clipping shrinks a key along the very query that looks for it. An average over all queries
does not show this, but the third number does.

A soft cap is applied to exact logits and to those with errors, and a learned sink is one more row
outside the history, whose output is 0.

With p the exact weights and e what the error of the keys adds to a logit (0 outside the history),
less its mean sum p e, the weights become p exp(e) / Z, where Z = 1 + sum p (exp(e) - 1) is at least
1 and KL = log Z. Rows outside the history share one e, so only their total weight and output are
needed. Rows are float32, sums over rows float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.capture.rows import (
    SCORES_AT_ONCE,
    LayerRows,
    Queries,
    SequenceRows,
    history_mask,
)
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.simulated_cache import Side
from oscar_zoo.models.attention import Softmax
from oscar_zoo.next_step import AddOption

LARGEST_NOISE = 60.0
"""Errors of logits are cut here, so their exponentials and sums of these fit into float32."""


@dataclass(frozen=True)
class LayerBench:
    """Measures caches of one layer, all on the same rows. All methods raise `ComputeFailed` where
    rows or errors are not finite, or no query has history."""

    layer_id: int
    rows: LayerRows
    windows: Windows

    def retrieval(self, sides: Sequence[Side]) -> tuple[tuple[float, ...], float]:
        """Retrieval errors of some K sides, and their weight in an average over layers."""
        lost, focus = [0.0] * len(sides), 0.0
        for one in self.rows.sequences:
            blocks, key = self._blocks(one, one.focused), self._stored(one.key)
            focus += math.fsum(float(block.focus.sum()) for block in blocks)
            for n, side in enumerate(sides):
                error = _error(side, key)
                lost[n] += math.fsum(block.divergence(error) for block in blocks)
        return self._checked([focus], *((x / focus if focus else math.nan) for x in lost)), focus

    def values(self, sides: Sequence[Side]) -> tuple[float, ...]:
        """Output error of some V sides with exact keys."""
        lost, energy = [0.0] * len(sides), 0.0
        for one in self.rows.sequences:
            blocks, value = self._blocks(one, one.even), self._stored(one.value)
            energy += math.fsum(block.output_energy(block.output) for block in blocks)
            for n, side in enumerate(sides):
                error = _error(side, value)
                lost[n] += math.fsum(block.output_energy(block.weights @ error) for block in blocks)
        return self._checked([energy], *((x / energy if energy else math.nan) for x in lost))

    def caches(self, pairs: Sequence[tuple[Side, Side]]) -> list[tuple[float, ...]]:
        """Errors of some pairs of a K side and a V side: of the output with both in INT2 and with
        exact values, and of the logits."""
        lost = torch.zeros(len(pairs), 3, dtype=torch.float64, device="cpu")
        energy = torch.zeros(3, dtype=torch.float64, device="cpu")
        for one in self.rows.sequences:
            blocks = self._blocks(one, one.even)
            key, value = self._stored(one.key), self._stored(one.value)
            for block in blocks:
                whole = block.output_energy(block.output)
                energy += energy.new_tensor([whole, whole, block.logit_energy(block.logits)])
            for n, (k, v) in enumerate(pairs):
                k_error, v_error = _error(k, key), _error(v, value)
                for block in blocks:
                    lost[n] += lost.new_tensor(block.cache_errors(k_error, v_error))
        self._checked(energy.tolist(), *(lost / energy).flatten().tolist())
        return [tuple(row) for row in (lost / energy).tolist()]

    def _stored(self, rows: Tensor) -> Tensor:
        """The rows of `[num_kv_heads, T, d]` that the last query reads from INT2."""
        sink, recent = self.windows.sink, self.windows.recent
        return rows[:, sink : max(sink, rows.shape[1] - recent)]

    def _blocks(self, sequence: SequenceRows, queries: Queries) -> list[_Block]:
        """The queries of a sequence, a few at a time."""
        if not len(queries.positions):
            return []
        size = max(1, SCORES_AT_ONCE // (queries.rows.shape[0] * sequence.key.shape[1]))
        parts = zip(queries.positions.split(size), queries.rows.split(size, 1), strict=True)
        return [self._block(sequence, at, rows) for at, rows in parts]

    def _block(self, sequence: SequenceRows, positions: Tensor, rows: Tensor) -> _Block:
        key, value, softmax = sequence.key.float(), sequence.value.float(), self.rows.softmax
        (kv_heads, tokens, _), number = key.shape, len(positions)
        query = rows.float().unflatten(0, (kv_heads, -1)).flatten(1, 2) * softmax.scaling
        products = query @ key.mT
        logits = softmax.capped(products).unflatten(1, (-1, number))
        future = torch.arange(tokens, device=key.device) > positions[:, None]
        seen = logits.masked_fill(future, -math.inf)
        weights = softmax.weights(seen.flatten(0, 1)).unflatten(0, (kv_heads, -1)).flatten(1, 2)
        history = self._stored(history_mask(positions, tokens, self.windows)[None].mT).mT[0]
        group = query.shape[1] // number
        history = history.repeat(group, 1)
        stored = self._stored(weights.mT).mT.masked_fill(~history, 0.0)
        return _Block(
            query=query,
            products=self._stored(products.mT).mT,
            softmax=softmax,
            weights=stored,
            history=history,
            output=weights @ value,
            beside=(weights @ value) - stored @ self._stored(value),
            value=self._stored(value),
            o_proj=self.rows.o_proj.float(),
            number=number,
        )

    def _checked(self, energies: Sequence[float], *errors: float) -> tuple[float, ...]:
        if not all(energies):
            both = self.windows.sink + self.windows.recent
            raise ComputeFailed(
                f"layer {self.layer_id} has no held-out query that reads INT2 rows.",
                hint=f"held-out sequences must be longer than {both} tokens",
            )
        if not all(map(math.isfinite, (*energies, *errors))):
            raise ComputeFailed(
                f"attention of layer {self.layer_id} is not finite on held-out text.",
                next_step=AddOption("--dtype", "float32"),
            )
        return errors


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; 0 when any value is 0."""
    items = list(values)
    return 0.0 if min(items) <= 0.0 else math.exp(math.fsum(map(math.log, items)) / len(items))


@dataclass(frozen=True)
class _Block:
    """Some queries of a sequence, and the exact results for them.

    Heads of a group are stacked as more queries.

    Attributes:
        query: `[num_kv_heads, g * n, d]`, scaled.
        products: `[num_kv_heads, g * n, S]`, scaled and before any cap, over the S rows stored for
            the last query.
        softmax: of the layer.
        weights: of the same shape, 0 outside the query's own history.
        history: `[g * n, S]` bool: rows that are read from INT2.
        output, beside: `[num_kv_heads, g * n, dv]`, from all rows and from those outside it.
        value: `[num_kv_heads, S, dv]`.
        o_proj: `[hidden, num_q_heads * dv]`.
        number: n.
    """

    query: Tensor
    products: Tensor
    softmax: Softmax
    weights: Tensor
    history: Tensor
    output: Tensor
    beside: Tensor
    value: Tensor
    o_proj: Tensor
    number: int

    @property
    def focus(self) -> Tensor:
        """`[num_kv_heads, g * n]` float64: squared largest weight on one row of the history."""
        return self.weights.amax(-1).double() ** 2

    @property
    def logits(self) -> Tensor:
        """`[num_kv_heads, g * n, S]`, capped."""
        return self.softmax.capped(self.products)

    def noise(self, k_error: Tensor) -> Tensor:
        """What an error of the keys `[num_kv_heads, S, d]` adds to the logits."""
        added = self.query @ k_error.mT
        if self.softmax.cap is None:
            return added
        return self.softmax.capped(self.products + added) - self.logits

    def divergence(self, k_error: Tensor) -> float:
        """Sum of KL(p || p^), times `focus`, under an error of the keys `[num_kv_heads, S, d]`."""
        more, beside = self._changes(self.noise(k_error))
        kl = (more.sum(-1) + beside[..., 0] * self._weight_beside).log1p()
        return float((kl.double().clamp_min(0) * self.focus).sum())

    def cache_errors(self, k_error: Tensor, v_error: Tensor) -> tuple[float, float, float]:
        """Squared norms of the output error, for both sides together and for the keys alone. The
        third number is the energy of the error of the logits."""
        noise = self.noise(k_error)
        more, beside = self._changes(noise)
        more_in_all = more.sum(-1, keepdim=True) + beside * self._weight_beside[..., None]
        total = 1 + more_in_all
        from_keys = (more @ self.value + beside * self.beside - more_in_all * self.output) / total
        from_values = ((self.weights + more) @ v_error) / total
        both = self.output_energy(from_keys + from_values)
        return both, self.output_energy(from_keys), self.logit_energy(noise)

    def logit_energy(self, logits: Tensor) -> float:
        """Sum over the history of squares of `logits`, each query's mean removed."""
        mean = logits.masked_fill(~self.history, 0.0).sum(-1) / self.history.sum(-1).clamp_min(1)
        centered = (logits - mean[..., None]).masked_fill_(~self.history, 0.0)
        return float((centered**2).sum(-1, dtype=torch.float64).sum())

    def output_energy(self, heads: Tensor) -> float:
        """Squared norm of `[num_kv_heads, g * n, dv]` after the output projection."""
        rows = heads.unflatten(1, (-1, self.number)).flatten(0, 1).transpose(0, 1).flatten(1)
        return float(((rows @ self.o_proj.mT) ** 2).sum(-1, dtype=torch.float64).sum())

    @property
    def _weight_beside(self) -> Tensor:
        """`[num_kv_heads, g * n]`: of all rows outside the history."""
        return (1 - self.weights.sum(-1)).clamp_min(0)

    def _changes(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The change of each weight for an error e of its logit. It is `p (exp(e) - 1)` in the
        history, and `exp(e) - 1` outside of it."""
        mean = (self.weights * noise).sum(-1, keepdim=True)
        more = self.weights * (noise - mean).clamp_(max=LARGEST_NOISE).expm1_()
        return more, (-mean).clamp_(max=LARGEST_NOISE).expm1_()


def _error(side: Side, x: Tensor) -> Tensor:
    """The error that INT2 adds to rows `[num_kv_heads, S, d]`, in the model's own basis."""
    return side.restored(fake_quantize(side.rows(x), side.spec)) - x.float()
