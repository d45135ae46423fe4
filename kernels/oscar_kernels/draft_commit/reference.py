"""Committing the accepted drafts of a tree, in plain torch: the definition of what the kernel
copies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oscar_kernels.cache import LayerCache, WindowState


class DraftCommit:
    """Makes accepted drafts the next tokens of their requests.

    Args:
        caches: of all layers, written; they have the same windows and stay where they are.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = caches

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
        """Make the accepted nodes of every request its next tokens, in all layers.

        Node `j` was written to slot `out_loc[b * n + j]` and to the ring at `lengths[b] + j`. The
        node that is accepted at depth `d` is copied to slot `out_loc[b * n + d]`, to the ring at
        `lengths[b] + d`, and to the sinks if that position is one of them.

        Args:
            accepted: `[B * n]` int32; entry `b * n + d` is the node at depth `d`, or -1 from the
                first depth without an accepted node on. Nodes ascend, and none is less than its
                depth.
            rows: `[B]` int32 or int64, the row of each request.
            lengths: `[B]` int32 or int64, tokens of each request in front of its drafts.
            out_loc: `[B * n]` int32 or int64, slots of the drafts.
            windows: `sink_block` of every row.
        """
        table = accepted.view(-1, count)
        request, depth = (table >= 0).nonzero(as_tuple=True)
        node, row, length = (
            table[request, depth].long(),
            rows.long()[request],
            lengths.long()[request],
        )
        slots = out_loc.long().view(-1, count)
        old, new = slots[request, node], slots[request, depth]
        first = length + depth < self.caches[0].sink
        block = windows.sink_block.long()[row][first]
        for cache in self.caches:
            for store in (cache.codes, cache.affine):
                store[new] = store[old]
            for ring, sink in ((cache.ring_k, cache.sink_k), (cache.ring_v, cache.sink_v)):
                kept = ring[row, (length + node) % cache.ring_rows]
                ring[row, (length + depth) % cache.ring_rows] = kept
                sink[block, (length + depth)[first]] = kept[first]
