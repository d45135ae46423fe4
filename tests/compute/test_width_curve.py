"""The order in which sides of layers get more bits, on numbers."""

from __future__ import annotations

import pytest

from oscar_zoo.compute.select.width_choice import recalls_as_much
from oscar_zoo.compute.select.width_curve import Curve, Slot
from oscar_zoo.evaluate.measure import Measurement


def measured(*sums: float) -> Measurement:
    """Of prompts with ten positions each."""
    return Measurement(sum(sums) / (10 * len(sums)), tuple((one, 10) for one in sums))


BASE = measured(10.0, 12.0, 11.0, 13.0)


def slot(index: int, *gains: float, cost: float = 0.25) -> Slot:
    """A slot that alone takes `gains` away from the prompts of `BASE`."""
    left = [total - gain for (total, _), gain in zip(BASE.parts, gains, strict=True)]
    return Slot(index, "k", cost, measured(*left))


GREAT, GOOD, SMALL = slot(0, 6, 6, 6, 6), slot(1, 3, 2, 3, 2), slot(2, 0.5, 1, 0.5, 1)
DOUBTFUL = slot(3, 9, -1, 9, -1)


def order(curve: Curve) -> list[int]:
    return [one.index for one in curve.slots]


def test_slots_come_in_the_order_of_gain_and_doubtful_ones_last() -> None:
    curve = Curve.of(BASE, 2.5, [SMALL, DOUBTFUL, GOOD, GREAT])
    assert order(curve) == [0, 1, 2, 3]
    assert curve.sure == 3
    assert [curve.bits(steps) for steps in range(5)] == [2.5, 2.75, 3.0, 3.25, 3.5]


def test_gain_counts_per_bit() -> None:
    dear = slot(4, 4, 4, 4, 4, cost=0.5)
    assert order(Curve.of(BASE, 2.5, [dear, GOOD])) == [1, 4]


def test_predictions_add_single_gains_up_and_stop_at_nothing() -> None:
    curve = Curve.of(BASE, 2.5, [GREAT, GOOD, SMALL, DOUBTFUL])
    assert curve.predicted(0).value == pytest.approx(BASE.value)
    assert curve.predicted(2).value == pytest.approx((46 - 24 - 10) / 40)
    assert [total for total, _ in curve.predicted(2).parts] == pytest.approx([1, 4, 2, 5])
    more = Curve.of(BASE, 2.5, [GREAT, slot(5, 6, 6, 6, 6), GOOD])
    assert more.predicted(3).value == 0


@pytest.mark.parametrize(
    ("budget", "steps"), [(2.5, 0), (2.74, 0), (2.75, 1), (3.1, 2), (3.4, 3), (3.5, 4), (9, 4)]
)
def test_a_budget_is_never_exceeded_nor_spent_on_doubtful_slots(budget: float, steps: int) -> None:
    curve, found = Curve.of(BASE, 2.5, [GREAT, GOOD, SMALL, DOUBTFUL]).within(budget)
    assert found == steps
    assert curve.bits(found) <= max(budget, 2.5)
    assert order(curve) == [0, 1, 2, 3]


def test_what_does_not_fit_gives_way_to_cheaper_slots() -> None:
    dear = slot(4, 9, 9, 9, 9, cost=0.5)
    curve, found = Curve.of(BASE, 2.5, [dear, GOOD, SMALL]).within(3.0)
    assert (order(curve)[:found], curve.bits(found)) == ([4], 3.0)
    curve, found = Curve.of(BASE, 2.5, [dear, GOOD, SMALL]).within(2.75)
    assert (order(curve)[:found], order(curve)) == ([1], [1, 4, 2])


def test_a_cautious_order_counts_the_lesser_half() -> None:
    uneven = slot(6, 7, 1, 7, 1)
    assert order(Curve.of(BASE, 2.5, [uneven, GOOD])) == [6, 1]
    assert order(Curve.of(BASE, 2.5, [uneven, GOOD], cautious=True)) == [1, 6]


def test_raises_together_must_keep_half_of_what_they_promise_on_both_halves() -> None:
    curve = Curve.of(BASE, 2.5, [GREAT, GOOD])
    assert curve.keeps_promise(1, measured(5, 8, 6, 9))
    assert not curve.keeps_promise(1, measured(1, 11, 2, 12))
    assert curve.keeps_promise(0, BASE)


@pytest.mark.parametrize(
    ("digits", "lost", "enough"), [(640, 0, True), (640, 1, True), (640, 2, False), (3000, 3, True)]
)
def test_recall_may_lose_one_digit_or_a_thousandth(digits: int, lost: int, enough: bool) -> None:
    own, found = (
        Measurement(right / digits, ((float(right), digits),)) for right in (digits, digits - lost)
    )
    assert recalls_as_much(found, own) is enough
