"""Which side of which layer gets codes of 4 bits, by the divergence from the exact cache.

The divergence is measured with 2 bits everywhere and with every slot, a side of a layer, raised
alone. `width_curve` makes an order of that. How far to go in it is decided by the wish: as far as
the bits allow, or until perplexity and recall are near enough to BF16. What is kept is measured
together once: divergence, perplexity and recall. Where it gains less than half of what was
predicted on one half of the text, slots are counted with the lesser of their gains, and the better
of both choices is kept.
"""

from __future__ import annotations

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import FitResult
from oscar_zoo.compute.phases import GAINS
from oscar_zoo.compute.select.choose import heldout_task
from oscar_zoo.compute.select.meter import Meter
from oscar_zoo.compute.select.width_choice import WidthChoice
from oscar_zoo.compute.select.width_curve import Curve
from oscar_zoo.compute.select.width_runner import (
    NOTHING,
    Known,
    WidthRunner,
    divergence_prompts,
    known_predictions,
    taken,
)
from oscar_zoo.compute.width_wish import AUTO_BITS, AUTO_LOSS, WidthWish
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.measure import exact_predictions
from oscar_zoo.evaluate.shared import Progress


def choose_widths(
    model: RunningModel,
    heldout: HeldOut,
    fit: FitResult,
    recipe: ServingRecipe,
    wish: WidthWish,
    *,
    known: Known | None = None,
    progress: Progress = lambda done, total, phase: None,
) -> WidthChoice:
    """Measure what each raise gains, and choose.

    Args:
        recipe: with the clip of codes of 2 bits.
        wish: fits the group size; see `width_wish.check_wish`.
        progress: called during the phases `bits by layer` and `bits verified`.
    """
    meter = Meter(progress)
    prompts = divergence_prompts(heldout, recipe.windows)
    slots = 2 * len(model.block.attention_layers) if wish.measures else 0
    meter.start(GAINS, (slots + 3) * len(prompts))
    found = known_predictions(known, prompts)
    exact = found[0] if found else exact_predictions(model.loaded, prompts, tick=meter.tick)
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
    """The first step at which perplexity should be near enough.

    Its rise goes with the divergence, which has far less noise.
    """
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
