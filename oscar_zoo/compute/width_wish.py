"""How many bits the user wants codes to have, and whether that is possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe, Widths, check_groups
from oscar_zoo.errors import UsageError

ALL_TWO, ALL_FOUR = 2.0, 4.0
"""These two are no budgets: they mean codes of 2 or of 4 bits everywhere, whatever scales add."""
AUTO_BITS, AUTO_LOSS = 3.25, 0.2
"""`auto` takes at most these bits, and the fewest within this rise of perplexity in percent."""


@dataclass(frozen=True)
class WidthWish:
    """At most so many average bits of an element, scales and offsets included (`ALL_FOUR` gives all
    codes 4 bits); or the fewest bits with at most this rise of perplexity over BF16, in percent; or
    the fewest within `AUTO_LOSS` and without loss of recall, at most `AUTO_BITS`."""

    bits: float | None = None
    max_loss: float | None = None
    auto: bool = False

    @property
    def measures(self) -> bool:
        """Whether layers and sides have to be told apart."""
        return self.bits != ALL_FOUR

    @property
    def option(self) -> str:
        """As on the command line."""
        if self.max_loss is not None:
            return f"--max-loss {self.max_loss:g}%"
        return "--bits auto" if self.auto else f"--bits {self.bits:g}"


INSTEAD: tuple[WidthWish, ...] = (WidthWish(auto=True), WidthWish(bits=ALL_FOUR))
"""What is tried, in this order, where nobody asked for 2 bits and they fail their gates."""


def width_wish(bits: float | Literal["auto"] | None, max_loss: float | None) -> WidthWish | None:
    """The wish of two options; `None` for codes of 2 bits everywhere."""
    if bits is not None and max_loss is not None:
        raise UsageError("--bits and --max-loss exclude each other.", hint="give one of the two")
    if bits == "auto":
        return WidthWish(auto=True)
    if bits is not None:
        return None if bits == ALL_TWO else WidthWish(bits=float(bits))
    if max_loss is None:
        return None
    if not (math.isfinite(max_loss) and 0 < max_loss <= 100):
        raise UsageError(
            f"--max-loss {max_loss:g} is no rise of perplexity.",
            hint="use percent above 0, such as 0.1%",
        )
    return WidthWish(max_loss=max_loss)


def possible_bits(recipe: ServingRecipe, geometry: Geometry) -> tuple[float, float]:
    """Bits of an element with codes of 2 and of 4 bits everywhere, scales and offsets included."""
    layers, no_clip = len(geometry.attention_layers), Clip(k=0.0, v=0.0, algorithm="none")
    four = Widths.uniform(layers, k=4, v=4, clip=no_clip)
    low, high = (bits_of(recipe.with_widths(widths), geometry) for widths in (None, four))
    return low, high


def bits_of(recipe: ServingRecipe, geometry: Geometry) -> float:
    """Bits of an element, scales and offsets included, on average over all layers."""
    from oscar_zoo.evaluate.caches import stored_bits  # imports torch
    from oscar_zoo.evaluate.simulated_cache import CacheSpec

    return stored_bits(CacheSpec(None, None, recipe), geometry)


def check_wish(wish: WidthWish | None, recipe: ServingRecipe, model: ModelBlock) -> None:
    """Raise `UsageError` for a number of bits that codes of 2 and 4 bits cannot have, or for groups
    that rows of the model cannot be cut into."""
    check_groups(model.head_dims, recipe.group_size, model.id)
    if wish is None or wish.bits is None or wish.bits == ALL_FOUR:
        return
    low, high = possible_bits(recipe, model)
    if not low <= wish.bits <= high:
        raise UsageError(
            f"--bits {wish.bits:g} is not possible with groups of {recipe.group_size}: codes of 2"
            f" bits cost {low:g} with their scales, codes of 4 bits {high:g}.",
            hint=f"use 2 or 4 for all codes, a budget from {low:g} to {high:g}, or auto",
        )
