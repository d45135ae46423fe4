"""Prefill over 16-bit rows by FlashInfer, which stock SGLang brings on CUDA:
`kernel_executor.Prefill`.

New tokens go through the ragged kernel that SGLang's own FlashInfer backend runs them through,
planned once per forward pass; pieces of a materialized prefix through the kernel for one request.
Log-sum-exps are to base 2.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_zoo.errors import MissingDependency
from oscar_zoo.runtime.batch import ExtendBatch

WORKSPACE_BYTES = 384 << 20
"""What SGLang gives its own FlashInfer backend for Qwen-sized models."""


class FlashInferPrefill:
    """Over the kernels of FlashInfer.

    Args:
        num_q_heads, num_kv_heads: of this worker.
        head_dims: of K and of V.
        scaling: factor of the logits.
        dtype: of rows.
        device: a CUDA device.

    Raises:
        MissingDependency: FlashInfer is not installed.
    """

    def __init__(
        self,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        head_dims: tuple[int, int],
        scaling: float,
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
        self._heads, self._dims, self._scaling, self._dtype = (
            (num_q_heads, num_kv_heads),
            head_dims,
            scaling,
            dtype,
        )
        scratch = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(scratch, "NHD")

    def begin(self, batch: ExtendBatch) -> None:
        """Plan the pass over new tokens."""
        self._ragged.plan(
            batch.cuts,
            batch.cuts,
            *self._heads,
            self._dims[0],
            self._dims[1],
            causal=True,
            sm_scale=self._scaling,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: ExtendBatch, scaling: float
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        out, lse = self._ragged.run(q, k, v, return_lse=True)
        return out, lse

    def whole(self, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        out, lse = self._library.single_prefill_with_kv_cache(
            q, k, v, sm_scale=scaling, return_lse=True
        )
        return out, lse

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """See `Prefill`."""
        out, lse = self._library.merge_state(*(part.contiguous() for part in (*one, *other)))
        return out, lse
