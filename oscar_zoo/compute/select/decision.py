"""The result of `auto` and its reasons, as callers, manifests and reports read it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.width_selection import KEY, WidthSelection
from oscar_zoo.compute.data.calibration import HeldOut
from oscar_zoo.compute.methods.base import FitResult
from oscar_zoo.compute.select.attention_errors import Fidelity, ratio_text
from oscar_zoo.compute.select.rule import (
    FAST_RULE,
    LARGEST,
    RULE,
    Base,
    Gate,
    Questions,
    Trial,
    Verdict,
    Verified,
    output_gates,
    whole,
    worst,
)
from oscar_zoo.compute.width_wish import AUTO_LOSS
from oscar_zoo.evaluate.measure import ExactPredictions, Measurement

WIDTHS_RULE = "widths/1"
LOST = 0.001
"""Share of digits that `auto` may lose."""
Raised = frozenset[tuple[int, Role]]
"""Layers, counted from 0 among those with full attention, and sides with codes of 4 bits."""


@dataclass(frozen=True)
class WidthChoice:
    """Bits of every layer and side: the recipe with these widths, the curve, BF16, how recall was
    measured, and what was measured with the widths."""

    recipe: ServingRecipe
    selection: WidthSelection
    base: Base
    questions: Questions
    verified: Verified

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that decide, measured with these widths."""
        return self.verified.gates(self.base)

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
            "rule": WIDTHS_RULE,
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


@dataclass(frozen=True)
class ChoiceRow:
    """One row of the table: a fit with a clip. What was not measured is `None`.

    Attributes:
        method: of `table.TABLE`.
        clip_k, clip_v: ratios; 0 for none.
        sequences: of held-out text that the figures are of; fewer than all for what left early.
        divergence: of the next token's distribution from that with the exact cache, in nats per
            position, on at most half of the text; `None` too where an engine has none.
        perplexity: at positions beyond both windows; `None` for what left early, whose perplexity
            is of other text.
        change_percent: of perplexity over BF16, on the same sequences.
        standard_error: of `change_percent`, paired by sequence.
        recall: share of the digits of facts beyond both windows that are predicted right.
        output_error_geo, output_error_worst: of the attention output, geometric mean over layers
            and worst layer.
        logit_error, retrieval_error: see `quality`.
        gate: what perplexity and recall mean.
    """

    method: str
    clip_k: float
    clip_v: float
    sequences: int | None
    divergence: float | None
    perplexity: float | None
    change_percent: float | None
    standard_error: float | None
    recall: float | None
    output_error_geo: float
    output_error_worst: float
    logit_error: float
    retrieval_error: float
    gate: Verdict | None

    @property
    def clip_texts(self) -> tuple[str, str]:
        """Both ratios for people; `0` for none."""
        return ratio_text(self.clip_k), ratio_text(self.clip_v)


@dataclass(frozen=True)
class Choice:
    """The choice of `auto`.

    Attributes:
        result: the fit.
        recipe: the serving recipe with its clip.
        trials: all that was measured, in the order of `table.TABLE`.
        at: which of them was chosen.
        reason: why, a sentence without a full stop.
        errors: by method.
        base: the model with a BF16 cache, or `None` with `fast`.
        heldout: the text of the measurements.
        refused: method -> why it was no candidate.
        questions: how recall was measured.
        widths: how bits were chosen afterwards; `None` for 2 bits everywhere without a choice.
        instead: how codes of 2 bits failed a gate, where bits were chosen because of it.
        exact: what the model says with the exact cache on half of the text, where it was kept.
    """

    result: FitResult
    recipe: ServingRecipe
    trials: tuple[Trial, ...]
    at: int
    reason: str
    errors: Mapping[str, Fidelity]
    base: Base | None
    heldout: HeldOut
    refused: Mapping[str, str]
    questions: Questions
    widths: WidthChoice | None = None
    instead: str | None = None
    exact: ExactPredictions | None = field(default=None, repr=False)

    @property
    def measured_on(self) -> str:
        """The text and the positions behind the perplexities. Perplexities of other text are other
        numbers."""
        first = self.recipe.windows.sink + self.recipe.windows.recent
        text = [len(one) for one in self.heldout.sequences if len(one) > first + 1]
        return (
            f"{len(text)} held-out sequences of {max(text, default=0):,} tokens, positions from"
            f" {first:,} on"
        )

    @cached_property
    def rows(self) -> tuple[ChoiceRow, ...]:
        """The table, a row per trial."""
        return tuple(_row(trial, self.base) for trial in self.trials)

    @property
    def chosen(self) -> ChoiceRow:
        """The row that was kept."""
        return self.rows[self.at]

    @property
    def served(self) -> ChoiceRow:
        """The row that was kept, with what was measured with the chosen bits."""
        if self.widths is None:
            return self.chosen
        kept = replace(self.chosen, **self.widths.figures)
        return replace(kept, gate=worst(self.widths.gates))

    @cached_property
    def gates(self) -> tuple[Gate, ...]:
        """Gates of the chosen fit: those that decide, then remarks on its attention output."""
        kept = self.trials[self.at]
        decide = kept.gates(self.base) if self.widths is None else self.widths.gates
        baseline = self.errors.get("hadamard")
        if baseline is None or kept.method == "hadamard":
            return decide
        same = baseline.of(kept.errors.clip) or baseline.found
        return (*decide, *output_gates(kept.errors, same))

    @property
    def worth_more_bits(self) -> str | None:
        """A remark where codes of 2 bits lose more than `--bits auto` allows; `None` where they do
        not, and where bits were chosen."""
        kept, row = self.trials[self.at], self.chosen
        if self.widths is not None or self.base is None:
            return None
        own, recall = self.base.recall, kept.recall
        forgets = recall is not None and own is not None and not recalls_as_much(recall, own)
        change = row.change_percent or 0.0
        if change <= AUTO_LOSS and not forgets:
            return None
        told = f", and recall falls to {row.recall:.1%} of digits" if forgets else ""
        return (
            f"codes of 2 bits cost {change:.2f} % of perplexity{told}: --bits auto finds the fewest"
            f" bits within {AUTO_LOSS:g} % and with full recall."
        )

    @property
    def selection(self) -> dict[str, Any]:
        """The block `fit.selection` of the manifest."""
        return {
            "rule": FAST_RULE if self.base is None else RULE,
            "heldout": {
                "prompts_sha256": self.heldout.prompts_sha256,
                "tokens": self.heldout.tokens,
            },
            "bf16_perplexity": self.base.perplexity.value if self.base else None,
            "bf16_recall": self.questions.own.value if self.questions.own else None,
            "candidates": [asdict(row) for row in self.rows],
            "chosen": asdict(self.served),
            "reason": self.reason,
            "refused": dict(self.refused),
            **(self.widths.block if self.widths else {}),
        }

    @property
    def quality(self) -> dict[str, Any]:
        """The `quality` block of the manifest; lists are in ascending order of layers."""
        mine, fidelity = self.trials[self.at].errors, self.errors[self.chosen.method]
        block: dict[str, Any] = {
            "windows": self.recipe.windows.model_dump(),
            "quantizer": self.recipe.quantizer,
            "gates": [asdict(gate) for gate in self.gates],
            "errors": {
                "clip": {"k": mine.clip.k, "v": mine.clip.v},
                "output": list(mine.output),
                "output_k": list(mine.k_only),
                "output_v": list(mine.v_only),
                "logit": list(mine.logit),
                "retrieval": mine.retrieval,
            },
            "clip": {"k": fidelity.k_curve.to_json(), "v": fidelity.v_curve.to_json()},
        }
        if self.base is not None:
            block["recall"] = self.questions.to_json() | {"int2": self.served.recall}
        return block


def _row(trial: Trial, base: Base | None) -> ChoiceRow:
    errors, perplexity, change = trial.errors, trial.perplexity, trial.change(base)
    early = change is not None and base is not None and not whole(trial, base.perplexity)
    return ChoiceRow(
        method=trial.method,
        clip_k=errors.clip.k,
        clip_v=errors.clip.v,
        sequences=None if perplexity is None else len(perplexity.parts),
        divergence=None if trial.divergence is None else min(trial.divergence.value, LARGEST),
        perplexity=None if perplexity is None or early else min(perplexity.value, LARGEST),
        change_percent=change[0] if change else None,
        standard_error=change[1] if change else None,
        recall=None if trial.recall is None else trial.recall.value,
        output_error_geo=errors.output_geo,
        output_error_worst=errors.output_worst,
        logit_error=errors.logit_geo,
        retrieval_error=errors.retrieval,
        gate=worst(trial.gates(base)) if change else None,
    )
