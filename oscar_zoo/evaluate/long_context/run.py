"""The map of one model in this process, or of running servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.caches import bits_of, caches_of, encode_text, facts_of
from oscar_zoo.evaluate.long_context.grid import (
    Cell,
    RulerReport,
    cells_of,
    length_rows,
    measure_cells,
    write_prompts,
)
from oscar_zoo.evaluate.tasks.base import measure
from oscar_zoo.evaluate.tasks.recall import Recall
from oscar_zoo.models.loading import LoadedModel

Progress = Callable[[int, int, str], None]
"""`(done, total, unit)`"""
CACHES = ("bf16", "int2", "int2-hadamard", "int2-hadamard-clip", "artifact")


@dataclass(frozen=True)
class Questions:
    """What is asked.

    Attributes:
        families: names of `families.FAMILIES`.
        lengths: tokens of the prompts, questions and answers included.
        depths: places of the fact that is asked for.
        samples: prompts of a cell.
        seed: the same seed gives the same prompts.
    """

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
    """Ask a model in this process, with every cache simulated.

    Args:
        artifact: its K and V sets, or `None` without the cache `artifact`.
        recipe: group size, scale dtype, windows and clip.
    """
    longest = model.block.rope.max_position if model.block.rope else None
    check_lengths(questions.lengths, longest, model.block.id)
    found = caches_of(model, artifact, recipe)
    specs = {name: found[name] for name in caches if name in found}
    tasks = questions.tasks(encode_text(model, text), partial(encode_text, model))
    tick = _ticking(progress, len(specs) * sum(len(task.prompts) for task in tasks.values()))
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
    tick = _ticking(progress, total, "answers")

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


def _ticking(progress: Progress, total: int, unit: str = "prompts") -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total, unit)

    return tick
