"""The attention backend of a model whose layers partly have a sliding window.

Its full-attention layers go to the INT2 backend. The others go to a stock backend over a pool in
the model's dtype.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oscar_zoo.engines.sglang.backend import OscarAttentionBackend
from oscar_zoo.engines.sglang.compat import radix_attention

_Stock: Any = radix_attention.attention_backend_class()


class WindowedBackend(_Stock):  # type: ignore[misc]
    """Two backends in one."""

    def __init__(self, full: OscarAttentionBackend, sliding: Any) -> None:
        super().__init__()
        # SGLang's own pairs of backends have these names, and it reads them.
        self.full_attn_backend, self.attn_backend_list = full, [full, sliding]
        self.token_to_kv_pool, self.req_to_token_pool = (
            full.token_to_kv_pool,
            full.req_to_token_pool,
        )
        self.sliding = sliding
        self.kv_index_translator = getattr(sliding, "kv_index_translator", None)
        self.needs_cpu_seq_lens = full.needs_cpu_seq_lens or sliding.needs_cpu_seq_lens
        self.extend_dummy_seqs_capped_by_req_pool = getattr(
            sliding, "extend_dummy_seqs_capped_by_req_pool", False
        )
        self.max_context_len = full.max_context_len  # SGLang sizes masks of drafts by it
        self._full_layers = frozenset(full.cache.config.layer_ids)

    @property
    def verify_mask(self) -> Any:
        """Where SGLang writes which drafts see which; `None` without drafts and without graphs.
        The other backend keeps a copy of its own."""
        return self.sliding.verify_mask

    def support_triton(self) -> bool:
        """SGLang may use its own Triton helpers if both backends allow it."""
        return all(part.support_triton() for part in self.attn_backend_list)

    def shared_read_ends(self, mode: Any) -> Any:
        """When SGLang may change what a forward pass reads: after the later of both backends."""
        ends = [part.shared_read_ends(mode) for part in self.attn_backend_list]
        return type(ends[0]).max_of(ends)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare a forward pass."""
        for part in self.attn_backend_list:
            part.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what graphs read."""
        for part in self.attn_backend_list:
            part.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill what a graph reads, before its capture and before every replay."""
        for part in self.attn_backend_list:
            part.init_forward_metadata_out_graph(forward_batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """What a graph prepares itself."""
        for part in self.attn_backend_list:
            part.init_forward_metadata_in_graph(forward_batch)

    def on_after_cuda_graph_warmup(self) -> None:
        """Undo what the pass before a capture changed."""
        for part in self.attn_backend_list:
            part.on_after_cuda_graph_warmup()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padding requests."""
        return self.full_attn_backend.get_cuda_graph_seq_len_fill_value()

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a prefill or mixed batch in one layer."""
        part = self._of(layer)
        out: Tensor = part.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return out

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a decode batch in one layer."""
        part = self._of(layer)
        out: Tensor = part.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        return out

    def _of(self, layer: Any) -> Any:
        return self.full_attn_backend if layer.layer_id in self._full_layers else self.sliding
