"""The mixed cache of LMDeploy, `quant_policy=42`: TurboQuant with keys of 4 bits and values of 2.

Rows are divided by their norm and rotated by a Hadamard matrix H. Values are the nearest of the 4
values of a codebook. Keys are the nearest of 8 values and the sign of what remains, which is not
sketched as in the paper but read where it is:

    y = H x / |x|,  r_j = y_j - c_i,  x' = |x| H^T (c_i + |r| / sqrt(d) * sign(r))

A key has 4 bits a channel and two numbers of 16, a value 2 bits and one. The codebook here is the
exact one for the sphere, where LMDeploy has a table for the normal distribution that is near it.
The windows of the recipe stay exact here, as for the other alternatives.

Source: LMDeploy, pull request 4510, `lmdeploy/pytorch/kernels/cuda/turbo_quant.py` and its tests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard, has_hadamard
from oscar_zoo.evaluate.alternatives.base import Alternative, Arrays, EqualWindows, Stored, Subject
from oscar_zoo.evaluate.alternatives.turboquant import NORM_BITS, looked_up, nearest, norms


@dataclass(frozen=True)
class HadamardCode:
    """Codebook codes behind a Hadamard matrix.

    Attributes:
        bits: of a code.
        signed: whether the sign of what remains is stored too, and its mean size.
    """

    bits: int
    signed: bool
    tokens: int = 1

    def check(self, width: int) -> None:
        """See `RowCode`."""
        if not has_hadamard(width):
            raise ValueError(f"no Hadamard matrix for {width} channels is known here")

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        width = rows.shape[-1]
        turned = rows @ _matrix(rows)
        turned = turned / turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        codes = nearest(turned, self.bits, width)
        arrays = {"codes": Stored(codes, self.bits), "norm": Stored(norms(rows), NORM_BITS)}
        if not self.signed:
            return arrays
        rest = turned - looked_up(codes, self.bits, width)
        return arrays | {
            "signs": Stored((rest >= 0).to(torch.uint8), 1),
            "rest": Stored(norms(rest / math.sqrt(width)), NORM_BITS),
        }

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        codes = arrays["codes"].values
        turned = looked_up(codes, self.bits, codes.shape[-1])
        if self.signed:
            signs = 2 * arrays["signs"].values.float() - 1
            turned = turned + arrays["rest"].values * signs
        return (turned * arrays["norm"].values) @ _matrix(turned)


def _matrix(like: Tensor) -> Tensor:
    """The Hadamard matrix, which is its own inverse."""
    matrix = hadamard(like.shape[-1])
    return torch.tensor(matrix, dtype=torch.float32, device=like.device)


def lmdeploy(bits: float | None, subject: Subject) -> Alternative:
    """Keys of 3 bits and a sign, values of 2 bits, with the windows of the recipe."""
    windows = EqualWindows(subject.recipe.windows)
    return Alternative(HadamardCode(3, True), HadamardCode(2, False), windows)
