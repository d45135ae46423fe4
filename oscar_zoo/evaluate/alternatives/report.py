"""What a comparison with alternatives found. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from oscar_zoo.evaluate.alternatives.pareto import pareto_optimal

SCHEMA = "oscar-zoo.eval-against/1"


@dataclass(frozen=True)
class AgainstRow:
    """One cache.

    Attributes:
        cache: `bf16`, or a name as in `--against`.
        title: for people.
        source: where the method is described; `None` for BF16.
        bits_per_element: of one stored element, with its share of scales, norms and the like.
        bits_per_element_with_windows: everything that a sequence of the measured length occupies,
            for each element of its rows.
        bits_per_element_at: the same for other sequences, by their tokens in `caches.CONTEXTS`.
        divergence: from what the model says with the exact cache, in nats per position.
        divergence_error: standard error over the windows of text; `None` for one window.
        perplexity: over all positions.
        perplexity_change: against BF16, in percent.
        perplexity_change_error: standard error of the change over the same windows, in percent.
        digits: share of the digits of all answers that are predicted right.
        digits_error: standard error over the prompts; `None` for one prompt.
        answers: share of the answers of which every digit is.
        answers_error: as that of the digits.
        pareto: whether no other cache has at most as many bits, windows included, and at most as
            much divergence.
        pareto_at: the same with the bits of other sequences, by their tokens in `caches.CONTEXTS`.
    """

    cache: str
    title: str
    source: str | None
    bits_per_element: float
    bits_per_element_with_windows: float
    bits_per_element_at: Mapping[str, float]
    divergence: float
    divergence_error: float | None
    perplexity: float
    perplexity_change: float
    perplexity_change_error: float | None
    digits: float
    digits_error: float | None
    answers: float
    answers_error: float | None
    pareto: bool = False
    pareto_at: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class AgainstReport:
    """What was measured.

    Attributes:
        rows: one per cache, by bits with windows.
        facts: what is needed to repeat them, plain JSON values.
        left_out: alternatives that do not fit the model, with the reason.
    """

    rows: tuple[AgainstRow, ...]
    facts: Mapping[str, Any]
    left_out: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """`{"schema": "oscar-zoo.eval-against/1", "rows": [...], ...}`; numbers that are not
        finite, which only a broken cache gives, are null."""
        rows = [{key: _finite(one) for key, one in asdict(row).items()} for row in self.rows]
        return {"schema": SCHEMA, **self.facts, "rows": rows, "left_out": dict(self.left_out)}


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def by_bits(rows: Sequence[AgainstRow]) -> tuple[AgainstRow, ...]:
    """Rows by their bits with windows, with the Pareto-optimal ones marked."""
    best = _best(rows, [row.bits_per_element_with_windows for row in rows])
    at = {
        n: _best(rows, [row.bits_per_element_at[n] for row in rows])
        for n in rows[0].bits_per_element_at
    }
    marked = [
        replace(row, pareto=best[i], pareto_at={n: one[i] for n, one in at.items()})
        for i, row in enumerate(rows)
    ]
    return tuple(
        sorted(marked, key=lambda row: (row.bits_per_element_with_windows, row.divergence))
    )


def _best(rows: Sequence[AgainstRow], bits: Sequence[float]) -> list[bool]:
    return pareto_optimal([(n, row.divergence) for n, row in zip(bits, rows, strict=True)])
