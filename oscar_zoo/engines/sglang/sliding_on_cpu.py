"""Attention of layers with a sliding window on a CPU.

SGLang's own backend for a CPU writes a token to its slot in the pool of these layers, and reads the
slot that the token has in the other pool. The two differ as soon as slots behind a window are used
again. It also knows neither learned sinks nor a cap of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import radix_attention
from oscar_zoo.engines.sglang.compat.forward_batch import step_input
from oscar_zoo.models.attention import Softmax, attend
from oscar_zoo.runtime.engine import StepInput

_Stock: Any = radix_attention.attention_backend_class()


class SlidingOnCpu(_Stock):  # type: ignore[misc]
    """Plain attention over SGLang's pool for layers with a sliding window."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = (
            runner.token_to_kv_pool,
            runner.req_to_token_pool,
        )
        self._step: StepInput | None = None
        self._lengths: list[int] = []
        self._new: list[int] = []

    def support_triton(self) -> bool:
        """SGLang may not use its own Triton helpers without a GPU."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Note the requests of a forward pass."""
        self._step = step = step_input(forward_batch)
        drafts = 0 if step.drafts is None else step.drafts.count
        if step.drafts is not None and step.drafts.mask is not None:
            chain = [(2 << place) - 1 for place in range(drafts)] * len(step.request_rows)
            if [bits & 0xFFFFFFFF for bits in step.drafts.mask.tolist()] != chain:
                raise NotImplementedError("a tree of drafts over a sliding window")
        # Drafts are not among the tokens of their request, which a new token of any other step is.
        self._lengths = [length + drafts for length in step.seq_lens.tolist()]
        self._new = list(step.extend_lens) or [drafts or 1] * len(self._lengths)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch in one layer; `sinks` is `[heads]` of this worker.

        Returns:
            `[tokens, heads * v_head_dim]`.
        """
        step = self._step
        if step is None:
            raise RuntimeError("a forward pass without metadata")
        if k is None or not save_kv_cache:
            raise NotImplementedError("a sliding window over the keys of another layer")
        pool = self.token_to_kv_pool
        radix_attention.write_both(pool, layer, step.out_loc, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        softmax = Softmax(layer.scaling, layer.logit_cap or None, sinks)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts, begin = [], 0
        for row, length, new in zip(step.request_rows, self._lengths, self._new, strict=True):
            first = max(0, length - new - layer.sliding_window_size)
            slots = self.slots(row, first, length)
            asking = torch.arange(length - new, length)[:, None]
            mask = self.seen(asking, torch.arange(first, length), layer.sliding_window_size)
            parts.append(
                attend(
                    q[None, begin : begin + new].transpose(1, 2),
                    keys[None, slots].transpose(1, 2),
                    values[None, slots].transpose(1, 2),
                    mask,
                    softmax,
                )[0].transpose(0, 1)
            )
            begin += new
        return torch.cat(parts).flatten(1)

    forward_decode = forward_extend

    def seen(self, asking: Tensor, positions: Tensor, window: int) -> Tensor:
        """Which positions each token sees: its own, and `window` before it.

        Args:
            asking: positions of tokens, `[tokens, 1]`.
            positions: `[keys]`.
        """
        return (positions <= asking) & (positions >= asking - window)

    def slots(self, row: int, first: int, last: int) -> Tensor:
        """Slots of the positions `[first, last)` of a request in the pool of these layers."""
        own = self.req_to_token_pool.req_to_token[row, first:last].long()
        translated: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(own)
        return translated
