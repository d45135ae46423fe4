"""The attention backend: hands the steps of vLLM's V2 runner to the INT2 cache.

vLLM mixes requests that decode with chunks of prompts in one step. So a step has up to two parts,
which run one after the other: nobody who decodes reads what a chunk of the same step writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._worker = worker.start(vllm_config)
        self._page = kv_cache_spec.block_size
        # A CUDA graph of decode steps reads them, so they stay where they are.
        most = self._worker.windows.shape.max_batch
        self._rows, self._lengths, self._slots = (
            torch.zeros(most, dtype=torch.int64, device=device) for _ in range(3)
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Int2Metadata:
        """Row `i + 1` is that of request `i` in the runner's table. Tokens without a slot are those
        of a dummy run, which names real requests: they get row 0 and slot 0, which nobody reads."""
        common, state = common_attn_metadata, self._worker
        number = len(common.req_idx)
        bounds = common.query_start_loc_cpu[: number + 1].tolist()
        new = [end - first for first, end in itertools.pairwise(bounds)]
        prefixes = [
            n - m for n, m in zip(common.seq_lens_cpu_upper_bound.tolist(), new, strict=False)
        ]
        on_host = [int(index) + 1 for index in common.req_idx]
        slots = common.slot_mapping[: bounds[-1]]
        rows = torch.from_numpy(common.req_idx).to(slots.device, torch.int64) + 1
        rows = torch.where(slots[common.query_start_loc[:number].long()] < 0, 0, rows)
        # A token that comes alone counts itself in the window, also the last one of a prompt.
        chunks = [i for i in range(number) if new[i] > 1 or not prefixes[i]]
        alone = [i for i in range(number) if new[i] == 1 and prefixes[i]]
        for i in alone:
            if on_host[i] in state.windows.fresh:
                state.cache.start_requests((on_host[i],), (prefixes[i],), (1,))
        parts = []
        if alone:
            padding = 0 if chunks else common.num_reqs - number
            parts.append(self._decode(common, alone, rows, slots, padding))
        if chunks:
            own = _at(chunks)
            tokens = _at([t for i in chunks for t in range(bounds[i], bounds[i + 1])])
            state.step(common.block_table_tensor[own], self._page).begin(
                StepInput(
                    "extend",
                    rows[own],
                    tuple(on_host[i] for i in chunks),
                    common.seq_lens[own],
                    slots[tokens].clamp(min=0),
                    tuple(prefixes[i] for i in chunks),
                    tuple(new[i] for i in chunks),
                )
            )
            parts.append(Part(tokens, state.batch))
        return Int2Metadata(state.cache, parts)

    def _decode(
        self, common: Any, alone: list[int], rows: Tensor, slots: Tensor, padding: int
    ) -> Part:
        """Requests with one new token each, whose tokens come first; a graph has `padding` more."""
        own, count = _at(alone), len(alone)
        self._rows[:count], self._slots[:count] = rows[own], slots[own].clamp(min=0)
        self._lengths[:count] = torch.where(rows[own] == 0, 1, common.seq_lens[own])
        whole = count + padding
        self._rows[count:whole], self._slots[count:whole], self._lengths[count:whole] = 0, 0, 1
        tokens = slice(0, whole) if padding else own
        self._worker.step(common.block_table_tensor[tokens], self._page).begin(
            StepInput("decode", self._rows[:whole], (), self._lengths[:whole], self._slots[:whole])
        )
        return Part(tokens, self._worker.batch)


def _at(places: list[int]) -> slice | Tensor:
    """A slice, where these are neighbours, as they nearly always are."""
    if places[-1] - places[0] == len(places) - 1:
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places)


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
