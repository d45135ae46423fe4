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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from oscar_kernels.cache import Drafts
from oscar_zoo.runtime.softmax import Softmax


@dataclass(frozen=True)
class CacheConfig:
    """What one worker serves, beside the shapes of its stores.

    Attributes:
        layer_ids: global ids of the full-attention layers of this worker, in the order of the
            stores. Other layers of the model are not the cache's business.
        num_q_heads: local query heads.
        softmax: scale and cap of the logits, the same in all layers; without sinks.
        max_batch: requests of a decode step.
        max_tokens: cached tokens of one request.
        piece_tokens: tokens of a cached prefix that are read back into 16 bits at once; 0 where no
            prefill kernel reads 16-bit rows.
        device: where the stores live.
    """

    layer_ids: tuple[int, ...]
    num_q_heads: int
    softmax: Softmax
    max_batch: int
    max_tokens: int
    piece_tokens: int
    device: str | torch.device


class SlotSource(Protocol):
    """Where the engine keeps the slots of cached tokens."""

    def pack(self, rows: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
        """Copy the slots of the requests in `rows` `[B]` to `out`, in order of position.

        Request `b` fills `out[kv_indptr[b] : kv_indptr[b + 1]]`. Nothing is read on the host.
        """
        ...


@dataclass(frozen=True)
class SlotTable:
    """The `SlotSource` of an engine with one table of slots by row and position.

    Attributes:
        table: `[R, max tokens]` integers on the device.
        copy: `Ops.pack` of the device.
    """

    table: Tensor
    copy: Callable[[Tensor, Tensor, Tensor, Tensor], None]

    def pack(self, rows: Tensor, kv_indptr: Tensor, out: Tensor) -> None:
        """See `SlotSource.pack`."""
        self.copy(self.table, rows, kv_indptr, out)


@dataclass(frozen=True)
class StepInput:
    """One forward pass of `B` requests with `T` new tokens.

    Attributes:
        kind: `decode` for one new token per request, `verify` for the drafts of every request, else
            `extend`.
        rows: `[B]` on the device, the window row of every request; 0 for padding.
        request_rows: the same on the host; empty in a decode or verify step on a GPU, which must
            not wait for the device.
        seq_lens: `[B]` on the device, tokens of every request with the new ones, in a verify step
            without them; an extend step does not read it.
        out_loc: `[T]` on the device, slots of the new tokens.
        prefix_lens, extend_lens: cached and new tokens of every request; empty in other steps.
        drafts: of a verify step. A mask says that `Int2Cache.commit` will be called for the
            accepted ones; those of a chain stay where they are.
    """

    kind: Literal["decode", "extend", "verify"]
    rows: Tensor
    request_rows: tuple[int, ...]
    seq_lens: Tensor
    out_loc: Tensor
    prefix_lens: tuple[int, ...] = ()
    extend_lens: tuple[int, ...] = ()
    drafts: Drafts | None = None
