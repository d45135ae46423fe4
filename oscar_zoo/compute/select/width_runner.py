"""Measures raises, alone and together: divergence, perplexity and recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import ServingRecipe, Windows
from oscar_zoo.artifact.width_selection import WidthSelection, WidthStep
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import FitResult
from oscar_zoo.compute.phases import VERIFY
from oscar_zoo.compute.select.choose import heldout_task
from oscar_zoo.compute.select.meter import Meter
from oscar_zoo.compute.select.questions import Questions
from oscar_zoo.compute.select.rule import Base
from oscar_zoo.compute.select.trial_runner import NO_ROOM, judged, recall_task
from oscar_zoo.compute.select.width_choice import (
    RULE,
    Raised,
    Verified,
    WidthChoice,
    curve_steps,
    gains,
    recalls_as_much,
    widths_of,
)
from oscar_zoo.compute.select.width_curve import Curve, Slot
from oscar_zoo.compute.width_wish import WidthWish, possible_bits
from oscar_zoo.evaluate.caches import CONTEXTS, bits_with_windows, stored_bits
from oscar_zoo.evaluate.changed_layers import divergences_of_changes
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    Task,
    TaskPrompt,
    measure_divergence,
)
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec

PROMPTS = 4
"""Least number of prompts that held-out text is cut into, so that two halves have two each."""
TOKENS = 4096
"""Tokens of these prompts that are enough, where there are more than `PROMPTS`."""
LEAST_BEYOND = 2
"""Least length of such a prompt, in units of both windows."""
SIDES: tuple[Role, Role] = ("k", "v")
NOTHING: Raised = frozenset()
"""Codes of 2 bits everywhere."""
ROUNDS = 3
"""Steps that are verified in a search for the fewest bits, for the progress bar."""


@dataclass(frozen=True)
class Known:
    """What `auto` has measured already: BF16, the questions, the fit with 2 bits, and what the
    model says on half of the text, which is where the divergence of 2 bits is of."""

    base: Base
    questions: Questions
    two_bits: Verified
    exact: ExactPredictions | None = None


def divergence_prompts(heldout: HeldOut, windows: Windows) -> tuple[TaskPrompt, ...]:
    """Held-out sequences, scored beyond both windows.

    Where they are fewer than `PROMPTS` they are cut, and where they have more than `TOKENS` the
    first are taken, which are spread over the text: on the example models, slots that are picked on
    half of the text keep 86 to 100 % of their gain on the other half.
    """
    first = windows.sink + windows.recent
    found = heldout_task(heldout, windows).prompts
    while len(found) < PROMPTS and min(len(one.ids) for one in found) >= 2 * LEAST_BEYOND * first:
        halves = [one.ids.tensor_split(2) for one in found]
        found = tuple(
            TaskPrompt(ids, torch.arange(first, len(ids) - 1, device="cpu"))
            for pair in halves
            for ids in pair
        )
    return found[: max(PROMPTS, TOKENS // max(len(one.ids) for one in found))]


def known_predictions(
    known: Known | None, prompts: Sequence[TaskPrompt]
) -> tuple[ExactPredictions, Verified] | None:
    """What is known of these prompts, and the divergence of 2 bits on them; `None` of others."""
    if known is None or known.exact is None or len(known.exact.prompts) != len(prompts):
        return None
    pairs = zip(known.exact.prompts, prompts, strict=True)
    if not all(torch.equal(one.ids, other.ids) for one, other in pairs):
        return None
    found = known.two_bits.divergence
    same = found is not None and len(found.parts) == len(prompts)
    return known.exact, Verified(divergence=found if same else None)


@dataclass
class WidthRunner:
    """Everything that raises are measured with, and what was found so far."""

    model: RunningModel
    fit: FitResult
    recipe: ServingRecipe
    wish: WidthWish
    exact: ExactPredictions
    task: Perplexity
    meter: Meter
    found: dict[Raised, Verified] = field(default_factory=dict)
    base: Base | None = None
    asked: Questions = field(default_factory=Questions)

    @property
    def everything(self) -> Raised:
        """Both sides of all layers."""
        return frozenset(
            (index, side)
            for index in range(len(self.model.block.attention_layers))
            for side in SIDES
        )

    def cache(self, raised: Raised) -> CacheSpec:
        """The cache with these raises."""
        layers = len(self.model.block.attention_layers)
        return CacheSpec(self.fit.k, self.fit.v, widths_of(self.recipe, layers, raised))

    def divergence(self, raised: Raised) -> Measurement:
        """Measured once for each set of raises."""
        seen = self.found.get(raised, Verified())
        if seen.divergence is None:
            measured = measure_divergence(
                self.model.loaded, self.exact, self.cache(raised), tick=self.meter.tick
            )
            seen = self.found[raised] = replace(seen, divergence=measured)
        assert seen.divergence is not None
        return seen.divergence

    def curve(self) -> Curve:
        """Every slot raised alone, in order of gain."""
        layers, two = self.model.block.attention_layers, self.cache(NOTHING)
        order = [(index, side) for index in range(len(layers)) for side in SIDES]
        changed = [(layers[index], self.cache(frozenset({(index, side)}))) for index, side in order]
        alone = divergences_of_changes(
            self.model.loaded, self.exact, two, changed, tick=self.meter.tick
        )
        floor = stored_bits(two, self.model.block)
        slots = [
            Slot(index, side, stored_bits(spec, self.model.block) - floor, one)
            for (index, side), (_, spec), one in zip(order, changed, alone, strict=True)
        ]
        return Curve.of(self.divergence(NOTHING), floor, slots)

    def start_verifying(self, heldout: HeldOut, known: Known | None) -> None:
        """Measure BF16, unless that is known."""
        if known is not None:
            self.base, self.asked = known.base, known.questions
            self.found[NOTHING] = replace(known.two_bits, divergence=self.divergence(NOTHING))
        questions = (
            self.asked.task if known else recall_task(self.model, heldout, self.recipe.windows)
        )
        one = len(self.task.prompts) + (len(questions.prompts) if questions else 0)
        rounds = ROUNDS if self.wish.bits is None else 1
        if known is None:
            rounds += 1 if self.wish.bits is None else 2  # BF16, and the codes of 2 bits
        self.meter.start(VERIFY, rounds * one + len(self.exact.prompts))
        if known is None:
            perplexity = self._run(self.task, None)
            self.asked = (
                judged(questions, self._run(questions, None))
                if questions
                else Questions(remark=NO_ROOM)
            )
            own = self.asked.own if self.asked.remark is None else None
            self.base = Base(perplexity, own)

    def verify(self, raised: Raised) -> Verified:
        """Perplexity and recall of some raises together, each measured once."""
        seen = self.found.get(raised, Verified())
        if seen.perplexity is None:
            seen = replace(seen, perplexity=self._run(self.task, self.cache(raised)))
        if seen.recall is None and self.asked.task is not None and self.asked.remark is None:
            seen = replace(seen, recall=self._run(self.asked.task, self.cache(raised)))
        self.found[raised] = seen
        return seen

    def rise(self, raised: Raised) -> float:
        """Of perplexity over BF16, in percent."""
        assert self.base is not None
        change = self.verify(raised).change(self.base)
        assert change is not None
        return change[0]

    def recalls(self, raised: Raised) -> bool:
        """Whether nothing is lost of what the model itself recalls; true where it is not judged."""
        recall, own = self.verify(raised).recall, self.base.recall if self.base else None
        return recall is None or own is None or recalls_as_much(recall, own)

    def _run(self, task: Task, cache: CacheSpec | None) -> Measurement:
        return self.model.measure(task, cache, tick=self.meter.tick)

    def result(self, curve: Curve | None, steps: int, reason: str) -> WidthChoice:
        """The choice, after what is kept was measured, and the codes of 2 bits beside it."""
        raised = self.everything if curve is None else taken(curve, steps)
        for one in (NOTHING, raised):
            self.verify(one)
        self.divergence(raised)
        assert self.base is not None
        block = self.model.block
        shown = (
            self._ends()
            if curve is None
            else curve_steps(curve, block.attention_layers, self.found, self.base)
        )
        cache = self.cache(raised)
        selection = WidthSelection(
            rule=RULE,
            wish=self.wish.option,
            reason=reason,
            prompts=len(self.exact.prompts),
            positions=self.exact.positions,
            layers=block.attention_layers,
            gains_k=None if curve is None else gains(curve, "k"),
            gains_v=None if curve is None else gains(curve, "v"),
            steps=shown,
            chosen=steps,
            bits_at={str(length): bits_with_windows(cache, block, length) for length in CONTEXTS},
        )
        return WidthChoice(cache.recipe, selection, self.base, self.asked, self.found[raised])

    def _ends(self) -> tuple[WidthStep, ...]:
        """The curve without single raises: 2 bits and 4 bits everywhere."""
        assert self.base is not None
        return tuple(
            WidthStep(bits=bits, verified=self.found[raised].as_block(self.base))
            for bits, raised in zip(
                possible_bits(self.recipe, self.model.block),
                (NOTHING, self.everything),
                strict=True,
            )
        )


def taken(curve: Curve, steps: int) -> Raised:
    """What is raised after so many steps."""
    return frozenset((slot.index, slot.side) for slot in curve.slots[:steps])
