"""Memory that stage 1 hands to stage 2, allocated once: the partial output and lse of every split,
and the merged outputs."""

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
    def allocate(cls, numel: int, device: torch.device | str) -> Workspace:
        """Scratch of `numel` float32 elements; see `dispatch.decode_workspace_numel`."""
        return cls(torch.empty(numel, dtype=torch.float32, device=device))

    def parts(self, rows: int, splits: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial outputs, their lse, and merged outputs.

        Args:
            rows: query tokens times query heads.
        """
        needed = numel(rows, splits, head_dim)
        if self.scratch.numel() < needed:
            raise ValueError(
                f"the workspace holds {self.scratch.numel()} elements; this call needs {needed}"
            )
        sizes = [rows * splits * head_dim, rows * splits, rows * head_dim]
        partial, lse, merged = self.scratch[:needed].split(sizes)
        return partial, lse, merged


def numel(rows: int, splits: int, head_dim: int) -> int:
    """Float32 elements that one call needs; arguments as for `Workspace.parts`."""
    return rows * (splits * (head_dim + 1) + head_dim)
