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
from dataclasses import dataclass, field, replace

import torch

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import ServingRecipe, SideWidths, Widths, Windows
from oscar_zoo.artifact.width_selection import WidthSelection, WidthStep
from oscar_zoo.compute.data.calibration import HeldOut
from oscar_zoo.compute.estimate import GAINS, VERIFY, Meter
from oscar_zoo.compute.methods.base import FitResult
from oscar_zoo.compute.select.choose import NO_ROOM, heldout_task, judged, recall_task
from oscar_zoo.compute.select.decision import (
    WIDTHS_RULE,
    Choice,
    Raised,
    WidthChoice,
    recalls_as_much,
)
from oscar_zoo.compute.select.rule import Base, Questions, Verified, standard_error
from oscar_zoo.compute.width_wish import AUTO_BITS, AUTO_LOSS, WidthWish, possible_bits
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.caches import CONTEXTS, bits_with_windows, stored_bits
from oscar_zoo.evaluate.changed_layers import divergences_of_changes
from oscar_zoo.evaluate.measure import (
    ExactPredictions,
    Measurement,
    Task,
    TaskPrompt,
    exact_predictions,
    measure,
    measure_divergence,
)
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel

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
_NOTHING = 1e-9
"""Bits that rounding may add to a sum of them."""


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
    meter = Meter(progress)
    prompts = divergence_prompts(heldout, recipe.windows)
    slots = 2 * len(model.block.attention_layers) if wish.measures else 0
    meter.start(GAINS, (slots + 3) * len(prompts))
    found = known_predictions(known, prompts)
    exact = found[0] if found else exact_predictions(model, prompts, tick=meter.tick)
    task = heldout_task(heldout, recipe.windows)
    runner = WidthRunner(model, fit, recipe, wish, exact, task, meter)
    if found:
        runner.found[NOTHING] = found[1]
    for raised in (NOTHING, runner.everything):
        runner.divergence(raised)
    curve = runner.curve() if wish.measures else None
    runner.start_verifying(heldout, known)
    if curve is None:
        return runner.result(None, 1, "codes of 4 bits everywhere")
    search = _within if wish.bits is not None else _fewest
    return runner.result(*search(runner, curve))


def _within(runner: WidthRunner, curve: Curve) -> tuple[Curve, int, str]:
    """As many raises as the budget allows."""
    budget = runner.wish.bits
    assert budget is not None
    order, steps = curve.within(budget)
    reason = f"the raises that gain most within {budget:g} bits"
    if order.keeps_promise(steps, runner.divergence(taken(order, steps))):
        return order, steps, reason
    careful = Curve.of(curve.base, curve.floor, curve.slots, cautious=True)
    other, fewer = careful.within(budget)
    first, second = (
        runner.divergence(taken(*one)).value for one in ((order, steps), (other, fewer))
    )
    if second >= first:
        return order, steps, f"{reason}, though they gain less together than alone"
    return other, fewer, f"{reason} on both halves of the text"


def _fewest(runner: WidthRunner, curve: Curve) -> tuple[Curve, int, str]:
    """The fewest raises that are good enough: in growing strides until they are, then between."""
    limit = AUTO_LOSS if runner.wish.auto else runner.wish.max_loss
    assert limit is not None
    cap = curve.within(AUTO_BITS)[1] if runner.wish.auto else len(curve.slots)

    def good(steps: int) -> bool:
        raised = taken(curve, steps)
        return runner.rise(raised) <= limit and (not runner.wish.auto or runner.recalls(raised))

    found = first = min(_predicted(runner, curve, limit), cap)
    bad, stride = first - 1, 1
    while not good(found):
        if found == cap:
            return curve, cap, _too_few(runner, limit)
        bad, found, stride = found, min(found + stride, cap), 2 * stride
    while found - bad > 1:
        middle = (found + bad) // 2
        found, bad = (middle, bad) if good(middle) else (found, middle)
    what = f"the fewest bits within {limit:g} % of perplexity"
    return curve, found, f"{what} and with full recall" if runner.wish.auto else what


def _predicted(runner: WidthRunner, curve: Curve, limit: float) -> int:
    """The first step at which perplexity should be near enough. Its rise goes with the divergence,
    which has far less noise."""
    rise, whole = runner.rise(NOTHING), curve.predicted(0).value
    for steps in range(len(curve.slots)):
        if rise <= limit or rise * curve.predicted(steps).value <= limit * whole:
            return steps
    return len(curve.slots)


def _too_few(runner: WidthRunner, limit: float) -> str:
    """Why `auto` keeps the most bits that it takes; an error for other wishes."""
    if runner.wish.auto:
        return (
            f"short of the quality of BF16, but no other raise within {AUTO_BITS:g} bits gains on"
            " both halves of the text"
        )
    raise ComputeFailed(
        f"codes of 4 bits everywhere raise perplexity by {runner.rise(runner.everything):.2f} %,"
        f" more than {limit:g} %.",
        hint="ask for a larger loss, or for smaller groups with --group-size",
    )


def divergence_prompts(heldout: HeldOut, windows: Windows) -> tuple[TaskPrompt, ...]:
    """Held-out sequences, scored beyond both windows. Where they are fewer than `PROMPTS` they are
    cut, and where they have more than `TOKENS` the first are taken, which are spread over the text:
    on the example models, slots that are picked on half of the text keep 86 to 100 % of their gain
    on the other half."""
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
    known: Choice | None, prompts: Sequence[TaskPrompt]
) -> tuple[ExactPredictions, Verified] | None:
    """What is known of these prompts, and the divergence of 2 bits on them; `None` of others."""
    if known is None or known.exact is None or len(known.exact.prompts) != len(prompts):
        return None
    pairs = zip(known.exact.prompts, prompts, strict=True)
    if not all(torch.equal(one.ids, other.ids) for one, other in pairs):
        return None
    found = known.trials[known.at].divergence
    same = found is not None and len(found.parts) == len(prompts)
    return known.exact, Verified(divergence=found if same else None)


@dataclass
class WidthRunner:
    """Everything that raises are measured with, and what was found so far."""

    model: LoadedModel
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
                self.model, self.exact, self.cache(raised), tick=self.meter.tick
            )
            seen = self.found[raised] = replace(seen, divergence=measured)
        assert seen.divergence is not None
        return seen.divergence

    def curve(self) -> Curve:
        """Every slot raised alone, in order of gain."""
        layers, two = self.model.block.attention_layers, self.cache(NOTHING)
        order = [(index, side) for index in range(len(layers)) for side in SIDES]
        changed = [(layers[index], self.cache(frozenset({(index, side)}))) for index, side in order]
        alone = divergences_of_changes(self.model, self.exact, two, changed, tick=self.meter.tick)
        floor = stored_bits(two, self.model.block)
        slots = [
            Slot(index, side, stored_bits(spec, self.model.block) - floor, one)
            for (index, side), (_, spec), one in zip(order, changed, alone, strict=True)
        ]
        return Curve.of(self.divergence(NOTHING), floor, slots)

    def start_verifying(self, heldout: HeldOut, known: Choice | None) -> None:
        """Measure BF16, unless that is known."""
        if known is not None:
            self.base, self.asked = known.base, known.questions
            self.found[NOTHING] = replace(
                known.trials[known.at], divergence=self.divergence(NOTHING)
            )
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
        return measure(self.model, task, cache, tick=self.meter.tick)

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
            rule=WIDTHS_RULE,
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
        """Sort `slots`."""

        def key(slot: Slot) -> tuple[bool, float]:
            both = halves(base, slot.alone)
            counted = min(both) if cautious else gain(base, slot.alone)
            return min(both) <= 0, -counted / slot.cost

        order = sorted(slots, key=key)
        return cls(base, floor, tuple(order), sum(not key(slot)[0] for slot in order))

    def bits(self, steps: int) -> float:
        """Average bits of an element after so many raises."""
        return self.floor + math.fsum(slot.cost for slot in self.slots[:steps])

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
        if budget >= self.bits(len(self.slots)) - _NOTHING:
            return self, len(self.slots)
        taken: list[Slot] = []
        left = budget - self.floor + _NOTHING
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
        return all(
            got >= promised / 2
            for got, promised in zip(halves(self.base, joint), wanted, strict=True)
        )


def gain(base: Measurement, other: Measurement) -> float:
    """Divergence per position that `other` takes away from `base`."""
    return _gain(base.parts, other.parts)


def halves(base: Measurement, other: Measurement) -> tuple[float, float]:
    """The gain on either half of the prompts; where there is one prompt, its gain for both."""
    if len(base.parts) < 2:
        return (gain(base, other),) * 2
    first, second = (_gain(base.parts[at::2], other.parts[at::2]) for at in (0, 1))
    return first, second


def _gain(before: Sequence[tuple[float, int]], after: Sequence[tuple[float, int]]) -> float:
    pairs = zip(before, after, strict=True)
    return math.fsum(one - two for (one, _), (two, _) in pairs) / sum(n for _, n in before)


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


def curve_steps(
    curve: Curve, layers: tuple[int, ...], verified: dict[Raised, Verified], base: Base
) -> tuple[WidthStep, ...]:
    """Every step of a curve with what was predicted and measured."""
    steps, raised = [], frozenset[tuple[int, Role]]()
    for number in range(len(curve.slots) + 1):
        slot = curve.slots[number - 1] if number else None
        if slot is not None:
            raised |= {(slot.index, slot.side)}
        told, found = curve.predicted(number), verified.get(raised)
        steps.append(
            WidthStep(
                layer=None if slot is None else layers[slot.index],
                side=None if slot is None else slot.side,
                bits=curve.bits(number),
                predicted=told.value,
                predicted_error=standard_error(told),
                verified=found.as_block(base) if found else None,
            )
        )
    return tuple(steps)


def gains(curve: Curve, side: Role) -> tuple[float, ...]:
    """The gain of raising one side of each layer alone, in the order of layers."""
    found = {slot.index: gain(curve.base, slot.alone) for slot in curve.slots if slot.side == side}
    return tuple(found[index] for index in sorted(found))
