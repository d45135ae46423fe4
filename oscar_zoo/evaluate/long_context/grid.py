"""Every family at every length and depth, under every cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.long_context.families import FAMILIES
from oscar_zoo.evaluate.long_context.writer import Encode, PromptWriter
from oscar_zoo.evaluate.tasks.base import TaskPrompt
from oscar_zoo.evaluate.tasks.recall import Recall

SCHEMA = "oscar-zoo.ruler/1"


@dataclass(frozen=True)
class Cell:
    """One place of the map.

    Attributes:
        family: of `FAMILIES`.
        length: tokens of a prompt.
        depth: of the fact that is asked for, 0 to 1; `None` where facts lie everywhere.
    """

    family: str
    length: int
    depth: float | None


@dataclass(frozen=True)
class Measured:
    """Answers of one cell under one cache.

    Attributes:
        cell: the place.
        cache: a name of the caches of `eval`.
        right, asked: answers, each counted as a whole.
    """

    cell: Cell
    cache: str
    right: int
    asked: int

    @property
    def share(self) -> float:
        """Of right answers, 0 to 1."""
        return self.right / self.asked

    @property
    def stderr(self) -> float:
        """Standard error of `share`: binomial, with the estimate of Agresti and Coull (The American
        Statistician 52, 1998), which is not 0 where all answers are right."""
        count = self.asked + 4
        share = (self.right + 2) / count
        return math.sqrt(share * (1 - share) / count)


@dataclass(frozen=True)
class LengthRow:
    """One cache at one length, over all families and depths.

    Attributes:
        share: mean over the families.
        bits_per_element: everything that a request of this length occupies, windows included, for
            each element of a full row; `None` for a server.
    """

    cache: str
    length: int
    share: float
    bits_per_element: float | None


@dataclass(frozen=True)
class RulerReport:
    """All cells, a row per cache and length, and the facts needed to repeat the measurement."""

    cells: tuple[Measured, ...]
    rows: tuple[LengthRow, ...]
    facts: Mapping[str, Any]

    @property
    def caches(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return tuple(dict.fromkeys(one.cache for one in self.cells))

    def place(self, cache: str, length: int, depth: float) -> float | None:
        """Share of right answers over all families with a depth, or `None` without one."""
        at = [
            m
            for m in self.cells
            if (m.cache, m.cell.length, m.cell.depth) == (cache, length, depth)
        ]
        return sum(m.right for m in at) / sum(m.asked for m in at) if at else None

    def family(self, cache: str, family: str, length: int | None = None) -> float:
        """Share of right answers of one family at all depths, at one length or at all."""
        at = [
            one
            for one in self.cells
            if (one.cache, one.cell.family) == (cache, family) and length in (None, one.cell.length)
        ]
        return sum(one.right for one in at) / sum(one.asked for one in at)

    @property
    def families(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return tuple(dict.fromkeys(one.cell.family for one in self.cells))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({one.cell.length for one in self.cells}))

    @property
    def depths(self) -> tuple[float, ...]:
        """Ascending; empty without a family that has depths."""
        return tuple(sorted({m.cell.depth for m in self.cells if m.cell.depth is not None}))

    def to_json(self) -> dict[str, Any]:
        """`{"schema": "oscar-zoo.ruler/1", "cells": [...], "lengths": [...], ...}`."""
        cells = [
            {
                **asdict(one.cell),
                "cache": one.cache,
                "right": one.right,
                "asked": one.asked,
                "stderr": one.stderr,
            }
            for one in self.cells
        ]
        return {
            "schema": SCHEMA,
            **self.facts,
            "cells": cells,
            "lengths": [asdict(row) for row in self.rows],
        }


def cells_of(families: Sequence[str], lengths: Sequence[int], depths: int) -> tuple[Cell, ...]:
    """Every cell, shortest prompts first.

    Args:
        depths: how many, evenly from 0 to 1; 1 means the middle.
    """
    for name in families:
        if name not in FAMILIES:
            raise UsageError(
                f"no family is called {name!r}.", hint=f"families: {', '.join(FAMILIES)}"
            )
    places = [0.5] if depths == 1 else [round(i / (depths - 1), 4) for i in range(depths)]
    return tuple(
        Cell(name, length, depth)
        for length in sorted(set(lengths))
        for name in dict.fromkeys(families)
        for depth in (places if FAMILIES[name].has_depth else [None])
    )


def write_prompts(
    cells: Sequence[Cell],
    filler: Sequence[int],
    encode: Encode,
    *,
    samples: int,
    depths: int,
    seed: int,
) -> dict[Cell, Recall]:
    """The prompts of every cell: `samples` where facts have a depth, and as many as all depths
    together where they lie everywhere.
    """

    def prompt(cell: Cell, number: int) -> TaskPrompt:
        drawn = f"{seed} {cell.family} {cell.length} {cell.depth} {number}"
        writer = PromptWriter(filler, encode, cell.length, drawn)
        return FAMILIES[cell.family].write(writer, cell.depth or 0.0)

    return {
        cell: Recall(
            tuple(
                prompt(cell, number)
                for number in range(samples if cell.depth is not None else samples * depths)
            ),
            seed,
        )
        for cell in cells
    }


def measure_cells(
    tasks: Mapping[Cell, Recall],
    caches: Mapping[str, Any],
    count_right: Callable[[Recall, Any], int],
) -> tuple[Measured, ...]:
    """Every cell under every cache."""
    found = []
    for cache, spec in caches.items():
        for cell, task in tasks.items():
            asked = sum(len(prompt.answers) for prompt in task.prompts)
            found.append(Measured(cell, cache, count_right(task, spec), asked))
    return tuple(found)


def length_rows(
    cells: Sequence[Measured], bits: Callable[[str, int], float | None]
) -> tuple[LengthRow, ...]:
    """A row per cache and length.

    Args:
        bits: `(cache, length)` to bits per element with windows.
    """
    rows = []
    for cache in dict.fromkeys(one.cache for one in cells):
        for length in sorted({one.cell.length for one in cells}):
            report = RulerReport(tuple(cells), (), {})
            shares = [report.family(cache, family, length) for family in report.families]
            rows.append(LengthRow(cache, length, sum(shares) / len(shares), bits(cache, length)))
    return tuple(rows)


def length_text(length: int) -> str:
    """`4096` as `4k`, `1000` as `1,000`."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
