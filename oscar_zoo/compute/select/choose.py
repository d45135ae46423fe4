"""`auto`: measure every method in its INT2 cache on held-out text, and keep the best.

First come the errors of each fit in the attention layers, for every clip of a small grid, which
finds its clip (`attention_errors`), on half of the held-out sequences. Then candidates with that
clip, with the recipe's and with none, and for the best method with a few more, are measured on more
and more of the text, and leave when they cannot win (`rule.race`). Recall is measured last, only
for candidates that could still be kept. The rule and its limits are in `rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture.rows import HeldOutRows, collect
from oscar_zoo.compute.data.calibration import HeldOut
from oscar_zoo.compute.estimate import ERRORS, HELD_OUT, MORE_RECALL, PERPLEXITY, RECALL, Meter
from oscar_zoo.compute.methods.base import Fits
from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.options import shortest_measured
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.select.attention_errors import Fidelity, index_of, measure_fits
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.compute.select.rule import Base, Gate, Trial, farthest, in_halving_order, race, whole
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    Task,
    TaskPrompt,
    exact_predictions,
    mean_of,
    measure,
    measure_both,
)
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.next_step import AddOption, NextStep

FINER_CLIPS = (0.94, 0.925, 0.9)
"""Ratios that the best method is also measured with, the same for K and V."""
RACE_QUARTERS = 48
"""Measurements of a quarter of the text behind the first round, for the progress bar."""
SAMPLE_BYTES = 1 << 28
"""Of exact predictions: 2,730 positions of a vocabulary of 49,152, and 512 of 262,144, where a
small model on a CPU spends its time."""
RECALL_ANSWERS = 128
RECALL_PER_PROMPT = (16, 8)
"""Facts that one prompt asks for, the first number that has room: reading a prompt takes the
time."""
RECALL_WINDOWS = (4, 8)
"""Tokens of a recall prompt, in units of both windows: the first in which the facts have room."""
NO_ROOM = "recall was not measured: windows, context or held-out text leave no room for it"
RECALL_LEAST = 0.5
"""Recall is not gated when the BF16 model itself scores below this value."""


def choose(
    model: LoadedModel,
    heldout: HeldOut,
    fits: Fits,
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    fast: bool = False,
    progress: Progress = lambda done, total, phase: None,
) -> Choice:
    """Measure every fit with the clips worth it, and keep the best."""
    task, meter = heldout_task(heldout, recipe.windows), Meter(progress)
    half = task.prompts[: -(-len(task.prompts) // 2)]
    shown = task.prompts if fast else half
    meter.start(HELD_OUT, len(shown))
    rows = collect(model, [one.ids.tolist() for one in shown], recipe.windows, tick=meter.at)
    runner = _Runner(model, rows, fits, recipe, meter)
    errors = runner.errors(fixed_clip=fixed_clip)
    base = None
    if fast:
        trials = [Trial(name, found.found) for name, found in errors.items()]
        final = [at for at, trial in enumerate(trials) if TABLE[trial.method].publishable]
        at, reason = rule.best_by_error([trials[n] for n in final])
    else:
        quarters = len(fits.results) + RACE_QUARTERS  # of a race between few methods
        meter.start(PERPLEXITY, (2 + quarters // 4) * len(task.prompts))
        own = runner.measure(task, None)
        if not math.isfinite(own.value):
            raise ComputeFailed(
                "the model's own perplexity is not finite on held-out text.",
                next_step=AddOption("--dtype", "float32"),
            )
        exact = exact_predictions(model, half, max_bytes=SAMPLE_BYTES, tick=meter.tick)
        on_more = partial(runner.on_more, task=task, exact=exact)
        finer = partial(runner.finer, errors=errors) if not fixed_clip else lambda names: ()
        offered_clips = {
            name: [Trial(name, one) for one in found.clips] for name, found in errors.items()
        }
        trials = race(own, on_more, finer, offered_clips)
        offered = [at for at, one in enumerate(trials) if TABLE[one.method].publishable]
        lasting = [at for at in offered if whole(trials[at], own)]
        final = [lasting[n] for n in rule.finalists([trials[at] for at in lasting])]
        questions = recall_task(model, heldout, recipe.windows)
        if questions is not None:
            meter.start(RECALL, (1 + len(final)) * len(questions.prompts))
        base = judged(own, questions, partial(runner.measure, cache=None))
        if questions is not None and base.recall is not None:
            runner.recalls(trials, final, questions)
            pool = [at for at in offered if farthest(trials[at], trials)]
            measured = [pool.index(at) for at in final]
            more = [pool[n] for n in rule.substitutes([trials[at] for at in pool], measured, base)]
            for at in more:  # of methods that left early
                trials[at] = on_more(trials[at], len(task.prompts))
            meter.start(MORE_RECALL, len(more) * len(questions.prompts))
            runner.recalls(trials, more, questions)
            final = sorted(final + more)
        at, reason = rule.best([trials[n] for n in final], base)
    kept = trials[final[at]]
    return Choice(
        result=fits.results[kept.method],
        recipe=recipe.model_copy(update={"clip": kept.errors.clip}),
        trials=tuple(trials),
        at=final[at],
        reason=reason,
        errors=errors,
        base=base,
        heldout=heldout,
        refused=fits.refused,
    )


def heldout_task(heldout: HeldOut, windows: Windows) -> Perplexity:
    """Perplexity of held-out text at positions beyond both windows, which `read_data` has checked.
    The sequences stand in an order in which every beginning is spread over the text."""
    first, shortest = windows.sink + windows.recent, shortest_measured(windows)
    prompts = [
        TaskPrompt(torch.tensor(one, device="cpu"), torch.arange(first, len(one) - 1, device="cpu"))
        for one in heldout.sequences
        if len(one) >= shortest
    ]
    return Perplexity(tuple(prompts[at] for at in in_halving_order(len(prompts))))


def refuse_poor(name: str, gates: Sequence[Gate], step: NextStep | None = None) -> None:
    """Raise `ComputeFailed` when the fit `name` fails one of `gates`; `step` would help."""
    failed = failure(gates)
    if failed is not None:
        raise ComputeFailed(
            f"the best fit, {name}, {failed}.",
            hint="use more or other text, or keep it with --allow-poor",
            next_step=step,
        )


def failure(gates: Sequence[Gate]) -> str | None:
    """The first of `gates` that fails, in words that follow a subject; `None` where none does."""
    for gate in gates:
        if gate.result == "fail" and gate.name == "recall_loss_points":
            return f"loses recall by {gate.value:.1f} points (limit {rule.RECALL_FAIL:.0f})"
        if gate.result == "fail":
            limit = rule.PERPLEXITY_FAIL
            return f"raises perplexity by {gate.value:.1f} % (limit {limit:.0f} %)"
    return None


def recall_task(model: LoadedModel, heldout: HeldOut, windows: Windows) -> Recall | None:
    """Questions about facts in held-out text; `None` where there is no room for them."""

    def encode(text: str) -> list[int]:
        ids: list[int] = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    text = torch.tensor([token for one in heldout.sequences for token in one], device="cpu")
    longest = (model.block.rope and model.block.rope.max_position) or math.inf
    for times, number in product(RECALL_WINDOWS, RECALL_PER_PROMPT):
        length = int(min(times * (windows.sink + windows.recent), longest))
        try:
            return Recall.from_tokens(
                text,
                encode,
                windows=windows,
                answers=RECALL_ANSWERS,
                per_prompt=number,
                length=length,
                unit="token",
            )
        except UsageError:
            continue
    return None


def judged(
    perplexity: Measurement, questions: Recall | None, measure: Callable[[Task], Measurement]
) -> Base:
    """The model itself with its answers, which may be too poor to judge by."""
    if questions is None:
        return Base(perplexity, remark=NO_ROOM)
    own, remark = measure(questions), None
    if own.value < RECALL_LEAST:
        remark = f"the model itself recalls {own.value:.0%} of digits: recall was not judged"
    return Base(perplexity, own, questions, remark)


class _Runner:
    """Everything that candidates are measured with."""

    def __init__(
        self, model: LoadedModel, rows: HeldOutRows, fits: Fits, recipe: ServingRecipe, meter: Meter
    ) -> None:
        self._model, self._rows, self._fits = model, rows, fits
        self._recipe, self._meter = recipe, meter

    def errors(self, *, fixed_clip: bool) -> dict[str, Fidelity]:
        """Errors of every fit; `identity` shows the cost of no transform and is not clipped."""
        plain = self._clipped(Clip(k=0.0, v=0.0, algorithm="none"))
        shown = [name for name in self._fits.results if not TABLE[name].publishable]
        offered = [name for name in self._fits.results if TABLE[name].publishable]
        self._meter.start(ERRORS, len(self._model.block.attention_layers), share=4)
        tick = self._meter.tick
        return self._fidelity(shown, plain, fixed_clip=True, tick=tick) | self._fidelity(
            offered, self._recipe, fixed_clip=fixed_clip, tick=tick
        )

    def measure(self, task: Task, cache: CacheSpec | None) -> Measurement:
        """A task with a cache; `None` for that of the model."""
        return measure(self._model, task, cache, tick=self._meter.tick)

    def on_more(
        self, trial: Trial, sequences: int, *, task: Perplexity, exact: ExactPredictions
    ) -> Trial:
        """The trial with its perplexity on the first `sequences`, and its divergence where `exact`
        has them; what it has is not measured again."""
        for most in (len(exact.prompts), len(task.prompts)):
            first = 0 if trial.perplexity is None else len(trial.perplexity.parts)
            last = min(most, sequences)
            if last <= first:
                continue
            part, cache = replace(task, prompts=task.prompts[first:last]), self._cache(trial)
            divergence = trial.divergence
            if last <= len(exact.prompts):
                some = exact.between(first, last)
                found, new = measure_both(self._model, part, some, cache, tick=self._meter.tick)
                divergence = mean_of((*(divergence.parts if divergence else ()), *new.parts))
            else:
                found = self.measure(part, cache)
            before = trial.perplexity.parts if trial.perplexity else ()
            perplexity = Measurement.of(task, (*before, *found.parts))
            trial = replace(trial, perplexity=perplexity, divergence=divergence)
        return trial

    def finer(self, names: Sequence[str], errors: Mapping[str, Fidelity]) -> list[Trial]:
        """Trials with more clips for some methods, the same for K and V, with their errors."""
        trials = []
        for name in names:
            tried = [self._indices(one.clip) for one in errors[name].clips]
            for ratio in FINER_CLIPS:
                clip = Clip(k=ratio, v=ratio)
                if self._indices(clip) not in tried:
                    found = self._fidelity([name], self._clipped(clip), fixed_clip=True)
                    trials.append(Trial(name, found[name].found))
        return trials

    def recalls(self, trials: list[Trial], which: Sequence[int], questions: Recall) -> None:
        """Measure the recall of some trials, in place."""
        for at in which:
            found = self.measure(questions, self._cache(trials[at]))
            trials[at] = replace(trials[at], recall=found)

    def _fidelity(
        self,
        names: Sequence[str],
        recipe: ServingRecipe,
        *,
        fixed_clip: bool,
        tick: Callable[[], None] = lambda: None,
    ) -> dict[str, Fidelity]:
        pairs = {name: (self._fits.results[name].k, self._fits.results[name].v) for name in names}
        return measure_fits(
            self._rows, self._model.block, pairs, recipe, fixed_clip=fixed_clip, tick=tick
        )

    def _clipped(self, clip: Clip) -> ServingRecipe:
        return self._recipe.model_copy(update={"clip": clip})

    def _cache(self, trial: Trial) -> CacheSpec:
        result = self._fits.results[trial.method]
        return CacheSpec(result.k, result.v, self._clipped(trial.errors.clip))

    def _indices(self, clip: Clip) -> tuple[int, int]:
        """The indices at which a clip clips; two ratios may mean the same index."""
        cache, block = CacheSpec(None, None, self._clipped(clip)), self._model.block
        k, v = (
            cache.recipe.quant_spec("k", block.head_dim),
            cache.recipe.quant_spec("v", block.v_head_dim),
        )
        return index_of(k), index_of(v)
