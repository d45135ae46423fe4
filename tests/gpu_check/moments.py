"""How far apart the sums of two calibrations are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

MATRICES = ("qq", "kk", "vv", "oo", "sst_num")
"""Sums over rows of queries, keys, values and outputs, and the weighted one of values."""


def largest_difference(one: Path, other: Path) -> float:
    """The norm of the difference of a layer, relative to the norm of the layer in `other`; the
    largest of all sums and layers.

    Args:
        one, other: moments files of the same model and text.
    """
    ours, theirs = load_file(one), load_file(other)
    return max(
        float(np.linalg.norm(mine - want) / np.linalg.norm(want))
        for name in MATRICES
        for mine, want in zip(ours[name], theirs[name], strict=True)
    )
