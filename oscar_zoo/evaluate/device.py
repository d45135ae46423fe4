"""Where torch runs when nobody says."""

from __future__ import annotations

import torch


def default_device() -> str:
    """`cuda` when torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"
