"""Caches on one model, over the same text and questions.

Two comparisons are made: BF16 beside data-free INT2 caches and that of an artifact (or the artifact
under several settings), and `--against`, the caches of other methods beside it. All rows see the
same tokens, windows, group size and quantizer; only what differs between caches differs. Every
query position reads its own window exactly, and the rest as INT2, so no number depends on how a
server would chunk the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import truediv
from typing import Any

import torch

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.against_table import LONG, OWN, Choice, by_bits, choices
from oscar_zoo.evaluate.caches import (
    bit_facts,
    bits_of,
    caches_of,
    code_bits,
    encoder,
    facts_of,
    largest_magnitudes,
)
from oscar_zoo.evaluate.formats import Alternative, Subject
from oscar_zoo.evaluate.measure import (
    Measurement,
    Task,
    exact_predictions,
    measure,
    measure_both,
    measure_each,
)
from oscar_zoo.evaluate.outcome import AgainstReport, AgainstRow, EvalReport, EvalRow
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.shared import Progress, ticking
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.statistics import relative_change, standard_error
from oscar_zoo.models.loading import LoadedModel

TASKS = ("perplexity", "recall")
Artifact = tuple[RotationSet, RotationSet]
Setting = tuple[ServingRecipe, Mapping[str, Any]]
"""A recipe to measure with, and what it has in place of the values of the report's, as plain
values."""
SEED = 0
"""Of the recall prompts."""


def evaluate(
    model: LoadedModel,
    text: str,
    *,
    tasks: Sequence[str] = TASKS,
    artifact: Artifact | None,
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
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
    caches: list[tuple[str, CacheSpec | None, Mapping[str, Any]]] = [("bf16", None, {})]
    if settings:
        assert artifact is not None
        caches += [("artifact", CacheSpec(*artifact, one), changes) for one, changes in settings]
    else:
        found = caches_of(model.block, artifact, recipe)
        caches = [(name, spec, {}) for name, spec in found.items()]
    for _, spec, _ in caches:
        if spec is not None:
            spec.check(model.block)
    length = min(length, (model.block.rope and model.block.rope.max_position) or length)
    exact = widest_windows([one for one, _ in settings] or [recipe])
    asked, tokens = _tasks(model, text, tasks, exact, windows, length, answers)
    tick = ticking(progress, len(caches) * sum(len(task.prompts) for task in asked), "sequences")
    rows, compared = [], dict[str, list[Measurement]]()
    for cache, spec, changes in caches:
        compared[cache] = [measure(model, task, spec, tick=tick) for task in asked]
        values = {task.name: one.value for task, one in zip(asked, compared[cache], strict=True)}
        row = EvalRow(
            cache=cache,  # type: ignore[arg-type]
            perplexity=values.get("perplexity"),
            recall=values.get("recall"),
            changes=changes,
            **bit_facts(spec, model.block, length),
        )
        rows.append(row)
    pairs = zip(asked, compared["bf16"], compared.get("artifact", ()), strict=False)
    return EvalReport(
        **facts_of(model, text, recipe),
        tokens=tokens,
        length=length,
        tasks={task.name: task.describe() for task in asked},
        rows=tuple(rows),
        compared=() if settings else tuple(pairs),
    )


def widest_windows(recipes: Sequence[ServingRecipe]) -> Windows:
    """Windows that hold those of all recipes."""
    windows = [recipe.windows for recipe in recipes]
    sink, recent = max(one.sink for one in windows), max(one.recent for one in windows)
    return windows[0].model_copy(update={"sink": sink, "recent": recent})


def _tasks(
    model: LoadedModel,
    text: str,
    names: Sequence[str],
    exact: Windows,
    windows: int,
    length: int,
    answers: int,
) -> tuple[list[Any], int]:
    """The tasks, and the number of tokens of the text."""
    encode = encoder(model.tokenizer)
    ids, tasks = torch.tensor(encode(text), device="cpu"), list[Task]()
    for name in dict.fromkeys(names):
        if name == "perplexity":
            tasks.append(Perplexity.from_tokens(ids, windows=windows, length=length))
        elif name == "recall":
            size = {"answers": answers, "length": length, "seed": SEED}
            tasks.append(Recall.from_tokens(ids, encode, windows=exact, unit="token", **size))
        else:
            raise UsageError(f"no task is called {name!r}.", hint=f"tasks: {', '.join(TASKS)}")
    return tasks, len(ids)


def compare(
    model: LoadedModel,
    text: str,
    chosen: Sequence[Choice],
    *,
    artifact: Artifact,
    method: str,
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
    strict: bool = True,
    progress: Progress = lambda done, total, unit: None,
) -> AgainstReport:
    """Measure BF16, the artifact and the alternatives that were `chosen`, on held-out text: bits,
    divergence, perplexity and recall of each.

    Args:
        method: of the artifact.
        recipe: of the artifact; its windows are those of all alternatives that take them.
        length: tokens of a window and of a recall prompt, at most; the model's own limit applies.
        strict: whether an alternative that does not fit the model is an error, or is left out.
    """
    longest = (model.block.rope and model.block.rope.max_position) or int(LONG)
    length, context = min(length, longest), min(longest, int(LONG))
    subject = Subject(model.block, recipe, artifact, lambda: largest_magnitudes(model, length))
    caches, left_out = build_caches(chosen, subject, strict)
    behind = recipe.windows.sink + recipe.windows.recent
    (cut, digits), tokens = _tasks(model, text, TASKS, recipe.windows, windows, length, answers)
    prompts = len(cut.prompts) + len(digits.prompts)
    tick = ticking(progress, len(cut.prompts) + (1 + len(caches)) * prompts, "sequences")
    scored = tuple(replace(one, scored=one.scored[behind:]) for one in cut.prompts)
    exact = exact_predictions(model, scored, tick=tick)
    recall = digits, replace(digits, unit="answer")
    elements = len(model.block.attention_layers) * model.block.num_kv_heads
    elements *= sum(model.block.row_dims)
    rows: list[AgainstRow] = []
    base: Measurement | None = None
    for choice, cache in [(None, None), *caches]:
        perplexity, divergence = measure_both(model, cut, exact, cache, tick=tick)
        shares = measure_each(model, recall, cache, tick=tick)
        base = base or perplexity
        change, error = relative_change(cut.result, perplexity, base)
        own = choice is not None and choice.row.name == OWN
        title = "BF16" if choice is None else choice.title
        if own and isinstance(cache, CacheSpec):
            title = f"{method}:{code_bits(cache, model.block):.3g}"
        row = AgainstRow(
            cache="bf16" if choice is None else choice.name,
            title=title,
            own=own,
            windows=None if choice is None else choice.row.windows,
            source=None if choice is None else choice.row.source,
            # BF16 has none by definition.
            divergence=0.0 if choice is None else divergence.value,
            divergence_error=None if choice is None else standard_error(truediv, divergence),
            perplexity=perplexity.value,
            perplexity_change=100 * change,
            perplexity_change_error=None if error is None else 100 * error,
            digits=shares[0].value,
            digits_error=standard_error(truediv, shares[0]),
            answers=shares[1].value,
            answers_error=standard_error(truediv, shares[1]),
            tokens_per_gb=int(8e9 / bits_of(cache, model.block, context)[1] / elements),
            **bit_facts(cache, model.block, length),
        )
        rows.append(row)
    return AgainstReport(
        **facts_of(model, text, recipe),
        tokens=tokens,
        length=length,
        tasks={
            "perplexity": cut.describe(),
            "recall": {k: v for k, v in digits.describe().items() if k != "unit"},
            "divergence": {"windows": len(exact.prompts), "positions": exact.positions},
        },
        context=context,
        rows=by_bits(rows),
        left_out=left_out,
    )


def build_caches(
    chosen: Sequence[Choice], subject: Subject, strict: bool
) -> tuple[list[tuple[Choice, Alternative | CacheSpec]], dict[str, str]]:
    """The caches to measure, the artifact first, and the reasons why others are left out."""
    (own,) = [one for one in choices([OWN]) if one.bits is None]
    built, left_out = [(own, own.build(subject))], {}
    uniform = None if subject.recipe.widths else 2.0
    for one in chosen:
        if one.row.name == OWN and one.bits in (None, uniform):
            continue  # measured already
        try:
            built.append((one, one.build(subject)))
        except UsageError as error:
            if strict:
                raise
            left_out[one.name] = error.message
    return built, left_out
