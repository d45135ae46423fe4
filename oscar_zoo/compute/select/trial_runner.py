"""Measures the trials of `auto`: errors of attention, perplexity and recall in an INT2 cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from oscar_zoo.artifact.model_block import ModelBlock
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture.held_out_rows import HeldOutRows
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import Fits
from oscar_zoo.compute.methods.table import TABLE, main_method
from oscar_zoo.compute.phases import ERRORS, PERPLEXITY, RECALL
from oscar_zoo.compute.select.attention_errors import Fidelity, measure_fits
from oscar_zoo.compute.select.clip import index_of
from oscar_zoo.compute.select.meter import Meter
from oscar_zoo.compute.select.questions import Questions
from oscar_zoo.compute.select.rule import Trial
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.tasks.base import Measurement, Task
from oscar_zoo.evaluate.tasks.recall import Recall
from oscar_zoo.next_step import AddOption

FINER_CLIPS = (0.94, 0.925, 0.9)
"""Ratios that the best method is also measured with, the same for K and V."""
RECALL_ANSWERS = 128
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
    for length in recall_lengths(windows, model.block):
        try:
            return Recall.from_tokens(
                text, encode, windows=windows, answers=RECALL_ANSWERS, length=length, unit="token"
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

    def start_perplexities(self, trials: Sequence[Trial], task: Task, *, finer: bool) -> None:
        """Start the phase: BF16, the trials, and as many finer clips as there may be."""
        alike = max(Counter(map(main_method, self.fits.results)).values())
        more = len(FINER_CLIPS) * alike if finer else 0
        self.meter.start(PERPLEXITY, (1 + len(trials) + more) * len(task.prompts))

    def own_perplexity(self, task: Task) -> Measurement:
        """Perplexity of the model with a BF16 cache."""
        found = self._measure(task, None)
        if not math.isfinite(found.value):
            raise ComputeFailed(
                "the model's own perplexity is not finite on held-out text.",
                next_step=AddOption("--dtype", "float32"),
            )
        return found

    def perplexities(self, trials: Sequence[Trial], task: Task, *, finer: bool) -> list[Trial]:
        """Measure the perplexity of the trials.

        With `finer`, also with more clips of the best method and of its variants;
        these trials follow those of their method.
        """
        found = [self._with_perplexity(trial, task) for trial in trials]
        if not finer:
            return found
        offered = [
            trial
            for trial in found
            if TABLE[trial.method].publishable and trial.perplexity is not None
        ]
        best = min(
            offered, key=lambda trial: trial.perplexity.value if trial.perplexity else math.inf
        ).method
        for name in [name for name in self.fits.results if main_method(name) == main_method(best)]:
            tried = [self._indices(trial.errors.clip) for trial in found if trial.method == name]
            more = [
                clip
                for ratio in FINER_CLIPS
                if self._indices(clip := Clip(k=ratio, v=ratio)) not in tried
            ]
            after = max(at for at, trial in enumerate(found) if trial.method == name) + 1
            found[after:after] = [
                self._with_perplexity(self._trial(name, clip), task) for clip in more
            ]
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

    def _with_perplexity(self, trial: Trial, task: Task) -> Trial:
        return replace(trial, perplexity=self._measure(task, self._cache(trial)))

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
