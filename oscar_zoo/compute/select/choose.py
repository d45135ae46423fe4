"""`auto`: measure every method in its INT2 cache on held-out text, and keep the best.

First come the errors of each fit in the attention layers, for every clip of a small grid, which
finds its clip (`attention_errors`), on half of the held-out sequences. Then candidates with that
clip, with the recipe's and with none, and for the best method with a few more, are measured on more
and more of the text, and leave when they cannot win (`rule.Race`). Recall is measured last, only
for candidates that could still be kept. The rule and its limits are in `rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from oscar_zoo.artifact.manifest import ModelBlock
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
from oscar_zoo.compute.select.rule import (
    Base,
    Gate,
    Questions,
    Race,
    Trial,
    farthest,
    in_halving_order,
    whole,
)
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
    task = heldout_task(heldout, recipe.windows)
    meter = Meter(progress)
    half = task.prompts[: None if fast else -(-len(task.prompts) // 2)]
    meter.start(HELD_OUT, len(half))
    sequences = [prompt.ids.tolist() for prompt in half]
    rows = collect(model, sequences, recipe.windows, tick=meter.at)
    runner = TrialRunner(model, rows, fits, recipe, meter)
    errors = runner.errors(fixed_clip=fixed_clip)
    trials = [Trial(name, found.found) for name, found in errors.items()]
    base, asked, exact = None, Questions(), None
    if fast:
        final = [at for at, trial in enumerate(trials) if TABLE[trial.method].publishable]
        at, reason = rule.best_by_error([trials[n] for n in final])
    else:
        runner.start_perplexities(task)
        base = Base(runner.own_perplexity(task))
        first = task.prompts[: -(-len(task.prompts) // 2)]
        exact = exact_predictions(model, first, tick=meter.tick)
        on_more = partial(runner.on_more, task=task, exact=exact)
        finer = partial(runner.finer, errors=errors) if not fixed_clip else lambda names: ()
        offered_clips = {
            name: [Trial(name, one) for one in found.clips] for name, found in errors.items()
        }
        trials = Race(base.perplexity, on_more, finer).run(offered_clips)
        offered = [at for at, one in enumerate(trials) if TABLE[one.method].publishable]
        lasting = [at for at in offered if whole(trials[at], base.perplexity)]
        final = [lasting[n] for n in rule.finalists([trials[at] for at in lasting])]
        asked = runner.questions(heldout, len(final))
        if asked.remark is None:
            base = replace(base, recall=asked.own)
            runner.recalls(trials, final, asked)
            pool = [at for at in offered if farthest(trials[at], trials)]
            measured = [pool.index(at) for at in final]
            more = [pool[n] for n in rule.substitutes([trials[at] for at in pool], measured, base)]
            for at in more:  # of methods that left early
                trials[at] = on_more(trials[at], len(task.prompts))
            meter.start(MORE_RECALL, len(more) * len(asked.task.prompts) if asked.task else 0)
            runner.recalls(trials, more, asked)
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
        questions=asked,
        exact=exact,
    )


def heldout_task(heldout: HeldOut, windows: Windows) -> Perplexity:
    """Perplexity of held-out text at positions beyond both windows. The sequences stand in an order
    in which every beginning is spread over the text."""
    first, shortest = windows.sink + windows.recent, shortest_measured(windows)
    prompts = [
        TaskPrompt(
            torch.tensor(sequence, device="cpu"),
            torch.arange(first, len(sequence) - 1, device="cpu"),
        )
        for sequence in heldout.sequences
        if len(sequence) >= shortest
    ]
    if not prompts:
        raise UsageError(
            f"no held-out sequence has {shortest} tokens; {first} tokens stay in high precision.",
            hint="use longer sequences, or more text",
        )
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
    words = {
        "perplexity_change_percent": (
            "raises perplexity by",
            f"% (limit {rule.PERPLEXITY_FAIL:.0f} %)",
        ),
        "recall_loss_points": ("loses recall by", f"points (limit {rule.RECALL_FAIL:.0f})"),
    }
    for gate in gates:
        if gate.result == "fail":
            what, limit = words[gate.name]
            return f"{what} {gate.value:.1f} {limit}"
    return None


def recall_lengths(windows: Windows, block: ModelBlock) -> tuple[int, ...]:
    """Tokens of a recall prompt, in the order in which they are tried."""
    longest = (block.rope and block.rope.max_position) or math.inf
    both = windows.sink + windows.recent
    return tuple(int(min(times * both, longest)) for times in RECALL_WINDOWS)


def recall_task(model: LoadedModel, heldout: HeldOut, windows: Windows) -> Recall | None:
    """Questions about facts in held-out text; `None` where there is no room for them."""

    def encode(text: str) -> list[int]:
        ids: list[int] = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    text = torch.tensor(
        [token for sequence in heldout.sequences for token in sequence], device="cpu"
    )
    for length, number in product(recall_lengths(windows, model.block), RECALL_PER_PROMPT):
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


def judged(task: Recall, own: Measurement) -> Questions:
    """Questions with the answers of the model itself, which may be too poor to judge by."""
    if own.value < RECALL_LEAST:
        remark = f"the model itself recalls {own.value:.0%} of digits: recall was not judged"
        return Questions(task, own, remark)
    return Questions(task, own)


@dataclass(frozen=True)
class TrialRunner:
    """Everything that candidates are measured with."""

    model: LoadedModel
    rows: HeldOutRows
    fits: Fits
    recipe: ServingRecipe
    meter: Meter

    def errors(self, *, fixed_clip: bool) -> dict[str, Fidelity]:
        """Candidates of every fit; `identity` shows the cost of no transform and is not clipped."""
        plain = self.recipe.model_copy(update={"clip": Clip(k=0.0, v=0.0, algorithm="none")})
        shown = [name for name in self.fits.results if not TABLE[name].publishable]
        offered = [name for name in self.fits.results if TABLE[name].publishable]
        parts = ((shown, plain, True), (offered, self.recipe, fixed_clip))
        self.meter.start(ERRORS, len(self.model.block.attention_layers), share=2 * len(parts))
        found: dict[str, Fidelity] = {}
        for names, recipe, fixed in parts:
            found |= self._fidelity(names, recipe, fixed_clip=fixed, tick=self.meter.tick)
        return found

    def start_perplexities(self, task: Task) -> None:
        """Start the phase: BF16, what BF16 says, and the rounds of a race between few methods."""
        quarters = len(self.fits.results) + RACE_QUARTERS
        self.meter.start(PERPLEXITY, (2 + quarters // 4) * len(task.prompts))

    def own_perplexity(self, task: Task) -> Measurement:
        """Perplexity of the model with a BF16 cache."""
        found = self._measure(task, None)
        if not math.isfinite(found.value):
            raise ComputeFailed(
                "the model's own perplexity is not finite on held-out text.",
                next_step=AddOption("--dtype", "float32"),
            )
        return found

    def on_more(
        self, trial: Trial, sequences: int, *, task: Perplexity, exact: ExactPredictions
    ) -> Trial:
        """The trial with its perplexity on the first `sequences`, and its divergence where `exact`
        has them; what it has is not measured again."""
        for last in (len(exact.prompts), len(task.prompts)):
            done = 0 if trial.perplexity is None else len(trial.perplexity.parts)
            trial = self._extended(trial, done, min(last, sequences), task, exact)
        return trial

    def _extended(
        self, trial: Trial, first: int, last: int, task: Perplexity, exact: ExactPredictions
    ) -> Trial:
        """The trial with the sequences `first` to `last - 1` added, all of which `exact` has, or
        none."""
        if last <= first:
            return trial
        part, cache = replace(task, prompts=task.prompts[first:last]), self._cache(trial)
        divergence = trial.divergence
        if last <= len(exact.prompts):
            some = exact.between(first, last)
            found, new = measure_both(self.model, part, some, cache, tick=self.meter.tick)
            divergence = mean_of((*(divergence.parts if divergence else ()), *new.parts))
        else:
            found = self._measure(part, cache)
        before = trial.perplexity.parts if trial.perplexity else ()
        whole = Measurement.of(task, (*before, *found.parts))
        return replace(trial, perplexity=whole, divergence=divergence)

    def finer(self, names: Sequence[str], errors: Mapping[str, Fidelity]) -> list[Trial]:
        """Trials with more clips for some methods, the same for K and V, with their errors."""
        found = []
        for name in names:
            tried = [self._indices(one.clip) for one in errors[name].clips]
            for ratio in FINER_CLIPS:
                clip = Clip(k=ratio, v=ratio)
                if self._indices(clip) not in tried:
                    found.append(self._trial(name, clip))
        return found

    def questions(self, heldout: HeldOut, number: int) -> Questions:
        """The recall questions, for the model and then for `number` trials, when it is asked."""
        task = recall_task(self.model, heldout, self.recipe.windows)
        if task is None:
            return Questions(remark=NO_ROOM)
        self.meter.start(RECALL, (1 + number) * len(task.prompts))
        return judged(task, self._measure(task, None))

    def recalls(self, trials: list[Trial], which: Sequence[int], asked: Questions) -> None:
        """Measure the recall of some trials, in place."""
        assert asked.task is not None
        for at in which:
            trials[at] = replace(
                trials[at], recall=self._measure(asked.task, self._cache(trials[at]))
            )

    def _fidelity(
        self,
        names: Sequence[str],
        recipe: ServingRecipe,
        *,
        fixed_clip: bool,
        tick: Callable[[], None],
    ) -> dict[str, Fidelity]:
        pairs = {name: (self.fits.results[name].k, self.fits.results[name].v) for name in names}
        return measure_fits(
            self.rows, self.model.block, pairs, recipe, fixed_clip=fixed_clip, tick=tick
        )

    def _trial(self, name: str, clip: Clip) -> Trial:
        recipe = self.recipe.model_copy(update={"clip": clip})
        found = self._fidelity([name], recipe, fixed_clip=True, tick=lambda: None)
        return Trial(name, found[name].found)

    def _cache(self, trial: Trial) -> CacheSpec:
        result = self.fits.results[trial.method]
        recipe = self.recipe.model_copy(update={"clip": trial.errors.clip})
        return CacheSpec(result.k, result.v, recipe)

    def _indices(self, clip: Clip) -> tuple[int, int]:
        """The indices at which a clip clips; two ratios may mean the same index."""
        cache = CacheSpec(None, None, self.recipe.model_copy(update={"clip": clip}))
        k = index_of(cache.quant_spec("k", self.model.block.head_dim))
        return k, index_of(cache.quant_spec("v", self.model.block.v_head_dim))

    def _measure(self, task: Task, cache: CacheSpec | None) -> Measurement:
        return measure(self.model, task, cache, tick=self.meter.tick)
