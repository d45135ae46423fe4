"""Alternatives beside BF16 and an artifact: bits, divergence, perplexity and recall of each, over
the same tokens and questions.

A prompt goes through the model once for each cache, and everything is counted from its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.against_table import (
    OWN,
    AgainstReport,
    AgainstRow,
    Choice,
    by_bits,
    choices,
)
from oscar_zoo.evaluate.caches import bits_at_contexts, bits_of, encoder, facts_of
from oscar_zoo.evaluate.formats import Alternative, Subject
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    PerPosition,
    Predictions,
    Progress,
    all_logits,
    exact_predictions,
    mean_of,
    simulating,
    ticking,
)
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.simulated_cache import CacheSpec, Simulated
from oscar_zoo.evaluate.statistics import relative_change, standard_error
from oscar_zoo.models.loading import LoadedModel

SEED = 0
"""Of the recall prompts."""


@dataclass(frozen=True)
class Questions:
    """What every cache is asked: windows of the text, every position scored; what the model says
    with the exact cache, behind the windows of the recipe; and recall, of which digits are counted,
    and whole answers."""

    text: Perplexity
    exact: ExactPredictions
    digits: Recall
    answers: Recall


@dataclass(frozen=True)
class _Found:
    """One cache under all questions."""

    divergence: Measurement
    perplexity: Measurement
    digits: Measurement
    answers: Measurement


def compare(
    model: LoadedModel,
    text: str,
    chosen: Sequence[Choice],
    *,
    artifact: tuple[RotationSet, RotationSet],
    recipe: ServingRecipe,
    windows: int = 6,
    length: int = 2048,
    answers: int = 64,
    strict: bool = True,
    progress: Progress = lambda done, total, unit: None,
) -> AgainstReport:
    """Measure BF16, the artifact and the alternatives that were `chosen`, on held-out text.

    Args:
        recipe: of the artifact; its windows are those of all alternatives that take them.
        length: tokens of a window and of a recall prompt, at most; the model's own limit applies.
        strict: whether an alternative that does not fit the model is an error, or is left out.
    """
    length = min(length, (model.block.rope and model.block.rope.max_position) or length)
    caches, left_out = build_caches(chosen, Subject(model.block, recipe, artifact), strict)
    text_task, recall, ids = _tasks(model, text, recipe, windows, length, answers)
    prompts = len(text_task.prompts) + len(recall.prompts)
    total = len(text_task.prompts) + (1 + len(caches)) * prompts
    tick = ticking(progress, total, "sequences")
    behind = recipe.windows.sink + recipe.windows.recent
    scored = tuple(replace(one, scored=one.scored[behind:]) for one in text_task.prompts)
    exact = exact_predictions(model, scored, tick=tick)
    asked = Questions(text_task, exact, recall, replace(recall, unit="answer"))
    base = _measure(model, None, asked, tick)
    rows = [_row(None, None, base, base, asked, model, length)]
    for choice, cache in caches:
        found = _measure(model, cache, asked, tick)
        rows.append(_row(choice, cache, found, base, asked, model, length))
    facts = facts_of(model, text, recipe) | {
        "tokens": ids,
        "length": length,
        "tasks": {
            "perplexity": dict(text_task.describe()),
            "recall": {k: v for k, v in recall.describe().items() if k != "unit"},
            "divergence": {"windows": len(exact.prompts), "positions": exact.positions},
        },
    }
    return AgainstReport(by_bits(rows), facts, left_out)


def build_caches(
    chosen: Sequence[Choice], subject: Subject, strict: bool
) -> tuple[list[tuple[Choice, Simulated]], dict[str, str]]:
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


def _tasks(
    model: LoadedModel, text: str, recipe: ServingRecipe, windows: int, length: int, answers: int
) -> tuple[Perplexity, Recall, int]:
    """Windows of the text, recall, and the tokens of the text."""
    kept = recipe.windows
    if kept.sink + kept.recent >= length - 1:
        raise UsageError(
            f"with {kept.sink:,} first and {kept.recent:,} last tokens in BF16, nothing of a"
            f" sequence of {length:,} tokens is quantized.",
            hint="give smaller --sink and --recent, or a larger --length",
        )
    ids = torch.tensor(encoder(model.tokenizer)(text), device="cpu")
    size = {"answers": answers, "length": length, "seed": SEED}
    encode = encoder(model.tokenizer)
    recall = Recall.from_tokens(ids, encode, windows=kept, unit="token", **size)
    return Perplexity.from_tokens(ids, windows=windows, length=length), recall, len(ids)


def _measure(
    model: LoadedModel, cache: Simulated | None, asked: Questions, tick: Callable[[], None]
) -> _Found:
    """Everything about one cache."""
    diverged, losses, digits, answers = [], [], [], []
    with simulating(model, cache):
        for number, logits in enumerate(all_logits(model, asked.text.prompts)):
            prompt = asked.text.prompts[number]
            losses.append(asked.text.count(prompt, Predictions.of_logits(prompt, logits)))
            sample = asked.exact.prompts[number].scored.to(logits.device)
            diverged.append(asked.exact.part(number, logits[sample]))
            tick()
        recalled = all_logits(model, asked.digits.prompts)
        for prompt, logits in zip(asked.digits.prompts, recalled, strict=True):
            said = Predictions.of_logits(prompt, logits)
            digits.append(asked.digits.count(prompt, said))
            answers.append(asked.answers.count(prompt, said))
            tick()
    return _Found(
        mean_of(diverged),
        Measurement.of(asked.text, losses),
        Measurement.of(asked.digits, digits),
        Measurement.of(asked.answers, answers),
    )


def _row(
    choice: Choice | None,
    cache: Simulated | None,
    found: _Found,
    base: _Found,
    asked: Questions,
    model: LoadedModel,
    length: int,
) -> AgainstRow:
    """A row; BF16 has no choice, and no divergence by definition."""
    change, error = relative_change(asked.text, found.perplexity, base.perplexity)
    assert cache is None or isinstance(cache, CacheSpec | Alternative)
    stored, whole = bits_of(cache, model, length)
    divergence = found.divergence
    return AgainstRow(
        cache="bf16" if choice is None else choice.name,
        title="BF16" if choice is None else choice.title,
        source=None if choice is None else choice.row.source,
        bits_per_element=stored,
        bits_per_element_with_windows=whole,
        bits_per_element_at=bits_at_contexts(cache, model),
        divergence=0.0 if choice is None else divergence.value,
        divergence_error=None if choice is None else standard_error(PerPosition(), divergence),
        perplexity=found.perplexity.value,
        perplexity_change=100 * change,
        perplexity_change_error=None if error is None else 100 * error,
        digits=found.digits.value,
        digits_error=standard_error(asked.digits, found.digits),
        answers=found.answers.value,
        answers_error=standard_error(asked.answers, found.answers),
    )
