"""Quality as this tool measured it: perplexity and recall of the INT2 cache beside BF16.

`compute` leaves the figures in `fit.selection` of a manifest, and `eval` in a score file, from
which they get to the index of a hub. Readers see one form of both. Another text gives other
figures, so they always go with the tool and the text that they were measured with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Final, Self

from pydantic import Field, ValidationError

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import Count, Hex64, Score, Spec, Text
from oscar_zoo.registry.score_file import FORCED, PERPLEXITY, RECALL

Perplexity = Annotated[float, Field(ge=1, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[float, Field(ge=-100, le=1e12)]
POOR_PERCENT: Final = 5.0
POOR_POINTS: Final = 10.0
"""Rise of perplexity over BF16, and points of recall below it, beyond which nobody should serve a
rotation unknowingly."""
_SHA256: Final = "sha256:"
_STDERRS: Final = 2 * 1.96
"""Width of a 95 % confidence interval in standard errors."""


class Measured(Spec):
    """Perplexity and recall of one artifact; what was not measured is `None`.

    Attributes:
        tool: name and version of what measured.
        dataset: the text's name; its tokens were not calibrated on.
        tokens: length of that text.
        text_sha256: of its token ids.
        perplexity, perplexity_bf16: on positions beyond the BF16 windows.
        change_percent, change_stderr: of perplexity over BF16, in percent, and its standard error.
        recall, recall_bf16: share of the digits of facts beyond the windows that are right, 0 to 1.
    """

    tool: Text
    dataset: Text | None = None
    tokens: Count | None = None
    text_sha256: Hex64 | None = None
    perplexity: Perplexity | None = None
    perplexity_bf16: Perplexity | None = None
    change_percent: Percent | None = None
    change_stderr: Annotated[float, Field(ge=0, le=1e12)] | None = None
    recall: Share | None = None
    recall_bf16: Share | None = None

    @classmethod
    def from_json(cls, value: object) -> Self | None:
        try:
            return None if value is None else cls.model_validate(value)
        except ValidationError:
            return None

    @classmethod
    def of(cls, manifest: Manifest) -> Self | None:
        selection = manifest.fit.selection or {}
        chosen, heldout = _object(selection.get("chosen")), _object(selection.get("heldout"))
        calibration, tool = manifest.fit.calibration, manifest.tool
        facts = {
            "tool": f"{tool.name} {tool.version}" if tool.version else tool.name,
            "dataset": calibration.dataset if calibration else None,
            "tokens": heldout.get("tokens"),
            "text_sha256": heldout.get("prompts_sha256"),
            "perplexity": _number(chosen.get("perplexity")),
            "perplexity_bf16": _number(selection.get("bf16_perplexity")),
            "change_percent": _number(chosen.get("change_percent")),
            "change_stderr": _number(chosen.get("standard_error")),
            "recall": _number(chosen.get("recall")),
            "recall_bf16": _number(selection.get("bf16_recall")),
        }
        found = cls.from_json(facts)
        return found if found is not None and found._says else None

    @classmethod
    def of_scores(cls, scores: Sequence[Score]) -> Self | None:
        """The figures among the scores, with their BF16 baseline."""
        found = {score.task: score for score in scores if is_figure(score)}
        first = found.get(PERPLEXITY) or found.get(RECALL)
        if first is None:
            return None
        tool, revision = first.harness, first.dataset_revision or ""
        facts: dict[str, Any] = {
            "tool": " ".join(filter(None, (tool.name, tool.version))) if tool else "oscar-zoo",
            "tokens": (first.tokens.prompt or None) if first.tokens else None,
            "text_sha256": revision.removeprefix(_SHA256) if _SHA256 in revision else None,
        }
        facts |= _perplexity_facts(found.get(PERPLEXITY))
        if (recall := found.get(RECALL)) and recall.baseline is not None:
            both = {"recall": recall.value, "recall_bf16": recall.baseline.value}
            facts |= {name: None if said is None else said / 100 for name, said in both.items()}
        return cls.from_json(facts)

    @classmethod
    def best(cls, scores: Sequence[Score], made: Self | None) -> Self | None:
        """The figures of the scores, or `made` of the manifest: what says more, of more tokens."""
        found = filter(None, (cls.of_scores(scores), made))
        return max(found, key=lambda one: (one._says, one.tokens or 0), default=None)

    @property
    def poor(self) -> str | None:
        """What is poor, to be said behind a name."""
        if round(self.change_percent or 0, 6) > POOR_PERCENT:
            return f"has a perplexity {self.change_percent:.1f} % above BF16"
        lost = 0 if self.recall is None else 100 * ((self.recall_bf16 or 0) - self.recall)
        return f"recalls {lost:.1f} points less than BF16" if round(lost, 6) > POOR_POINTS else None

    def as_scores(self) -> tuple[Score, ...]:
        """Perplexity and recall as scores beside BF16, for those that were measured with it."""
        found = []
        if self.perplexity is not None and self.perplexity_bf16 is not None:
            kind = {"task": PERPLEXITY, "metric": "perplexity", "unit": "perplexity"}
            found.append(_beside_bf16(kind, self.perplexity, self.perplexity_bf16))
        if self.recall is not None and self.recall_bf16 is not None:
            kind = {"task": RECALL, "metric": "digit_accuracy", "unit": "percent"}
            found.append(_beside_bf16(kind, 100 * self.recall, 100 * self.recall_bf16))
        return tuple(found)

    @property
    def _says(self) -> int:
        return (self.change_percent is not None) + (self.recall is not None)

    @property
    def by(self) -> str:
        of = f" of {self.dataset}" if self.dataset else ""
        number = f"{self.tokens:,} " if self.tokens else ""
        return f"measured by {self.tool} on {number}held-out tokens{of}"

    @property
    def short_perplexity(self) -> str | None:
        return None if self.change_percent is None else f"{self.change_percent:+.2f} %"

    @property
    def short_recall(self) -> str | None:
        if self.recall is None:
            return None
        before = "?" if self.recall_bf16 is None else f"{100 * self.recall_bf16:.1f}"
        return f"{before} → {100 * self.recall:.1f} %"

    @property
    def perplexity_line(self) -> str | None:
        if self.short_perplexity is None or self.perplexity is None or self.perplexity_bf16 is None:
            return self.short_perplexity
        error = "" if self.change_stderr is None else f", standard error {self.change_stderr:.2f} %"
        both = f"BF16 {self.perplexity_bf16:.4g}, INT2 {self.perplexity:.4g}"
        return f"{both} ({self.short_perplexity}{error})"

    @property
    def recall_line(self) -> str | None:
        if self.recall is None:
            return None
        before = "not reported" if self.recall_bf16 is None else f"{100 * self.recall_bf16:.1f} %"
        return f"BF16 {before}, INT2 {100 * self.recall:.1f} % of digits beyond the BF16 windows"


def _beside_bf16(kind: dict[str, Any], value: float, before: float) -> Score:
    facts = kind | {"reporter": "measured"}
    return Score(
        **facts,
        value=value,
        kv_dtype="int2",
        baseline=Score(**facts, value=before, kv_dtype="bf16"),
    )


def is_figure(score: Score) -> bool:
    """Whether a score is perplexity or recall as this tool measured it, under the recipe, and not
    of texts of fewer than 640 tokens, of which the usual windows hold half."""
    tokens = score.tokens.prompt if score.tokens and score.task == PERPLEXITY else math.inf
    return (
        tokens >= 640 * (score.n or 0)
        and score.task in FORCED
        and score.reporter == "measured"
        and score.kv_dtype == "int2"
        and not score.recipe_changes
        and score.value is not None
        and score.baseline is not None
        and score.baseline.value is not None
    )


def _perplexity_facts(score: Score | None) -> dict[str, float | None]:
    base = score.baseline.value if score and score.baseline else None
    if score is None or score.value is None or not base:
        return {}
    width = 100 * (score.paired.upper95 - score.paired.lower95) if score.paired else None
    return {
        "perplexity": score.value,
        "perplexity_bf16": base,
        "change_percent": 100 * (score.value / base - 1),
        "change_stderr": None if width is None else width / _STDERRS / base,
    }


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    """A JSON number; strict validation takes no integer for a float."""
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]
