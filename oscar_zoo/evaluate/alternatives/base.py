"""What an alternative is: how rows are stored, and which rows a query still reads exactly.

A `RowCode` turns rows into the arrays that a cache would hold, and these back into rows. Bits are
counted from the same arrays, so nothing that is stored can be forgotten. A `Schedule` says when a
row leaves the high-precision window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Geometry, ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.reading import Reads, StoredSide, stored_reads, window_reads

EXACT_BITS = 16
"""Of an element in a high-precision window."""


@dataclass(frozen=True)
class Subject:
    """What a cache is built for.

    Attributes:
        geometry: of the model.
        recipe: windows, groups, type of scales, and clip.
        artifact: its sets for keys and values, where there is one.
    """

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
        """The arrays of a cache for `rows`, `[.., T, width]` float32, with T a multiple of
        `tokens`."""

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
    """The windows of our recipe. As in our server, every row is stored, and windows stand on top.

    Attributes:
        windows: first and last tokens that queries read exactly.
    """

    windows: Windows
    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        """See `Schedule`."""
        return window_reads(self.windows, positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `Schedule`."""
        side = length, self.windows.sink + self.windows.recent
        return side, side


@dataclass(frozen=True)
class NoWindows:
    """Every row is stored at once, and read so by its own token too."""

    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        """See `Schedule`."""
        return stored_reads(positions)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `Schedule`."""
        return (length, 0), (length, 0)


@dataclass(frozen=True)
class CodedSide:
    """Keys or values of a layer in the model's own basis, stored by a code.

    Attributes:
        code: how rows are stored.
        first: position at which groups of rows begin.
    """

    code: RowCode
    first: int = 0
    partner: Tensor | None = None
    mean: Tensor | None = None

    def rows(self, x: Tensor) -> Tensor:
        """The rows as they are, float32."""
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
    """A cache of another method.

    Attributes:
        k: how keys are stored.
        v: how values are stored.
        schedule: when.
    """

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
        """What queries at consecutive positions read."""
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
