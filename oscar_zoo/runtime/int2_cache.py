"""The INT2 cache of one worker, as an engine drives it: `begin` or `refill` in front of a forward
pass, then `forward` for every layer.

A decode step reads nothing back from the device. Its tables are filled by kernels in front of the
graph, and the graph holds views of them. Per-request state is reset here, in front of the forward
pass, never by the scheduler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from oscar_zoo.runtime.batch import Batch, BatchTables, decode_batch, extend_batch
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.engine import CacheConfig, SlotSource, StepInput
from oscar_zoo.runtime.executor import Executor, executor_bytes
from oscar_zoo.runtime.flashinfer_prefill import HEADS, WORKSPACE_BYTES, FlashInferPrefill
from oscar_zoo.runtime.prefill import Prefill
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.verify import VerifyTables
from oscar_zoo.runtime.warm_up import warm_up
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

logger = logging.getLogger(__name__)

PIECE_TOKENS = 32_768
"""Tokens of a prefix that are read back into 16 bits at once; 134 MB at 8 KV heads of 128."""


class Int2Cache:
    """Stores, tables and executor of one worker.

    Args:
        ops: what runs on its device.
        prefill: its kernel over 16-bit rows, if there is one.
    """

    def __init__(
        self,
        config: CacheConfig,
        slots: SlotStore,
        windows: WindowStore,
        transforms: TransformTable,
        source: SlotSource,
        *,
        ops: Ops,
        prefill: Prefill | None,
    ) -> None:
        self.config, self.windows, self.source = config, windows, source
        self._index = {layer_id: index for index, layer_id in enumerate(config.layer_ids)}
        self.executor = Executor(
            [slots.layer(index, windows) for index in range(slots.shape.num_layers)],
            windows.state,
            transforms.layers,
            ops,
            prefill,
            num_q_heads=config.num_q_heads,
            max_batch=config.max_batch,
            drafts=windows.shape.drafts,
            scratch_tokens=config.piece_tokens,
        )
        self._tables = BatchTables(config.max_batch, config.max_tokens, config.device)
        self._verify = (
            VerifyTables(self._tables, windows.state, config.max_batch, windows.shape.drafts)
            if windows.shape.drafts > 1
            else None
        )
        self._commit = ops.make_commit(self.executor.caches) if self._verify else None
        self.batch: Batch | None = None

    def compile_kernels(self, wait: Callable[[], None]) -> None:
        """Have every kernel of prefill compiled and run once, on a GPU; those of a CPU need it
        not.
        """
        if torch.device(self.config.device).type != "cuda":
            return
        logger.info("INT2 KV cache: compiling kernels")
        began = perf_counter()
        wait()
        waited = perf_counter() - began
        warm_up(self.executor, self.source, self.config)
        took = perf_counter() - began
        logger.info("INT2 KV cache: kernels ready after %.1f s, %.1f s of waiting", took, waited)

    def begin(self, step: StepInput) -> None:
        """Prepare the layers of one forward pass."""
        if step.kind == "decode":
            self.refill(step)
            self.batch = decode_batch(
                self._tables, step.rows, step.seq_lens, step.out_loc, self.windows.state
            )
        elif step.kind == "verify":
            self.refill(step)
            self.batch = self._drafts().batch(step)
        else:
            self._start_requests(step)
            self.batch = extend_batch(
                self.source,
                step.rows,
                step.out_loc,
                step.prefix_lens,
                step.extend_lens,
                self.windows.state,
                piece_tokens=self.config.piece_tokens,
            )
        self.executor.begin(self.batch)

    def refill(self, step: StepInput) -> None:
        """Fill the tables of a decode or verify step whose graph holds views of them already."""
        if step.kind == "verify":
            self._drafts().fill(self.source, step)
        else:
            self._tables.fill(self.source, step.rows, step.seq_lens)

    def commit(self, target: Tensor, source: Tensor) -> None:
        """Make accepted drafts of the last verify step the next tokens of their requests.

        What is looked up is the step's own snapshot, so a row that got a new owner meanwhile is
        left alone.

        Args:
            target, source: `[N]` slots; the draft in slot `source[i]` shall be in slot `target[i]`.
                Slot 0 and slots that are not of the step are skipped.
        """
        if self._commit is None:
            raise RuntimeError("drafts of a cache that has no room for them")
        self._commit(**self._drafts().accepted(target, source), windows=self.windows.state)

    def forward(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Attention of one layer over the step that `begin` prepared.

        Args:
            q, k, v: `[tokens, heads * head_dim]`, of the local heads, after RoPE. Tokens beyond
                those of the batch are padding.
            sinks: `[num_q_heads]`, learned sinks of the layer, if it has any.

        Returns:
            `[tokens, num_q_heads * v_head_dim]`; zeros for padding.
        """
        if self.batch is None:
            raise RuntimeError("a forward pass without metadata")
        shape, total = self.windows.shape, self.batch.num_tokens
        q = q.view(-1, self.config.num_q_heads, shape.k_head_dim)
        k = k.view(-1, shape.num_kv_heads, shape.k_head_dim)
        v = v.view(-1, shape.num_kv_heads, shape.v_head_dim)
        out = self.executor.forward(
            self.layer_index(layer_id),
            q[:total],
            k[:total],
            v[:total],
            self.batch,
            replace(self.config.softmax, sinks=sinks),
        )
        if total == len(q):
            return out.flatten(1)
        padded = out.new_zeros(len(q), *out.shape[1:])
        padded[:total] = out
        return padded.flatten(1)

    def layer_index(self, layer_id: int) -> int:
        """Index of a layer in the stores."""
        return self._index[layer_id]

    def report(self) -> dict[str, object]:
        """What this cache allocated beside its stores, in bytes."""
        return {
            "scratch": self.executor.nbytes
            + table_bytes(self.windows.shape, self.config.max_tokens)
        }

    def _drafts(self) -> VerifyTables:
        if self._verify is None:
            raise RuntimeError("drafts of a cache that has no room for them")
        return self._verify

    def _start_requests(self, step: StepInput) -> None:
        """Reset rows with a new owner, and follow the sinks of all of them."""
        prefixes = dict(zip(step.request_rows, step.prefix_lens, strict=True))
        fresh = self.windows.take_fresh(step.request_rows)
        self.windows.begin({row: prefixes[row] for row in fresh})
        ends = [p + n for p, n in zip(step.prefix_lens, step.extend_lens, strict=True)]
        self.windows.sinks.launched(step.request_rows, ends)
        self.windows.rings.launched(step.request_rows, ends)


def piece_tokens(device: str | torch.device) -> int:
    """`CacheConfig.piece_tokens` of a device: only a GPU has a prefill kernel."""
    return PIECE_TOKENS if torch.device(device).type == "cuda" else 0


def cache_bytes(
    slots: SlotShape,
    windows: WindowShape,
    ops: Ops,
    *,
    num_q_heads: int,
    max_tokens: int,
    device: str | torch.device,
) -> int:
    """Bytes that an `Int2Cache` allocates beside its stores and transforms.

    Args:
        slots, windows: shapes of the stores of the worker.
        ops: what runs on its device.
        max_tokens: cached tokens of one request.
        device: of the worker.
    """
    scratch = executor_bytes(
        slots,
        windows,
        ops,
        num_q_heads=num_q_heads,
        scratch_tokens=piece_tokens(device),
        device=device,
    )
    flashinfer = torch.device(device).type == "cuda" and flashinfer_has(windows)
    prefill = WORKSPACE_BYTES if flashinfer else 0
    return scratch + prefill + table_bytes(windows, max_tokens)


def table_bytes(windows: WindowShape, max_tokens: int) -> int:
    """Bytes of the tables that are filled in front of a step."""
    verify = VerifyTables.nbytes(windows.max_batch, windows.drafts) if windows.drafts > 1 else 0
    return BatchTables.nbytes(windows.max_batch, max_tokens) + verify


def flashinfer_has(windows: WindowShape) -> bool:
    """Whether FlashInfer has a prefill for the heads of these windows."""
    return (windows.k_head_dim, windows.v_head_dim) in HEADS


def make_prefill(
    config: CacheConfig, windows: WindowShape, *, of_engine: Callable[[], Prefill]
) -> Prefill | None:
    """The prefill kernel of a device: none on a CPU; on a GPU FlashInfer, if it has the heads.

    Args:
        windows: shape of its windows.
    """
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
