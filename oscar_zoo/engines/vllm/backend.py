"""The attention backend: hands the steps of vLLM's V2 runner to the INT2 cache.

vLLM mixes requests that decode with chunks of prompts in one step. So a step has up to two parts,
which run one after the other: nobody who decodes reads what a chunk of the same step writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout, KVQuantMode

from oscar_zoo.engines.vllm import compat, worker
from oscar_zoo.engines.vllm.register import DTYPE, NAME
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
PAGE = 128
"""Tokens of a page, where the command does not say."""


class Int2Backend(AttentionBackend):  # type: ignore[misc]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [DTYPE]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[Int2Impl]:
        return Int2Impl

    @staticmethod
    def get_builder_cls() -> type[Int2Builder]:
        return Int2Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PAGE

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """A layer is one contiguous region of pages."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM also asks for pages in general, and for those of a layer once more."""
        return spec if spec.state_content_bytes is not None else pages_of(spec, 0)


def pages_of(spec: Any, index: int) -> Any:
    """The pages of a layer with attention: a token is one row of bytes."""
    return replace(
        spec,
        num_head_slots=1,
        state_content_bytes=worker.token_bytes(spec.head_size, spec.num_kv_heads, index),
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NONE,
    )


@dataclass
class Part:
    """Requests of one kind, and their tokens among those of the step."""

    tokens: slice | Tensor
    batch: Batch


@dataclass
class Int2Metadata(AttentionMetadata):  # type: ignore[misc]
    cache: Int2Cache
    parts: Sequence[Part]


class Int2Builder(AttentionMetadataBuilder[Int2Metadata]):  # type: ignore[misc]
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._worker = worker.start(vllm_config)
        self._worker.forget_pages()
        self._page = kv_cache_spec.block_size

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Int2Metadata:
        """Of dummies, which have one token each and none before it."""
        return self._built(common_attn_metadata, captured=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Int2Metadata:
        return self._built(common_attn_metadata, captured=False)

    def _built(self, common: Any, captured: bool) -> Int2Metadata:
        """The same for all builders of a step: layers of other widths have one of their own."""
        state = self._worker
        if state.built is None or state.built[0] is not common:
            state.built = common, Int2Metadata(state.cache, self._parts(common, captured))
        found: Int2Metadata = state.built[1]
        return found

    def _parts(self, common: Any, captured: bool) -> list[Part]:
        """Row `i + 1` is that of request `i` in the runner's table."""
        state, number = self._worker, len(common.req_idx)
        bounds = common.query_start_loc_cpu[: number + 1].numpy()
        rows, new = common.req_idx.astype(np.int64) + 1, np.diff(bounds)
        prefixes = common.seq_lens_cpu_upper_bound[:number].numpy() - new
        # A token that comes alone counts itself in the window, also the last one of a prompt.
        alone = (new == 1) & ((prefixes > 0) | captured)
        decoding, chunks = alone.nonzero()[0], (~alone).nonzero()[0]
        for i in decoding if state.windows.fresh else ():
            if int(rows[i]) in state.windows.fresh:
                state.cache.start_requests((int(rows[i]),), (int(prefixes[i]),), (1,))
        parts = []
        if len(decoding):
            padding = 0 if len(chunks) else common.num_reqs - number
            parts.append(self._decode(common, decoding, rows[decoding], padding))
        if len(chunks):
            own, all_tokens = _at(chunks), np.arange(bounds[-1])
            tokens = _at(all_tokens[np.repeat(~alone, new)])
            slots, first = common.slot_mapping[tokens], common.query_start_loc[:-1][own].long()
            state.step(common.block_table_tensor[own], self._page).begin(
                StepInput(
                    "extend",
                    state.moved(rows[chunks]).masked_fill(common.slot_mapping[first] < 0, 0),
                    tuple(rows[chunks].tolist()),
                    common.seq_lens[own],
                    slots.clamp(min=0),
                    tuple(prefixes[chunks].tolist()),
                    tuple(new[chunks].tolist()),
                )
            )
            parts.append(Part(tokens, state.batch))
        return parts

    def _decode(self, common: Any, own: Indices, rows: Indices, padding: int) -> Part:
        """Requests with one new token each, whose tokens come first. A graph has `padding` more of
        them. It reads buffers that stay where they are."""
        state, whole = self._worker, len(own) + padding
        tokens = slice(0, whole) if padding else _at(own)
        slots = common.slot_mapping[tokens]
        known = state.steps.get(whole)
        step = known[0] if known else state.decode_step(whole)
        # Tokens without a slot are padding, or those of a dummy run, which names real requests:
        # they get row 0 and slot 0, which nobody reads.
        whole_rows = np.concatenate([rows, np.zeros(padding, np.int64)]) if padding else rows
        torch.mul(state.moved(whole_rows), slots >= 0, out=step.rows)
        torch.clamp(slots, min=0, out=step.out_loc)
        step.seq_lens.copy_(common.seq_lens[tokens].clamp(min=1))
        cache = state.step(common.block_table_tensor[tokens], self._page)
        if known:
            cache.refill(step)
            return Part(tokens, known[1])
        cache.begin(step)
        state.steps[whole] = step, state.batch
        return Part(tokens, state.batch)


def _at(places: Indices) -> slice | Tensor:
    """A slice, where these are neighbours, as they nearly always are."""
    if places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return torch.from_numpy(places)


class Int2Impl(AttentionImpl):  # type: ignore[misc]
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: Any = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = DTYPE,
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        wanted = {
            "a sliding window": sliding_window,
            "ALiBi": alibi_slopes,
            "a cache that layers share": kv_sharing_target_layer_name,
            **others,
        }
        for name, value in wanted.items():
            if value is not None:
                raise UnsupportedModel(f"{name} does not work with an INT2 KV cache in vLLM.")
        if attn_type != "decoder":
            raise UnsupportedModel(f"{attn_type} attention does not work with an INT2 KV cache.")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.logits_soft_cap = num_kv_heads or num_heads, logits_soft_cap
        self.sinks, self.kv_cache_dtype, self._config = sinks, kv_cache_dtype, compat.config()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Allocate what is not in pages, so that vLLM counts it."""
        worker.start(self._config)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Int2Metadata | None,
        output: Tensor,
        output_scale: Any = None,
        output_block_scale: Any = None,
    ) -> Tensor:
        """`query` is `[T, num_heads, head_size]`, after RoPE; tokens beyond those of the step are
        padding."""
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        cache, number = attn_metadata.cache, compat.layer_number(layer.layer_name)
        q, k, v = (x.reshape(len(x), -1) for x in (query, key, value))
        flat = output.view(len(output), -1)
        for part in attn_metadata.parts:
            cache.batch, own = part.batch, part.tokens
            flat[own] = cache.forward(number, q[own], k[own], v[own], self.sinks)
        return output
