"""The tag of what was computed."""

from __future__ import annotations

from oscar_zoo.artifact.names import CalibrationTag
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.compute.methods.base import Method
from oscar_zoo.evaluate.caches import stored_bits
from oscar_zoo.evaluate.simulated_cache import CacheSpec


def calibration_tag(
    tokens: int, prompts: int, recipe: ServingRecipe, geometry: Geometry, method: Method | None
) -> CalibrationTag:
    """The tag of a fit with this recipe; its average bits are named unless all codes have 2.

    Args:
        tokens, prompts: of the calibration.
        method: of the fit; `None` while it is not chosen.
    """
    bits = None
    if recipe.widths is not None:
        bits = stored_bits(CacheSpec(None, None, recipe), geometry)
    variant = method.variant if method else None
    return CalibrationTag(tokens, prompts, recipe.group_size, variant, bits)
