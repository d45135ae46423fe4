"""KIVI: keys quantized per channel along the sequence, values per token, a residual in full
precision.

Keys have outlier channels, so a scale for each channel and G consecutive tokens fits them better
than one for each token. For the keys of one channel in a group of G tokens, and for the values of
one token in a group of G channels, with B bits:

    offset = min(x), scale = (max(x) - min(x)) / (2^B - 1), code = round((x - offset) / scale)

The last tokens stay in full precision: keys until R of them are there, which are then quantized
together, values while they are among the last R. As in the authors' code, attention of a step
comes before the rows of this step are quantized. So the query at position p reads keys from
`R * floor(p / R)` on and values from `p - R` on exactly, and nothing of the beginning. Defaults are
G = 32 and R = 128. A scale and an offset of 16 bits make 3 bits of 2 and 5 of 4.

`windows` replaces the residual by the windows of our recipe, with the first tokens too: a group of
keys is quantized when it is complete and all of it is older than the recent window. `per_token`
gives keys the groups of values, to show what the channels bring. In all variants a row is held
either as codes or exactly.

Source: arXiv 2402.02750, section 3.2 and algorithm 1; settings of section 4.1; order of a step and
prefill: the authors' repository, github.com/jy-yuan/KIVI, `models/llama_kivi.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.evaluate.alternatives.base import Alternative, Subject
from oscar_zoo.evaluate.alternatives.groups import ChannelGroups, TokenGroups
from oscar_zoo.evaluate.reading import Reads, mixed_reads

GROUP, RESIDUAL = 32, 128


@dataclass(frozen=True)
class Residual:
    """The full-precision rows of KIVI.

    Attributes:
        length: R; keys are quantized in chunks of so many tokens.
    """

    length: int = RESIDUAL
    first: int = 0

    def reads(self, positions: Tensor) -> Reads:
        """See `Schedule`."""
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        p = positions[:, None]
        return mixed_reads(positions, s >= p // self.length * self.length, s >= p - self.length)

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `Schedule`."""
        last = length - 1
        keys, values = last // self.length * self.length, max(0, last - self.length)
        return (keys, length - keys), (values, length - values)


@dataclass(frozen=True)
class GroupedWindows:
    """The windows of our recipe for keys that are stored in groups of tokens.

    Attributes:
        windows: first and last tokens that queries read exactly, at least.
        group: tokens of a group of keys; groups begin behind the first tokens.
    """

    windows: Windows
    group: int

    @property
    def first(self) -> int:
        """See `Schedule`."""
        return self.windows.sink

    def reads(self, positions: Tensor) -> Reads:
        """See `Schedule`."""
        s = torch.arange(int(positions[-1]) + 1, device=positions.device)
        age, sinks = positions[:, None] - s, s < self.first
        newest = self.first + ((s - self.first) // self.group + 1) * self.group - 1
        exact_k = sinks | (positions[:, None] - newest < self.windows.recent)
        return mixed_reads(positions, exact_k, sinks | (age < self.windows.recent))

    def rows(self, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """See `Schedule`."""
        values = max(0, length - self.first - self.windows.recent)
        keys = values // self.group * self.group
        return (keys, length - keys), (values, length - values)


def kivi(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with its own residual; the recipe is not read."""
    width = int(bits or 2)
    return Alternative(ChannelGroups(width, GROUP), TokenGroups(width, GROUP), Residual())


def windows(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with the windows of the recipe."""
    width = int(bits or 2)
    schedule = GroupedWindows(subject.recipe.windows, GROUP)
    return Alternative(ChannelGroups(width, GROUP), TokenGroups(width, GROUP), schedule)


def per_token(bits: float | None, subject: Subject) -> Alternative:
    """KIVI with keys per token, and its own residual; the recipe is not read."""
    width = int(bits or 2)
    return Alternative(TokenGroups(width, GROUP), TokenGroups(width, GROUP), Residual())
