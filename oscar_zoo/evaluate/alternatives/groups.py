"""Asymmetric integer codes of groups of channels or of tokens, for methods that cut rows otherwise
than our recipe does. The quantizer is ours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.quantizer import SCALE_DTYPES, dequantize_codes, quantize_codes
from oscar_kernels.spec import QuantSpec
from oscar_zoo.evaluate.alternatives.base import Arrays, Stored


@dataclass(frozen=True)
class TokenGroups:
    """Every row is cut into groups of consecutive channels, with a scale and an offset each.

    Attributes:
        bits: of a code, 2 or 4.
        group: the most channels of a group; rows are cut into equal groups of a multiple of 4.
    """

    bits: int
    group: int
    tokens: int = 1

    def check(self, width: int) -> None:
        """Rows of any multiple of 4 fit, as in our cache."""

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        width = rows.shape[-1]
        size = next(n for n in range(self.group, 0, -4) if width % n == 0)
        return _arrays(rows.unflatten(-1, (-1, size)), self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        return _groups(arrays, self.bits).flatten(-2)


@dataclass(frozen=True)
class ChannelGroups:
    """Every channel is cut into groups of consecutive tokens, with a scale and an offset each.

    Attributes:
        bits: of a code, 2 or 4.
        tokens: of a group.
    """

    bits: int
    tokens: int

    def check(self, width: int) -> None:
        """Rows of any width fit."""

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        groups = rows.unflatten(-2, (-1, self.tokens)).mT
        return _arrays(groups, self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        return _groups(arrays, self.bits).mT.flatten(-3, -2)


def _arrays(groups: Tensor, bits: int) -> Arrays:
    """Codes, scales and offsets of the groups along the last axis."""
    codes, affine = quantize_codes(groups, _spec(groups.shape[-1], bits))
    scale, offset = affine.float().unbind(-1)
    size = 8 * SCALE_DTYPES["float16"].itemsize
    return {
        "codes": Stored(codes, bits),
        "scale": Stored(scale, size),
        "offset": Stored(offset, size),
    }


def _groups(arrays: Arrays, bits: int) -> Tensor:
    codes = arrays["codes"].values
    affine = [arrays[name].values for name in ("scale", "offset")]
    return dequantize_codes(codes, torch.stack(affine, -1), _spec(codes.shape[-1], bits))


def _spec(size: int, bits: int) -> QuantSpec:
    """A group as a row of its own."""
    return QuantSpec(size, size, 0.0, "float16", bits)
