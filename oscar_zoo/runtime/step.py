"""One forward step as executors see it, without any type of SGLang.

A step holds requests in batch order; the tokens of request `i` are rows
`offsets[i] .. offsets[i + 1]` of q, k and v. In an extend step a request brings `new` tokens on top
of `prefix` cached ones, and these tokens read each other directly. In a decode step it brings one
token, which is cached before it reads, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from oscar_zoo.runtime.window_store import WindowCoverage


@dataclass(frozen=True)
class StepRequest:
    """One request of a step.

    Attributes:
        row: its row in the side store.
        prefix: tokens cached before this step.
        new: tokens it brings.
        cached: where it reads the tokens it finds in the cache: `prefix` of them (extend) or
            `prefix + 1` (decode).
        slots: `[cached.length]` int64, slot of each of them.
    """

    row: int
    prefix: int
    new: int
    cached: WindowCoverage
    slots: Tensor


@dataclass(frozen=True)
class Step:
    """A whole batch. `out_slots` `[tokens]` int64 are the slots of the tokens it brings."""

    requests: tuple[StepRequest, ...]
    out_slots: Tensor
    decode: bool

    @property
    def num_tokens(self) -> int:
        """Tokens the step brings; rows of q, k and v beyond are padding."""
        return sum(request.new for request in self.requests)


class Executor(Protocol):
    """Attention over the cache, including all writes to it. One implementation per kind of
    machine."""

    def extend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, *, scaling: float
    ) -> Tensor:
        """Cache the new tokens and let them read the prefix and each other.

        Slots are written first; rings and sinks after attention, because the chunk reads the ring
        of the one before.

        Args:
            layer: local layer index.
            q: `[tokens, num_q_heads, head_dim]`, after RoPE, not transformed. Not modified.
            k, v: `[tokens, num_kv_heads, ...]`, not transformed. Not modified.
            step: the batch; `tokens == step.num_tokens`.
            scaling: factor of the logits.

        Returns:
            `[tokens, num_q_heads, v_head_dim]` in the basis of the model and the dtype of `q`.
        """
        ...

    def decode(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step, *, scaling: float
    ) -> Tensor:
        """As `extend` for one token per request; slot, ring and sink are written before
        attention."""
        ...
