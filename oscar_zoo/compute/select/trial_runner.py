"""Measures the trials of `auto`: errors of attention, perplexity and recall in an INT2 cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture.held_out_rows import HeldOutRows
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import Fits
from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.phases import ERRORS, PERPLEXITY, RECALL
from oscar_zoo.compute.select.attention_errors import Fidelity, measure_fits
from oscar_zoo.compute.select.clip import index_of
from oscar_zoo.compute.select.meter import Meter
from oscar_zoo.compute.select.questions import Questions
from oscar_zoo.compute.select.rule import Trial
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    Task,
    exact_predictions,
    mean_of,
    measure_both,
)
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.next_step import AddOption

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


def recall_lengths(windows: Windows, block: ModelBlock) -> tuple[int, ...]:
    """Tokens of a recall prompt, in the order in which they are tried."""
    longest = (block.rope and block.rope.max_position) or math.inf
    both = windows.sink + windows.recent
    return tuple(int(min(times * both, longest)) for times in RECALL_WINDOWS)


def recall_task(model: RunningModel, heldout: HeldOut, windows: Windows) -> Recall | None:
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

    model: RunningModel
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
        methods = len(self.fits.results)
        quarters = methods + RACE_QUARTERS
        self.meter.start(PERPLEXITY, (2 + quarters // 4) * len(task.prompts))

    def exact_half(self, task: Task) -> ExactPredictions | None:
        """What the model says with the exact cache on the first half of the sequences; `None` for
        an engine, which does not hand distributions over."""
        if not isinstance(self.model, RunningModel):
            return None
        half = task.prompts[: -(-len(task.prompts) // 2)]
        return exact_predictions(self.model.loaded, half, tick=self.meter.tick)

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
        self, trial: Trial, sequences: int, *, task: Perplexity, exact: ExactPredictions | None
    ) -> Trial:
        """The trial with its perplexity on the first `sequences`, and its divergence where `exact`
        has them; what it has is not measured again."""
        for last in (len(exact.prompts) if exact else 0, len(task.prompts)):
            done = 0 if trial.perplexity is None else len(trial.perplexity.parts)
            trial = self._extended(trial, done, min(last, sequences), task, exact)
        return trial

    def _extended(
        self, trial: Trial, first: int, last: int, task: Perplexity, exact: ExactPredictions | None
    ) -> Trial:
        """The trial with the sequences `first` to `last - 1` added, all of which `exact` has, or
        none."""
        if last <= first:
            return trial
        part, cache = replace(task, prompts=task.prompts[first:last]), self._cache(trial)
        divergence = trial.divergence
        if exact is not None and last <= len(exact.prompts):
            assert isinstance(self.model, RunningModel)
            some = exact.between(first, last)
            found, new = measure_both(self.model.loaded, part, some, cache, tick=self.meter.tick)
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
        return Trial(
            name, self._fidelity([name], recipe, fixed_clip=True, tick=lambda: None)[name].found
        )

    def _cache(self, trial: Trial) -> CacheSpec:
        result = self.fits.results[trial.method]
        return CacheSpec(
            result.k, result.v, self.recipe.model_copy(update={"clip": trial.errors.clip})
        )

    def _indices(self, clip: Clip) -> tuple[int, int]:
        """The indices at which a clip clips; two ratios may mean the same index."""
        cache, block = (
            CacheSpec(None, None, self.recipe.model_copy(update={"clip": clip})),
            self.model.block,
        )
        return index_of(cache.quant_spec("k", block.head_dim)), index_of(
            cache.quant_spec("v", block.v_head_dim)
        )

    def _measure(self, task: Task, cache: CacheSpec | None) -> Measurement:
        return self.model.measure(task, cache, tick=self.meter.tick)
