"""Expert weights in MXFP4, as gpt-oss ships them: four bits per number, and an exponent for 32.

A checkpoint has `NAME_blocks`, `[experts, rows, groups, 16]` uint8 with two numbers per byte, the
first in the low half, and `NAME_scales`, `[experts, rows, groups]` uint8, an exponent plus 127.
They count as the bfloat16 tensor `NAME`, `[experts, 32 * groups, rows]`, which holds every value
exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""Numbers that share an exponent."""
BIAS = 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = (*_POSITIVE, *(-value for value in _POSITIVE))
"""What a four-bit code stands for."""


def unpacked_shape(blocks: torch.Size, scales: torch.Size) -> torch.Size | None:
    """The shape of the tensor that the two stand for; `None` where they do not fit each other."""
    if len(blocks) != 4 or blocks[3] != GROUP // 2 or blocks[:3] != scales:
        return None
    experts, rows, groups, _ = blocks
    return torch.Size((experts, GROUP * groups, rows))


def unpack(blocks: Tensor, scales: Tensor) -> Tensor:
    """The weights, bfloat16; arguments and result as the module says. One expert after the other.

    Source: `convert_moe_packed_tensors` of transformers, with which a test compares.
    """
    numbers = torch.tensor(NUMBERS, dtype=torch.float32, device=blocks.device)
    experts, rows, groups, _ = blocks.shape
    shape = (experts, GROUP * groups, rows)
    found = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for expert in range(experts):
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], -1).flatten(-2)
        exponents = scales[expert].int() - BIAS
        values = torch.ldexp(numbers[codes.int()], exponents[..., None])
        found[expert] = values.flatten(1).T
    return found
