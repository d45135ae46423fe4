"""Caches of other methods, simulated like ours: what all of them have, FP8, and KIVI.

A `RowCode` turns rows into the arrays that a cache would hold, and these back into rows. Bits are
counted from the same arrays, so nothing that is stored can be forgotten. A `Schedule` says when a
row leaves the high-precision window. The functions that make a cache come after each method's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oscar_kernels.quantizer import SCALE_DTYPES, dequantize_codes, quantize_codes
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import RotationSet
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
"""Of an element in a high-precision window, and of a norm."""


@dataclass(frozen=True)
class Subject:
    """What a cache is built for: a model, the recipe (windows, groups, type of scales, and clip),
    and the sets of an artifact for keys and values, where there is one."""

    geometry: Geometry
    recipe: ServingRecipe
    artifact: tuple[RotationSet, RotationSet] | None = None


@dataclass(frozen=True)
class Stored:
    """An array of a cache.

    Attributes:
        values: codes or numbers; the numbers are float32 that the stored type represents exactly.
        bits: of each of them in memory.
        per_sequence: whether a sequence has it once, not for every row.
    """

    values: Tensor
    bits: int
    per_sequence: bool = False


Arrays = Mapping[str, Stored]


class RowCode(Protocol):
    """How rows of one side are stored.

    Attributes:
        tokens: consecutive rows that are stored together; more than 1 for codes along the sequence.
    """

    @property
    def tokens(self) -> int: ...

    def check(self, width: int) -> None:
        """Raise `ValueError`, with what is wrong, for rows of `width` channels that do not fit."""

    def store(self, rows: Tensor) -> Arrays:
        """The arrays for `rows`, `[.., T, width]` float32, with T a multiple of `tokens`."""

    def read(self, arrays: Arrays) -> Tensor:
        """The rows that a query reads, `[.., T, width]` float32."""


class Schedule(Protocol):
    """Which rows stay exact, for how long.

    Attributes:
        first: position of the first row that is ever stored; groups of rows begin there.
    """

    @property
    def first(self) -> int: ...

    def reads(self, positions: Tensor) -> Reads:
        """What queries at consecutive positions read when they are decoded one by one."""

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """For keys and for values, how many rows of a sequence of `length` tokens are held as they
        are stored, and how many exactly, when its last token is decoded."""


@dataclass(frozen=True)
class EqualWindows:
    """The windows of our recipe. As in our server, every row is stored, windows stand on top."""

    windows: Windows
    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        return window_reads(self.windows, positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        side = length, self.windows.sink + self.windows.recent
        return side, side


@dataclass(frozen=True)
class NoWindows:
    """Every row is stored at once, and read so by its own token too."""

    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        return stored_reads(positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        return (length, 0), (length, 0)


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
        return sum(row_bits(code, width)[0] for code, width in codes) / sum(widths)

    def bits_at(self, geometry: Geometry, length: int) -> float:
        """Bits of all that a sequence of `length` tokens occupies, for each element of its rows."""
        total = 0.0
        sides = zip((self.k, self.v), geometry.head_dims, self.schedule.rows(length), strict=True)
        for code, width, (coded, exact) in sides:
            each, once = row_bits(code, width)
            total += coded * each + once + exact * EXACT_BITS * width
        return total / (length * sum(geometry.head_dims))


def row_bits(code: RowCode, width: int) -> tuple[float, float]:
    """Bits of one stored row of one head, and of what is stored once for a sequence and head,
    counted over the arrays of a code."""
    arrays = code.store(torch.zeros(code.tokens, width, device="cpu")).values()
    rows = sum(one.values.numel() * one.bits for one in arrays if not one.per_sequence)
    once = sum(one.values.numel() * one.bits for one in arrays if one.per_sequence)
    return rows / code.tokens, float(once)


@dataclass(frozen=True)
class Fp8:
    """FP8 as SGLang stores it: every element is cast to float8 e4m3, whose largest value is 448;
    larger magnitudes saturate, as the cast of PyTorch does it.

    With `--kv-cache-dtype fp8_e4m3`, `MHATokenToKVPool.set_kv_buffer` divides rows by `k_scale` and
    `v_scale` of the checkpoint, where it has them, else by 1. A query reads the cast rows, that of
    its own token included. There are no windows, and 8 bits are all that an element costs.

    Source: SGLang 0.5.21, `srt/mem_cache/memory_pool.py`; the format: arXiv 2209.05433, section 3.
    """

    scale: float = 1.0
    tokens: int = 1

    def check(self, width: int) -> None: ...

    def store(self, rows: Tensor) -> Arrays:
        cast = (rows / self.scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return {"values": Stored(cast.float(), 8)}

    def read(self, arrays: Arrays) -> Tensor:
        return arrays["values"].values * self.scale


def fp8(bits: float | None, subject: Subject) -> Alternative:
    """Both sides with scale 1; there is one width, and the recipe is not read."""
    return Alternative(Fp8(), Fp8(), NoWindows())


@dataclass(frozen=True)
class TokenGroups:
    """Every row is cut into groups of at most `group` consecutive channels, with a scale and an
    offset each; the groups are equal and of a multiple of 4. The quantizer is ours."""

    bits: int
    group: int
    tokens: int = 1

    def check(self, width: int) -> None: ...

    def store(self, rows: Tensor) -> Arrays:
        width = rows.shape[-1]
        size = next(n for n in range(self.group, 0, -4) if width % n == 0)
        return _grouped(rows.unflatten(-1, (-1, size)), self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        return _ungrouped(arrays, self.bits).flatten(-2)


@dataclass(frozen=True)
class ChannelGroups:
    """Every channel is cut into groups of `tokens` consecutive tokens, with a scale and an offset
    each."""

    bits: int
    tokens: int

    def check(self, width: int) -> None: ...

    def store(self, rows: Tensor) -> Arrays:
        return _grouped(rows.unflatten(-2, (-1, self.tokens)).mT, self.bits)

    def read(self, arrays: Arrays) -> Tensor:
        return _ungrouped(arrays, self.bits).mT.flatten(-3, -2)


def _grouped(groups: Tensor, bits: int) -> Arrays:
    """Codes, scales and offsets of the groups along the last axis."""
    codes, affine = quantize_codes(groups, _spec(groups.shape[-1], bits))
    scale, offset = affine.float().unbind(-1)
    size = 8 * SCALE_DTYPES["float16"].itemsize
    return {
        "codes": Stored(codes, bits),
        "scale": Stored(scale, size),
        "offset": Stored(offset, size),
    }


def _ungrouped(arrays: Arrays, bits: int) -> Tensor:
    codes = arrays["codes"].values
    affine = [arrays[name].values for name in ("scale", "offset")]
    return dequantize_codes(codes, torch.stack(affine, -1), _spec(codes.shape[-1], bits))


def _spec(size: int, bits: int) -> QuantSpec:
    """A group as a row of its own."""
    return QuantSpec(size, size, 0.0, "float16", bits)


KIVI_GROUP, KIVI_RESIDUAL = 32, 128


@dataclass(frozen=True)
class Residual:
    """The full-precision rows of KIVI.

    The last tokens stay in full precision: keys until R = `length` of them are there, which are
    then quantized together, values while they are among the last R. As in the authors' code,
    attention of a step comes before the rows of this step are quantized. So the query at position p
    reads keys from `R * floor(p / R)` on and values from `p - R` on exactly, and nothing of the
    beginning.
    """

    length: int = KIVI_RESIDUAL
    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        p = positions[:, None]
        return mixed_reads(positions, s >= p // self.length * self.length, s >= p - self.length)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        last = length - 1
        keys, values = last // self.length * self.length, max(0, last - self.length)
        return (keys, length - keys), (values, length - values)


@dataclass(frozen=True)
class GroupedWindows:
    """The windows of our recipe for keys that are stored in groups of `group` tokens, which begin
    behind the first tokens: a group is quantized when it is complete and all of it is older than
    the recent window."""

    windows: Windows
    group: int

    @property
    def first(self) -> int:
        return self.windows.sink

    def reads(self, positions: Tensor) -> Reads:
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        age, sinks = positions[:, None] - s, s < self.first
        newest = self.first + ((s - self.first) // self.group + 1) * self.group - 1
        exact_k = sinks | (positions[:, None] - newest < self.windows.recent)
        return mixed_reads(positions, exact_k, sinks | (age < self.windows.recent))

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        values = max(0, length - self.first - self.windows.recent)
        keys = values // self.group * self.group
        return (keys, length - keys), (values, length - values)


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
    width = int(bits or 2)
    return Alternative(TokenGroups(width, KIVI_GROUP), TokenGroups(width, KIVI_GROUP), Residual())
