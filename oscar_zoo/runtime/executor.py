"""Attention over the INT2 cache, including all writes to it.

A decode step writes its tokens and then reads them with the rest: write, attention, and a merge
that brings outputs back to the basis of the model. So does a step that verifies drafts. An extend
step writes its slots first. Without cached tokens the prefill kernel runs on the raw rows, because
a transform pair does not change attention. A short extend over a prefix reads the INT2 rows
directly. For a long one the prefix is read back into 16 bits piece by piece for the prefill kernel,
and the parts are merged by their log-sum-exp. Without a prefill kernel every extend reads the INT2
rows directly. Rings and sinks are written after attention, because a chunk reads those of the chunk
before it.

A learned sink takes its share of the softmax when all parts are merged. Centred keys shift every
logit of a query by the same amount, so there the sink is shifted too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, Transforms, WindowState, allocate
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.reference import apply_o_partner, with_sink
from oscar_zoo.runtime.batch import Batch, PrefixPiece
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.slot_store import SlotShape
from oscar_zoo.runtime.softmax import Softmax
from oscar_zoo.runtime.window_store import WindowShape

SHORT = tuning.FUSED_TOKENS_OF_A_STEP
"""New tokens of a step up to which the extend itself reads the INT2 rows, if no request brings more
than `tuning.FUSED_TOKENS` of them."""


class Executor:
    """Runs the ops of one worker, layer by layer.

    Args:
        windows: state of all rows.
        ops: what runs on this device.
        prefill: kernel over 16-bit rows; `None` where there is none.
        drafts: most query tokens of a request in a verify step; 1 without speculation.
        scratch_tokens: most tokens of a prefix piece; 0 without a prefill kernel.
    """

    def __init__(
        self,
        caches: Sequence[LayerCache],
        windows: WindowState,
        transforms: Sequence[Transforms],
        ops: Ops,
        prefill: Prefill | None,
        *,
        num_q_heads: int,
        max_batch: int,
        drafts: int = 1,
        scratch_tokens: int,
    ) -> None:
        self.caches, self.windows, self.transforms = tuple(caches), windows, tuple(transforms)
        self.ops, self.prefill, self.num_q_heads = ops, prefill, num_q_heads
        for pair in self.transforms:
            ops.prepare(pair)
        cache, device = self.caches[0], self.caches[0].codes.device

        def rows(ring: Tensor) -> Tensor:
            size = (scratch_tokens, *ring.shape[2:])
            return torch.empty(size, dtype=ring.dtype, device=device)

        self.scratch = rows(cache.ring_k), rows(cache.ring_v)
        self.decode_scratch, self.extend_scratch = (
            Workspace.allocate(numel, device)
            for numel in ops.workspace_numel(cache, num_q_heads, max_batch, drafts, SHORT)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of this executor, as allocated."""
        workspaces = self.decode_scratch.scratch, self.extend_scratch.scratch
        return sum(buffer.nbytes for buffer in (*self.scratch, *workspaces))

    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of one forward pass share."""
        if self.prefill is not None and batch.kind == "extend":
            self.prefill.begin(batch)

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> Tensor:
        """Cache the new tokens of one layer and attend to everything they may see.

        Args:
            q: `[T, num_q_heads, head_dim]`, after RoPE, not transformed. Not modified.
            k, v: `[T, num_kv_heads, ...]`, not transformed. Not modified.
            batch: `T == batch.num_tokens`; an extend batch was given to `begin`.

        Returns:
            `[T, num_q_heads, v_head_dim]` in the basis of the model and the dtype of `q`.
        """
        run = self._extend if batch.kind == "extend" else self._decode
        return run(layer, q, k, v, batch, softmax)

    def _decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> Tensor:
        cache, transforms = self.caches[layer], self.transforms[layer]
        query, out = self._rows_like(q), q.new_empty(*q.shape[:2], v.shape[2])
        windows = self.windows
        if batch.sinks is not None:
            windows = replace(windows, sink_block=batch.sinks)
        # In front of the write, because the attention starts before the kernel in front has ended.
        sink_logits = softmax.sink_logits(q, transforms.k_mean)
        self.ops.write(
            k, v, cache, transforms, batch.targets, windows=windows, query=q, query_out=query
        )
        return self.ops.decode(
            query,
            cache,
            batch.view,
            sm_scale=softmax.scale,
            logit_cap=softmax.cap,
            sink_logits=sink_logits,
            o_partner=transforms.o_partner,
            workspace=self.decode_scratch,
            out=out,
            # A ring has at least one row, so the newest token is read from there or from the sinks.
            prefix_stable=batch.drafts is None,
            drafts=batch.drafts,
        )

    def _extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> Tensor:
        cache, transforms = self.caches[layer], self.transforms[layer]
        write = partial(
            self.ops.write, k, v, cache, transforms, batch.targets, windows=self.windows
        )
        if self.prefill is not None and not any(batch.prefix_lens):
            write(parts="slots")
            out, lse = self.prefill.chunk(q, k, v, batch, softmax)
            unit, mean = self.prefill.lse_unit, None
        elif self.prefill is None or _short(batch):
            rows, query = (self._rows_like(k), self._rows_like(v)), self._rows_like(q)
            write(parts="slots", query=q, query_out=query, rows_out=rows)
            out, lse = self.ops.extend(
                query,
                *rows,
                cache,
                batch.view,
                qo_indptr=batch.qo_indptr,
                sm_scale=softmax.scale,
                logit_cap=softmax.cap,
                o_partner=transforms.o_partner,
                workspace=self.extend_scratch,
            )
            unit, mean = 1.0, transforms.k_mean
        else:
            query = self._rows_like(q)
            write(parts="slots", query=q, query_out=query)
            out, lse = self._by_pieces(self.prefill, q, query, (k, v), layer, batch, softmax)
            unit, mean = self.prefill.lse_unit, transforms.k_mean
        sink = softmax.sink_logits(q, mean)
        if sink is not None:
            out = with_sink(out, lse * unit, sink)
        write(parts="windows")
        return out.to(q.dtype)

    def _by_pieces(
        self,
        prefill: Prefill,
        q: Tensor,
        query: Tensor,
        new: tuple[Tensor, Tensor],
        layer: int,
        batch: Batch,
        softmax: Softmax,
    ) -> tuple[Tensor, Tensor]:
        cache, transforms, (k, v) = self.caches[layer], self.transforms[layer], new
        if transforms.k_mean is not None:
            # Cached keys are centred, and all parts must have the same logits.
            k = k - transforms.k_mean.to(k.dtype)
        out, lse = prefill.chunk(q, k, v, batch, softmax)
        spans, found = batch.spans, dict[int, tuple[Tensor, Tensor]]()
        for piece in batch.pieces:
            own = spans[piece.request]
            part = prefill.whole(query[own], *self._piece_rows(cache, piece), softmax)
            earlier = found.get(piece.request)
            found[piece.request] = part if earlier is None else prefill.merge(earlier, part)
        for request, (rows, sums) in found.items():
            own = spans[request]
            restored = apply_o_partner(rows, transforms.o_partner)
            out[own], lse[own] = prefill.merge((out[own], lse[own]), (restored, sums))
        return out, lse

    def _piece_rows(self, cache: LayerCache, piece: PrefixPiece) -> tuple[Tensor, Tensor]:
        """Transformed 16-bit rows of a piece; they are good until the next call."""
        k, v = (rows[: piece.count] for rows in self.scratch)
        self.ops.materialize(
            cache, piece.view, out_k=k, out_v=v, first=piece.first, out_indptr=piece.out_indptr
        )
        return k, v

    def _rows_like(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=self.ops.rows_dtype or x.dtype)


def _short(batch: Batch) -> bool:
    """Whether the extend itself reads the INT2 rows."""
    return sum(batch.extend_lens) <= SHORT and max(batch.extend_lens) <= tuning.FUSED_TOKENS


def executor_bytes(
    slots: SlotShape,
    windows: WindowShape,
    ops: Ops,
    *,
    num_q_heads: int,
    scratch_tokens: int,
    device: str | torch.device,
) -> int:
    """Bytes that an executor for batches of every row allocates: rows of a prefix piece, and the
    workspaces.

    Args:
        slots, windows: shapes of the stores of the worker.
        ops, num_q_heads, scratch_tokens: as for `Executor`.
        device: of the worker.
    """
    rows: int = (
        scratch_tokens
        * windows.num_kv_heads
        * (windows.k_head_dim + windows.v_head_dim)
        * windows.dtype.itemsize
    )
    alike = allocate(
        slots.k,
        slots.v,
        slots=1,
        rows=1,
        num_kv_heads=windows.num_kv_heads,
        sink=windows.sink,
        recent=windows.recent,
        ring_rows=windows.ring_rows,
        dtype=windows.dtype,
        device=device,
    )
    sizes = ops.workspace_numel(alike, num_q_heads, windows.max_batch, windows.drafts, SHORT)
    return rows + 4 * sum(sizes)
