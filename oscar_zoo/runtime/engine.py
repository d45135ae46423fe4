"""What a serving engine gives to the INT2 cache, without any type of an engine.

A shim for an engine fills in `CacheConfig` once and a `StepInput` for every forward pass, and calls
`Int2Cache.begin`, `refill` and `forward`. It also tells the stores about the owners of window rows,
on the host:

* `WindowStore.hand_out(rows)`: the engine gave rows to new requests.
* `SinkBlocks.admit(rows, prompts)`: the tokens that these requests will bring.
* `SinkBlocks.release(row, prompt)`: a request has ended or must start again.
* `SinkBlocks.flush()`: the engine emptied its prefix cache.
* `SinkBlocks.reprefill_tail(prompt, page_size)`: tokens of a prefix hit to compute again.
* `KeptRings.choose(scope, ids)`, `expect(row, choice)`, `ended(row, ...)`, `flush()`: rings of
  requests that have ended, for prompts that go on from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oscar_kernels.cache import Drafts


@dataclass(frozen=True)
class CacheConfig:
    # Global ids of the full-attention layers of this worker, in the order of the stores. Other
    # layers of the model are not the cache's business.
    layer_ids: tuple[int, ...]
    num_q_heads: int  # local query heads
    softmax: Softmax  # scale and cap of the logits, the same in all layers; without sinks
    max_batch: int  # requests of a decode step
    max_tokens: int  # cached tokens of one request
    # Tokens of a cached prefix that are read back into 16 bits at once; 0 where no prefill kernel
    # reads 16-bit rows.
    piece_tokens: int
    device: str | torch.device  # where the stores live


@dataclass(frozen=True)
class StepInput:
    """One forward pass of `B` requests with `T` new tokens."""

    # `decode` for one new token per request, `verify` for the drafts of every request, else
    # `extend`.
    kind: Literal["decode", "extend", "verify"]
    rows: Tensor  # `[B]` on the device, the window row of every request; 0 for padding
    # The same on the host; empty in a decode or verify step on a GPU, which must not wait for the
    # device.
    request_rows: tuple[int, ...]
    # `[B]` on the device, tokens of every request with the new ones, in a verify step without them;
    # an extend step does not read it.
    seq_lens: Tensor
    out_loc: Tensor  # `[T]` on the device, slots of the new tokens
    # Both: cached and new tokens of every request; empty in other steps.
    prefix_lens: tuple[int, ...] = ()
    extend_lens: tuple[int, ...] = ()
    # Of a verify step. A mask says that `Int2Cache.commit` will be called for the accepted ones;
    # those of a chain stay where they are.
    drafts: Drafts | None = None


@dataclass(frozen=True)
class Softmax:
    scale: float  # factor of the products of queries and keys
    # `c` for `c * tanh(logit / c)`; 0 for none. It does not go with centred keys, because they
    # shift the logits.
    cap: float = 0.0
    # `[num_q_heads]`, a learned logit of every query head that takes its share of every softmax and
    # has no value (gpt-oss); `None` for none.
    sinks: Tensor | None = None

    def sink_logits(self, query: Tensor, k_mean: Tensor | None) -> Tensor | None:
        """The learned logit beside those that the cache gives, `[T, num_q_heads]` float32, perhaps
        with a stride of 0; `None` without one. `query`: `[T, num_q_heads, head_dim]`, not
        transformed. `k_mean`: `[1 or num_kv_heads, 1, head_dim]`, subtracted from the keys whose
        logits stand beside this one; `None` where they are whole."""
        if self.sinks is None:
            return None
        sinks = self.sinks.float()
        if k_mean is None:
            return sinks.expand(query.shape[0], -1)
        grouped = query.float().unflatten(1, (k_mean.shape[0], -1))
        moved = torch.einsum("thgd,hd->thg", grouped, k_mean.float().reshape(k_mean.shape[0], -1))
        return sinks - self.scale * moved.flatten(1)
