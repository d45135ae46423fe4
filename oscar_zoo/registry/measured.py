"""Quality as the tool measured it when it made an artifact: perplexity and recall of the INT2 cache
beside BF16.

The figures come from `fit.selection` of a manifest. They are not scores: nobody ran a benchmark,
and another text gives other figures. So they always go with the tool and the text that they were
measured with.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.specs import Count, Hex64, Spec, Text

Perplexity = Annotated[float, Field(ge=1, le=1e9)]
Share = Annotated[float, Field(ge=0, le=1)]
Percent = Annotated[float, Field(ge=-100, le=1e12)]


class Measured(Spec):
    """Perplexity and recall of one artifact; what was not measured is `None`.

    Attributes:
        tool: name and version of what measured.
        dataset: the text's name; its tokens were not calibrated on.
        tokens: length of that text.
        text_sha256: of its token ids.
        perplexity, perplexity_bf16: on positions beyond the BF16 windows.
        change_percent, change_stderr: of perplexity over BF16, in percent, and its standard error.
        recall, recall_bf16: share of facts beyond the windows that are answered right, 0 to 1.
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
    def of(cls, manifest: Manifest) -> Self | None:
        """The figures of `manifest`; `None` where it has none, or none that make sense."""
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
        try:
            found = cls.model_validate(facts)
        except ValidationError:
            return None
        return found if found.change_percent is not None or found.recall is not None else None

    @property
    def by(self) -> str:
        """Who measured, and on what."""
        of = f" of {self.dataset}" if self.dataset else ""
        return (
            f"measured by {self.tool} on {f'{self.tokens:,} ' if self.tokens else ''}held-out"
            f" tokens{of}"
        )

    @property
    def short_perplexity(self) -> str | None:
        """The change over BF16."""
        return None if self.change_percent is None else f"{self.change_percent:+.2f} %"

    @property
    def short_recall(self) -> str | None:
        """BF16 and INT2 in percent."""
        if self.recall is None:
            return None
        before = "?" if self.recall_bf16 is None else f"{100 * self.recall_bf16:.1f}"
        return f"{before} → {100 * self.recall:.1f} %"

    @property
    def perplexity_line(self) -> str | None:
        """Both values, the change and its standard error."""
        if self.short_perplexity is None or self.perplexity is None or self.perplexity_bf16 is None:
            return self.short_perplexity
        error = "" if self.change_stderr is None else f", standard error {self.change_stderr:.2f}"
        return (
            f"BF16 {self.perplexity_bf16:.4g}, INT2 {self.perplexity:.4g}"
            f" ({self.short_perplexity}{error})"
        )

    @property
    def recall_line(self) -> str | None:
        """Both values."""
        if self.recall is None:
            return None
        before = "not reported" if self.recall_bf16 is None else f"{100 * self.recall_bf16:.1f} %"
        return f"BF16 {before}, INT2 {100 * self.recall:.1f} % of facts beyond the BF16 windows"


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> float | None:
    """A JSON number; strict validation takes no integer for a float."""
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]
