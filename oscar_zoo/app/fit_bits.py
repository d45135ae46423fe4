"""A serving recipe with codes of other bits, for an estimate before anything is computed."""

from __future__ import annotations

from bisect import bisect_right
from typing import Literal

from oscar_zoo.app.model_needs import Needs
from oscar_zoo.artifact.specs import CodeBits, Geometry, ServingRecipe, SideWidths, Widths
from oscar_zoo.compute.width_wish import AUTO_BITS, check_range, width_wish
from oscar_zoo.engines.sglang.capacity import stored_bits
from oscar_zoo.errors import UsageError


def recipe_of_bits(needs: Needs, bits: float | Literal["auto"] | None) -> ServingRecipe:
    """The recipe of `needs` with codes that take `bits` per element.

    Which layers get codes of 4 bits does not matter for an estimate: keys come first, then values.
    """
    recipe, geometry = needs.serving, needs.geometry
    if bits is None:
        return recipe
    if bits == "auto":
        raise UsageError(
            "--bits auto is what compute measures, so fit-gpu does not know it.",
            hint=f"it takes at most --bits {AUTO_BITS:g}",
        )
    wish = width_wish(bits, None)
    if wish is None:
        return recipe.with_widths(None)
    sides = 2 * len(geometry.attention_layers)

    def raised(number: int) -> ServingRecipe:
        return recipe.with_widths(_widths(geometry, number))

    def cost(number: int) -> float:
        return stored_bits(geometry, raised(number))

    if not wish.measures:
        return raised(sides)
    check_range(bits, (cost(0), cost(sides)), recipe.group_size)
    return raised(bisect_right(range(sides + 1), bits, key=cost) - 1)


def _widths(geometry: Geometry, number: int) -> Widths:
    """Codes of 4 bits for the first `number` sides, and of 2 bits for the others."""
    layers = len(geometry.attention_layers)

    def side(first: int) -> SideWidths:
        bits: tuple[CodeBits, ...] = tuple(
            4 if first + layer < number else 2 for layer in range(layers)
        )
        return SideWidths(bits=bits, clip=(0.0,) * layers)

    return Widths(k=side(0), v=side(layers))
