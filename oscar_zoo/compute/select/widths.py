"""Which side of which layer gets codes of 4 bits, by the divergence from the exact cache.

The divergence is measured with 2 bits everywhere and with every slot, a side of a layer, raised
alone. Single gains add up: on three models the sum was off by 3 to 7 % of the whole. So slots are
raised in the order of gain per bit. A slot that gains nothing on one half of the prompts, every
other one, may owe its gain to chance: it stands at the end, and no budget is spent on it.

How far to go is decided by the wish: as far as the bits allow, or until perplexity and recall are
near enough to BF16. What is kept is measured together once: divergence, perplexity and recall.
Where it gains less than half of what was predicted on one half of the text, slots are counted with
the lesser of their gains, and the better of both choices is kept.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

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
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.caches import CONTEXTS, bits_with_windows, stored_bits
from oscar_zoo.evaluate.changed_layers import divergences_of_changes
from oscar_zoo.evaluate.measure import (
    Measurement,
    Task,
    TaskPrompt,
    exact_predictions,
    measure,
    measure_divergence,
)
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel

PROMPTS = 4
"""Least number of prompts that held-out text is cut into, so that two halves have two each."""
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
    """One side of one attention layer, counted from 0 among those with full attention; `cost` is
    what raising it adds to the average bits of an element, `alone` the divergence when only this
    slot is raised."""

    index: int
    side: Role
    cost: float
    alone: Measurement


@dataclass(frozen=True)
class Curve:
    """Slots in the order in which they are raised. With none of them the divergence is `base` and
    an element has `floor` bits; the first `sure` gain on both halves of the text."""

    base: Measurement
    floor: float
    slots: tuple[Slot, ...]
    sure: int

    @classmethod
    def of(
        cls, base: Measurement, floor: float, slots: Sequence[Slot], *, cautious: bool = False
    ) -> Curve:
        """Sort `slots`; the `cautious` order counts the lesser half."""

        def key(slot: Slot) -> tuple[bool, float]:
            both = halves(base, slot.alone)
            counted = min(both) if cautious else gain(base.parts, slot.alone.parts)
            return min(both) <= 0, -counted / slot.cost

        order = sorted(slots, key=key)
        return cls(base, floor, tuple(order), sum(not key(slot)[0] for slot in order))

    def bits(self, steps: int) -> float:
        """Average bits of an element after so many raises."""
        return self.floor + math.fsum(slot.cost for slot in self.slots[:steps])

    def raised(self, steps: int) -> Raised:
        """What is raised after so many steps."""
        return frozenset((slot.index, slot.side) for slot in self.slots[:steps])

    def predicted(self, steps: int) -> Measurement:
        """The divergence after so many raises, prompt by prompt; it is never below 0 as a whole."""
        sums = [total for total, _ in self.base.parts]
        for slot in self.slots[:steps]:
            gained = zip(self.base.parts, slot.alone.parts, strict=True)
            sums = [
                total - (before - after)
                for total, ((before, _), (after, _)) in zip(sums, gained, strict=True)
            ]
        numbers = [number for _, number in self.base.parts]
        value = max(0.0, math.fsum(sums) / sum(numbers))
        return Measurement(value, tuple(zip(sums, numbers, strict=True)))

    def within(self, budget: float) -> tuple[Curve, int]:
        """This curve and the number of raises that `budget` allows. Of slots that do not fit,
        cheaper ones behind them may; those come first in the new curve."""
        if budget >= self.bits(len(self.slots)) - _ROUNDING:
            return self, len(self.slots)
        taken: list[Slot] = []
        left = budget - self.floor + _ROUNDING
        for slot in self.slots[: self.sure]:
            if slot.cost <= left:
                taken.append(slot)
                left -= slot.cost
        others = [slot for slot in self.slots if slot not in taken]
        return Curve(self.base, self.floor, (*taken, *others), self.sure), len(taken)

    def keeps_promise(self, steps: int, joint: Measurement) -> bool:
        """Whether `joint`, measured after so many raises, gains at least half of what was
        predicted on either half of the text."""
        wanted = halves(self.base, self.predicted(steps))
        found = zip(halves(self.base, joint), wanted, strict=True)
        return all(got >= promised / 2 for got, promised in found)


def gain(before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]]) -> float:
    """Divergence per position that is taken away."""
    pairs = zip(before, after, strict=True)
    return math.fsum(one - two for (one, _), (two, _) in pairs) / sum(n for _, n in before)


def halves(base: Measurement, other: Measurement) -> tuple[float, float]:
    """The gain on either half of the prompts; where there is one prompt, its gain for both."""
    if len(base.parts) < 2:
        return (gain(base.parts, other.parts),) * 2
    first, second = (gain(base.parts[at::2], other.parts[at::2]) for at in (0, 1))
    return first, second


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
    runner.start_verifying(heldout, known)
    if curve is None:
        return runner.result(None, 1, "codes of 4 bits everywhere")
    search = _within if wish.bits is not None else _fewest
    return runner.result(*search(runner, curve))


def _within(runner: _Runner, curve: Curve) -> tuple[Curve, int, str]:
    """As many raises as the budget allows."""
    budget = runner.wish.bits
    assert budget is not None
    order, steps = curve.within(budget)
    reason = f"the raises that gain most within {budget:g} bits"
    first = runner.divergence(order.raised(steps))
    if order.keeps_promise(steps, first):
        return order, steps, reason
    careful = Curve.of(curve.base, curve.floor, curve.slots, cautious=True)
    other, fewer = careful.within(budget)
    if runner.divergence(other.raised(fewer)).value >= first.value:
        return order, steps, f"{reason}, though they gain less together than alone"
    return other, fewer, f"{reason} on both halves of the text"


def _fewest(runner: _Runner, curve: Curve) -> tuple[Curve, int, str]:
    """The fewest raises that are good enough: in growing strides until they are, then between."""
    auto, slots = runner.wish.auto, len(curve.slots)
    limit = rule.PERPLEXITY_PASS if auto else runner.wish.max_loss
    assert limit is not None

    def good(steps: int) -> bool:
        raised = curve.raised(steps)
        return runner.passes(raised) if auto else runner.rise(raised) <= limit

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
    while not good(found):
        if found == slots and auto:
            return curve, slots, "codes of 4 bits everywhere, which do not pass all gates"
        if found == slots:
            raise ComputeFailed(
                "codes of 4 bits everywhere raise perplexity by"
                f" {runner.rise(runner.everything):.2f} %, more than {limit:g} %.",
                hint="ask for a larger loss, or for smaller groups with --group-size",
            )
        bad, found, stride = found, min(found + stride, slots), 2 * stride
    while found - bad > max(1, slots // 30):
        middle = (found + bad) // 2
        found, bad = (middle, bad) if good(middle) else (found, middle)
    what = "that pass the gates" if auto else f"within {limit:g} % of perplexity"
    return curve, found, f"the fewest bits {what}"


def divergence_prompts(heldout: HeldOut, windows: Windows) -> tuple[TaskPrompt, ...]:
    """Held-out sequences, scored beyond both windows. Where they are fewer than `PROMPTS` they are
    cut, and where they have more than `GAIN_TOKENS` the first are taken, which are spread over the
    text: on the example models, slots that are picked on half of the text keep 86 to 100 % of their
    gain on the other half."""
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
        self._slots = [(index, side) for index in range(len(self._layers)) for side in SIDES]
        self.everything: Raised = frozenset(self._slots)
        self._task = heldout_task(heldout, recipe.windows)
        self._found: dict[Raised, Verified] = {}
        prompts = divergence_prompts(heldout, recipe.windows)
        single = len(self._slots) if wish.measures else 0
        meter.start(GAINS, (single + 3) * len(prompts))
        exact = None if known is None else known.exact
        if known is not None and exact is not None and _same(exact.prompts, prompts):
            self._exact, of_two = exact, known.trials[known.at].divergence
            if of_two is not None and len(of_two.parts) == len(prompts):
                self._found[NOTHING] = Verified(divergence=of_two)
        else:
            self._exact = exact_predictions(model, prompts, max_bytes=SAMPLE_BYTES, tick=meter.tick)
        for raised in (NOTHING, self.everything):
            self.divergence(raised)

    def divergence(self, raised: Raised) -> Measurement:
        """Measured once for each set of raises."""
        seen = self._found.get(raised, Verified())
        if seen.divergence is None:
            cache = self._cache(raised)
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
        alone = divergences_of_changes(
            self._model, self._exact, two, changed, tick=self._meter.tick
        )
        floor = stored_bits(two, block)
        slots = [
            Slot(index, side, stored_bits(spec, block) - floor, one)
            for (index, side), spec, one in zip(self._slots, specs, alone, strict=True)
        ]
        return Curve.of(self.divergence(NOTHING), floor, slots)

    def start_verifying(self, heldout: HeldOut, known: Choice | None) -> None:
        """Measure BF16, unless that is known."""
        rounds = ROUNDS if self.wish.bits is None else 1
        if known is not None and known.base is not None:
            questions = known.base.questions
        else:
            questions = recall_task(self._model, heldout, self._recipe.windows)
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
        """Whether the gates are passed, and not by chance: of the divergence, what codes of 4 bits
        everywhere have is mostly the arithmetic of the model's dtype, and the rest is to be within
        the gate of perplexity too."""
        if worst(self._verify(raised).gates(self._base)) != "pass":
            return False
        least = self.divergence(self.everything).value
        return 100 * (self.divergence(raised).value - least) <= rule.PERPLEXITY_PASS

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
            gains_v=None if curve is None else _gains(curve, "v"),
            steps=tuple(self._ends() if curve is None else self._steps(curve)),
            chosen=steps,
            bits_at={str(length): bits_with_windows(cache, block, length) for length in CONTEXTS},
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


def _same(some: Sequence[TaskPrompt], others: Sequence[TaskPrompt]) -> bool:
    pairs = zip(some, others, strict=False)
    return len(some) == len(others) and all(torch.equal(a.ids, b.ids) for a, b in pairs)


def _gains(curve: Curve, side: Role) -> tuple[float, ...]:
    """The gain of raising one side of each layer alone, in the order of layers."""
    slots = sorted((slot for slot in curve.slots if slot.side == side), key=lambda one: one.index)
    return tuple(gain(curve.base.parts, slot.alone.parts) for slot in slots)


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
