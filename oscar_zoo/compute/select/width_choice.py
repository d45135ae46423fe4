"""The choice of bits per layer and side, as callers, manifests and reports read it."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import ServingRecipe, SideWidths, Widths
from oscar_zoo.artifact.width_selection import KEY, VerifiedWidths, WidthSelection, WidthStep
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.select.questions import Questions
from oscar_zoo.compute.select.rule import (
    LARGEST,
    Base,
    Gate,
    change_percent,
    perplexity_gate,
    recall_gate,
)
from oscar_zoo.compute.select.width_curve import Curve, gain, standard_error
from oscar_zoo.evaluate.measure import Measurement

RULE = "widths/1"
LOST = 0.001
"""Share of digits that `auto` may lose."""
Raised = frozenset[tuple[int, Role]]
"""Layers, counted from 0 among those with full attention, and sides with codes of 4 bits."""


@dataclass(frozen=True)
class Verified:
    """What was measured with some raises together; `None` for what was not."""

    divergence: Measurement | None = None
    perplexity: Measurement | None = None
    recall: Measurement | None = None

    def change(self, base: Base) -> tuple[float, float] | None:
        """Rise of perplexity over BF16 and its standard error, in percent."""
        return None if self.perplexity is None else change_percent(self.perplexity, base.perplexity)

    def as_block(self, base: Base) -> VerifiedWidths:
        """As in a manifest."""
        change, kl = self.change(base), self.divergence
        return VerifiedWidths(
            divergence=None if kl is None else max(0.0, kl.value),
            divergence_error=None if kl is None else standard_error(kl),
            change_percent=change[0] if change else None,
            change_error=change[1] if change else None,
            recall=None if self.recall is None else self.recall.value,
        )


@dataclass(frozen=True)
class WidthChoice:
    """Bits of every layer and side, and what they were chosen by.

    Attributes:
        recipe: the serving recipe with these widths; without any where nothing was raised.
        selection: the curve.
        base: the model with a BF16 cache; its recall is `None` where it is not judged.
        questions: how recall was measured.
        verified: what was measured with the widths of `recipe`.
    """

    recipe: ServingRecipe
    selection: WidthSelection
    base: Base
    questions: Questions
    verified: Verified

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that decide, measured with these widths."""
        found: list[Gate] = []
        if self.verified.perplexity is not None:
            found.append(perplexity_gate(self.verified.perplexity, self.base.perplexity))
        if self.verified.recall is not None and self.base.recall is not None:
            found.append(recall_gate(self.verified.recall, self.base.recall))
        return tuple(found)

    @property
    def figures(self) -> dict[str, Any]:
        """Perplexity and recall with these widths; keys as of `decision.ChoiceRow`."""
        change, found = self.verified.change(self.base), self.verified
        value = found.perplexity.value if found.perplexity else None
        return {
            "perplexity": None if value is None else min(value, LARGEST),
            "change_percent": change[0] if change else None,
            "standard_error": change[1] if change else None,
            "recall": None if found.recall is None else found.recall.value,
        }

    def selection_of(self, method: str, heldout: HeldOut) -> dict[str, Any]:
        """`fit.selection` of a manifest whose method the user named; keys as of `Choice`."""
        own = self.questions.own
        return {
            "rule": RULE,
            "heldout": {"prompts_sha256": heldout.prompts_sha256, "tokens": heldout.tokens},
            "bf16_perplexity": self.base.perplexity.value,
            "bf16_recall": own.value if own else None,
            "chosen": {"method": method, **self.figures},
            **self.block,
        }

    @property
    def quality(self) -> dict[str, Any]:
        """The `quality` block of such a manifest."""
        return {
            "windows": self.recipe.windows.model_dump(),
            "quantizer": self.recipe.quantizer,
            "gates": [asdict(gate) for gate in self.gates],
            "recall": self.questions.to_json() | {"int2": self.figures["recall"]},
        }

    @property
    def block(self) -> dict[str, Any]:
        """What it adds to `fit.selection`."""
        return {KEY: self.selection.to_json()}


def recalls_as_much(recall: Measurement, own: Measurement) -> bool:
    """Whether at most `LOST` of the digits that the model itself recalls are lost, or a single one,
    which is what chance takes in so few questions."""
    lost, number = (
        math.fsum(right for right, _ in own.parts) - math.fsum(right for right, _ in recall.parts),
        sum(count for _, count in own.parts),
    )
    return lost <= max(1.0, LOST * number)


def widths_of(
    recipe: ServingRecipe, layers: int, raised: Collection[tuple[int, Role]]
) -> ServingRecipe:
    """`recipe` with codes of 4 bits where `raised` says so, and of 2 bits and its clip elsewhere.

    Codes of 4 bits are not clipped: on the example models any clip makes their divergence larger,
    the mildest one (0.98) by a third.
    """
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
