"""The attention backend: hands the steps of vLLM's V2 runner to the INT2 cache.

vLLM mixes requests that decode with chunks of prompts in one step. So a step has up to two parts,
which run one after the other: nobody who decodes reads what a chunk of the same step writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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
from vllm.v1.kv_cache_interface import KVCacheLayout

from oscar_zoo.engines.vllm import compat, worker
from oscar_zoo.engines.vllm.decoding import Rows, landing
from oscar_zoo.engines.vllm.placement import pages_of
from oscar_zoo.engines.vllm.register import DTYPE, NAME
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.runtime.batch import Batch, moved
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
        """A layer is one contiguous region of pages, in which a token is one head to vLLM."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """vLLM also asks for pages in general, and for those of a layer once more."""
        return spec if spec.state_content_bytes is not None else pages_of(spec, 0)


@dataclass
class Part:
    """Requests of one kind, and their tokens among those of the step."""

    tokens: slice | Tensor
    batch: Batch
    fill: Callable[[], None] | None = None
    """What the first layer begins with."""


@dataclass
class Int2Metadata(AttentionMetadata):  # type: ignore[misc]
    cache: Int2Cache
    parts: Sequence[Part]


class Int2Builder(AttentionMetadataBuilder[Int2Metadata]):  # type: ignore[misc]
    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        drafts = vllm_config.num_speculative_tokens > 0
        kinds = AttentionCGSupport
        return kinds.UNIFORM_BATCH if drafts else kinds.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._worker = worker.start(vllm_config)
        self._worker.forget_pages()
        self._page, self._most = kv_cache_spec.block_size, 1 + vllm_config.num_speculative_tokens
        self._decoding: Rows = np.zeros(0, np.int64)  # requests of the last step, if all did

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
        state, most = self._worker, self._most
        named = state.requests if common.req_idx is None else common.req_idx
        number = len(named)
        bounds = common.query_start_loc_cpu[: number + 1].numpy()
        state.step(common.block_table_tensor, self._page)
        alike = common.max_query_len == most and bounds[-1] == number * most
        if alike and np.array_equal(named, self._decoding):
            return [self._decode(common, self._decoding + 1, most)]  # as most steps are
        rows, new = named.astype(np.int64) + 1, np.diff(bounds)
        known = common.seq_lens_cpu_upper_bound[:number].numpy()
        # A token that comes alone counts itself in the window, also the last one of a prompt.
        alone = (new == 1) & ((known > 1) | captured)
        drafts = ~common.is_prefilling[:number].numpy() & (new > 1) & (new <= most)
        alike = (alone if most == 1 else drafts & (new == most)).all()
        self._decoding = rows[: number if alike and not captured else 0] - 1
        if alike:
            return [self._decode(common, rows, most)]
        counts = np.unique(new[alone | drafts]).tolist()
        longest = int(known.max()) if len(counts) > 1 else None
        parts = [
            self._decode(common, rows, n, (new == n) & (alone | drafts), longest) for n in counts
        ]
        chunks = (~alone & ~drafts).nonzero()[0]
        if not len(chunks):
            return parts
        own, tokens = _at(chunks, common), _tokens(common, chunks)
        state.step(common.block_table_tensor[own], self._page).begin_extend(
            StepInput(
                "extend",
                moved(torch.from_numpy(rows[chunks]), common.seq_lens.device),
                (),
                common.seq_lens[own],
                landing(common.slot_mapping[tokens], state.unused),
                tuple((known - new)[chunks].tolist()),
                tuple(new[chunks].tolist()),
            )
        )
        return [*parts, Part(tokens, state.batch)]

    def _decode(
        self,
        common: Any,
        rows: Rows,
        count: int,
        among: Any = None,
        longest: int | None = None,
    ) -> Part:
        """Requests with `count` new tokens each: those `among` the rows, or all. A graph may have
        more of them at the end, which is padding: its row is 0 and its slot too, which nobody
        reads. Dummy runs name rows that have no owner yet, because all of them come in front of the
        first request."""
        if among is None:
            own, tokens = (slice(0, common.num_reqs * n) for n in (1, count))
            rows = np.concatenate([rows, np.zeros(common.num_reqs - len(rows), np.int64)])
        else:
            places = among.nonzero()[0]
            own, tokens, rows = _at(places, common), _tokens(common, places), rows[places]
        steps = self._worker.decoding(rows, longest)
        batch = steps.set(rows, count)

        def fill() -> None:
            slots, lengths = common.slot_mapping[tokens], common.seq_lens[own]
            pages = common.block_table_tensor[own], self._page
            steps.fill(count, slots, lengths, *pages, self._worker.unused)

        return Part(tokens, batch, fill)


def _tokens(common: Any, requests: Rows) -> slice | Tensor:
    bounds = common.query_start_loc_cpu.numpy()
    return _at(np.concatenate([np.arange(bounds[i], bounds[i + 1]) for i in requests]), common)


def _at(places: Rows, common: Any) -> slice | Tensor:
    """A slice, where these are neighbours, as they nearly always are."""
    if places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return moved(torch.from_numpy(places), common.seq_lens.device)


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
            if part.fill is not None and cache.index[number] == 0:
                part.fill()
            cache.batch, own = part.batch, part.tokens
            flat[own] = cache.forward(number, q[own], k[own], v[own], self.sinks)
        return output
