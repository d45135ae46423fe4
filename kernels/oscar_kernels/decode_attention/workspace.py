"""Memory between the two stages, made once: partial outputs and lse of every split, and merged
outputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Workspace:
    """Scratch of split-KV attention on one stream; nothing in it outlives a call.

    Attributes:
        scratch: float32, one dimension.
    """

    scratch: Tensor

    @classmethod
    def allocate(cls, elements: int, device: torch.device | str) -> Workspace:
        """Scratch of `elements` float32 numbers; see `launcher.decode_elements`."""
        return cls(torch.empty(elements, dtype=torch.float32, device=device))

    def parts(self, rows: int, splits: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial outputs, their lse, and merged outputs.

        Args:
            rows: query tokens times query heads.
            splits: of each.
            head_dim: of V.

        Raises:
            ValueError: the scratch is too small.
        """
        needed = elements(rows, splits, head_dim)
        if self.scratch.numel() < needed:
            raise ValueError(
                f"the workspace holds {self.scratch.numel()} numbers; this call needs {needed}"
            )
        cuts = [rows * splits * head_dim, rows * splits, rows * head_dim]
        partial, lse, merged = self.scratch[:needed].split(cuts)
        return partial, lse, merged


def elements(rows: int, splits: int, head_dim: int) -> int:
    """Float32 numbers of a call."""
    return rows * (splits * (head_dim + 1) + head_dim)
