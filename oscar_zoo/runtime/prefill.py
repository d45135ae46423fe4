"""What the executor asks of a prefill kernel over 16-bit rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.softmax import Softmax


class Prefill(Protocol):
    """Dense attention over 16-bit rows, whose parts can be merged into one softmax.

    Log-sum-exps `[tokens, num_q_heads]` are float32. Their base is the library's own.

    Attributes:
        lse_unit: factor that makes them natural logarithms.
    """

    lse_unit: float

    def begin(self, batch: Batch) -> None:
        """Plan what all layers of one forward pass share."""
        ...

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the new tokens of every request over themselves.

        Args:
            q: `[tokens, num_q_heads, head_dim]`.
            k, v: `[tokens, num_kv_heads, head_dim]`.
            softmax: of the layer; its sinks are not looked at.

        Returns:
            Outputs `[tokens, num_q_heads, v_head_dim]` and their log-sum-exp.
        """
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Attention of all `q` over all of `k` and `v`, without a mask; results as for `chunk`."""
        ...

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The results of two parts as those of one softmax over the tokens of both."""
        ...
