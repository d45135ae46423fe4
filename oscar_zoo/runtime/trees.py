"""Trees of drafts: from an engine's mask to the bits that kernels read, or to a chain."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def ancestors(mask: Tensor, lengths: Tensor, count: int, real: int) -> Tensor:
    """Which drafts every draft sees, as `oscar_kernels.cache.Drafts.mask`. Nothing is read on the
    host.

    Args:
        mask: bool, one dimension; for each real request `[count, count]`, or
            `[count, length + count]` with the tokens in front of the drafts.
        lengths: `[B]`, tokens of each request in front of its drafts.
        real: requests with a mask; a draft of the others, which are padding, sees itself.

    Returns:
        `[B * count]` int32.
    """
    device, used = mask.device, lengths[:real]
    node = torch.arange(count, device=device)
    before = torch.zeros_like(used) if mask.numel() == real * count**2 else used
    width = (before + count).long()
    first = (width.cumsum(0) - width) * count + before
    at = first[:, None, None] + node[:, None] * width[:, None, None] + node
    own = node == node[:, None]
    seen = own.repeat(lengths.numel(), 1, 1)
    seen[:real] |= mask[at.clamp(max=mask.numel() - 1)] & (node < node[:, None])
    bits = (seen * (1 << node)).sum(-1)
    return bits.flatten().to(torch.int32)  # the bit of draft 31 is the sign


def longest_chains(tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Any:
    """A chain in place of every tree: its longest path, and behind it the other drafts, which are
    wrong there unless the model says the same.

    Args:
        tokens: one dimension; drafts of each tree, parents in front of children.
        mask: one dimension; for each tree `[count, count]`, which drafts every draft sees, itself
            among them.

    Returns:
        Tokens and mask of the chains, of the same shapes and types.
    """
    count = mask.size // tokens.size
    seen = mask.reshape(-1, count, count).astype(bool)
    last = seen.sum(-1).argmax(-1)
    path = np.take_along_axis(seen, last[:, None, None], 1)[:, 0]
    order = np.argsort(~path, axis=1, kind="stable")
    chains = np.take_along_axis(tokens.reshape(-1, count), order, 1)
    everything_before = np.tri(count, dtype=mask.dtype).reshape(-1)
    return chains.reshape(-1), np.tile(everything_before, len(seen))
