"""The INT2 cache of one worker, as an engine drives it: `begin` or `refill` in front of a forward
pass, then `forward` for every layer, which attends and does all writes.

A decode step reads nothing back from the device. Its tables are filled by kernels in front of the
graph, and the graph holds views of them. Per-request state is reset here, in front of the forward
pass, never by the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from oscar_kernels.cache import allocate
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.reference import apply_o_partner, as_read, with_sink
from oscar_zoo.runtime.batch import (
    Batch,
    BatchTables,
    Pack,
    VerifyTables,
    decode_batch,
    extend_batch,
)
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.engine import CacheConfig, Softmax, StepInput
from oscar_zoo.runtime.prefill import HEADS, WORKSPACE_BYTES, FlashInferPrefill, Prefill
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

logger = logging.getLogger(__name__)

PIECE_TOKENS = 32_768
"""Tokens of a prefix that are read back into 16 bits at once; 134 MB at 8 KV heads of 128."""
SHORT = tuning.FUSED_TOKENS_OF_A_STEP
"""New tokens of a step up to which the extend itself reads the INT2 rows, if no request brings more
than `tuning.FUSED_TOKENS` of them."""
PREFIX = 2
"""Cached tokens of a request that has a prefix, in a step of `warm_up`."""


class Int2Cache:
    def __init__(
        self,
        config: CacheConfig,
        slots: SlotStore,
        windows: WindowStore,
        transforms: TransformTable,
        pack: Pack,
        *,
        ops: Ops,
        prefill: Prefill | None,
    ) -> None:
        self.config, self.windows, self._pack = config, windows, pack
        self.ops, self.prefill, self.transforms = ops, prefill, transforms.layers
        self.batch: Batch | None = None
        self.use(slots)
        self._state = windows.state
        self.index = {layer_id: index for index, layer_id in enumerate(config.layer_ids)}
        for pair in self.transforms:
            ops.prepare(pair)
        cache, drafts = self.caches[0], windows.shape.drafts

        def rows(ring: Tensor) -> Tensor:
            size = (config.piece_tokens, *ring.shape[2:])
            return torch.empty(size, dtype=ring.dtype, device=ring.device)

        self._pieces = rows(cache.ring_k), rows(cache.ring_v)
        self._decode_scratch, self._extend_scratch = (
            Workspace.allocate(numel, cache.codes.device)
            for numel in ops.workspace_numel(
                cache, config.num_q_heads, config.max_batch, drafts, SHORT
            )
        )
        self.tables = BatchTables(config.max_batch, config.max_tokens, config.device)
        self.verify = (
            VerifyTables(self.tables, self._state, config.max_batch, drafts) if drafts > 1 else None
        )
        self._commit = ops.make_commit(self.caches) if self.verify else None

    def use(self, slots: SlotStore) -> None:
        """Keep tokens in other slots from now on, where an engine allocates them late."""
        number = slots.shape.num_layers
        self.caches = tuple(slots.layer(index, self.windows) for index in range(number))

    def compile_kernels(self, wait: Callable[[], None]) -> None:
        """Have every kernel of prefill compiled and run once, on a GPU; those of a CPU need it
        not."""
        if torch.device(self.config.device).type != "cuda":
            return
        logger.info("INT2 KV cache: compiling kernels")
        began = perf_counter()
        wait()
        waited = perf_counter() - began
        warm_up(self)
        took = perf_counter() - began
        logger.info("INT2 KV cache: kernels ready after %.1f s, %.1f s of waiting", took, waited)

    def begin(self, step: StepInput) -> None:
        if step.kind == "extend":
            self.start_requests(step.request_rows, step.prefix_lens, step.extend_lens)
            self.begin_extend(step)
            return
        self.refill(step)
        self.batch = self.batch_of(step)

    def batch_of(self, step: StepInput) -> Batch:
        """Views of the tables, which `refill` fills, for a decode or verify step."""
        if step.kind == "verify":
            return self._drafts().batch(step)
        return decode_batch(self.tables, step.rows, step.seq_lens, step.out_loc, self._state)

    def refill(self, step: StepInput) -> None:
        self.windows.before_step()
        if step.kind == "verify":
            self._drafts().fill(self._pack, step)
        else:
            self.tables.fill(self._pack, step.rows, step.seq_lens)

    def commit(self, target: Tensor, source: Tensor) -> None:
        """Make accepted drafts of the last verify step the next tokens of their requests: the draft
        in slot `source[i]` shall be in slot `target[i]`, `[N]` each. Slot 0 and slots that are not
        of the step are skipped. What is looked up is the step's own snapshot, so a row that got a
        new owner meanwhile is left alone."""
        accepted = self._drafts().accepted(target, source)
        assert self._commit is not None
        self._commit(**accepted, windows=self._state)

    def forward(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Cache the new tokens of one layer, and attend to everything they may see: `q`, `k` and
        `v` are `[tokens, heads * head_dim]`, of the local heads, after RoPE, and are not modified.
        Tokens beyond those of the batch are padding. `sinks` `[num_q_heads]` are learned. With
        latents `k` is the latent, `v` the rotary part of its key, and `q` has both. The result is
        `[tokens, num_q_heads * v_head_dim]` in the basis of the model and the dtype of `q`, with
        zeros for padding; of latents it is their sums."""
        batch, shape = self.batch, self.windows.shape
        if batch is None:
            raise RuntimeError("a forward pass without metadata")
        tokens, total, index = len(q), batch.num_tokens, self.index[layer_id]
        q = q.view(-1, self.config.num_q_heads, self.caches[index].query_dim)[:total]
        k = k.view(-1, shape.num_kv_heads, shape.k_head_dim)[:total]
        v = v.view(-1, shape.num_kv_heads, shape.v_head_dim)[:total]
        softmax = self.config.softmax
        softmax = softmax if sinks is None else replace(softmax, sinks=sinks)
        if batch.kind == "extend":
            out = self._extend(index, q, k, v, batch, softmax)
        else:  # Write the new tokens or drafts, then read them with the rest.
            cache, transforms, windows = self.caches[index], self.transforms[index], self._state
            query, out = self._rows_like(q), q.new_empty(*q.shape[:2], cache.out_dim)
            if batch.sinks is not None:
                windows = replace(windows, sink_block=batch.sinks)
            # In front of the write: the attention starts before the kernel in front has ended.
            sink_logits = softmax.sink_logits(q, transforms.k_mean)
            self.ops.write(
                k, v, cache, transforms, batch.targets, windows=windows, query=q, query_out=query
            )
            out = self.ops.decode(
                query,
                cache,
                batch.view,
                sm_scale=softmax.scale,
                logit_cap=softmax.cap,
                sink_logits=sink_logits,
                o_partner=transforms.o_partner,
                workspace=self._decode_scratch,
                out=out,
                # A ring has at least one row: the newest token is read from there or the sinks.
                prefix_stable=batch.drafts is None,
                drafts=batch.drafts,
                same_batch=layer_id != self.config.layer_ids[0],
            )
        if total == tokens:
            return out.flatten(1)
        padded = out.new_zeros(tokens, *out.shape[1:])
        padded[:total] = out
        return padded.flatten(1)

    def report(self) -> dict[str, object]:
        workspaces = self._decode_scratch.scratch, self._extend_scratch.scratch
        scratch = sum(buffer.nbytes for buffer in (*self._pieces, *workspaces))
        return {"scratch": scratch + table_bytes(self.windows.shape, self.config.max_tokens)}

    def begin_extend(self, step: StepInput) -> None:
        self.batch = extend_batch(
            self._pack,
            step.rows,
            step.out_loc,
            step.prefix_lens,
            step.extend_lens,
            self._state,
            piece_tokens=self.config.piece_tokens,
        )
        if self.prefill is not None:
            self.prefill.begin(self.batch)

    def start_requests(
        self, rows: Sequence[int], prefix_lens: Sequence[int], extend_lens: Sequence[int]
    ) -> None:
        """Give windows to those of `rows` that have new owners, and note what a step brings."""
        self.windows.before_step()
        prefixes = dict(zip(rows, prefix_lens, strict=True))
        self.windows.begin({row: prefixes[row] for row in self.windows.take_fresh(rows)})
        ends = [p + n for p, n in zip(prefix_lens, extend_lens, strict=True)]
        self.windows.sinks.launched(rows, ends)
        self.windows.rings.launched(rows, ends)

    def _drafts(self) -> VerifyTables:
        if self.verify is None:
            raise RuntimeError("drafts of a cache that has no room for them")
        return self.verify

    def _extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> Tensor:
        """Slots are written first. Rings and sinks are written after attention, because a chunk
        reads those of the chunk before it.

        Without cached tokens the prefill kernel runs on the raw rows, because a transform pair does
        not change attention. A short extend over a prefix, or one without a prefill kernel, reads
        the INT2 rows itself; that of latents has no kernel. Otherwise the prefix is read back into
        16 bits piece by piece.

        A learned sink takes its share of the softmax at the end. Centred keys shift every logit of
        a query by the same amount, so there the sink is shifted too.
        """
        cache, transforms = self.caches[layer], self.transforms[layer]
        write = partial(self.ops.write, k, v, cache, transforms, batch.targets, windows=self._state)
        if self.prefill is not None and not any(batch.prefix_lens):
            write(parts="slots")
            out, lse = self.prefill.chunk(q, *as_read(cache, k, v), batch, softmax)
            unit, mean = self.prefill.lse_unit, None
        elif self.prefill is None or (_is_short(batch) and not cache.latent):
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
                workspace=self._extend_scratch,
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
        """All parts are merged by their log-sum-exp."""
        cache, transforms, (k, v) = self.caches[layer], self.transforms[layer], new
        if transforms.k_mean is not None:
            # Cached keys are centred, and all parts must have the same logits.
            k = k - transforms.k_mean.to(k.dtype)
        out, lse = prefill.chunk(q, *as_read(cache, k, v), batch, softmax)
        spans, found = batch.spans, dict[int, tuple[Tensor, Tensor]]()
        for piece in batch.pieces:
            own = spans[piece.request]
            rows_k, rows_v = (rows[: piece.count] for rows in self._pieces)
            ends = {"first": piece.first, "out_indptr": piece.out_indptr}
            self.ops.materialize(cache, piece.view, out_k=rows_k, out_v=rows_v, **ends)
            part = prefill.whole(query[own], *as_read(cache, rows_k, rows_v), softmax)
            earlier = found.get(piece.request)
            found[piece.request] = part if earlier is None else prefill.merge(earlier, part)
        for request, (rows, sums) in found.items():
            own = spans[request]
            restored = apply_o_partner(rows, transforms.o_partner)
            out[own], lse[own] = prefill.merge((out[own], lse[own]), (restored, sums))
        return out, lse

    def _rows_like(self, x: Tensor) -> Tensor:
        return x.new_empty(x.shape, dtype=self.ops.rows_dtype or x.dtype)


def _is_short(batch: Batch) -> bool:
    return sum(batch.extend_lens) <= SHORT and max(batch.extend_lens) <= tuning.FUSED_TOKENS


def cache_bytes(
    slots: SlotShape,
    windows: WindowShape,
    ops: Ops,
    *,
    num_q_heads: int,
    max_tokens: int,
    piece_tokens: int,
    device: str | torch.device,
) -> int:
    """Bytes that an `Int2Cache` for batches of every row allocates beside its stores and
    transforms: rows of a prefix piece, workspaces, tables, and what FlashInfer takes."""
    dims = windows.k_head_dim + windows.v_head_dim
    pieces: int = piece_tokens * windows.num_kv_heads * dims * windows.dtype.itemsize
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
    on_gpu = torch.device(device).type == "cuda"
    prefill = WORKSPACE_BYTES if on_gpu and flashinfer_has(windows) else 0
    return pieces + 4 * sum(sizes) + prefill + table_bytes(windows, max_tokens)


def table_bytes(windows: WindowShape, max_tokens: int) -> int:
    verify = VerifyTables.nbytes(windows.max_batch, windows.drafts) if windows.drafts > 1 else 0
    return BatchTables.nbytes(windows.max_batch, max_tokens) + verify


def piece_tokens(device: str | torch.device) -> int:
    """`CacheConfig.piece_tokens` of a device: only a GPU has a prefill kernel."""
    return PIECE_TOKENS if torch.device(device).type == "cuda" else 0


def flashinfer_has(windows: WindowShape) -> bool:
    return (windows.k_head_dim, windows.v_head_dim) in HEADS


def make_prefill(
    config: CacheConfig, windows: WindowShape, *, of_engine: Callable[[], Prefill]
) -> Prefill | None:
    """The prefill kernel of a device: none on a CPU; on a GPU FlashInfer, if it has the heads."""
    if torch.device(config.device).type == "cpu":
        return None
    if not flashinfer_has(windows):
        return of_engine()
    return FlashInferPrefill(
        num_q_heads=config.num_q_heads,
        num_kv_heads=windows.num_kv_heads,
        head_dims=(windows.k_head_dim, windows.v_head_dim),
        softmax=config.softmax,
        dtype=windows.dtype,
        device=config.device,
    )


def steps() -> list[tuple[int, int, int]]:
    """Requests of each step of `warm_up`, and cached and new tokens of each request: one without a
    prefix, fused extends of every tile with as few requests as can be fused, and one over pieces of
    a prefix."""
    each = min(SHORT, tuning.FUSED_TOKENS)
    shared = [(1 << n, -(-(1 << n) // each)) for n in range(SHORT.bit_length())]
    fused = [(requests, PREFIX, total // requests) for total, requests in shared]
    return [(1, 0, 2), *fused, (1, PREFIX, SHORT + 1)]


def warm_up(cache: Int2Cache) -> None:
    """Run every kernel of prefill once before the server is ready, so that no request waits for a
    compiler.

    Decode needs no warm-up: an engine captures its graphs before it is ready, which compiles what
    they hold. All steps belong to the padding row and to slot 0, which no request owns, and to one
    layer for each pair of widths: the other layers have the same shapes.
    """
    config, shape, device = cache.config, cache.windows.shape, cache.caches[0].codes.device
    heads, local = config.num_q_heads, shape.num_kv_heads
    query_dim = cache.caches[0].query_dim
    widths = heads * query_dim, local * shape.k_head_dim, local * shape.v_head_dim
    first: dict[object, int] = {}
    for layer_id, layer in zip(config.layer_ids, cache.caches, strict=True):
        first.setdefault((layer.k_spec, layer.v_spec), layer_id)
    for requests, prefix, new in steps():
        if prefix + new > config.max_tokens:
            continue
        rows = torch.zeros(requests, dtype=torch.int64, device=device)
        out_loc = torch.zeros(requests * new, dtype=torch.int64, device=device)
        each = (prefix,) * requests, (new,) * requests
        cache.begin_extend(StepInput("extend", rows, (), rows, out_loc, *each))
        for layer_id in first.values():
            zeros = (
                torch.zeros(requests * new, width, dtype=shape.dtype, device=device)
                for width in widths
            )
            cache.forward(layer_id, *zeros)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
