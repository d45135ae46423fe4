"""How bits were chosen per layer and side: the block `widths` of `fit.selection` in a manifest.

`compute` writes it, and reports, `info` and the JSON of commands read it. Divergences are those of
the next token's distribution from the exact cache, in nats per position; a raise gives the codes of
one side of one layer 4 bits in place of 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from oscar_zoo.artifact.specs import Count, Spec, Text

KEY = "widths"
"""Of the block in `fit.selection`."""

NotNegative = Annotated[float, Field(ge=0, le=1e12)]
Bits = Annotated[float, Field(gt=0, le=64)]
Number = Annotated[float, Field(ge=-1e12, le=1e12)]
Share = Annotated[float, Field(ge=0, le=1)]


class VerifiedWidths(Spec):
    """What was measured with all raises up to a step together; `None` for what was not.

    Attributes:
        divergence, divergence_error: from the exact cache, and its standard error over prompts.
        change_percent, change_error: of perplexity over BF16, and its paired standard error.
        recall: share of the digits of facts that are predicted right.
    """

    divergence: NotNegative | None = None
    divergence_error: NotNegative | None = None
    change_percent: Number | None = None
    change_error: NotNegative | None = None
    recall: Share | None = None


class WidthStep(Spec):
    """One point of the curve: the raise that it adds to the step before, and what that gives.

    Attributes:
        layer: of the model, whose codes are raised; `None` in the first step, and where all are
            raised at once.
        side: keys or values of that layer.
        bits: average bits of an element after the raise, scales and offsets included.
        predicted, predicted_error: the divergence, from the gains of the single raises, and its
            standard error over prompts; `None` where single raises were not measured.
        verified: what was measured.
    """

    layer: Annotated[int, Field(ge=0, lt=1 << 20)] | None = None
    side: Literal["k", "v"] | None = None
    bits: Bits
    predicted: NotNegative | None = None
    predicted_error: NotNegative | None = None
    verified: VerifiedWidths | None = None

    @property
    def name(self) -> str:
        return "all" if self.layer is None else f"{self.layer} {'KV'['kv'.index(self.side or 'k')]}"


class WidthSelection(Spec):
    """The curve from 2 to 4 bits, and where on it the artifact is.

    Attributes:
        rule: by which it was chosen.
        wish: what the user asked for, as the option of the command line.
        reason: why, a sentence without a full stop.
        prompts, positions: of held-out text that divergences are means over.
        layers: the model's indices of its full-attention layers.
        gains_k, gains_v: divergence that raising a layer alone takes away, in the order of
            `layers`; below 0 where it adds some; `None` where not measured, as values of latents.
        steps: from codes of 2 bits everywhere to codes of 4.
        chosen: index of the step that was kept.
        bits_at: bits of an element with the high-precision windows, by the tokens of a sequence.
    """

    rule: Text
    wish: Text
    reason: Text
    prompts: Count
    positions: Count
    layers: tuple[Annotated[int, Field(ge=0, lt=1 << 20)], ...]
    gains_k: tuple[Number, ...] | None = None
    gains_v: tuple[Number, ...] | None = None
    steps: Annotated[tuple[WidthStep, ...], Field(min_length=1, max_length=2001)]
    chosen: Annotated[int, Field(ge=0)]
    bits_at: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Bits] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.chosen >= len(self.steps):
            raise ValueError("chosen is no step")
        if any(len(g) != len(self.layers) for g in (self.gains_k, self.gains_v) if g is not None):
            raise ValueError("gains have one entry for each layer")
        return self

    @property
    def kept(self) -> WidthStep:
        return self.steps[self.chosen]

    @property
    def raised(self) -> frozenset[tuple[int, str]]:
        """`(layer, side)` of what has codes of 4 bits."""
        taken = self.steps[1 : self.chosen + 1]
        if any(step.layer is None for step in taken):
            return frozenset((layer, side) for layer in self.layers for side in "kv")
        return frozenset(
            (step.layer, step.side) for step in taken if step.layer is not None and step.side
        )

    @classmethod
    def of(cls, selection: Mapping[str, Any] | None) -> Self | None:
        """From `fit.selection`, which is untrusted; `None` where it has none that makes sense."""
        block = (selection or {}).get(KEY)
        if not isinstance(block, dict):
            return None
        try:
            return cls.model_validate_json(json.dumps(block))
        except (ValidationError, ValueError):
            return None
