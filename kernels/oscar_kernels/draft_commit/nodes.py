"""Which drafts of a tree are accepted, from the slots that an engine copies."""

from __future__ import annotations

import torch
from torch import Tensor


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
