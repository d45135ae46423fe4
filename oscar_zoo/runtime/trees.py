"""Trees of drafts: from an engine's mask to the bits that kernels read."""

from __future__ import annotations

import torch
from torch import Tensor


def ancestors(mask: Tensor, lengths: Tensor, count: int, real: int) -> Tensor:
    """Which drafts every draft sees, as `oscar_kernels.cache.Drafts.mask`. Nothing is read on the
    host.

    Args:
        mask: bool, one dimension; for each real request `[count, count]`, or
            `[count, length + count]` with the tokens in front of the drafts.
        lengths: `[B]`, tokens of each request in front of its drafts.
        count: drafts of each request.
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
