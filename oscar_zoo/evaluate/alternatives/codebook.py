"""The best scalar codebook for a coordinate of a random unit vector.

A coordinate x of a vector drawn evenly from the unit sphere of d dimensions has the density

    f(x) = Gamma(d / 2) / (sqrt(pi) Gamma((d - 1) / 2)) * (1 - x^2)^((d - 3) / 2),  -1 <= x <= 1

The codebook of B bits has the 2^B values c that make `sum over bins of integral (x - c)^2 f(x) dx`
least, when every x takes its nearest value. Lloyd and Max find them by turns: bounds half way
between neighbours, then each value at the mean of its bin.

Source: arXiv 2504.19874, lemma 1 for the density, equation 4 for the codebook.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

POINTS, ROUNDS = 200_001, 2_000
"""Of the grid, and at most of the search."""


@lru_cache(maxsize=32)
def codebook(width: int, bits: int) -> NDArray[np.float64]:
    """The values of the codebook, ascending, `[2^bits]` float64, read-only because it is cached.

    Args:
        width: d, at least 4.
        bits: B.
    """
    reach = min(1.0, 12 / np.sqrt(width))  # beyond it the density is nothing
    x = np.linspace(-reach, reach, POINTS)
    density = np.clip(1 - x * x, 0, None) ** ((width - 3) / 2)
    mass, moment = np.cumsum(density), np.cumsum(density * x)
    values = np.interp((np.arange(1 << bits) + 0.5) / (1 << bits), mass / mass[-1], x)
    for _ in range(ROUNDS):
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
