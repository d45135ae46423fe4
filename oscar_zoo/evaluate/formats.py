"""Caches of other methods, simulated like ours.

A code turns rows of one side into the arrays that a cache would hold, and gives what a query reads
of them. Bits are counted from the same arrays, so nothing that is stored can be forgotten. A
schedule says when a row leaves the high-precision window. The functions at the end make a cache of
both; they take bits, or `None` for a method with one setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
FP8_MAX = 448.0
KIVI_GROUP, KIVI_RESIDUAL = 32, 128


@dataclass(frozen=True)
class Subject:
    """What a cache is built for; `largest` finds the largest magnitudes of keys and of values on
    calibration text, by layer."""

    geometry: Geometry
    recipe: ServingRecipe
    artifact: tuple[RotationSet, RotationSet] | None = None
    largest: Callable[[], Mapping[int, tuple[float, float]]] = dict


@dataclass(frozen=True)
class Stored:
    """An array of a cache: codes, or float32 numbers that the stored type represents exactly, and
    the bits of each in memory. `per_sequence`: a sequence has it once, not for every row."""

    values: Tensor
    bits: int
    per_sequence: bool = False


Coded = tuple[Tensor, dict[str, Stored]]
"""What a query reads of rows, `[.., T, width]` float32, and the arrays of a cache."""


@dataclass(frozen=True)
class RowCode:
    """How rows of one side are stored, `[.., heads, T, width]` float32, where `tokens` consecutive
    rows, of which T is a multiple, are stored together. `encode` raises `ValueError`, with what is
    wrong, for a width that does not fit."""

    encode: Callable[[Tensor], Coded]
    tokens: int = 1


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
    """The full-precision rows of KIVI: keys until R of them are there, which are then quantized
    together, values while they are among the last R, or `together` with their keys. As in the
    authors' code, attention of a step comes before the rows of this step are quantized. So the
    query at position p reads keys from `R * floor(p / R)` on and values from `p - R` on exactly,
    and nothing of the beginning."""

    def __init__(self, *, together: bool = False) -> None:
        self.together = together

    def reads(self, positions: Tensor) -> Reads:
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        p = positions[:, None]
        keys = s >= p // KIVI_RESIDUAL * KIVI_RESIDUAL
        return mixed_reads(positions, keys, keys if self.together else s >= p - KIVI_RESIDUAL)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        last = length - 1
        keys = last // KIVI_RESIDUAL * KIVI_RESIDUAL
        values = keys if self.together else max(0, last - KIVI_RESIDUAL)
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
    """Keys or values in the model's own basis, in groups of rows that begin at `first`."""

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
            read[..., chosen, :], _ = self.code.encode(rows[..., chosen, :])
        return read


@dataclass(frozen=True)
class Alternative:
    """A cache of another method: how keys and values are stored, and when; `layers` have codes of
    as many bits with other constants."""

    k: RowCode
    v: RowCode
    schedule: Schedule
    layers: Mapping[int, tuple[RowCode, RowCode]] = field(default_factory=dict)

    def check(self, model: Geometry) -> None:
        try:
            self.stored_bits(model)
        except ValueError as error:
            raise UsageError(
                f"this alternative does not fit the model: {error}.",
                hint="leave it out of --against",
            ) from None

    def sides(
        self, geometry: Geometry, layer_id: int, device: torch.device
    ) -> tuple[StoredSide, StoredSide]:
        k, v = self.layers.get(layer_id, (self.k, self.v))
        return CodedSide(k, self.schedule.first), CodedSide(v, self.schedule.first)

    def reads(self, positions: Tensor) -> Reads:
        return self.schedule.reads(positions)

    def stored_bits(self, geometry: Geometry) -> float:
        widths, heads = geometry.head_dims, geometry.num_kv_heads
        codes = zip((self.k, self.v), widths, strict=True)
        return sum(_row_bits(code, width, heads)[0] for code, width in codes) / sum(widths)

    def bits_at(self, geometry: Geometry, length: int) -> float:
        """Bits of all that a sequence of `length` tokens occupies, for each element of its rows."""
        total = 0.0
        sides = zip((self.k, self.v), geometry.head_dims, self.schedule.rows(length), strict=True)
        for code, width, (coded, exact) in sides:
            each, once = _row_bits(code, width, geometry.num_kv_heads)
            total += coded * each + once + exact * EXACT_BITS * width
        return total / (length * sum(geometry.head_dims))


def _row_bits(code: RowCode, width: int, heads: int) -> tuple[float, float]:
    """Bits of one stored row of one head, and of what is stored once for a sequence and head."""
    _, arrays = code.encode(torch.zeros(heads, code.tokens, width, device="cpu"))
    sizes = [(one.values.numel() * one.bits / heads, one.per_sequence) for one in arrays.values()]
    rows = sum(bits for bits, once in sizes if not once)
    return rows / code.tokens, float(sum(bits for bits, once in sizes if once))


def float8(scale: float = 1.0) -> RowCode:
    """FP8 as SGLang stores it: every element is cast to float8 e4m3, and magnitudes above the
    largest value saturate. `MHATokenToKVPool.set_kv_buffer` divides rows by `k_scale` and `v_scale`
    of the checkpoint, where it has them, else by 1. A query reads the cast rows, that of its own
    token included. There are no windows, and 8 bits are all that an element costs.

    Source: SGLang 0.5.21, `srt/mem_cache/memory_pool.py`; the format: arXiv 2209.05433, section 3.
    """

    def encode(rows: Tensor) -> Coded:
        cast = (rows / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
        return cast * scale, {"values": Stored(cast, 8)}

    return RowCode(encode)


def token_groups(bits: int, group: int) -> RowCode:
    """Every row is cut into groups of at most `group` consecutive channels, with a scale and an
    offset each; the groups are equal and of a multiple of 4."""

    def encode(rows: Tensor) -> Coded:
        size = next(n for n in range(group, 0, -4) if rows.shape[-1] % n == 0)
        read, arrays = _grouped(rows.unflatten(-1, (-1, size)), bits)
        return read.flatten(-2), arrays

    return RowCode(encode)


def channel_groups(bits: int, tokens: int) -> RowCode:
    """Every channel is cut into groups of `tokens` consecutive tokens, with a scale and an offset
    each."""

    def encode(rows: Tensor) -> Coded:
        read, arrays = _grouped(rows.unflatten(-2, (-1, tokens)).mT, bits)
        return read.mT.flatten(-3, -2), arrays

    return RowCode(encode, tokens)


def _grouped(groups: Tensor, bits: int) -> Coded:
    """Codes, scales and offsets of the groups along the last axis; the quantizer is ours."""
    size = groups.shape[-1]
    spec = QuantSpec(size, size, 0.0, "float16", bits)  # a group as a row of its own
    codes, affine = quantize_codes(groups, spec)
    scale, offset = affine.float().unbind(-1)
    return dequantize_codes(codes, torch.stack([scale, offset], -1), spec), {
        "codes": Stored(codes, bits),
        "scale": Stored(scale, EXACT_BITS),
        "offset": Stored(offset, EXACT_BITS),
    }


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


def _norms(rows: Tensor) -> Stored:
    """Lengths of rows as float16 holds them, `[.., 1]` float32."""
    largest = torch.finfo(torch.float16).max
    return Stored(rows.norm(dim=-1, keepdim=True).clamp_max(largest).half().float(), EXACT_BITS)


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


def mse(bits: int, seed: int = 0) -> RowCode:
    """Algorithm 1 of TurboQuant, for the mean squared error. With a random orthogonal matrix P of
    `seed` and the codebook c of `bits` bits for coordinates of the unit sphere:

        y = P x / |x|,  i_j = argmin_k |y_j - c_k|,  x' = |x| P^T c_i
    """

    def encode(rows: Tensor) -> Coded:
        if rows.shape[-1] < 4:  # the density of a coordinate needs them
            raise ValueError(f"TurboQuant needs 4 channels, not {rows.shape[-1]}")
        return _turned(rows, rotation(rows.shape[-1], seed).to(rows.device), bits)

    return RowCode(encode)


def _turned(rows: Tensor, matrix: Tensor, bits: int, *, signed: bool = False) -> Coded:
    """Codebook codes behind an orthogonal matrix; with `signed`, the sign of what remains is stored
    too, and its mean size."""
    turned = rows @ matrix.mT
    turned = turned / turned.norm(dim=-1, keepdim=True).clamp_min(1e-30)
    book = codebook(rows.shape[-1], bits)
    values = torch.tensor(book, dtype=torch.float32, device=rows.device)
    codes = torch.bucketize(turned, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    arrays, read = {"codes": Stored(codes, bits), "norm": _norms(rows)}, values[codes.int()]
    if signed:
        rest = turned - read
        signs = (rest >= 0).to(torch.uint8)
        arrays["signs"] = Stored(signs, 1)
        arrays["rest"] = _norms(rest / math.sqrt(rows.shape[-1]))
        read = read + arrays["rest"].values * (2 * signs.float() - 1)
    return (read * arrays["norm"].values) @ matrix, arrays


def products(bits: int, seed: int = 0) -> RowCode:
    """Algorithm 2 of TurboQuant, for inner products: algorithm 1 with one bit fewer, and of the
    residual r = x - x' its norm and the signs of S r, with a Gaussian matrix S of d rows, drawn
    with the next seed. A query reads what makes products right on average:

        x'' = x' + sqrt(pi / 2) / d * |r| S^T sign(S r)
    """

    def encode(rows: Tensor) -> Coded:
        width = rows.shape[-1]
        coarse, arrays = mse(bits - 1, seed).encode(rows)
        rest, sketch = rows - coarse, gaussian(width, seed + 1).to(rows.device)
        signs = (rest @ sketch.mT >= 0).to(torch.uint8)
        arrays |= {"signs": Stored(signs, 1), "rest": _norms(rest)}
        scale = math.sqrt(math.pi / 2) / width * arrays["rest"].values
        return coarse + scale * ((2 * signs.float() - 1) @ sketch), arrays

    return RowCode(encode)


def split(share: float, more: int, fewer: int) -> RowCode:
    """Algorithm 1 with `more` bits for a `share` of outlier channels and with fewer for the others.

    Outliers are the channels with the largest squares summed over the first 64 tokens of a
    sequence, as if these were the prompt; their numbers are stored once for a sequence.
    """

    def encode(rows: Tensor) -> Coded:
        width = rows.shape[-1]
        number = round(share * width)
        energy = rows[..., :64, :].square().sum(-2, keepdim=True)
        # Ascending numbers within each part, so that the numbers of the first tell both.
        order = energy.argsort(dim=-1, descending=True, stable=True)
        order = torch.cat([order[..., :number].sort(-1)[0], order[..., number:].sort(-1)[0]], -1)
        moved = rows.gather(-1, order.expand_as(rows)).split([number, width - number], -1)
        first, outliers = mse(more).encode(moved[0])
        second, others = mse(fewer).encode(moved[1])
        bits = max(1, math.ceil(math.log2(width)))
        arrays = {"channels": Stored(order[..., :number], bits, per_sequence=True)}
        arrays |= {f"outlier {name}": one for name, one in outliers.items()}
        arrays |= {f"other {name}": one for name, one in others.items()}
        read = torch.cat([first, second], -1)
        return torch.empty_like(read).scatter(-1, order.expand_as(read), read), arrays

    return RowCode(encode)


def behind_hadamard(bits: int, *, signed: bool) -> RowCode:
    """Codebook codes behind a Hadamard matrix H, which is its own inverse:

    y = H x / |x|,  r_j = y_j - c_i,  x' = |x| H^T (c_i + |r| / sqrt(d) * sign(r))
    """

    return RowCode(lambda rows: _turned(rows, _hadamard(rows), bits, signed=signed))


def _hadamard(rows: Tensor) -> Tensor:
    width = rows.shape[-1]
    if not has_hadamard(width):
        raise ValueError(f"no Hadamard matrix for {width} channels is known here")
    return torch.tensor(hadamard(width), dtype=torch.float32, device=rows.device)


def canalized(code: RowCode, *, scaled: bool) -> RowCode:
    """Another code behind a Hadamard matrix; with `scaled`, of rows divided by the norm that a
    token has over all heads, which is stored once for it."""

    def encode(rows: Tensor) -> Coded:
        matrix = _hadamard(rows)
        norms = {"norm": _norms(rows.transpose(-3, -2).flatten(-2))} if scaled else {}
        each = norms["norm"].values.unsqueeze(-3).clamp_min(1e-7) if scaled else 1.0
        read, arrays = code.encode(rows / each @ matrix)
        return read * each @ matrix.mT, arrays | norms

    return RowCode(encode, code.tokens)


def fp8(bits: float | None, subject: Subject) -> Alternative:
    return Alternative(float8(), float8(), Schedule())


def fp8_scaled(bits: float | None, subject: Subject) -> Alternative:
    """A scale for each layer and side, as `k_scale` and `v_scale` of a checkpoint: with it, the
    largest magnitude on calibration text becomes the largest of the type."""
    layers = {
        layer: (float8(k / FP8_MAX), float8(v / FP8_MAX))
        for layer, (k, v) in subject.largest().items()
    }
    return Alternative(float8(), float8(), Schedule(), layers)


def kivi(bits: float | None, subject: Subject) -> Alternative:
    """KIVI: keys, which have outlier channels, quantized per channel along the sequence, values per
    token, a residual in full precision. For the keys of one channel in a group of G tokens, and for
    the values of one token in a group of G channels, with B bits:

        offset = min(x), scale = (max(x) - min(x)) / (2^B - 1), code = round((x - offset) / scale)

    G = 32 and R = 128. A scale and an offset of 16 bits make 3 bits of 2 and 5 of 4. In all
    variants a row is held either as codes or exactly.

    Source: arXiv 2402.02750, section 3.2 and algorithm 1; settings of section 4.1; order of a step
    and prefill: the authors' repository, github.com/jy-yuan/KIVI, `models/llama_kivi.py`.
    """
    width = int(bits or 2)
    codes = channel_groups(width, KIVI_GROUP), token_groups(width, KIVI_GROUP)
    return Alternative(*codes, Residual())


def kivi_windows(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with the windows of the recipe in place of its residual, the first tokens too."""
    schedule = GroupedWindows(subject.recipe.windows, KIVI_GROUP)
    return replace(kivi(bits, subject), schedule=schedule)


def kivi_token(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with the groups of values for keys too, to show what the channels bring."""
    known = kivi(bits, subject)
    return replace(known, k=known.v)


def omni_scaled(bits: float | None, subject: Subject) -> Alternative:
    """OScaR of Su et al.: KIVI behind Hadamard matrices, where keys of all tokens have norm 1 while
    they are quantized, and values leave the residual together with their keys.

    A token's norm is that over all its heads. G = 32 and R = 128, of which the authors' code for
    GPUs evicts two at a time. Their zero points are whole codes, and ours any number, as in KIVI.

    Source: arXiv 2605.19660; what it leaves open: github.com/ZunhaiSu/OScaR-KV-Quant at d2109f57,
    `kv_cache_compression/quarot_utils.py`, with the settings of `eval_longbench.py`.
    """
    known = kivi(bits, subject)
    keys, values = canalized(known.k, scaled=True), canalized(known.v, scaled=False)
    return Alternative(keys, values, Residual(together=True))


SPLITS: Mapping[float, tuple[float, int, int]] = {2.5: (0.25, 3, 2), 3.5: (0.5, 4, 3)}
"""Share of outliers, their bits, and those of the others, by the mean. 2.5 is the setting of the
paper: of 128 channels 32 have 3 bits and 96 have 2, which are 2.25, and 2.5 with the two norms. The
paper does not say what its 3.5 bits are, nor how outliers are found."""


def turboquant(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 1 on both sides. The same matrices serve all layers and heads, drawn with a fixed
    seed, and cost nothing for a sequence. The paper quantizes every token; here the windows of the
    recipe stay exact.

    Source: arXiv 2504.19874, algorithms 1 and 2, section 4.3 for the bits of a KV cache; the sketch
    of signs: arXiv 2406.03482.
    """
    width = bits or 2.0
    code = split(*SPLITS[width]) if width in SPLITS else mse(int(width))
    return Alternative(code, code, EqualWindows(subject.recipe.windows))


def turboquant_prod(bits: float | None, subject: Subject) -> Alternative:
    """Algorithm 2 on keys and algorithm 1, with as many bits, on values."""
    width = int(bits or 2)
    return Alternative(products(width), mse(width), EqualWindows(subject.recipe.windows))


def lmdeploy(bits: float | None, subject: Subject) -> Alternative:
    """The mixed cache of LMDeploy, `quant_policy=42`: keys of 3 bits and a sign, values of 2 bits.
    What remains of a key is not sketched as in TurboQuant but read where it is. The codebook here
    is the exact one for the sphere, where LMDeploy has a table for the normal distribution that is
    near it. The windows of the recipe stay exact.

    Source: LMDeploy, pull request 4510, `lmdeploy/pytorch/kernels/cuda/turbo_quant.py` and tests.
    """
    keys, values = behind_hadamard(3, signed=True), behind_hadamard(2, signed=False)
    return Alternative(keys, values, EqualWindows(subject.recipe.windows))
