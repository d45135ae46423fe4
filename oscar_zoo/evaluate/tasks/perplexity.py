"""Perplexity over windows spaced evenly in a text.

It is the exponential of the mean negative log-likelihood of the next token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.tasks.base import Predictions, TaskPrompt


@dataclass(frozen=True)
class Perplexity:
    """Windows of a text; every window starts at position 0 and predicts its tokens 1 .. length - 1.

    Attributes:
        prompts: the windows.
    """

    prompts: tuple[TaskPrompt, ...]
    name: str = "perplexity"

    @classmethod
    def from_tokens(
        cls, ids: Tensor, *, windows: int = 6, length: int = 2048, skip: int = 0
    ) -> Perplexity:
        """Cut `n` windows from a text; window i begins at token `(len(ids) - length) * i // n`.

        There are fewer windows when they would overlap.

        Args:
            ids: `[N]` int64, the whole text.
            length: tokens of a window.
            skip: predictions of the first `skip` positions are not scored.
        """
        if length > len(ids):
            raise UsageError(
                f"the text has {len(ids)} tokens, one window needs {length}.",
                hint="give a longer text with --data, or a smaller --length",
            )
        if windows < 1 or not 0 <= skip < length - 1:
            raise UsageError(
                f"{windows} windows of {length} tokens from position {skip} leave nothing to score."
            )
        number = min(windows, len(ids) // length)
        starts = [(len(ids) - length) * i // number for i in range(number)]
        scored = torch.arange(skip, length - 1, device="cpu")
        return cls(tuple(TaskPrompt(ids[start : start + length], scored) for start in starts))

    def count(self, prompt: TaskPrompt, said: Predictions) -> tuple[float, int]:
        """Summed negative log-likelihood in nats, and the number of predictions."""
        return float(said.losses.sum()), len(said.losses)

    def result(self, total: float, number: int) -> float:
        """`exp(mean)`; infinite when the exponential overflows."""
        mean = total / number
        return math.exp(mean) if mean < 700 else math.inf

    def describe(self) -> Mapping[str, int | float | str]:
        """Windows, their length and the scored predictions."""
        return {
            "windows": len(self.prompts),
            "length": len(self.prompts[0].ids),
            "predictions": sum(len(p.scored) for p in self.prompts),
        }
