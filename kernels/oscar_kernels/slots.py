"""What moves slots: packing the engine's table into one list, and committing the accepted drafts of
a tree, each in one Triton launch; and which drafts those are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_kernels import _triton
from oscar_kernels.cache import LayerCache, NewTokens, WindowState

BLOCK = 1024
PROGRAMS = 64
"""Programs per request, so that many programs copy a long one."""


def pack_slots(
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    kv_indptr: Tensor,
    out: Tensor,
    page: int = 1,
    step: NewTokens | None = None,
) -> None:
    """Pack the slots of every request; see `reference.pack_slots`.

    The list is a snapshot, so kernels of a CUDA graph may read it while the engine changes its
    table, whose rows are contiguous. Bound by memory: 8 bytes per token at int32.
    """
    _triton.require(table.device)
    fits = table.dim() == 2 and table.stride(1) == 1 and kv_indptr.numel() == rows.numel() + 1
    dense = rows.is_contiguous() and lengths.is_contiguous() and out.is_contiguous()
    if not (fits and dense and lengths.shape == rows.shape):
        shapes = (tuple(x.shape) for x in (table, rows, lengths, kv_indptr))
        raise ValueError("table {}, rows {}, lengths {} and kv_indptr {}".format(*shapes))
    if not rows.numel():
        kv_indptr.zero_()
        return
    from oscar_kernels.slots_kernel import _pack_slots_kernel

    _pack_slots_kernel[(rows.numel(), PROGRAMS)](
        table, rows, lengths, kv_indptr, out, table.stride(0), *(step or (None,) * 4),
        LEAST=0 if step is None else 1, PAGE=page, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


class DraftCommit:
    """Makes accepted drafts the next tokens of their requests; see `reference.DraftCommit`.

    The addresses of all stores are kept in one table on the device, so that a step is one launch.
    Nothing is read on the host.

    Args:
        caches: of all layers. Their stores must stay where they are.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        device = caches[0].codes.device
        _triton.require(device)
        self.caches = caches
        lines = [_line(cache) for cache in caches]
        self.table = torch.tensor(lines, dtype=torch.int64).to(device)

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
        from oscar_kernels.slots_kernel import _commit_drafts_kernel

        _commit_drafts_kernel[(len(self.caches), rows.numel())](
            self.table, accepted, rows, lengths, out_loc, windows.sink_block, count,
            RING=self.caches[0].ring_rows, SINK=self.caches[0].sink, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip


def _line(cache: LayerCache) -> list[int]:
    """Addresses of the stores of a layer, and how many units of 16 bits a row of the first four
    has."""
    if not all(store.is_contiguous() for store in cache.stores):
        raise ValueError("the tensors of a cache must be contiguous")
    rows = (cache.codes[0], cache.affine[0], cache.ring_k[0, 0], cache.ring_v[0, 0])
    return [*(store.data_ptr() for store in cache.stores), *(row.nbytes // 2 for row in rows)]


def accepted_nodes(out_loc: Tensor, count: int, target: Tensor, source: Tensor) -> Tensor:
    """Which node is accepted at each depth, from a list of slots to copy.

    Slot 0 and slots that are not in `out_loc` name no node, and a pair of slots of two requests
    does not either. Nothing is read on the host.

    Args:
        out_loc: `[B * n]` int64, slots of the drafts, each of them once but for slot 0.
        target, source: `[N]` int64; the node in slot `source[i]` shall be in slot `target[i]`.

    Returns:
        `[B * n]` int32, `accepted` of `reference.DraftCommit`.
    """
    total = out_loc.numel()
    ordered, order = out_loc.sort()

    def place(slot: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.searchsorted(ordered, slot.contiguous()).clamp(max=total - 1)
        return order[at], (ordered[at] == slot) & (slot > 0)

    (new, new_there), (old, old_there) = place(target), place(source)
    there = new_there & old_there & (new // count == old // count)
    accepted = torch.full((total + 1,), -1, dtype=torch.int32, device=out_loc.device)
    accepted[torch.where(there, new, total)] = (old % count).int()
    return accepted[:total]
