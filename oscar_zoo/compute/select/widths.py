"""Which side of which layer gets codes of 4 bits, by the divergence from the exact cache.

The divergence is measured with 2 bits everywhere and with every slot, a side of a layer, raised
alone, on held-out text and on answers that recall facts from it. What a slot takes away is counted
as a share of each prompt's divergence, so that a text which a model finds strange does not outweigh
all others. Slots are raised in the order of these shares per bit.

Where memory allows, the model computes in float32 meanwhile: bfloat16 changes what it says by as
much as ten raises do on average, anew with each. On SmolLM2-135M the single gains, in float32, of
the twelve slots that float32 picks are 1.4 times those of the twelve that bfloat16 picks.

How far to go is decided by the wish: as far as the bits allow, or until perplexity and recall are
near enough to BF16. What is kept is measured together once: divergence, perplexity and recall.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean

import torch

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import ServingRecipe, SideWidths, Widths, Windows
from oscar_zoo.artifact.width_selection import WidthSelection, WidthStep
from oscar_zoo.compute.data.calibration import HeldOut
from oscar_zoo.compute.estimate import GAIN_TOKENS, GAINS, VERIFY, Meter
from oscar_zoo.compute.methods.base import FitResult
from oscar_zoo.compute.options import WidthWish, possible_bits
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.select.choose import SAMPLE_BYTES, heldout_task, judged, recall_task
from oscar_zoo.compute.select.decision import WIDTHS_RULE, Choice, WidthChoice
from oscar_zoo.compute.select.rule import Verified, standard_error, worst
from oscar_zoo.evaluate.caches import CONTEXTS
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    Task,
    TaskPrompt,
    divergences_of_changes,
    exact_predictions,
    mean_of,
    measure,
    measure_divergence,
)
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, float32_arithmetic

PROMPTS = 4
"""Least number of prompts that held-out text is cut into."""
SINGLES = 2
"""How many of them show what a raise alone takes away, which needs the most time."""
LEAST_BEYOND = 2
"""Least length of such a prompt, in units of both windows."""
SIDES: tuple[Role, Role] = ("k", "v")
Raised = frozenset[tuple[int, Role]]
"""Layers, counted from 0 among those with full attention, and sides with codes of 4 bits."""
NOTHING: Raised = frozenset()
ROUNDS = 3
"""Steps that are verified in a search for the fewest bits, for the progress bar."""
_ROUNDING = 1e-9
"""Bits that rounding may add to a sum of them."""


@dataclass(frozen=True)
class Slot:
    """One side of one attention layer, counted from 0 among those with full attention; the keys of
    latents stand for both. `cost` is what raising it adds to the average bits of an element;
    `of_text` and `of_all` are the share of a prompt's divergence that it takes away alone, on
    average over text, and over text and answers.
    """

    index: int
    side: Role
    cost: float
    of_text: float
    of_all: float


@dataclass(frozen=True)
class Curve:
    """Slots in the order in which they are raised. With none of them the divergence is `base` and
    an element has `floor` bits."""

    base: Measurement
    floor: float
    slots: tuple[Slot, ...]

    @classmethod
    def of(cls, base: Measurement, floor: float, slots: Sequence[Slot]) -> Curve:
        """Sort `slots`."""
        return cls(base, floor, tuple(sorted(slots, key=lambda one: -one.of_all / one.cost)))

    def bits(self, steps: int) -> float:
        """Average bits of an element after so many raises."""
        return self.floor + math.fsum(slot.cost for slot in self.slots[:steps])

    def raised(self, steps: int) -> Raised:
        """What is raised after so many steps."""
        return frozenset((slot.index, slot.side) for slot in self.slots[:steps])

    def predicted(self, steps: int) -> Measurement:
        """The divergence after so many raises; it is never below 0."""
        left = max(0.0, 1 - math.fsum(slot.of_text for slot in self.slots[:steps]))
        parts = tuple((left * total, number) for total, number in self.base.parts)
        return Measurement(left * self.base.value, parts)

    def within(self, budget: float) -> tuple[Curve, int]:
        """This curve and the number of raises that `budget` allows. Of slots that do not fit,
        cheaper ones behind them may; those come first in the new curve."""
        if budget >= self.bits(len(self.slots)) - _ROUNDING:
            return self, len(self.slots)
        taken: list[Slot] = []
        left = budget - self.floor + _ROUNDING
        for slot in self.slots:
            if slot.of_all > 0 and slot.cost <= left:
                taken.append(slot)
                left -= slot.cost
        others = [slot for slot in self.slots if slot not in taken]
        return Curve(self.base, self.floor, (*taken, *others)), len(taken)


def share(before: Measurement, after: Measurement) -> float:
    """How much of a prompt's divergence is taken away, on average over prompts."""
    pairs = zip(before.parts, after.parts, strict=True)
    return fmean(1 - two / one if one > 0 else 0.0 for (one, _), (two, _) in pairs)


def choose_widths(
    model: LoadedModel,
    heldout: HeldOut,
    fit: FitResult,
    recipe: ServingRecipe,
    wish: WidthWish,
    *,
    known: Choice | None = None,
    progress: Progress = lambda done, total, phase: None,
) -> WidthChoice:
    """Measure what each raise gains, and choose; what `auto` has measured, the choice `known`, is
    not measured again."""
    if known is not None and known.base is None:
        known = None  # only errors were measured
    runner = _Runner(model, heldout, fit, recipe, wish, known, Meter(progress))
    curve = runner.curve() if wish.measures else None
    runner.start_verifying(known)
    if curve is None:
        return runner.result(None, 1, "codes of 4 bits everywhere")
    search = _within if wish.bits is not None else _fewest
    return runner.result(*search(runner, curve))


def _within(runner: _Runner, curve: Curve) -> tuple[Curve, int, str]:
    """As many raises as the budget allows."""
    budget = runner.wish.bits
    assert budget is not None
    order, steps = curve.within(budget)
    return order, steps, f"the raises that gain most within {budget:g} bits"


def _fewest(runner: _Runner, curve: Curve) -> tuple[Curve, int, str]:
    """The fewest raises that are good enough: in growing strides until they are, then between."""
    slots, limit = len(curve.slots), rule.PERPLEXITY_PASS

    # Perplexity's rise goes with the divergence, which has far less noise.
    rise, whole = runner.rise(NOTHING), curve.predicted(0).value
    near = (
        steps
        for steps in range(slots)
        if rise <= limit or rise * curve.predicted(steps).value <= limit * whole
    )
    # Where single gains drown in the arithmetic of a small model the prediction does not fall.
    found = min(next(near, slots), max(1, slots // 8))
    bad, stride = -1, max(1, slots // 16)
    while not runner.passes(curve.raised(found)):
        if found == slots:
            return curve, slots, "codes of 4 bits everywhere, which do not pass all gates"
        bad, found, stride = found, min(found + stride, slots), 2 * stride
    while found - bad > max(1, slots // 30):
        middle = (found + bad) // 2
        passes = runner.passes(curve.raised(middle))
        found, bad = (middle, bad) if passes else (found, middle)
    return curve, found, "the fewest bits that pass the gates"


def divergence_prompts(heldout: HeldOut, windows: Windows) -> tuple[TaskPrompt, ...]:
    """Held-out sequences, scored beyond both windows. Where they are fewer than `PROMPTS` they are
    cut, and where they have more than `GAIN_TOKENS` the first are taken, which are spread over the
    text."""
    first = windows.sink + windows.recent
    found = heldout_task(heldout, windows).prompts
    while len(found) < PROMPTS and min(len(one.ids) for one in found) >= 2 * LEAST_BEYOND * first:
        halves = [ids for one in found for ids in one.ids.tensor_split(2)]
        found = tuple(
            TaskPrompt(ids, torch.arange(first, len(ids) - 1, device="cpu")) for ids in halves
        )
    return found[: max(PROMPTS, GAIN_TOKENS // max(len(one.ids) for one in found))]


class _Runner:
    """Everything that raises are measured with, and what was found so far."""

    def __init__(
        self,
        model: LoadedModel,
        heldout: HeldOut,
        fit: FitResult,
        recipe: ServingRecipe,
        wish: WidthWish,
        known: Choice | None,
        meter: Meter,
    ) -> None:
        self.wish = wish
        self._model, self._fit, self._recipe, self._meter = model, fit, recipe, meter
        self._layers = model.block.attention_layers
        self._latent = bool(model.block.rotary_key)
        sides = SIDES[:1] if self._latent else SIDES
        self._slots = [(index, side) for index in range(len(self._layers)) for side in sides]
        self.everything: Raised = frozenset(self._slots)
        self._task = heldout_task(heldout, recipe.windows)
        self._found: dict[Raised, Verified] = {}
        if known is not None and known.base is not None:
            self._questions = known.base.questions
        else:
            self._questions = recall_task(model, heldout, recipe.windows)
        prompts = divergence_prompts(heldout, recipe.windows)
        answers = self._questions.prompts[:1] if self._questions and wish.measures else ()
        single = len(self._slots) if wish.measures else 0
        some = len(prompts[:SINGLES]) + len(answers)
        meter.start(GAINS, single * some + 3 * len(prompts) + 2 * len(answers))
        self._answers: ExactPredictions | None = None
        predict = partial(exact_predictions, model, max_bytes=SAMPLE_BYTES, tick=meter.tick)
        with float32_arithmetic(model):
            self._exact = predict(prompts)
            if answers:
                self._answers = predict(answers)
        for raised in (NOTHING, self.everything):
            self.divergence(raised)

    def divergence(self, raised: Raised) -> Measurement:
        """Measured once for each set of raises."""
        seen = self._found.get(raised, Verified())
        if seen.divergence is None:
            cache = self._cache(raised)
            with float32_arithmetic(self._model):
                found = measure_divergence(self._model, self._exact, cache, tick=self._meter.tick)
            seen = self._found[raised] = replace(seen, divergence=found)
        assert seen.divergence is not None
        return seen.divergence

    def curve(self) -> Curve:
        """Every slot raised alone, in order of gain."""
        two, block = self._cache(NOTHING), self._model.block
        specs = [self._cache(frozenset({slot})) for slot in self._slots]
        changed = [
            (self._layers[index], spec) for (index, _), spec in zip(self._slots, specs, strict=True)
        ]
        found, tick = self.divergence(NOTHING), self._meter.tick
        some, text = self._exact.between(0, SINGLES), mean_of(found.parts[:SINGLES])
        with float32_arithmetic(self._model):
            alone = divergences_of_changes(self._model, some, two, changed, tick=tick)
            shares = [[share(text, one)] * (len(text.parts) + 1) for one in alone]
            if self._answers is not None:
                answers = measure_divergence(self._model, self._answers, two, tick=tick)
                others = divergences_of_changes(self._model, self._answers, two, changed, tick=tick)
                for told, one in zip(shares, others, strict=True):
                    told[-1] = share(answers, one)
        floor = two.stored_bits(block)
        slots = [
            Slot(index, side, spec.stored_bits(block) - floor, told[0], fmean(told))
            for (index, side), spec, told in zip(self._slots, specs, shares, strict=True)
        ]
        return Curve.of(found, floor, slots)

    def start_verifying(self, known: Choice | None) -> None:
        """Measure BF16, unless that is known."""
        rounds, questions = ROUNDS if self.wish.bits is None else 1, self._questions
        if known is None:
            rounds += 1 if self.wish.bits is None else 2  # BF16, and the codes of 2 bits
        one = len(self._task.prompts) + (len(questions.prompts) if questions else 0)
        self._meter.start(VERIFY, rounds * one + len(self._exact.prompts))
        if known is not None and known.base is not None:
            self._base = known.base
            two = self.divergence(NOTHING)
            self._found[NOTHING] = replace(known.trials[known.at], divergence=two)
            return
        perplexity = self._run(self._task, None)
        self._base = judged(perplexity, questions, lambda task: self._run(task, None))

    def rise(self, raised: Raised) -> float:
        """Of perplexity over BF16, in percent."""
        change = self._verify(raised).change(self._base)
        assert change is not None
        return change[0]

    def passes(self, raised: Raised) -> bool:
        """Whether the gates are passed, and not by chance: what codes of 4 bits everywhere diverge
        by may be the arithmetic of the model's dtype, and the rest has a limit of its own."""
        least = rule.typical(self.divergence(self.everything))
        if rule.typical(self.divergence(raised)) - least > rule.DIVERGENCE_PASS:
            return False
        return worst(self._verify(raised).gates(self._base)) == "pass"

    def result(self, curve: Curve | None, steps: int, reason: str) -> WidthChoice:
        """The choice, after what is kept was measured, and the codes of 2 bits beside it."""
        raised = self.everything if curve is None else curve.raised(steps)
        for one in (NOTHING, raised):
            self._verify(one)
        self.divergence(raised)
        cache, block = self._cache(raised), self._model.block
        selection = WidthSelection(
            rule=WIDTHS_RULE,
            wish=self.wish.option,
            reason=reason,
            prompts=len(self._exact.prompts),
            positions=self._exact.positions,
            layers=self._layers,
            gains_k=None if curve is None else _gains(curve, "k"),
            gains_v=None if curve is None or self._latent else _gains(curve, "v"),
            steps=tuple(self._ends() if curve is None else self._steps(curve)),
            chosen=steps,
            bits_at={str(length): cache.bits_at(block, length) for length in CONTEXTS},
        )
        return WidthChoice(cache.recipe, selection, self._base, self._found[raised])

    def _verify(self, raised: Raised) -> Verified:
        """Perplexity and recall of some raises together, each measured once."""
        seen, questions = self._found.get(raised, Verified()), self._base.questions
        if seen.perplexity is None:
            seen = replace(seen, perplexity=self._run(self._task, self._cache(raised)))
        if seen.recall is None and questions is not None and self._base.remark is None:
            seen = replace(seen, recall=self._run(questions, self._cache(raised)))
        self._found[raised] = seen
        return seen

    def _cache(self, raised: Raised) -> CacheSpec:
        if self._latent:  # keys and values at once
            raised = frozenset((index, side) for index, _ in raised for side in SIDES)
        recipe = widths_of(self._recipe, len(self._layers), raised)
        return CacheSpec(self._fit.k, self._fit.v, recipe)

    def _run(self, task: Task, cache: CacheSpec | None) -> Measurement:
        return measure(self._model, task, cache, tick=self._meter.tick)

    def _ends(self) -> list[WidthStep]:
        """The curve without single raises: 2 bits and 4 bits everywhere."""
        low, high = possible_bits(self._recipe, self._model.block)
        ends = ((low, NOTHING), (high, self.everything))
        return [
            WidthStep(bits=bits, verified=self._found[raised].as_block(self._base))
            for bits, raised in ends
        ]

    def _steps(self, curve: Curve) -> list[WidthStep]:
        """Every step of a curve with what was predicted and measured."""
        steps = []
        for number in range(len(curve.slots) + 1):
            slot = curve.slots[number - 1] if number else None
            told, found = curve.predicted(number), self._found.get(curve.raised(number))
            step = WidthStep(
                layer=None if slot is None else self._layers[slot.index],
                side=None if slot is None else slot.side,
                bits=curve.bits(number),
                predicted=told.value,
                predicted_error=standard_error(told),
                verified=found.as_block(self._base) if found else None,
            )
            steps.append(step)
        return steps


def _gains(curve: Curve, side: Role) -> tuple[float, ...]:
    """The gain of raising one side of each layer alone, in the order of layers."""
    slots = sorted((slot for slot in curve.slots if slot.side == side), key=lambda one: one.index)
    return tuple(slot.of_text * curve.base.value for slot in slots)


def widths_of(
    recipe: ServingRecipe, layers: int, raised: Collection[tuple[int, Role]]
) -> ServingRecipe:
    """`recipe` with codes of 4 bits where `raised` says so, and of 2 bits and its clip elsewhere.
    Codes of 4 bits are not clipped: on the example models any clip makes their divergence larger,
    the mildest one (0.98) by a third."""
    if not raised:
        return recipe.with_widths(None)
    two = Widths.uniform(layers, k=2, v=2, clip=recipe.clip)

    def side(role: Role, plain: SideWidths) -> SideWidths:
        up = [(index, role) in raised for index in range(layers)]
        return SideWidths(
            bits=tuple(4 if high else 2 for high in up),
            clip=tuple(0.0 if high else ratio for high, ratio in zip(up, plain.clip, strict=True)),
        )

    return recipe.with_widths(Widths(k=side("k", two.k), v=side("v", two.v)))
