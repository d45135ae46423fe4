"""Values that may differ from layer to layer, as text of flags. Needs neither torch nor sglang.

One value holds for every layer. A list has one entry for each layer with full attention, and `NxM`
stands for `N`, `M` times: `4,2x35` is 4 in the first layer and 2 in the 35 that follow.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from oscar_kernels.spec import BITS, WIDTHS

T = TypeVar("T", int, float)
MOST_LAYERS = 1000


def whole_number(text: str) -> int | None:
    """The number that decimal digits mean, or `None` for any other text."""
    digits = text.strip()
    try:
        return int(digits) if digits.isascii() and digits.isdigit() else None
    except ValueError:  # Python refuses thousands of digits
        return None


def parse_layers(text: str, read: Callable[[str], T]) -> tuple[T, ...]:
    """The values of a list; one value for all layers is a list of one."""
    values: list[T] = []
    for entry in text.split(","):
        value, star, times = entry.strip().partition("x")
        count = whole_number(times) if star else 1
        if count is None or not 1 <= count <= MOST_LAYERS:
            raise ValueError(
                f"{entry.strip()!r} must say how many layers have the value, 1 to {MOST_LAYERS},"
                " as 2x35 does"
            )
        values += [read(value)] * count
    if len(values) > MOST_LAYERS:
        raise ValueError(f"{len(values)} entries are more than a model has layers")
    return tuple(values)


def layers_text(values: Sequence[float]) -> str:
    """`values` as a flag has them, and as people read them."""
    runs = [(value, sum(1 for _ in run)) for value, run in itertools.groupby(values)]
    return ",".join(f"{value:g}" if count == 1 else f"{value:g}x{count}" for value, count in runs)


def of_layer(values: Sequence[T], index: int) -> T:
    """The value of the layer `index`, counted from 0 among those with full attention."""
    return values[0] if len(values) == 1 else values[index]


def one_or_text(values: Sequence[float]) -> float | str:
    """The value of all layers, or the text of a list."""
    return values[0] if len(values) == 1 else layers_text(values)


@dataclass(frozen=True)
class CodeBits:
    """Bits of the codes of keys and of values: lists as of `parse_layers`.

    As text the two lists stand on both sides of a slash, and one list is for both: `2`, `4/2`,
    `4,2x35/2`.
    """

    k: tuple[int, ...] = (BITS,)
    v: tuple[int, ...] = (BITS,)

    @classmethod
    def parse(cls, text: str) -> CodeBits:
        """The bits that `text` means; raises `ValueError`."""
        k, _, v = text.partition("/")
        return cls(parse_layers(k, _width), parse_layers(v or k, _width))

    @property
    def narrow(self) -> bool:
        """Whether every code has the bits of the published method."""
        return {*self.k, *self.v} == {BITS}

    def __str__(self) -> str:
        k, v = layers_text(self.k), layers_text(self.v)
        return k if k == v else f"{k}/{v}"


def _width(text: str) -> int:
    if text.strip() not in map(str, WIDTHS):
        raise ValueError(f"codes have {' or '.join(map(str, WIDTHS))} bits, not {text.strip()!r}")
    return int(text)
