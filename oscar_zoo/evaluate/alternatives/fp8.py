"""FP8 as SGLang stores it: every element is cast to float8 e4m3.

With `--kv-cache-dtype fp8_e4m3`, `MHATokenToKVPool.set_kv_buffer` divides rows by `k_scale` and
`v_scale` of the checkpoint, where it has them, and casts them to `torch.float8_e4m3fn`; without
them the scale is 1. A query reads the cast rows, that of its own token included. There are no
windows, and 8 bits are all that an element costs.

e4m3 has 3 bits of mantissa and reaches 448. Larger magnitudes saturate here, as the cast of PyTorch
does it.

Source: SGLang 0.5.21, `srt/mem_cache/memory_pool.py`; the format: arXiv 2209.05433, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.evaluate.alternatives.base import Alternative, Arrays, NoWindows, Stored, Subject

LARGEST = 448.0


@dataclass(frozen=True)
class Fp8:
    """Rows as float8 e4m3.

    Attributes:
        scale: rows are divided by it, and multiplied when they are read.
    """

    scale: float = 1.0
    tokens: int = 1

    def check(self, width: int) -> None:
        """Rows of any width fit."""

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        cast = (rows / self.scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        return {"values": Stored(cast.float(), 8)}

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        return arrays["values"].values * self.scale


def fp8(bits: float | None, subject: Subject) -> Alternative:
    """Both sides with scale 1; there is one width, and the recipe is not read."""
    return Alternative(Fp8(), Fp8(), NoWindows())
