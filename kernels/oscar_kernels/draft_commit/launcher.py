"""Committing the accepted drafts of a tree, in one Triton launch for all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import LayerCache, WindowState

BLOCK = 1024


class DraftCommit:
    """Makes accepted drafts the next tokens of their requests; see `reference.DraftCommit`.

    The addresses of all stores are kept in one table on the device, so that a step is one launch.
    Nothing is read on the host.

    Args:
        caches: of all layers. Their stores must stay where they are.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        reason = _triton.missing(caches[0].codes.device)
        if reason:
            raise ValueError(f"drafts cannot be committed: {reason}")
        self.caches = caches
        self.table = torch.tensor([_line(cache) for cache in caches], dtype=torch.int64).to(
            caches[0].codes.device
        )

    def __call__(
        self,
        *,
        accepted: Tensor,
        count: int,
        rows: Tensor,
        lengths: Tensor,
        out_loc: Tensor,
        windows: WindowState,
    ) -> None:
        """See `reference.DraftCommit`."""
        if not rows.numel():
            return
        from oscar_kernels.draft_commit.kernel import _commit_drafts_kernel

        _commit_drafts_kernel[(len(self.caches), rows.numel())](
            self.table,
            accepted,
            rows,
            lengths,
            out_loc,
            windows.sink_block,
            count,
            RING=self.caches[0].ring_rows,
            SINK=self.caches[0].sink,
            BLOCK=BLOCK,
            num_warps=4,
        )


def _line(cache: LayerCache) -> list[int]:
    """Addresses of the stores of a layer, and how many units of 16 bits a row of the first four
    has."""
    stores = (cache.codes, cache.affine, cache.ring_k, cache.ring_v, cache.sink_k, cache.sink_v)
    if not all(store.is_contiguous() for store in stores):
        raise ValueError("the tensors of a cache must be contiguous")
    rows = (cache.codes[0], cache.affine[0], cache.ring_k[0, 0], cache.ring_v[0, 0])
    return [*(store.data_ptr() for store in stores), *(row.nbytes // 2 for row in rows)]
