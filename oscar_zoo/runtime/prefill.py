"""Dense attention over 16-bit rows: what `Int2Cache` asks of a kernel, and FlashInfer, which stock
SGLang brings on CUDA.

With FlashInfer new tokens go through the ragged kernel, planned once per forward pass, and pieces
of a materialized prefix through the kernel for one request. Its log-sum-exps are to base 2.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_zoo.errors import MissingDependency
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax

WORKSPACE_BYTES = 384 << 20
"""Bytes that SGLang gives its own FlashInfer backend for Qwen-sized models."""
HEADS = frozenset(((64, 64), (128, 128), (192, 128), (256, 256)))
"""Channels of K and of V that every release has kernels for. With others it compiles, and answers
wrongly when they are no multiples of 64, or does not compile when they are wider."""
LN2 = math.log(2)
MERGE_THREADS, MERGE_VECTOR = 512, 8
"""`merge_state` gives a thread 8 channels of a head and puts all heads of a token into one block.
A block has at most 1,024 threads; half of that leaves them registers."""


class Prefill(Protocol):
    """Dense attention over 16-bit rows, whose parts can be merged into one softmax. Log-sum-exps
    `[tokens, num_q_heads]` are float32. Their base is the library's own."""

    lse_unit: float  # factor that makes them natural logarithms

    def begin(self, batch: Batch) -> None:
        """Plan what all layers of one forward pass share."""
        ...

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of the new tokens of every request over themselves: `q`, `k` and `v`
        are `[tokens, heads, head_dim]`. Returns outputs `[tokens, num_q_heads, v_head_dim]` and
        their log-sum-exp. The sinks of the layer are not looked at."""
        ...

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        """Attention of all `q` over all of `k` and `v`, without a mask; results as for `chunk`."""
        ...

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The results of two parts as those of one softmax over the tokens of both."""
        ...


class FlashInferPrefill:
    """`Prefill` over the kernels of FlashInfer."""

    lse_unit = LN2

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dims: tuple[int, int],
        softmax: Softmax,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        try:
            import flashinfer
        except ImportError:
            raise MissingDependency(
                "an INT2 server on a GPU runs FlashInfer for prefill, which is not installed.",
                hint="pip install flashinfer-python",
            ) from None
        self._library: Any = flashinfer
        self._heads, self._dims, self._dtype = (num_q_heads, num_kv_heads), head_dims, dtype
        self._logits = {"sm_scale": softmax.scale, "logits_soft_cap": softmax.cap or None}
        scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD")

    def begin(self, batch: Batch) -> None:
        self._ragged.plan(
            batch.qo_indptr,
            batch.qo_indptr,
            *self._heads,
            self._dims[0],
            self._dims[1],
            causal=True,
            **self._logits,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        out, lse = self._ragged.run(q, k, v, return_lse=True)
        return out, lse

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        out, lse = self._library.single_prefill_with_kv_cache(
            q, k, v, **self._logits, return_lse=True
        )
        return out, lse

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        heads, dim = one[0].shape[1:]
        fewer = heads_of_a_block(heads, dim)

        def folded(rows: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
            rows, sums = rows.reshape(-1, fewer, dim), sums.reshape(-1, fewer)
            return rows.contiguous(), sums.contiguous()

        out, lse = self._library.merge_state(*folded(*one), *folded(*other))
        return out.view(-1, heads, dim), lse.view(-1, heads)


def modules(
    head_dims: tuple[int, int], dtype: torch.dtype, *, capped: bool, device: torch.device
) -> list[Any]:
    """What `FlashInferPrefill` compiles at its first use, as the `JitSpec`s of FlashInfer. Nothing
    is compiled, and the device gets no context."""
    from flashinfer.jit.attention import gen_batch_prefill_module, gen_single_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.utils import determine_attention_backend

    no_rope, no_window, exact_sums = 0, False, False
    backend = determine_attention_backend(device, no_rope, exact_sums, False, dtype, dtype)
    types, rest = (dtype,) * 3, (*head_dims, no_rope, no_window, capped, exact_sums)
    return [
        gen_batch_prefill_module(backend, *types, torch.int32, *rest),
        gen_single_prefill_module(backend, *types, *rest),
        gen_cascade_module(),
    ]


def heads_of_a_block(num_heads: int, head_dim: int) -> int:
    """How many heads of a token FlashInfer's merge takes at a time: the largest divisor of
    `num_heads` that one block of threads has room for. Heads are merged one by one, so that a token
    of 96 heads is as good as two tokens of 48."""
    most = max(1, MERGE_THREADS * MERGE_VECTOR // head_dim)
    return max(
        count for count in range(1, num_heads + 1) if num_heads % count == 0 and count <= most
    )
