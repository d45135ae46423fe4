"""TurboQuant: a random rotation, the norm, and one codebook for all coordinates.

`turboquant` is the quantizer for the mean squared error (algorithm 1) on keys and values. With a
random orthogonal matrix P and the codebook c of B bits for coordinates of the unit sphere:

    y = P x / |x|,  i_j = argmin_k |y_j - c_k|,  x' = |x| P^T c_i

`turboquant-prod` is the quantizer for inner products (algorithm 2) on keys: algorithm 1 with B - 1
bits, and of the residual r = x - x' its norm and the signs of S r, with a Gaussian matrix S of d
rows. A query reads

    x'' = x' + sqrt(pi / 2) / d * |r| S^T sign(S r)

with which products are right on average. Values keep algorithm 1 with B bits there.

2.5 and 3.5 bits split the channels into outliers and others, each with a quantizer of its own for
its part of the row. 2.5 is the setting of the paper: of 128 channels 32 have 3 bits and 96 have 2.
The paper writes that these are 2.5 bits; they are 2.25, and 2.5 with the two norms. It does not say
what its 3.5 bits are; half of the channels have 4 bits and half 3 here. It does not say how
outliers are found either. Here they are the channels with the largest squares summed over the first
64 tokens of a sequence, as if these were the prompt; their numbers are stored once for a sequence.

Norms have 16 bits, float16. The same matrices serve all layers and heads, drawn with a fixed seed,
and cost nothing for a sequence. The paper quantizes every token; here the windows of the recipe
stay exact, as for the other alternatives.

Source: arXiv 2504.19874, algorithms 1 and 2, section 4.3 for the bits of a KV cache; the sketch of
signs: arXiv 2406.03482.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from oscar_zoo.evaluate.alternatives.base import (
    Alternative,
    Arrays,
    EqualWindows,
    RowCode,
    Stored,
    Subject,
)
from oscar_zoo.evaluate.alternatives.codebook import codebook

SEED = 0
NORM_BITS = 16
LEAST_WIDTH = 4
"""Channels that the density of a coordinate needs."""
PROMPT = 64
"""Tokens that tell the outlier channels."""
SPLITS: Mapping[float, tuple[float, int, int]] = {2.5: (0.25, 3, 2), 3.5: (0.5, 4, 3)}
"""Share of outliers, their bits, and those of the others, by the mean."""


@lru_cache(maxsize=32)
def rotation(width: int, seed: int = SEED) -> Tensor:
    """A random orthogonal matrix, `[width, width]` float32: the Q of a Gaussian matrix, with the
    signs that make it evenly distributed."""
    q, r = torch.linalg.qr(gaussian(width, seed).double())
    return (q * r.diagonal().sign()).float()


@lru_cache(maxsize=32)
def gaussian(width: int, seed: int) -> Tensor:
    """`[width, width]` float32, independent and normal."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(width, width, generator=draw, device="cpu")


def norms(rows: Tensor) -> Tensor:
    """Lengths of rows as float16 holds them, `[.., 1]` float32."""
    largest = torch.finfo(torch.float16).max
    return rows.norm(dim=-1, keepdim=True).clamp_max(largest).half().float()


def nearest(y: Tensor, bits: int, width: int) -> Tensor:
    """Numbers of the nearest values of the codebook, uint8, same shape."""
    values = _values(bits, width, y.device)
    return torch.bucketize(y, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def looked_up(codes: Tensor, bits: int, width: int) -> Tensor:
    """The values of `codes`, float32, same shape."""
    return _values(bits, width, codes.device)[codes.int()]


def _values(bits: int, width: int, device: torch.device) -> Tensor:
    return torch.tensor(codebook(width, bits), dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Mse:
    """Algorithm 1.

    Attributes:
        bits: of a code.
        seed: of the rotation.
    """

    bits: int
    seed: int = SEED
    tokens: int = 1

    def check(self, width: int) -> None:
        """See `RowCode`."""
        if width < LEAST_WIDTH:
            raise ValueError(f"TurboQuant needs {LEAST_WIDTH} channels, not {width}")

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        width = rows.shape[-1]
        turned = rows @ rotation(width, self.seed).to(rows.device).mT
        length = turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        codes = nearest(turned / length, self.bits, width)
        return {"codes": Stored(codes, self.bits), "norm": Stored(norms(rows), NORM_BITS)}

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        codes = arrays["codes"].values
        width = codes.shape[-1]
        turned = looked_up(codes, self.bits, width) * arrays["norm"].values
        return turned @ rotation(width, self.seed).to(codes.device)


@dataclass(frozen=True)
class Prod:
    """Algorithm 2.

    Attributes:
        bits: of a code and a sign together, at least 2.
        seed: of the rotation; the matrix of the signs has the next one.
    """

    bits: int
    seed: int = SEED
    tokens: int = 1

    def check(self, width: int) -> None:
        """See `RowCode`."""
        self._coarse.check(width)

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        coarse = self._coarse.store(rows)
        rest = rows - self._coarse.read(coarse)
        signs = rest @ self._sketch(rows).mT >= 0
        return {
            **coarse,
            "signs": Stored(signs.to(torch.uint8), 1),
            "rest": Stored(norms(rest), NORM_BITS),
        }

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        signs = 2 * arrays["signs"].values.float() - 1
        width = signs.shape[-1]
        scale = math.sqrt(math.pi / 2) / width * arrays["rest"].values
        return self._coarse.read(arrays) + scale * (signs @ self._sketch(signs))

    @property
    def _coarse(self) -> Mse:
        return Mse(self.bits - 1, self.seed)

    def _sketch(self, like: Tensor) -> Tensor:
        return gaussian(like.shape[-1], self.seed + 1).to(like.device)


@dataclass(frozen=True)
class Split:
    """Algorithm 1 for outlier channels and, with fewer bits, for the others.

    Attributes:
        share: of the channels that are outliers.
        outliers: their quantizer.
        others: that of the other channels.
    """

    share: float
    outliers: Mse
    others: Mse
    tokens: int = 1

    def check(self, width: int) -> None:
        """See `RowCode`."""
        self.outliers.check(min(self._number(width), width - self._number(width)))

    def store(self, rows: Tensor) -> Arrays:
        """See `RowCode`."""
        width = rows.shape[-1]
        number = self._number(width)
        energy = rows[..., :PROMPT, :].square().sum(-2, keepdim=True)
        # Ascending numbers within each part, so that the numbers of the first tell both.
        order = energy.argsort(dim=-1, descending=True, stable=True)
        order = torch.cat([order[..., :number].sort(-1)[0], order[..., number:].sort(-1)[0]], -1)
        moved = rows.gather(-1, order.expand_as(rows))
        parts = {
            "outlier": self.outliers.store(moved[..., :number]),
            "other": self.others.store(moved[..., number:]),
        }
        named = {f"{part} {name}": one for part, a in parts.items() for name, one in a.items()}
        bits = max(1, math.ceil(math.log2(width)))
        return named | {"channels": Stored(order[..., :number], bits, per_sequence=True)}

    def read(self, arrays: Arrays) -> Tensor:
        """See `RowCode`."""
        outliers = self.outliers.read(_part(arrays, "outlier"))
        others = self.others.read(_part(arrays, "other"))
        moved = torch.cat([outliers, others], -1)
        first = arrays["channels"].values
        rank = torch.ones(*first.shape[:-1], moved.shape[-1], device=moved.device)
        rank = rank.scatter(-1, first, 0.0)
        order = rank.argsort(dim=-1, stable=True)
        return torch.empty_like(moved).scatter(-1, order.expand_as(moved), moved)

    def _number(self, width: int) -> int:
        return round(self.share * width)


def _part(arrays: Arrays, part: str) -> Arrays:
    """The arrays of one part under their own names."""
    return {
        name.removeprefix(f"{part} "): one
        for name, one in arrays.items()
        if name.startswith(f"{part} ")
    }


def turboquant(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 1 on both sides, with the windows of the recipe."""
    width = bits or 2.0
    code: RowCode
    if width in SPLITS:
        share, more, fewer = SPLITS[width]
        code = Split(share, Mse(more), Mse(fewer))
    else:
        code = Mse(int(width))
    return Alternative(code, code, EqualWindows(subject.recipe.windows))


def prod(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 2 on keys and algorithm 1 on values, with the windows of the recipe."""
    width = int(bits or 2)
    return Alternative(Prod(width), Mse(width), EqualWindows(subject.recipe.windows))
