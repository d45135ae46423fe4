"""From SGLang's batch to the kernels, on a GPU: what `backend` does step by step on a CPU, without
waiting for it.

A decode step reads nothing back: its tables are filled by kernels in front of the graph, and the
graph holds views of them. An extend step asks for its request rows once, to reset those that have a
new owner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import geometry, radix_attention
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.batch import DecodeBatch, DecodeTables, ExtendBatch, extend_batch
from oscar_zoo.runtime.executor import Executor, Prefill, executor_bytes
from oscar_zoo.runtime.flashinfer_prefill import WORKSPACE_BYTES, FlashInferPrefill
from oscar_zoo.runtime.plain_prefill import PlainPrefill
from oscar_zoo.runtime.slot_store import SlotShape
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.warm_up import warm_up
from oscar_zoo.runtime.window_store import WindowShape

logger = logging.getLogger(__name__)

SCRATCH_TOKENS = 32_768
"""Of a prefix that is read in 16 bits at once; 134 MB at 8 KV heads of 128."""

Begin = Callable[[list[int], list[int], list[int]], None]
"""Request rows, their cached tokens before an extend step and after it; called in front of the
step."""


class DevicePath:
    """Kernels and tables of one worker.

    Args:
        runner: SGLang's model runner.
        pool: our token pool.
        table: transforms of this worker.
        begin: resets rows with a new owner and follows their sinks.

    Raises:
        UnsupportedModel: attention layers that differ in their scaling.
        MissingDependency: no FlashInfer.
    """

    def __init__(self, runner: Any, pool: Any, table: TransformTable, begin: Begin) -> None:
        self._pool, self._begin = pool, begin
        self._slots_of: Tensor = runner.req_to_token_pool.req_to_token
        layers = list(radix_attention.attention_layers(runner.model))
        scalings = {float(layer.scaling) for layer in layers}
        if len(scalings) != 1:
            raise UnsupportedModel(
                f"attention layers with different scaling ({sorted(scalings)}) are not served."
            )
        side = pool.side.shape
        self.prefill = _prefill(side, layers[0].tp_q_head_num, scalings.pop(), pool.device)
        self.executor = Executor(
            pool.slots,
            pool.side,
            table,
            num_q_heads=layers[0].tp_q_head_num,
            max_batch=side.num_rows,
            scratch_tokens=SCRATCH_TOKENS,
            prefill=self.prefill,
        )
        self._tables = DecodeTables(side.num_rows, geometry.longest_request(runner), pool.device)
        self.batch: DecodeBatch | ExtendBatch | None = None
        if self._slots_of.is_cuda:
            began = perf_counter()
            warm_up(
                self.executor,
                self._slots_of,
                scaling=layers[0].scaling,
                scratch_tokens=SCRATCH_TOKENS,
            )
            logger.info("INT2 KV cache: kernels ready after %.1f s", perf_counter() - began)

    @staticmethod
    def nbytes(
        slots: SlotShape, side: WindowShape, *, num_q_heads: int, max_tokens: int, device: str
    ) -> int:
        """What it allocates beside the pool and the transforms.

        Args:
            slots, side: of the worker.
            num_q_heads: local query heads.
            max_tokens: of one request.
            device: of the worker.
        """
        kernels = executor_bytes(
            slots, side, num_q_heads=num_q_heads, scratch_tokens=SCRATCH_TOKENS, device=device
        )
        prefill = 0 if torch.device(device).type == "cpu" else WORKSPACE_BYTES
        return kernels + prefill + DecodeTables.nbytes(side.num_rows, max_tokens)

    def start(self, forward_batch: Any, *, refill_only: bool = False) -> None:
        """Prepare the layers of one forward pass; `refill_only` for a graph that holds its views
        already."""
        rows, lengths = forward_batch.req_pool_indices, forward_batch.seq_lens
        written = radix_attention.write_location(forward_batch.out_cache_loc)
        if forward_batch.forward_mode.is_extend():
            prefixes, counts = (
                [int(n) for n in numbers]
                for numbers in (
                    forward_batch.extend_prefix_lens_cpu,
                    forward_batch.extend_seq_lens_cpu,
                )
            )
            self._begin(
                rows.tolist(), prefixes, [p + n for p, n in zip(prefixes, counts, strict=True)]
            )
            written = written[: sum(counts)]
            windows = self.executor.windows
            batch = extend_batch(
                self._slots_of, rows, written, prefixes, counts, windows, piece=SCRATCH_TOKENS
            )
            self.prefill.begin(batch)
            self.batch = batch
            return
        self._tables.fill(self._slots_of, rows, lengths)
        if not refill_only:
            self.batch = self._tables.batch(rows, lengths, written, self.executor.windows)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: Any) -> Tensor:
        """Attention of one layer; `q`, `k`, `v` flat, of the local heads, after RoPE."""
        heads, dims = (
            (layer.tp_q_head_num, layer.tp_k_head_num),
            (layer.qk_head_dim, layer.v_head_dim),
        )
        q, k, v = (
            q.view(-1, heads[0], dims[0]),
            k.view(-1, heads[1], dims[0]),
            v.view(-1, heads[1], dims[1]),
        )
        local = layer.layer_id - self._pool.start_layer
        if isinstance(self.batch, DecodeBatch):
            return self.executor.decode(local, q, k, v, self.batch, scaling=layer.scaling).flatten(
                1
            )
        if self.batch is None:
            raise RuntimeError("a forward pass without metadata")
        total = sum(self.batch.lengths)
        out = self.executor.extend(
            local, q[:total], k[:total], v[:total], self.batch, scaling=layer.scaling
        )
        if total == len(q):
            return out.flatten(1)
        padded: Tensor = torch.zeros(len(q), heads[0], dims[1], dtype=q.dtype, device=q.device)
        padded[:total] = out
        return padded.flatten(1)


def _prefill(
    side: WindowShape, num_q_heads: int, scaling: float, device: str | torch.device
) -> Prefill:
    if torch.device(device).type == "cpu":
        return PlainPrefill()
    return FlashInferPrefill(
        num_q_heads=num_q_heads,
        num_kv_heads=side.num_kv_heads,
        head_dims=(side.k_head_dim, side.v_head_dim),
        scaling=scaling,
        dtype=side.dtype,
        device=device,
    )
