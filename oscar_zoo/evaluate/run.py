"""One comparison: BF16, data-free INT2 caches, and an artifact's INT2 cache on one model.

All rows of the comparison see the same tokens, windows, group size and quantizer; only transforms
and clip differ. Or BF16 stands beside one artifact under several settings, over the same tokens and
questions. Every query position reads its own window exactly, and the rest as INT2, so no
number depends on how a server would chunk the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.ablation import Setting, widest_windows
from oscar_zoo.evaluate.caches import bits_at_contexts, bits_of, caches_of, encoder, facts_of
from oscar_zoo.evaluate.measure import Measurement, Progress, Task, measure, ticking
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.records import Compared
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel

SCHEMA = "oscar-zoo.eval/1"
TASKS = ("perplexity", "recall")


@dataclass(frozen=True)
class EvalRow:
    """One cache, or one cache under one setting.

    Attributes:
        cache: `bf16`, `int2`, `int2-hadamard`, `int2-hadamard-clip` or `artifact`.
        recall: fraction of the digits of all answers that are predicted right, 0 .. 1 (guessing
            gives 0.1). Counting whole answers would show 0 for every cache that loses a digit here
            and there.
        bits_per_element: of one stored element, scales included; with windows, of everything that
            one sequence of the measured length occupies, and at others by tokens in `CONTEXTS`.
        changes: values that this row has in place of those of the report's recipe, as in
            `ablation.Setting`; empty where all rows have the same.
    """

    cache: str
    perplexity: float | None
    recall: float | None
    bits_per_element: float
    bits_per_element_with_windows: float
    bits_per_element_at: Mapping[str, float] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """What was measured.

    Attributes:
        rows: one per cache in the order above, or BF16 and one per setting.
        facts: what is needed to repeat them, plain JSON values.
        compared: every task under BF16 and under the artifact's cache, sequence by sequence; empty
            under several settings.
        record: the file in which the scores were kept, if any.
    """

    rows: tuple[EvalRow, ...]
    facts: Mapping[str, Any]
    compared: tuple[Compared, ...] = field(default=(), repr=False)
    record: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """`{"schema": "oscar-zoo.eval/1", "rows": [...], ...}`; what was not measured is null."""
        return {
            "schema": SCHEMA,
            **self.facts,
            "rows": [asdict(row) for row in self.rows],
            "record": None if self.record is None else str(self.record),
        }


def evaluate(
    model: LoadedModel,
    text: str,
    *,
    tasks: Sequence[str] = TASKS,
    artifact: tuple[RotationSet, RotationSet] | None,
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
    seed: int = 0,
    settings: Sequence[Setting] = (),
    progress: Progress = lambda done, total, unit: None,
) -> EvalReport:
    """Measure BF16, the data-free baselines and an artifact, if there is one, on held-out text.

    Args:
        recipe: group size, scale dtype, windows for all rows; its clip for `int2-hadamard-clip` and
            `artifact`.
        length: tokens of a window and of a recall prompt, at most; the model's own limit applies.
        settings: to measure the artifact with, one after the other, in place of the data-free
            baselines; `recipe` then only describes the report.
    """
    to_measure = _caches_under(settings, artifact, model) or [
        (name, spec, {}) for name, spec in caches_of(model, artifact, recipe).items()
    ]
    exact = widest_windows([one.recipe for one in settings] or [recipe])
    length = min(length, (model.block.rope and model.block.rope.max_position) or length)
    ids = torch.tensor(encoder(model.tokenizer)(text), device="cpu")
    todo: list[Task] = []
    for name in dict.fromkeys(tasks):
        if name == "perplexity":
            todo.append(Perplexity.from_tokens(ids, windows=windows, length=length))
        elif name == "recall":
            size = {"answers": answers, "length": length, "seed": seed}
            encode = encoder(model.tokenizer)
            todo.append(Recall.from_tokens(ids, encode, windows=exact, unit="token", **size))
        else:
            raise UsageError(f"no task is called {name!r}.", hint=f"tasks: {', '.join(TASKS)}")
    total = len(to_measure) * sum(len(task.prompts) for task in todo)
    tick = ticking(progress, total, "sequences")
    rows = []
    found: dict[str, list[Measurement]] = {}
    for cache, spec, changes in to_measure:
        found[cache] = [measure(model, task, spec, tick=tick) for task in todo]
        values = {task.name: one.value for task, one in zip(todo, found[cache], strict=True)}
        rows.append(
            EvalRow(
                cache,
                values.get("perplexity"),
                values.get("recall"),
                *bits_of(spec, model, length),
                bits_at_contexts(spec, model),
                changes,
            )
        )
    facts = facts_of(model, text, recipe) | {
        "tokens": len(ids),
        "length": length,
        "tasks": {t.name: dict(t.describe()) for t in todo},
    }
    mine = () if settings else zip(todo, found["bf16"], found.get("artifact", ()), strict=False)
    return EvalReport(tuple(rows), facts, tuple(Compared(*one) for one in mine))


def _caches_under(
    settings: Sequence[Setting],
    artifact: tuple[RotationSet, RotationSet] | None,
    model: LoadedModel,
) -> list[tuple[str, CacheSpec | None, Mapping[str, Any]]]:
    """BF16 and the artifact under every setting, with the changes; nothing without settings."""
    if not settings:
        return []
    if artifact is None:
        raise UsageError("several settings are measured with an artifact only.")
    several = [(CacheSpec(*artifact, one.recipe), one.changes) for one in settings]
    for spec, _ in several:
        spec.check(model.block)
    return [("bf16", None, {}), *(("artifact", spec, changes) for spec, changes in several)]
