"""Attention over the INT2 cache with the kernels of `oscar_kernels`: what `torch_executor` defines,
on a GPU.

Decode is three launches per layer: write (with the transform of the query), attention, merge (with
the way back to the model's basis). An extend writes its slots first. Without cached tokens it is
the stock prefill kernel on the raw rows: attention does not see a transform pair. A short extend
over a prefix reads the INT2 rows directly. For a long one the prefix is brought back to 16 bits
piece by piece and read by the stock kernel, and the parts are merged by their log-sum-exp. Rings
and sinks are written after attention, because the chunk reads those of the one before.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, Transforms, WindowState, allocate
from oscar_kernels.decode_attention import dispatch, launcher, tuning
from oscar_kernels.decode_attention.workspace import Workspace
from oscar_kernels.kv_read.launcher import materialize_prefix
from oscar_kernels.kv_write.dispatch import prepare, write_kv_int2
from oscar_zoo.runtime.batch import DecodeBatch, ExtendBatch, Piece
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.transforms import Pair, TransformTable
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

SHORT = tuning.FUSED_TOKENS_OF_A_STEP
"""New tokens of a step up to which the INT2 rows are read by the extend itself, if no request has
too many of them."""


class Prefill(Protocol):
    """Attention over 16-bit rows, by a kernel of the engine; parts of one softmax can be merged."""

    def begin(self, batch: ExtendBatch) -> None:
        """What the layers of one forward pass share."""
        ...

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ExtendBatch, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the new tokens of every request over themselves, and its
        log-sum-exp."""
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Attention of all `q` over all of `k` and `v`, and its log-sum-exp."""
        ...

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One softmax over the tokens of two parts."""
        ...


class Executor:
    """Executor over the stores of one worker.

    Args:
        slots, side: of the worker.
        table: its transforms.
        num_q_heads: local query heads.
        max_batch: requests of a decode step.
        scratch_tokens: of a materialized piece of prefix.
        prefill: of the engine.
    """

    def __init__(
        self,
        slots: SlotStore,
        side: WindowStore,
        table: TransformTable,
        *,
        num_q_heads: int,
        max_batch: int,
        scratch_tokens: int,
        prefill: Prefill,
    ) -> None:
        shape = side.shape
        self.num_q_heads, self.prefill = num_q_heads, prefill
        self.windows = WindowState(side.sink_block, side.sink_from, side.ring_start)
        self.caches = tuple(
            LayerCache(
                slots.shape.k, slots.shape.v, slots.codes[i], slots.affine[i],
                side.ring_k[i], side.ring_v[i], side.sink_k[i], side.sink_v[i],
            )
            for i in range(shape.num_layers)
        )  # fmt: skip
        self.transforms = tuple(_transforms(k, v) for k, v in zip(table.k, table.v, strict=True))
        for transforms in self.transforms:
            prepare(transforms)
        cache, device = self.caches[0], slots.codes[0].device

        def rows(dim: int) -> Tensor:
            return torch.empty(
                scratch_tokens, shape.num_kv_heads, dim, dtype=shape.dtype, device=device
            )

        self.scratch = rows(shape.k_head_dim), rows(shape.v_head_dim)
        decode, extend = _workspaces(cache, num_q_heads, max_batch)
        self.decode_scratch, self.extend_scratch = (
            Workspace.allocate(n, device) for n in (decode, extend)
        )

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: DecodeBatch, *, scaling: float
    ) -> Tensor:
        """One token per request; see `step.Executor.decode` for shapes."""
        cache, transforms = self.caches[layer], self.transforms[layer]
        rows, out = q.new_empty(q.shape), q.new_empty(*q.shape[:2], v.shape[2])
        write_kv_int2(
            k, v, cache, transforms, batch.targets, windows=self.windows, query=q, query_out=rows
        )
        return dispatch.decode_attention(
            rows,
            cache,
            batch.view,
            sm_scale=scaling,
            o_partner=transforms.o_partner,
            workspace=self.decode_scratch,
            out=out,
            # a ring has a row at least, so the newest token is read from there or from the sinks
            prefix_stable=True,
        )

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ExtendBatch, *, scaling: float
    ) -> Tensor:
        """New tokens of every request; see `step.Executor.extend` for shapes."""
        cache, transforms = self.caches[layer], self.transforms[layer]

        write = partial(write_kv_int2, k, v, cache, transforms, batch.targets, windows=self.windows)
        if not any(batch.prefixes):
            write(parts="slots")
            out, _ = self.prefill.chunk(q, k, v, batch, scaling)
        elif sum(batch.lengths) <= SHORT and max(batch.lengths) <= tuning.FUSED_TOKENS:
            rows = k.new_empty(k.shape), v.new_empty(v.shape)
            query = q.new_empty(q.shape)
            write(parts="slots", query=q, query_out=query, rows_out=rows)
            out = self._short(query, rows, layer, batch, scaling)
        else:
            query = q.new_empty(q.shape)
            write(parts="slots", query=q, query_out=query)
            out = self._long(q, query, (k, v), layer, batch, scaling)
        write(parts="windows")
        return out

    def _short(
        self,
        query: Tensor,
        rows: tuple[Tensor, Tensor],
        layer: int,
        batch: ExtendBatch,
        scaling: float,
    ) -> Tensor:
        cache, transforms = self.caches[layer], self.transforms[layer]
        out, _ = launcher.extend_attention(
            query,
            *rows,
            cache,
            batch.prefix,
            qo_indptr=batch.cuts,
            sm_scale=scaling,
            o_partner=transforms.o_partner,
            workspace=self.extend_scratch,
        )
        return out

    def _long(
        self,
        q: Tensor,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        layer: int,
        batch: ExtendBatch,
        scaling: float,
    ) -> Tensor:
        cache, transforms, (k, v) = self.caches[layer], self.transforms[layer], new
        if (
            transforms.k_mean is not None
        ):  # cached keys are centred, and the parts must have the same logits
            k = k - transforms.k_mean.to(k.dtype)
        out, lse = self.prefill.chunk(q, k, v, batch, scaling)
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for piece in batch.pieces:
            begin, end = batch.spans[piece.request]
            part = self.prefill.whole(query[begin:end], *self._rows(cache, piece), scaling)
            earlier = found.get(piece.request)
            found[piece.request] = part if earlier is None else self.prefill.merge(earlier, part)
        for number, (rows, sums) in found.items():
            own = slice(*batch.spans[number])
            restored = _undo(rows, transforms.o_partner)
            out[own] = self.prefill.merge((out[own], lse[own]), (restored, sums))[0]
        return out

    def _rows(self, cache: LayerCache, piece: Piece) -> tuple[Tensor, Tensor]:
        """Cached tokens in 16 bits, transformed; good until the next call."""
        k, v = (rows[: piece.count] for rows in self.scratch)
        materialize_prefix(
            cache, piece.view, out_k=k, out_v=v, first=piece.first, out_indptr=piece.cuts
        )
        return k, v


def executor_bytes(
    slots: SlotShape, side: WindowShape, *, num_q_heads: int, scratch_tokens: int, device: str
) -> int:
    """What an executor with a batch of every row allocates: rows of a materialized piece, and the
    workspaces.

    Args:
        slots, side: of the worker.
        num_q_heads, scratch_tokens: as `KernelExecutor`.
        device: of the worker.
    """
    rows: int = (
        scratch_tokens
        * side.num_kv_heads
        * (side.k_head_dim + side.v_head_dim)
        * side.dtype.itemsize
    )
    alike = allocate(
        slots.k,
        slots.v,
        slots=1,
        rows=1,
        num_kv_heads=side.num_kv_heads,
        sink=side.sink,
        recent=side.recent,
        dtype=side.dtype,
        device=device,
    )
    return rows + 4 * sum(_workspaces(alike, num_q_heads, side.num_rows))


def _workspaces(cache: LayerCache, num_q_heads: int, max_batch: int) -> tuple[int, int]:
    """Numbers for decode and for fused extends."""
    decode = dispatch.decode_workspace_numel(cache, num_q_heads, max_batch)
    return decode, launcher.extend_workspace_numel(cache, num_q_heads, SHORT)


def _transforms(k: Pair, v: Pair) -> Transforms:
    if v.mean is not None:
        raise ValueError(
            "values with a mean are not served: the weights of a softmax add up to 1 only over all"
            " tiers"
        )
    return Transforms(k.forward, k.partner, v.forward, v.partner, k.mean)


def _undo(rows: Tensor, partner: Tensor) -> Tensor:
    """`rows @ partner.T` `[tokens, num_q_heads, d]`, by KV head where the partner has one per
    head."""
    if partner.shape[0] == 1:
        return rows @ partner[0].mT.to(rows.dtype)
    grouped = rows.unflatten(1, (partner.shape[0], -1))
    return torch.einsum("thgd,hed->thge", grouped, partner.to(rows.dtype)).flatten(1, 2)
