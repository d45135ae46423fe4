"""Where the cache lies in vLLM's memory.

A page holds the codes of its tokens and nothing else. So vLLM may clear one, and a page of another
group of layers can lie at the same place. Scales and offsets lie behind all pages, by slot.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.kv_cache_interface import KVQuantMode, iter_layer_specs

from oscar_kernels.spec import QuantSpec, code_bytes, row_bytes
from oscar_zoo.engines.vllm import worker
from oscar_zoo.errors import UnsupportedModel


def pages_of(spec: Any, index: int) -> Any:
    """The pages of a layer with attention: a token is one row of bytes."""
    return replace(
        spec,
        num_head_slots=1,
        state_content_bytes=spec.num_kv_heads * sum(map(code_bytes, _rows(spec, index))),
        dtype=torch.uint8,
        kv_quant_mode=KVQuantMode.NONE,
    )


def window_pages_of(spec: Any, backend: Any, size: int) -> Any:
    """Pages of a layer with a sliding window, of as many tokens as fit into `size` bytes. Where its
    backend takes no such few tokens, vLLM makes all pages larger."""
    takes = backend.get_supported_kernel_block_sizes(spec)
    least = min(getattr(one, "base", one) for one in takes)
    token = spec.unpadded_page_size_bytes // spec.block_size
    tokens = max(least, size // token // least * least)
    return replace(spec, block_size=tokens, page_size_padded=None)


def _rows(spec: Any, index: int) -> tuple[QuantSpec, QuantSpec]:
    return worker.specs_of(spec.head_size, index)


def _ours(spec: Any) -> bool:
    return getattr(spec, "num_head_slots", None) == 1 and spec.dtype == torch.uint8


def behind_pages(groups: Any) -> int:
    """Bytes of scales and offsets by page, of all layers. They are as many whatever the bits."""
    found = 0
    for group in groups:
        specs = [*iter_layer_specs(group.kv_cache_spec)]
        each = len(group.layer_names) // len(specs)  # one for all layers, or one for each
        for spec in filter(_ours, specs):
            rows = sum(row_bytes(one) - code_bytes(one) for one in _rows(spec, 0))
            found += each * spec.block_size * spec.num_kv_heads * rows
    return found


class Int2Placement(planning.DefaultKVCacheConfigBuilder):  # type: ignore[misc]
    """Stock groups of layers, with room behind the pages. All pages have one size: as many tokens
    in 16 bits as fit make a page of a layer with a sliding window."""

    def get_kv_cache_groups(self, vllm_config: Any, kv_cache_spec: Any) -> Any:
        found = super().get_kv_cache_groups(vllm_config, kv_cache_spec)
        ours = sum(any(map(_ours, iter_layer_specs(one.kv_cache_spec))) for one in found)
        if ours != 1:
            raise UnsupportedModel(
                f"its layers with full attention are {ours} groups in vLLM; an INT2 cache has one.",
                hint="serve it with SGLang: leave out --engine",
            )
        if len(found) > 1 and any(spec.is_draft for spec in kv_cache_spec.values()):
            raise UnsupportedModel(
                "drafts of a model do not work with an INT2 cache beside sliding windows in vLLM."
            )
        return found

    def get_kv_cache_config_from_groups(
        self, vllm_config: Any, kv_cache_groups: Any, num_blocks: int
    ) -> Any:
        spare = int(len(kv_cache_groups) > 1)  # what padding writes, no other layer may read
        found = super().get_kv_cache_config_from_groups(
            vllm_config, kv_cache_groups, num_blocks + spare
        )
        for tensor in found.kv_cache_tensors:
            tensor.size += found.num_blocks * behind_pages(kv_cache_groups)
        found.num_blocks -= spare
        return found

    def _get_pool_bytes_per_block(self, vllm_config: Any, kv_cache_groups: Any) -> int:
        pages = planning._pool_bytes_per_block(vllm_config, kv_cache_groups)
        return int(pages) + behind_pages(kv_cache_groups)
