"""Widths of heads that an INT2 cache has no transform for."""

from __future__ import annotations

from oscar_zoo.artifact.hadamard import has_hadamard
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.other_caches import STOCK


def refuse_widths(widths: tuple[int, int], name: str) -> None:
    """Refuse a model with heads that no transform fits.

    Args:
        widths: channels of a row of K and of V.
    """
    for width in widths:
        if not has_hadamard(width):
            raise UnsupportedModel(
                f"{name} has heads of {width} channels; the transforms of an INT2 cache contain a"
                " Hadamard matrix of that width, and none is known here.",
                hint=f"{STOCK}, or choose a model with heads of 64, 96, 128 or 256 channels",
            )
