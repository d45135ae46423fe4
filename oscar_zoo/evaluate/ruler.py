"""Facts in long prompts: every family at every length and depth, under every cache of a model in
this process, or asked of running servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.caches import bits_of, caches_of, encoder, facts_of
from oscar_zoo.evaluate.measure import Progress, TaskPrompt, measure, ticking
from oscar_zoo.evaluate.questions import Encode, Recall
from oscar_zoo.evaluate.ruler_prompts import FAMILIES, PromptWriter
from oscar_zoo.models.loading import LoadedModel

CACHES = ("bf16", "int2", "int2-hadamard", "int2-hadamard-clip", "artifact")


@dataclass(frozen=True)
class Questions:
    """What is asked: families by name, tokens of the prompts (questions and answers included),
    places of the fact that is asked for, and prompts of a cell. The same seed gives the same
    prompts."""

    families: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int
    samples: int
    seed: int = 0

    def tasks(self, ids: Sequence[int], encode: Callable[[str], list[int]]) -> dict[Cell, Recall]:
        """The prompts, with filler from `ids`; raises `UsageError` as `write_prompts`."""
        cells = cells_of(self.families, self.lengths, self.depths)
        return write_prompts(
            cells, ids, encode, samples=self.samples, depths=self.depths, seed=self.seed
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"depths": self.depths, "samples": self.samples, "seed": self.seed}


def measure_model(
    model: LoadedModel,
    text: str,
    questions: Questions,
    *,
    artifact: tuple[RotationSet, RotationSet] | None,
    recipe: ServingRecipe,
    caches: Sequence[str] = CACHES,
    progress: Progress = lambda done, total, unit: None,
) -> RulerReport:
    """Ask a model in this process, with every cache simulated; without an `artifact` there is no
    cache of that name."""
    longest = model.block.rope.max_position if model.block.rope else None
    check_lengths(questions.lengths, longest, model.block.id)
    found = caches_of(model, artifact, recipe)
    specs = {name: found[name] for name in caches if name in found}
    tasks = questions.tasks(encoder(model.tokenizer)(text), encoder(model.tokenizer))
    total = len(specs) * sum(len(task.prompts) for task in tasks.values())
    tick = ticking(progress, total, "prompts")
    cells = measure_cells(
        tasks,
        specs,
        lambda task, spec: int(
            sum(right for right, _ in measure(model, task, spec, tick=tick).parts)
        ),
    )
    rows = length_rows(cells, lambda cache, length: bits_of(specs[cache], model, length)[1])
    return RulerReport(cells, rows, facts_of(model, text, recipe) | questions.facts)


def measure_servers(
    clients: Mapping[str, ServerClient],
    tasks: Mapping[Cell, Recall],
    questions: Questions,
    *,
    progress: Progress = lambda done, total, unit: None,
) -> RulerReport:
    """Ask running servers: an answer is right when the greedy answer of the server begins with it,
    after the prompt and the true answers before it.
    """
    for client in clients.values():
        check_lengths(questions.lengths, client.facts().longest_input, client.url)
    total = len(clients) * sum(
        len(prompt.answers) for task in tasks.values() for prompt in task.prompts
    )
    tick = ticking(progress, total, "answers")

    def right(task: Recall, client: ServerClient) -> int:
        count = 0
        for prompt in task.prompts:
            for first, last in prompt.answers:
                start, end = int(prompt.scored[first]) + 1, int(prompt.scored[last - 1]) + 2
                ids = prompt.ids.tolist()
                said = client.generate(ids[:start], end - start).ids
                count += list(said) == ids[start:end]
                tick()
        return count

    cells = measure_cells(tasks, clients, right)
    facts = {"servers": {name: _server_facts(client) for name, client in clients.items()}}
    return RulerReport(cells, length_rows(cells, lambda *_: None), facts | questions.facts)


def check_lengths(lengths: Sequence[int], longest: int | None, of: str) -> None:
    """Raise `UsageError` for a length that `of` does not take."""
    if longest is not None and max(lengths) > longest:
        raise UsageError(
            f"{of} takes {longest:,} tokens, and prompts of {max(lengths):,} are wanted.",
            hint=f"--lengths up to {longest}",
        )


def _server_facts(client: ServerClient) -> dict[str, Any]:
    facts = client.facts()
    return {
        "url": client.url,
        "sglang": facts.version,
        "cache_dtype": facts.cache_dtype,
        "recipe": dict(facts.recipe),
    }


SCHEMA = "oscar-zoo.ruler/1"


@dataclass(frozen=True)
class Cell:
    """One place of the map: `length` in tokens of a prompt, and the `depth` of the fact that is
    asked for, 0 to 1, or `None` where facts lie everywhere."""

    family: str
    length: int
    depth: float | None


@dataclass(frozen=True)
class Measured:
    """Answers of one cell under one cache, each counted as a whole."""

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
    """One cache at one length: the mean over the families, and the bits of everything that a
    request of this length occupies, windows included, for each element of a full row (`None` for a
    server)."""

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
    """Every cell, shortest prompts first; `depths` are spread evenly from 0 to 1, and 1 means the
    middle."""
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
    """A row per cache and length; `bits` are per element with windows, of `(cache, length)`."""
    rows = []
    for cache in dict.fromkeys(one.cache for one in cells):
        for length in sorted({one.cell.length for one in cells}):
            report = RulerReport(tuple(cells), (), {})
            shares = [report.family(cache, family, length) for family in report.families]
            rows.append(LengthRow(cache, length, sum(shares) / len(shares), bits(cache, length)))
    return tuple(rows)
