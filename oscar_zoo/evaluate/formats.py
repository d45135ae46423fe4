"""Caches of other methods, simulated like ours.

A code turns rows of one side into the arrays that a cache would hold, and these back into rows.
Bits are counted from the same arrays, so nothing that is stored can be forgotten. A schedule says
when a row leaves the high-precision window. The functions at the end make a cache of both; they
take bits, or `None` for a method with one setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscar_kernels.quantizer import dequantize_codes, quantize_codes
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import RotationSet, hadamard, has_hadamard
from oscar_zoo.artifact.specs import Geometry, ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.simulated_cache import (
    Reads,
    StoredSide,
    mixed_reads,
    stored_reads,
    window_reads,
)

EXACT_BITS = 16
"""Of an element in a high-precision window, of a norm, and of a scale."""
KIVI_GROUP, KIVI_RESIDUAL = 32, 128


@dataclass(frozen=True)
class Subject:
    """What a cache is built for: a model, the recipe (windows, groups, type of scales, and clip),
    and the sets of an artifact for keys and values, where there is one."""

    geometry: Geometry
    recipe: ServingRecipe
    artifact: tuple[RotationSet, RotationSet] | None = None


@dataclass(frozen=True)
class Stored:
    """An array of a cache: codes, or float32 numbers that the stored type represents exactly, and
    the bits of each in memory. `per_sequence`: a sequence has it once, not for every row."""

    values: Tensor
    bits: int
    per_sequence: bool = False


Arrays = Mapping[str, Stored]


class RowCode:
    """How rows of one side are stored; `tokens` consecutive rows are stored together, more than 1
    for codes along the sequence."""

    tokens = 1

    def check(self, width: int) -> None:
        """Raise `ValueError`, with what is wrong, for rows of `width` channels that do not fit."""

    def store(self, rows: Tensor) -> Arrays:
        """The arrays for `rows`, `[.., T, width]` float32, with T a multiple of `tokens`."""
        raise NotImplementedError

    def read(self, arrays: Arrays) -> Tensor:
        """The rows that a query reads, `[.., T, width]` float32."""
        raise NotImplementedError


class Schedule:
    """Which rows stay exact, for how long. This one: none, every row is stored at once, and read so
    by its own token too. `first` is the position of the first row that is ever stored."""

    first = 0

    def reads(self, positions: Tensor) -> Reads:
        """What queries at consecutive positions read when they are decoded one by one."""
        return stored_reads(positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """For keys and for values, how many rows of a sequence of `length` tokens are held as they
        are stored, and how many exactly, when its last token is decoded."""
        return (length, 0), (length, 0)


class EqualWindows(Schedule):
    """The windows of our recipe. As in our server, every row is stored, windows stand on top."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows

    def reads(self, positions: Tensor) -> Reads:
        return window_reads(self.windows, positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        side = length, self.windows.sink + self.windows.recent
        return side, side


class Residual(Schedule):
    """The full-precision rows of KIVI.

    The last tokens stay in full precision: keys until R of them are there, which are then quantized
    together, values while they are among the last R. As in the authors' code, attention of a step
    comes before the rows of this step are quantized. So the query at position p reads keys from
    `R * floor(p / R)` on and values from `p - R` on exactly, and nothing of the beginning.
    """

    def reads(self, positions: Tensor) -> Reads:
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        p = positions[:, None]
        return mixed_reads(
            positions, s >= p // KIVI_RESIDUAL * KIVI_RESIDUAL, s >= p - KIVI_RESIDUAL
        )

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        last = length - 1
        keys, values = last // KIVI_RESIDUAL * KIVI_RESIDUAL, max(0, last - KIVI_RESIDUAL)
        return (keys, length - keys), (values, length - values)


class GroupedWindows(Schedule):
    """The windows of our recipe for keys that are stored in groups of tokens, which begin behind
    the first tokens: a group is quantized when it is complete and all of it is older than the
    recent window."""

    def __init__(self, windows: Windows, group: int) -> None:
        self.first, self.recent, self.group = windows.sink, windows.recent, group

    def reads(self, positions: Tensor) -> Reads:
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        age, sinks = positions[:, None] - s, s < self.first
        newest = self.first + ((s - self.first) // self.group + 1) * self.group - 1
        exact_k = sinks | (positions[:, None] - newest < self.recent)
        return mixed_reads(positions, exact_k, sinks | (age < self.recent))

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        values = max(0, length - self.first - self.recent)
        keys = values // self.group * self.group
        return (keys, length - keys), (values, length - values)


@dataclass(frozen=True)
class CodedSide:
    """Keys or values of a layer in the model's own basis, stored by a code in groups of rows that
    begin at the position `first`."""

    code: RowCode
    first: int = 0
    partner: Tensor | None = None
    mean: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        return x.float()

    def stored(self, rows: Tensor) -> Tensor:
        """What a query reads; zeros for rows whose group is not complete, which no query reads."""
        number = max(0, rows.shape[-2] - self.first) // self.code.tokens * self.code.tokens
        read = torch.zeros_like(rows)
        if number:
            chosen = slice(self.first, self.first + number)
            read[..., chosen, :] = self.code.read(self.code.store(rows[..., chosen, :]))
        return read


@dataclass(frozen=True)
class Alternative:
    """A cache of another method: how keys and values are stored, and when."""

    k: RowCode
    v: RowCode
    schedule: Schedule

    def check(self, model: Geometry) -> None:
        """Refuse a model whose rows the method cannot store; raises `UsageError`."""
        for code, width in zip((self.k, self.v), model.head_dims, strict=True):
            try:
                code.check(width)
            except ValueError as error:
                raise UsageError(
                    f"this alternative does not fit the model: {error}.",
                    hint="leave it out of --against",
                ) from None

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]:
        """Keys and values; the same for all layers and devices."""
        return CodedSide(self.k, self.schedule.first), CodedSide(self.v, self.schedule.first)

    def reads(self, positions: Tensor) -> Reads:
        return self.schedule.reads(positions)

    def stored_bits(self, geometry: Geometry) -> float:
        """Bits of one stored element, with its share of scales, norms and the like."""
        widths = geometry.head_dims
        codes = zip((self.k, self.v), widths, strict=True)
        return sum(_row_bits(code, width)[0] for code, width in codes) / sum(widths)

    def bits_at(self, geometry: Geometry, length: int) -> float:
        """Bits of all that a sequence of `length` tokens occupies, for each element of its rows."""
        total = 0.0
        sides = zip((self.k, self.v), geometry.head_dims, self.schedule.rows(length), strict=True)
        for code, width, (coded, exact) in sides:
            each, once = _row_bits(code, width)
            total += coded * each + once + exact * EXACT_BITS * width
        return total / (length * sum(geometry.head_dims))


def _row_bits(code: RowCode, width: int) -> tuple[float, float]:
    """Bits of one stored row of one head, and of what is stored once for a sequence and head."""
    arrays = code.store(torch.zeros(code.tokens, width, device="cpu")).values()
    rows = sum(one.values.numel() * one.bits for one in arrays if not one.per_sequence)
    once = sum(one.values.numel() * one.bits for one in arrays if one.per_sequence)
    return rows / code.tokens, float(once)


class Fp8(RowCode):
    """FP8 as SGLang stores it: every element is cast to float8 e4m3, whose largest value is 448;
    larger magnitudes saturate, as the cast of PyTorch does it.

    With `--kv-cache-dtype fp8_e4m3`, `MHATokenToKVPool.set_kv_buffer` divides rows by `k_scale` and
    `v_scale` of the checkpoint, where it has them, else by 1. A query reads the cast rows, that of
    its own token included. There are no windows, and 8 bits are all that an element costs.

    Source: SGLang 0.5.21, `srt/mem_cache/memory_pool.py`; the format: arXiv 2209.05433, section 3.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def store(self, rows: Tensor) -> Arrays:
        cast = (rows / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return {"values": Stored(cast.float(), 8)}

    def read(self, arrays: Arrays) -> Tensor:
        return arrays["values"].values * self.scale


class TokenGroups(RowCode):
    """Every row is cut into groups of at most `group` consecutive channels, with a scale and an
    offset each; the groups are equal and of a multiple of 4. The quantizer is ours."""

    def __init__(self, bits: int, group: int) -> None:
        self.bits, self.group = bits, group

    def store(self, rows: Tensor) -> Arrays:
        size = next(n for n in range(self.group, 0, -4) if rows.shape[-1] % n == 0)
        return _grouped(rows.unflatten(-1, (-1, size)), self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        return _ungrouped(arrays, self.bits).flatten(-2)


class ChannelGroups(RowCode):
    """Every channel is cut into groups of `tokens` consecutive tokens, with a scale and an offset
    each."""

    def __init__(self, bits: int, tokens: int) -> None:
        self.bits, self.tokens = bits, tokens

    def store(self, rows: Tensor) -> Arrays:
        return _grouped(rows.unflatten(-2, (-1, self.tokens)).mT, self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        return _ungrouped(arrays, self.bits).mT.flatten(-3, -2)


def _grouped(groups: Tensor, bits: int) -> Arrays:
    """Codes, scales and offsets of the groups along the last axis."""
    codes, affine = quantize_codes(groups, _spec(groups.shape[-1], bits))
    scale, offset = affine.float().unbind(-1)
    return {
        "codes": Stored(codes, bits),
        "scale": Stored(scale, EXACT_BITS),
        "offset": Stored(offset, EXACT_BITS),
    }


def _ungrouped(arrays: Arrays, bits: int) -> Tensor:
    codes = arrays["codes"].values
    affine = [arrays[name].values for name in ("scale", "offset")]
    return dequantize_codes(codes, torch.stack(affine, -1), _spec(codes.shape[-1], bits))


def _spec(size: int, bits: int) -> QuantSpec:
    """A group as a row of its own."""
    return QuantSpec(size, size, 0.0, "float16", bits)


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


def _values(bits: int, like: Tensor) -> Tensor:
    return torch.tensor(codebook(like.shape[-1], bits), dtype=torch.float32, device=like.device)


def _nearest(y: Tensor, bits: int) -> Tensor:
    """Numbers of the nearest values of the codebook, uint8, same shape."""
    values = _values(bits, y)
    return torch.bucketize(y, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def _looked_up(codes: Tensor, bits: int) -> Tensor:
    """The values of `codes`, float32, same shape."""
    return _values(bits, codes)[codes.int()]


def _norms(rows: Tensor) -> Stored:
    """Lengths of rows as float16 holds them, `[.., 1]` float32."""
    largest = torch.finfo(torch.float16).max
    lengths = rows.norm(dim=-1, keepdim=True).clamp_max(largest).half().float()
    return Stored(lengths, EXACT_BITS)


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


class Mse(RowCode):
    """Algorithm 1 of TurboQuant, for the mean squared error. With a random orthogonal matrix P of
    `seed` and the codebook c of `bits` bits for coordinates of the unit sphere:

        y = P x / |x|,  i_j = argmin_k |y_j - c_k|,  x' = |x| P^T c_i
    """

    signed = False

    def __init__(self, bits: int, seed: int = 0) -> None:
        self.bits, self.seed = bits, seed

    def check(self, width: int) -> None:
        if width < 4:  # the density of a coordinate needs them
            raise ValueError(f"TurboQuant needs 4 channels, not {width}")

    def matrix(self, like: Tensor) -> Tensor:
        """P for rows such as `like`."""
        return rotation(like.shape[-1], self.seed).to(like.device)

    def store(self, rows: Tensor) -> Arrays:
        turned = rows @ self.matrix(rows).mT
        turned = turned / turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
        codes = _nearest(turned, self.bits)
        arrays = {"codes": Stored(codes, self.bits), "norm": _norms(rows)}
        if self.signed:
            rest = turned - _looked_up(codes, self.bits)
            arrays["signs"] = Stored((rest >= 0).to(torch.uint8), 1)
            arrays["rest"] = _norms(rest / math.sqrt(rows.shape[-1]))
        return arrays

    def read(self, arrays: Arrays) -> Tensor:
        turned = _looked_up(arrays["codes"].values, self.bits)
        if self.signed:
            signs = 2 * arrays["signs"].values.float() - 1
            turned = turned + arrays["rest"].values * signs
        return (turned * arrays["norm"].values) @ self.matrix(turned)


class HadamardCode(Mse):
    """The same behind a Hadamard matrix, which is its own inverse; with `signed`, the sign of what
    remains is stored too, and its mean size.

        y = H x / |x|,  r_j = y_j - c_i,  x' = |x| H^T (c_i + |r| / sqrt(d) * sign(r))
    """

    def __init__(self, bits: int, *, signed: bool) -> None:
        self.bits, self.signed = bits, signed

    def check(self, width: int) -> None:
        if not has_hadamard(width):
            raise ValueError(f"no Hadamard matrix for {width} channels is known here")

    def matrix(self, like: Tensor) -> Tensor:
        return torch.tensor(hadamard(like.shape[-1]), dtype=torch.float32, device=like.device)


class Prod(RowCode):
    """Algorithm 2 of TurboQuant, for inner products: algorithm 1 with one bit fewer, and of the
    residual r = x - x' its norm and the signs of S r, with a Gaussian matrix S of d rows, drawn
    with the next seed. A query reads what makes products right on average:

        x'' = x' + sqrt(pi / 2) / d * |r| S^T sign(S r)
    """

    def __init__(self, bits: int, seed: int = 0) -> None:
        self.coarse = Mse(bits - 1, seed)

    def check(self, width: int) -> None:
        self.coarse.check(width)

    def store(self, rows: Tensor) -> Arrays:
        coarse = self.coarse.store(rows)
        rest = rows - self.coarse.read(coarse)
        signs = (rest @ self._sketch(rows).mT >= 0).to(torch.uint8)
        return {**coarse, "signs": Stored(signs, 1), "rest": _norms(rest)}

    def read(self, arrays: Arrays) -> Tensor:
        signs = 2 * arrays["signs"].values.float() - 1
        scale = math.sqrt(math.pi / 2) / signs.shape[-1] * arrays["rest"].values
        return self.coarse.read(arrays) + scale * (signs @ self._sketch(signs))

    def _sketch(self, like: Tensor) -> Tensor:
        return gaussian(like.shape[-1], self.coarse.seed + 1).to(like.device)


class Split(RowCode):
    """Algorithm 1 for a `share` of outlier channels and, with fewer bits, for the others.

    Outliers are the channels with the largest squares summed over the first 64 tokens of a
    sequence, as if these were the prompt; their numbers are stored once for a sequence.
    """

    def __init__(self, share: float, outliers: Mse, others: Mse) -> None:
        self.share, self.parts = share, {"outlier": outliers, "other": others}

    def check(self, width: int) -> None:
        number = round(self.share * width)
        self.parts["other"].check(min(number, width - number))

    def store(self, rows: Tensor) -> Arrays:
        width = rows.shape[-1]
        number = round(self.share * width)
        energy = rows[..., :64, :].square().sum(-2, keepdim=True)
        # Ascending numbers within each part, so that the numbers of the first tell both.
        order = energy.argsort(dim=-1, descending=True, stable=True)
        order = torch.cat([order[..., :number].sort(-1)[0], order[..., number:].sort(-1)[0]], -1)
        moved = rows.gather(-1, order.expand_as(rows)).split([number, width - number], -1)
        bits = max(1, math.ceil(math.log2(width)))
        arrays = {"channels": Stored(order[..., :number], bits, per_sequence=True)}
        for (part, code), own in zip(self.parts.items(), moved, strict=True):
            arrays |= {f"{part} {name}": one for name, one in code.store(own).items()}
        return arrays

    def read(self, arrays: Arrays) -> Tensor:
        parts = [
            code.read({name: arrays[f"{part} {name}"] for name in ("codes", "norm")})
            for part, code in self.parts.items()
        ]
        moved = torch.cat(parts, -1)
        first = arrays["channels"].values
        rank = torch.ones(*first.shape[:-1], moved.shape[-1], device=moved.device)
        order = rank.scatter(-1, first, 0.0).argsort(dim=-1, stable=True)
        return torch.empty_like(moved).scatter(-1, order.expand_as(moved), moved)


def fp8(bits: float | None, subject: Subject) -> Alternative:
    """Both sides with scale 1."""
    return Alternative(Fp8(), Fp8(), Schedule())


def kivi(bits: float | None, subject: Subject) -> Alternative:
    """KIVI: keys quantized per channel along the sequence, values per token, a residual in full
    precision.

    Keys have outlier channels, so a scale for each channel and G consecutive tokens fits them
    better than one for each token. For the keys of one channel in a group of G tokens, and for the
    values of one token in a group of G channels, with B bits:

        offset = min(x), scale = (max(x) - min(x)) / (2^B - 1), code = round((x - offset) / scale)

    G = 32 and R = 128. A scale and an offset of 16 bits make 3 bits of 2 and 5 of 4. In all
    variants a row is held either as codes or exactly.

    Source: arXiv 2402.02750, section 3.2 and algorithm 1; settings of section 4.1; order of a step
    and prefill: the authors' repository, github.com/jy-yuan/KIVI, `models/llama_kivi.py`.
    """
    width = int(bits or 2)
    return Alternative(ChannelGroups(width, KIVI_GROUP), TokenGroups(width, KIVI_GROUP), Residual())


def kivi_windows(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with the windows of the recipe in place of its residual, the first tokens too."""
    width = int(bits or 2)
    schedule = GroupedWindows(subject.recipe.windows, KIVI_GROUP)
    return Alternative(ChannelGroups(width, KIVI_GROUP), TokenGroups(width, KIVI_GROUP), schedule)


def kivi_token(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with the groups of values for keys too, to show what the channels bring."""
    code = TokenGroups(int(bits or 2), KIVI_GROUP)
    return Alternative(code, code, Residual())


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
    width, code = bits or 2.0, RowCode()
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


def lmdeploy(bits: float | None, subject: Subject) -> Alternative:
    """The mixed cache of LMDeploy, `quant_policy=42`: keys of 3 bits and a sign, values of 2 bits.

    A key has 4 bits a channel and two numbers of 16, a value 2 bits and one. What remains of a key
    is not sketched as in TurboQuant but read where it is. The codebook here is the exact one for
    the sphere, where LMDeploy has a table for the normal distribution that is near it. The windows
    of the recipe stay exact, as for the other alternatives.

    Source: LMDeploy, pull request 4510, `lmdeploy/pytorch/kernels/cuda/turbo_quant.py` and tests.
    """
    keys, values = HadamardCode(3, signed=True), HadamardCode(2, signed=False)
    return Alternative(keys, values, EqualWindows(subject.recipe.windows))
