"""The tap of one attention layer of a worker: it sums over the rows of prompts, keeps them, or puts
an INT2 cache in the place of the layer's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.errors import ComputeFailed, OscarZooError, UnsupportedModel
from oscar_zoo.evaluate.simulated_cache import SimulatedCache
from oscar_zoo.models.softmax import Softmax

Keep = Callable[[int, Tensor, Tensor, Tensor, Softmax], None]
"""`(layer_id, query [n_q, T, d], key [n_kv, T, d], value [n_kv, T, dv], softmax)` of one sequence,
heads of this worker."""


@dataclass
class LayerTap:
    """The tap of one attention layer of this worker.

    Attributes:
        layer_id: decoder layer index.
        sums: sums of the worker's own heads.
        query_heads: number of query heads of this worker.
        outputs: whether attention outputs are summed too.
        lengths, weighted_lengths: lengths of the sequences of the first and second pass, in order.
        target: target of the second pass; `None` in the first pass.
        summing: whether rows are summed.
        keep: what else gets the rows of whole sequences; `None` for nothing.
        cache: computes the attention of the layer; `None` leaves it to the engine.
        error: the first error; nothing is done after it.
    """

    layer_id: int
    sums: LayerMoments
    query_heads: int
    outputs: bool
    lengths: list[int] = field(default_factory=list)
    weighted_lengths: list[int] = field(default_factory=list)
    target: Tensor | None = None
    summing: bool = True
    keep: Keep | None = None
    cache: SimulatedCache | None = None
    error: OscarZooError | None = None

    def replaced(
        self, rows: Sequence[Tensor | None], tokens: int, softmax: Softmax
    ) -> Tensor | None:
        """What the layer's attention would be with the cache; `None` without one.

        Args:
            rows: q, k, v of one whole sequence, as of `observe`.
            tokens: without padding.

        Returns:
            `[tokens + padding, heads * v_head_dim]` in the dtype of q.
        """
        if self.cache is None or self.error is not None:
            return None
        try:
            query, key, value = self._by_head(rows, tokens)
            output = self.cache(self.layer_id, query[None], key[None], value[None], softmax)[0]
        except OscarZooError as error:
            self.error = error
            return None
        flat = output.transpose(0, 1).flatten(1)
        padding = self._flat(rows[0], tokens, 0).shape[0] - tokens
        return torch.nn.functional.pad(flat, (0, 0, 0, padding))

    def observe(
        self,
        rows: Sequence[Tensor | None],
        prefixes: Sequence[int],
        lengths: Sequence[int],
        softmax: Callable[[], Softmax] | None = None,
    ) -> None:
        """See one extend batch.

        Args:
            rows: q, k, v, o as the attention layer got and returned them: tokens first, possibly
                padded at the end, heads and channels as one or two axes.
            prefixes: for every sequence of the batch, its tokens in earlier batches.
            lengths: for every sequence, its tokens in this batch.
            softmax: makes that of the layer; only `keep` asks for it.
        """
        if self.error is not None:
            return
        try:
            by_head = self._by_head(rows, sum(lengths))
            if self.summing:
                self._count(prefixes, lengths)
                self._sum(*by_head)
            if self.keep is not None and softmax is not None:
                self._whole(prefixes)
                query, key, value = by_head[:3]
                self.keep(self.layer_id, query, key, value, softmax())
        except OscarZooError as error:
            self.error = error

    def weigh(self) -> None:
        """Begin the second pass.

        The target comes from the queries of this rank alone. If ranks share a KV head,
        `join_heads` joins their weighted sums accordingly.

        Raises:
            ComputeFailed: there was no first pass.
        """
        if not self.sums.query_rows:
            raise ComputeFailed(
                f"attention of layer {self.layer_id} was never reached.",
                hint="its code does not use SGLang's attention layer, or ran inside a CUDA graph",
            )
        self.target = estimators.qqt(self.sums)

    def restore(self, sums: LayerMoments, report: ranks.LayerReport) -> None:
        """Continue from the sums of an earlier worker in this place."""
        device = self.sums.qq.device
        for name in (*ROW_SUMS, *WEIGHTED_SUMS, "wo"):
            tensor = getattr(sums, name)
            setattr(sums, name, None if tensor is None else tensor.to(device))
        self.sums = sums
        self.lengths, self.weighted_lengths = list(report.lengths), list(report.weighted_lengths)

    def report(self) -> ranks.LayerReport:
        """Counts for the driving process, which compares them with the prompts that it sent."""
        return ranks.LayerReport(
            heads=self.sums.heads,
            tokens=self.sums.tokens,
            query_rows=self.sums.query_rows,
            output_rows=self.sums.output_rows,
            weighted_tokens=self.sums.weighted_tokens,
            lengths=tuple(self.lengths),
            weighted_lengths=tuple(self.weighted_lengths),
        )

    def _count(self, prefixes: Sequence[int], lengths: Sequence[int]) -> None:
        """Check that sequences come one after the other, each from its first token on and without a
        gap."""
        seen = self.lengths if self.target is None else self.weighted_lengths
        for prefix, length in zip(prefixes, lengths, strict=True):
            if prefix == 0:
                seen.append(length)
            elif seen and seen[-1] == prefix:
                seen[-1] += length
            else:
                raise self._in_pieces(prefix, f" after {seen[-1:]} tokens.")

    def _whole(self, prefixes: Sequence[int]) -> None:
        if list(prefixes) != [0]:
            raise self._in_pieces(max(prefixes), f" of {len(prefixes)} sequences at once.")

    def _in_pieces(self, prefix: int, where: str) -> ComputeFailed:
        return ComputeFailed(
            f"layer {self.layer_id} got tokens from position {prefix} on,{where}",
            hint="prompts must run one at a time, without a prefix cache",
        )

    def _sum(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        if self.target is None:
            self.sums.add(query, key, value, output if self.outputs else None)
        else:
            self.sums.add_weighted(key, value, self.target)

    def _by_head(self, rows: Sequence[Tensor | None], tokens: int) -> list[Tensor]:
        """q, k, v and, if given, o as `[heads, tokens, width]`."""
        return [
            self._flat(x, tokens, place)[:tokens]
            .unflatten(1, (self._heads[place], -1))
            .transpose(0, 1)
            for place, x in enumerate(rows)
        ]

    @property
    def _heads(self) -> tuple[int, int, int, int]:
        kv_heads = len(self.sums.heads)
        return self.query_heads, kv_heads, kv_heads, self.query_heads

    def _flat(self, rows: Tensor | None, tokens: int, place: int) -> Tensor:
        """Rows as `[tokens + padding, heads * width]`.

        They come so, with two axes for heads and channels, or with a batch axis of 1 in front, as
        Gemma has them.

        Args:
            place: 0 to 3 for q, k, v, o.
        """
        heads, width = self._heads[place], (self.sums.kk, self.sums.vv)[place // 2].shape[-1]
        known = isinstance(rows, Tensor) and rows.shape[-1] in (width, heads * width)
        flat = rows.reshape(-1, heads * width) if isinstance(rows, Tensor) and known else None
        if flat is None or flat.shape[0] < tokens:
            seen = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise UnsupportedModel(
                f"attention of layer {self.layer_id} handles {seen} for {tokens} tokens and {heads}"
                " heads.",
                hint="calibration needs one K and one V row per token and head in every layer",
            )
        return flat
