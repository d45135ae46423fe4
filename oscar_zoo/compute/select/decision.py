"""The result of `auto` and its reasons, as callers, manifests and reports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.width_selection import KEY, WidthSelection
from oscar_zoo.compute.data.calibration import HeldOut
from oscar_zoo.compute.methods.base import FitResult
from oscar_zoo.compute.select.attention_errors import Fidelity, geometric_mean, ratio_text
from oscar_zoo.compute.select.rule import (
    DIVERGENCE_PASS,
    FAST_RULE,
    LARGEST,
    RULE,
    Base,
    Gate,
    Trial,
    Verdict,
    Verified,
    output_gates,
    typical,
    whole,
    worst,
)

WIDTHS_RULE = "widths/2"


@dataclass(frozen=True)
class WidthChoice:
    """Bits of every layer and side: the recipe with these widths, the curve, BF16, and what was
    measured with the widths."""

    recipe: ServingRecipe
    selection: WidthSelection
    base: Base
    verified: Verified

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The gates that decide, measured with these widths."""
        return self.verified.gates(self.base)

    @property
    def block(self) -> dict[str, Any]:
        """What it adds to `fit.selection`."""
        return {KEY: self.selection.model_dump(mode="json")}

    def selection_of(self, method: str, heldout: HeldOut) -> dict[str, Any]:
        """`fit.selection` of a manifest whose method the user named; keys as of `Choice`."""
        return {
            "rule": WIDTHS_RULE,
            **_measured(heldout, self.base),
            "chosen": {"method": method, **_figures(self.verified, self.base)},
            **self.block,
        }

    @property
    def quality(self) -> dict[str, Any]:
        """The `quality` block of such a manifest."""
        recall = _figures(self.verified, self.base)["recall"]
        return {**_quality(self.recipe, self.gates), "recall": self.base.recall_block(recall)}


@dataclass(frozen=True)
class ChoiceRow:
    """One row of the table: a fit with a clip, ratios of 0 for none. What was not measured is
    `None`: what left early has a rise of perplexity on the first `sequences`, and no perplexity,
    which would be of other text. Words of `fit.selection` in a manifest; errors as of `ClipErrors`.
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

    @classmethod
    def of(cls, trial: Trial, base: Base | None) -> ChoiceRow:
        """The row of a trial."""
        errors, perplexity = trial.errors, trial.perplexity
        figures = _figures(trial, base)
        if base is not None and perplexity is not None and not whole(trial, base.perplexity):
            figures["perplexity"] = None
        return cls(
            method=trial.method,
            clip_k=errors.clip.k,
            clip_v=errors.clip.v,
            sequences=None if perplexity is None else len(perplexity.parts),
            divergence=None if trial.divergence is None else min(trial.divergence.value, LARGEST),
            **figures,
            output_error_geo=errors.output_geo,
            output_error_worst=max(errors.output),
            logit_error=geometric_mean(errors.logit),
            retrieval_error=errors.retrieval,
            gate=None if figures["change_percent"] is None else worst(trial.gates(base)),
        )

    @property
    def clip_texts(self) -> tuple[str, str]:
        """Both ratios for people; `0` for none."""
        return ratio_text(self.clip_k), ratio_text(self.clip_v)


@dataclass(frozen=True)
class Choice:
    """The choice of `auto`.

    Attributes:
        trials: all that was measured, in the order of `table.TABLE`; number `at` was chosen.
        reason: why, a sentence without a full stop.
        base: the model with a BF16 cache, or `None` with `fast`.
        heldout: the text of the measurements.
        refused: method -> why it was no candidate.
        widths: how bits were chosen afterwards; `None` for 2 bits everywhere without a choice.
        raised: whether bits were chosen because codes of 2 bits do not pass the gates.
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
    widths: WidthChoice | None = None
    raised: bool = False

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
        return tuple(ChoiceRow.of(trial, self.base) for trial in self.trials)

    @property
    def chosen(self) -> ChoiceRow:
        """The row that was kept."""
        return self.rows[self.at]

    @property
    def served(self) -> ChoiceRow:
        """The row that was kept, with what was measured with the chosen bits."""
        if self.widths is None:
            return self.chosen
        figures = _figures(self.widths.verified, self.widths.base)
        return replace(self.chosen, **figures, gate=worst(self.widths.gates))

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
    def two_bits(self) -> str | None:
        """What codes of 2 bits cost, a clause with a plural subject before it, such as "raise
        perplexity by 0.93 % and lose 6.1 points of recall"; `None` where they pass the gates and
        were kept. Where they pass and were raised, that was for their divergence."""
        trial = self.trials[self.at]
        gates = trial.gates(self.base)
        if worst(gates) == "pass":
            found = f"{typical(trial.divergence):.4f} nats, above {DIVERGENCE_PASS}"
            return f"have a typical divergence of {found}" if self.raised else None
        words = {
            "perplexity_change_percent": "raise perplexity by {:.2f} %",
            "recall_loss_points": "lose {:.1f} points of recall",
        }
        return " and ".join(words[gate.name].format(gate.value) for gate in gates)

    @property
    def selection(self) -> dict[str, Any]:
        """The block `fit.selection` of the manifest."""
        return {
            "rule": FAST_RULE if self.base is None else RULE,
            **_measured(self.heldout, self.base),
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
            **_quality(self.recipe, self.gates),
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
            block["recall"] = self.base.recall_block(self.served.recall)
        return block


def _figures(found: Verified, base: Base | None) -> dict[str, Any]:
    """Perplexity and recall; keys as of `ChoiceRow`."""
    change, perplexity = found.change(base), found.perplexity
    return {
        "perplexity": None if perplexity is None else min(perplexity.value, LARGEST),
        "change_percent": change[0] if change else None,
        "standard_error": change[1] if change else None,
        "recall": None if found.recall is None else found.recall.value,
    }


def _measured(heldout: HeldOut, base: Base | None) -> dict[str, Any]:
    own = base.answers if base else None
    return {
        "heldout": {"prompts_sha256": heldout.prompts_sha256, "tokens": heldout.tokens},
        "bf16_perplexity": base.perplexity.value if base else None,
        "bf16_recall": own.value if own else None,
    }


def _quality(recipe: ServingRecipe, gates: tuple[Gate, ...]) -> dict[str, Any]:
    return {
        "windows": recipe.windows.model_dump(),
        "quantizer": recipe.quantizer,
        "gates": [asdict(gate) for gate in gates],
    }
