"""Colours, and matplotlib without the user's settings.

A method has one colour and one marker everywhere. Charts are drawn in the colours of the light
page; each colour has a name, by which the page replaces it with a CSS variable, so one drawing is
legible on light and on dark ground. Hues follow Okabe and Ito's palette for colour-blind readers,
darkened until text in them is legible on white.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import matplotlib

DEPTH_STEPS = 12
"""Colours between the first and the last layer."""


@dataclass(frozen=True)
class Colour:
    """One colour on light and on dark ground, `#rrggbb` in lower case."""

    light: str
    dark: str


PAGE = Colour("#ffffff", "#0f1419")
INK = Colour("#1c2128", "#e3e9f0")
MUTED = Colour("#5d6670", "#9aa4af")
RULE = Colour("#d5dae0", "#333b45")
SOFT = Colour("#f3f5f7", "#181f27")
FAINT = Colour("#a9b1ba", "#56606b")
GOOD = Colour("#1a7437", "#57c27a")
WARN = Colour("#8f5e00", "#dfa83f")
BAD = Colour("#b3261e", "#ff8078")
K_SIDE = Colour("#0b6aa8", "#5fb2ef")
V_SIDE = Colour("#b34a06", "#ff9556")

_METHODS: Mapping[str, Colour] = MappingProxyType(
    {
        "identity": Colour("#6b7480", "#98a3af"),
        "hadamard": Colour("#a34a86", "#e294c6"),
        "oscar": Colour("#0f62b0", "#62a8f5"),
        "oscar-exact": Colour("#2b8cb8", "#8ed0f0"),
        "oscar-per-head": Colour("#0a7a5c", "#45c79f"),
        "wush": Colour("#bf4a04", "#ff8d4a"),
        "wush-tuned": Colour("#8c3b3b", "#e59a9a"),
    }
)
_OTHERS = (
    Colour("#7d6608", "#dcc04b"),
    Colour("#5a4fc0", "#a9a1fa"),
    Colour("#3f6b2a", "#9ccf80"),
    Colour("#7a4a1e", "#d3a373"),
    Colour("#44546a", "#a8b9d0"),
)
_MARKERS = "XsD^voP<>ph*"

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE.light,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": MUTED.light,
    "axes.labelsize": 9,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK.light,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": RULE.light,
    "grid.linewidth": 0.6,
    "lines.solid_capstyle": "round",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.color": INK.light,
    "text.parse_math": False,
    "xtick.color": RULE.light,
    "xtick.labelcolor": MUTED.light,
    "xtick.labelsize": 9,
    "ytick.color": RULE.light,
    "ytick.labelcolor": MUTED.light,
    "ytick.labelsize": 9,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Within it matplotlib has our settings, whatever its configuration file says; restored
    afterwards."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing from"
        )  # names of models in any script
        yield


def method_colours(methods: Sequence[str]) -> dict[str, Colour]:
    """A colour for each method; those without one of their own take the others in turn."""
    strangers = [method for method in methods if method not in _METHODS]
    spare = {method: _OTHERS[index % len(_OTHERS)] for index, method in enumerate(strangers)}
    return {method: _METHODS.get(method) or spare[method] for method in methods}


def method_markers(methods: Sequence[str]) -> dict[str, str]:
    """A marker for each method, so that colour says nothing alone."""
    known = list(_METHODS)
    ordered = known + [method for method in methods if method not in known]
    return {method: _MARKERS[ordered.index(method) % len(_MARKERS)] for method in methods}


def depth_colours() -> tuple[Colour, ...]:
    """`DEPTH_STEPS` colours from the first layer to the last: viridis without the end that
    vanishes."""
    from matplotlib.colors import to_hex

    ramp = matplotlib.colormaps["viridis"]
    steps = [step / (DEPTH_STEPS - 1) for step in range(DEPTH_STEPS)]
    return tuple(
        Colour(to_hex(ramp(0.8 - 0.8 * step)), to_hex(ramp(1 - 0.68 * step))) for step in steps
    )


def colour_variables(methods: Sequence[str]) -> dict[str, Colour]:
    """CSS variable name -> colour, for everything the charts of a report may be drawn in."""
    base = {
        "page": PAGE, "ink": INK, "muted": MUTED, "rule": RULE, "soft": SOFT, "faint": FAINT,
        "good": GOOD, "warn": WARN, "bad": BAD, "k": K_SIDE, "v": V_SIDE,
    }  # fmt: skip
    used = {f"m{index}": colour for index, colour in enumerate(method_colours(methods).values())}
    depth = {f"d{index}": colour for index, colour in enumerate(depth_colours())}
    return base | used | depth
