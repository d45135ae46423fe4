"""TurboQuant, and the mixed cache of LMDeploy that comes from it: rows are turned, and every
coordinate gets the nearest value of one codebook."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard, has_hadamard
from oscar_zoo.evaluate.formats import (
    EXACT_BITS,
    Alternative,
    Arrays,
    EqualWindows,
    RowCode,
    Stored,
    Subject,
)


@lru_cache(maxsize=32)
def codebook(width: int, bits: int) -> NDArray[np.float64]:
    """The best scalar codebook for a coordinate of a random unit vector of `width` (at least 4)
    dimensions d: ascending, `[2^bits]` float64, read-only because it is cached.

    A coordinate x of a vector drawn evenly from the unit sphere has the density

        f(x) = Gamma(d / 2) / (sqrt(pi) Gamma((d - 1) / 2)) * (1 - x^2)^((d - 3) / 2), -1 <= x <= 1

    The codebook has the values c that make `sum over bins of integral (x - c)^2 f(x) dx` least,
    when every x takes its nearest value. Lloyd and Max find them by turns: bounds half way between
    neighbours, then each value at the mean of its bin.

    Source: arXiv 2504.19874, lemma 1 for the density, equation 4 for the codebook.
    """
    reach = min(1.0, 12 / np.sqrt(width))  # beyond it the density is nothing
    x = np.linspace(-reach, reach, 200_001)
    density = np.clip(1 - x * x, 0, None) ** ((width - 3) / 2)
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    values = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], x)
    for _ in range(2_000):
        ends = np.concatenate([[-reach], (values[1:] + values[:-1]) / 2, [reach]])
        weights = np.diff(np.interp(ends, x, mass))
        better = np.diff(np.interp(ends, x, moment)) / weights
        done = np.abs(better - values).max() < 1e-9
        values = better
        if done:
            break
    values = (values - values[::-1]) / 2  # the density is symmetric
    values.setflags(write=False)
    return values


def _values(bits: int, width: int, device: torch.device) -> Tensor:
    return torch.tensor(codebook(width, bits), dtype=torch.float32, device=device)


def nearest(y: Tensor, bits: int, width: int) -> Tensor:
    """Numbers of the nearest values of the codebook, uint8, same shape."""
    values = _values(bits, width, y.device)
    return torch.bucketize(y, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def looked_up(codes: Tensor, bits: int, width: int) -> Tensor:
    """The values of `codes`, float32, same shape."""
    return _values(bits, width, codes.device)[codes.int()]


def norms(rows: Tensor) -> Tensor:
    """Lengths of rows as float16 holds them, `[.., 1]` float32."""
    largest = torch.finfo(torch.float16).max
    return rows.norm(dim=-1, keepdim=True).clamp_max(largest).half().float()


@lru_cache(maxsize=32)
def rotation(width: int, seed: int) -> Tensor:
    """A random orthogonal matrix, `[width, width]` float32: the Q of a Gaussian matrix, with the
    signs that make it evenly distributed."""
    q, r = torch.linalg.qr(gaussian(width, seed).double())
    return (q * r.diagonal().sign()).float()


@lru_cache(maxsize=32)
def gaussian(width: int, seed: int) -> Tensor:
    """`[width, width]` float32, independent and normal."""
    draw = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(width, width, generator=draw, device="cpu")


@dataclass(frozen=True)
class Mse:
    """Algorithm 1 of TurboQuant, for the mean squared error. With a random orthogonal matrix P of
    `seed` and the codebook c of `bits` bits for coordinates of the unit sphere:

        y = P x / |x|,  i_j = argmin_k |y_j - c_k|,  x' = |x| P^T c_i
    """

    bits: int
    seed: int = 0
    tokens: int = 1

    def check(self, width: int) -> None:
        if width < 4:  # the density of a coordinate needs them
            raise ValueError(f"TurboQuant needs 4 channels, not {width}")

    def store(self, rows: Tensor) -> Arrays:
        width = rows.shape[-1]
        turned = rows @ rotation(width, self.seed).to(rows.device).mT
        length = turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        codes = nearest(turned / length, self.bits, width)
        return {"codes": Stored(codes, self.bits), "norm": Stored(norms(rows), EXACT_BITS)}

    def read(self, arrays: Arrays) -> Tensor:
        codes = arrays["codes"].values
        width = codes.shape[-1]
        turned = looked_up(codes, self.bits, width) * arrays["norm"].values
        return turned @ rotation(width, self.seed).to(codes.device)


@dataclass(frozen=True)
class Prod:
    """Algorithm 2 of TurboQuant, for inner products: algorithm 1 with one bit fewer, and of the
    residual r = x - x' its norm and the signs of S r, with a Gaussian matrix S of d rows, drawn
    with the next seed. A query reads what makes products right on average:

        x'' = x' + sqrt(pi / 2) / d * |r| S^T sign(S r)
    """

    bits: int
    seed: int = 0
    tokens: int = 1

    def check(self, width: int) -> None:
        self._coarse.check(width)

    def store(self, rows: Tensor) -> Arrays:
        coarse = self._coarse.store(rows)
        rest = rows - self._coarse.read(coarse)
        signs = (rest @ self._sketch(rows).mT >= 0).to(torch.uint8)
        return {**coarse, "signs": Stored(signs, 1), "rest": Stored(norms(rest), EXACT_BITS)}

    def read(self, arrays: Arrays) -> Tensor:
        signs = 2 * arrays["signs"].values.float() - 1
        scale = math.sqrt(math.pi / 2) / signs.shape[-1] * arrays["rest"].values
        return self._coarse.read(arrays) + scale * (signs @ self._sketch(signs))

    @property
    def _coarse(self) -> Mse:
        return Mse(self.bits - 1, self.seed)

    def _sketch(self, like: Tensor) -> Tensor:
        return gaussian(like.shape[-1], self.seed + 1).to(like.device)


@dataclass(frozen=True)
class Split:
    """Algorithm 1 for a `share` of outlier channels and, with fewer bits, for the others.

    Outliers are the channels with the largest squares summed over the first 64 tokens of a
    sequence, as if these were the prompt; their numbers are stored once for a sequence.
    """

    share: float
    outliers: Mse
    others: Mse
    tokens: int = 1

    def check(self, width: int) -> None:
        self.outliers.check(min(self._number(width), width - self._number(width)))

    def store(self, rows: Tensor) -> Arrays:
        width = rows.shape[-1]
        number = self._number(width)
        energy = rows[..., :64, :].square().sum(-2, keepdim=True)
        # Ascending numbers within each part, so that the numbers of the first tell both.
        order = energy.argsort(dim=-1, descending=True, stable=True)
        order = torch.cat([order[..., :number].sort(-1)[0], order[..., number:].sort(-1)[0]], -1)
        moved = rows.gather(-1, order.expand_as(rows))
        first = self.outliers.store(moved[..., :number])
        second = self.others.store(moved[..., number:])
        bits = max(1, math.ceil(math.log2(width)))
        return {
            **{f"outlier {name}": one for name, one in first.items()},
            **{f"other {name}": one for name, one in second.items()},
            "channels": Stored(order[..., :number], bits, per_sequence=True),
        }

    def read(self, arrays: Arrays) -> Tensor:
        parts = [
            code.read({name: arrays[f"{part} {name}"] for name in ("codes", "norm")})
            for part, code in (("outlier", self.outliers), ("other", self.others))
        ]
        moved = torch.cat(parts, -1)
        first = arrays["channels"].values
        rank = torch.ones(*first.shape[:-1], moved.shape[-1], device=moved.device)
        rank = rank.scatter(-1, first, 0.0)
        order = rank.argsort(dim=-1, stable=True)
        return torch.empty_like(moved).scatter(-1, order.expand_as(moved), moved)

    def _number(self, width: int) -> int:
        return round(self.share * width)


SPLITS: Mapping[float, tuple[float, int, int]] = {2.5: (0.25, 3, 2), 3.5: (0.5, 4, 3)}
"""Share of outliers, their bits, and those of the others, by the mean. 2.5 is the setting of the
paper: of 128 channels 32 have 3 bits and 96 have 2, which are 2.25, and 2.5 with the two norms. The
paper does not say what its 3.5 bits are, nor how outliers are found."""


def turboquant(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 1 on both sides.

    Norms have 16 bits, float16. The same matrices serve all layers and heads, drawn with a fixed
    seed, and cost nothing for a sequence. The paper quantizes every token; here the windows of the
    recipe stay exact, as for the other alternatives.

    Source: arXiv 2504.19874, algorithms 1 and 2, section 4.3 for the bits of a KV cache; the sketch
    of signs: arXiv 2406.03482.
    """
    width = bits or 2.0
    code: RowCode
    if width in SPLITS:
        share, more, fewer = SPLITS[width]
        code = Split(share, Mse(more), Mse(fewer))
    else:
        code = Mse(int(width))
    return Alternative(code, code, EqualWindows(subject.recipe.windows))


def turboquant_prod(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 2 on keys and algorithm 1, with as many bits, on values."""
    width = int(bits or 2)
    return Alternative(Prod(width), Mse(width), EqualWindows(subject.recipe.windows))


@dataclass(frozen=True)
class HadamardCode:
    """Codebook codes behind a Hadamard matrix; with `signed`, the sign of what remains is stored
    too, and its mean size.

        y = H x / |x|,  r_j = y_j - c_i,  x' = |x| H^T (c_i + |r| / sqrt(d) * sign(r))
    """

    bits: int
    signed: bool
    tokens: int = 1

    def check(self, width: int) -> None:
        if not has_hadamard(width):
            raise ValueError(f"no Hadamard matrix for {width} channels is known here")

    def store(self, rows: Tensor) -> Arrays:
        width = rows.shape[-1]
        turned = rows @ _hadamard(rows)
        turned = turned / turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        codes = nearest(turned, self.bits, width)
        arrays = {"codes": Stored(codes, self.bits), "norm": Stored(norms(rows), EXACT_BITS)}
        if not self.signed:
            return arrays
        rest = turned - looked_up(codes, self.bits, width)
        return arrays | {
            "signs": Stored((rest >= 0).to(torch.uint8), 1),
            "rest": Stored(norms(rest / math.sqrt(width)), EXACT_BITS),
        }

    def read(self, arrays: Arrays) -> Tensor:
        codes = arrays["codes"].values
        turned = looked_up(codes, self.bits, codes.shape[-1])
        if self.signed:
            signs = 2 * arrays["signs"].values.float() - 1
            turned = turned + arrays["rest"].values * signs
        return (turned * arrays["norm"].values) @ _hadamard(turned)


def _hadamard(like: Tensor) -> Tensor:
    """The Hadamard matrix, which is its own inverse."""
    return torch.tensor(hadamard(like.shape[-1]), dtype=torch.float32, device=like.device)


def lmdeploy(bits: float | None, subject: Subject) -> Alternative:
    """The mixed cache of LMDeploy, `quant_policy=42`: keys of 3 bits and a sign, values of 2 bits.

    A key has 4 bits a channel and two numbers of 16, a value 2 bits and one. What remains of a key
    is not sketched as in TurboQuant but read where it is. The codebook here is the exact one for
    the sphere, where LMDeploy has a table for the normal distribution that is near it. The windows
    of the recipe stay exact, as for the other alternatives.

    Source: LMDeploy, pull request 4510, `lmdeploy/pytorch/kernels/cuda/turbo_quant.py` and tests.
    """
    windows = EqualWindows(subject.recipe.windows)
    return Alternative(HadamardCode(3, True), HadamardCode(2, False), windows)
