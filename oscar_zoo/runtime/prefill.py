"""What the executor asks of a prefill kernel over 16-bit rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from oscar_zoo.runtime.batch import Batch


class Prefill(Protocol):
    """Dense attention over 16-bit rows, whose parts can be merged into one softmax.

    Log-sum-exps `[tokens, num_q_heads]` are float32. Their base is the library's own.
    """

    def begin(self, batch: Batch) -> None:
        """Plan what all layers of one forward pass share."""
        ...

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, sm_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the new tokens of every request over themselves.

        Args:
            q: `[tokens, num_q_heads, head_dim]`.
            k, v: `[tokens, num_kv_heads, head_dim]`.
            batch: the batch that `begin` planned.
            sm_scale: factor of the logits.

        Returns:
            Outputs `[tokens, num_q_heads, v_head_dim]` and their log-sum-exp.
        """
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> tuple[Tensor, Tensor]:
        """Attention of all `q` over all of `k` and `v`, without a mask; results as for `chunk`."""
        ...

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The results of two parts as those of one softmax over the tokens of both."""
        ...
