"""One comparison: BF16, data-free INT2 caches, and an artifact's INT2 cache on one model.

All rows of the comparison see the same tokens, windows, group size and quantizer; only transforms
and clip differ. Or BF16 stands beside one artifact under several settings, over the same tokens and
questions. Every query position reads its own window exactly, and the rest as INT2, so no
number depends on how a server would chunk the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Harness, Paired, Score, ServingRecipe, TokenCounts, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.ablation import Setting, widest_windows
from oscar_zoo.evaluate.caches import bits_at_contexts, bits_of, caches_of, encoder, facts_of
from oscar_zoo.evaluate.measure import Measurement, Task, measure
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.statistics import difference, standard_error
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.models.memory import hardware_name
from oscar_zoo.version import __version__

SCHEMA = "oscar-zoo.eval/1"
TASKS = ("perplexity", "recall")
Progress = Callable[[int, int, str], None]
"""`(done, total, unit)`"""


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
    todo = [
        Perplexity.from_tokens(ids, windows=windows, length=length)
        if name == "perplexity"
        else _recall(model, ids, exact, answers=answers, length=length, seed=seed)
        for name in _known(tasks)
    ]
    total = len(to_measure) * sum(len(task.prompts) for task in todo)
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        progress(done, total, "sequences")

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


def _known(tasks: Sequence[str]) -> list[str]:
    for name in tasks:
        if name not in TASKS:
            raise UsageError(f"no task is called {name!r}.", hint=f"tasks: {', '.join(TASKS)}")
    return list(dict.fromkeys(tasks))


def _recall(
    model: LoadedModel, ids: Tensor, windows: Windows, *, answers: int, length: int, seed: int
) -> Recall:
    return Recall.from_tokens(
        ids,
        encoder(model.tokenizer),
        windows=windows,
        answers=answers,
        length=length,
        seed=seed,
        unit="token",
    )


_SEED = 0
"""Of the errors; recall has its own for the questions."""


@dataclass(frozen=True)
class Compared:
    """One task under a BF16 cache and under that of an artifact."""

    task: Task
    bf16: Measurement
    int2: Measurement


@dataclass(frozen=True)
class Circumstances:
    """What a record says beside the numbers: the day, `YYYY-MM-DD`, the command that repeats the
    measurement, and settings that were not those of the recipe."""

    date: str
    source: str
    text_sha256: str
    digest: str
    recipe_changes: Mapping[str, str]


def scores(
    compared: Sequence[Compared], model: LoadedModel, around: Circumstances
) -> tuple[Score, ...]:
    """A score with its baseline for every task whose numbers are finite."""
    finite = (one for one in compared if math.isfinite(one.int2.value + one.bf16.value))
    return tuple(_score(one, model, around) for one in finite)


def _score(one: Compared, model: LoadedModel, around: Circumstances) -> Score:
    task, described = one.task, one.task.describe()
    is_recall = task.name == "recall"
    scale = 100.0 if is_recall else 1.0
    shared: dict[str, Any] = {
        "task": task.name,
        "metric": "digit_accuracy" if is_recall else "perplexity",
        "unit": "percent" if is_recall else "perplexity",
        "reporter": "measured",
        "date": around.date,
        "source": around.source,
        "dataset_revision": f"sha256:{around.text_sha256}",
        "n": int(described["answers"] if is_recall else described["windows"]),
        "repeats": 1,
        "seeds": (int(described.get("seed", _SEED)),),
        "harness": Harness(name="oscar-zoo", version=__version__),
        "engine": Harness(name="transformers", version=version("transformers")),
        "hardware": hardware_name(model.device),
        "model_revision": model.block.revision,
        "tokens": TokenCounts(prompt=sum(len(p.ids) for p in task.prompts), completion=0),
    }
    base = Score(
        **shared,
        kv_dtype="bf16",
        value=scale * one.bf16.value,
        stderr=_error(task, one.bf16, shared["n"], scale),
    )
    return Score(
        **shared,
        kv_dtype="int2",
        value=scale * one.int2.value,
        stderr=_error(task, one.int2, shared["n"], scale),
        artifact_digest=around.digest,
        recipe_changes=dict(around.recipe_changes),
        baseline=base,
        paired=_paired(one, scale),
    )


def _paired(one: Compared, scale: float) -> Paired | None:
    """The difference over sequences; a higher perplexity is worse, and so is a lower recall."""
    found = difference(one.task, one.int2, one.bf16, seed=_SEED)
    if found is None or not math.isfinite(found.upper95):
        return None
    return Paired(
        n=len(one.int2.parts),
        difference=scale * found.value,
        lower95=scale * found.lower95,
        upper95=scale * found.upper95,
        no_worse_than=scale * (-found.lower90 if one.task.name == "recall" else found.upper90),
    )


def _error(task: Task, found: Measurement, n: int, scale: float) -> float | None:
    """Standard error; of one prompt of recall, that of its answers, and of one window none."""
    error = standard_error(task, found, seed=_SEED)
    if error is None and task.name == "recall":
        error = math.sqrt(found.value * (1 - found.value) / n)
    return None if error is None or not math.isfinite(error) else scale * error
