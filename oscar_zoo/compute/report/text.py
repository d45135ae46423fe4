"""The words of a report: its numbers, its answer and its table, the same on page and picture.

Everything here is plain text, which the page escapes. A value that was not measured says so; it is
never a blank or a zero.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oscar_zoo.artifact.width_selection import WidthStep
from oscar_zoo.compute.report.data import Candidate, Comparison, ReportData, Verdict

NOT_MEASURED = "not measured"
NOT_APPLICABLE = "–"
KEPT = "kept"

BROKEN = 1e6
"""Percent over BF16 from which a number says nothing more."""
_HUGE = 1e9
"""Numbers from this size on are written as powers of ten."""

_TARGETS = {
    "qqt/1": "covariance of the queries",
    "kk/1": "covariance of the keys",
    "sst/1": "weighted covariance of the values",
    "oo/1": "covariance of the outputs",
    "vv/1": "covariance of the values",
}


@dataclass(frozen=True)
class TableRow:
    """One row of the table: its cells as text, its gate's verdict, and whether it was kept."""

    cells: tuple[str, ...]
    gate: Verdict | None = None
    kept: bool = False


@dataclass(frozen=True)
class Table:
    """The comparison: the first column is text, the others are numbers with their units."""

    heads: tuple[str, ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class _Column:
    head: str
    bf16: Callable[[Comparison], str]
    value: Callable[[Candidate], float | str | None]
    text: Callable[[Sequence[float]], list[str]]


def plain(text: str) -> str:
    """`text` in one line, without control characters and without changes of writing direction."""
    return "".join(
        c for c in " ".join(text.split()) if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
    )


def significant(value: float, digits: int) -> str:
    """`value` with that many significant digits: 9.654, 20.50, 4,754.

    Huge values are written as powers of ten.
    """
    if value == 0:
        return "0"
    if abs(value) >= _HUGE:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    return f"{value:,.{min(max(decimals, 0), 12)}f}"


def perplexity(value: float) -> str:
    """Four significant digits."""
    return significant(value, 4)


def change(percent: float) -> str:
    """A signed change: +0.22 %, +12.4 %, +49,143 %.

    From a million percent on, the model counts as broken.
    """
    if percent >= BROKEN:
        return "broken"
    decimals = 2 if abs(percent) < 9.995 else 1 if abs(percent) < 99.95 else 0
    return f"{percent:+,.{decimals}f} %"


def percent(value: float) -> str:
    """An amount in percent, without a sign."""
    return NOT_APPLICABLE if value >= BROKEN else change(value).removeprefix("+")


def tick(percent: float) -> str:
    """A change on an axis, as short as it can be: 0, +10 %, -5 %."""
    return "0" if percent == 0 else f"{percent:+,.10g} %"


def share(value: float) -> str:
    """A share on an axis, in percent: 100 %, 1 %, 0.01 %."""
    return f"{100 * value:.6g} %" if value >= 9e-8 else f"{100 * value:.0e} %"


def recall(value: float) -> str:
    """A share of answers, in percent."""
    return f"{100 * value:.1f} %"


def clip(ratio: float) -> str:
    """A clip ratio; 0 and 1 clip nothing."""
    return "none" if ratio in (0, 1) else f"{ratio:.4g}"


def errors(values: Sequence[float]) -> list[str]:
    """Errors of one column with common decimals: three significant digits for the smallest."""
    smallest = min((value for value in values if value > 0), default=1.0)
    decimals = min(max(2 - math.floor(math.log10(smallest)), 3), 9)
    return [f"{value:,.{decimals}f}" if value < _HUGE else f"{value:.2e}" for value in values]


def sentence(reason: str) -> str:
    """Why a method was kept, with a full stop."""
    text = plain(reason)
    return f"Why: {text}" if text.endswith((".", "!", "?")) else f"Why: {text}."


def target(estimator: str) -> str:
    """The matrix of an estimator in words, with its id."""
    known = _TARGETS.get(estimator)
    return f"{known} ({estimator})" if known else plain(estimator)


def answer(data: ReportData) -> tuple[str, str]:
    """Which method was kept, and the rest of that sentence."""
    if data.comparison is None and data.widths is not None:
        step = data.widths.kept
        return f"{step.bits:.4g} bits per element", f" {_buys(step)}"
    if data.comparison is None:
        return "", "No method was measured; the spectra show what a fit would see."
    chosen = data.comparison.chosen
    if chosen is None:
        return "", "No method was kept."
    facts = []
    if chosen.perplexity is not None:
        against = (
            ""
            if chosen.change_percent is None
            else f" ({change(chosen.change_percent)} against BF16)"
        )
        facts.append(f"perplexity {perplexity(chosen.perplexity)}{against}")
    if chosen.recall is not None:
        facts.append(f"recall {recall(chosen.recall)}")
    if chosen.output_error is not None:
        facts.append(f"output error {errors([chosen.output_error])[0]}")
    return plain(chosen.method), " was kept" + (f": {', '.join(facts)}." if facts else ".")


def _buys(step: WidthStep) -> str:
    """What was measured with the chosen bits."""
    found, facts = step.verified, list[str]()
    if found is not None and found.change_percent is not None:
        facts.append(f"perplexity {change(found.change_percent)} against BF16")
    if found is not None and found.recall is not None:
        facts.append(f"recall {recall(found.recall)}")
    return "were chosen" + (f": {', '.join(facts)}." if facts else ".")


def table(comparison: Comparison) -> Table:
    """The comparison as text, BF16 first; columns that nothing was measured for are left out."""
    rows = comparison.candidates
    columns = [column for column in _COLUMNS if any(column.value(row) is not None for row in rows)]
    written = [_column(column, rows) for column in columns]
    names = [plain(row.method) for row in rows]
    body = [
        TableRow((name, *(texts[index] for texts in written)), rows[index].gate, rows[index].chosen)
        for index, name in enumerate(names)
    ]
    bf16 = TableRow(("BF16", *(column.bf16(comparison) for column in columns)))
    return Table(("Method", *(column.head for column in columns)), (bf16, *body))


def _column(column: _Column, rows: Sequence[Candidate]) -> list[str]:
    values = [column.value(row) for row in rows]
    texts = iter(column.text([value for value in values if isinstance(value, float)]))
    return [
        NOT_MEASURED if value is None else value if isinstance(value, str) else next(texts)
        for value in values
    ]


def _most_sequences(comparison: Comparison) -> str:
    return str(max((row.sequences or 0 for row in comparison.candidates), default=0))


def _whole(values: Sequence[float]) -> list[str]:
    return [f"{value:.0f}" for value in values]


def _each(text: Callable[[float], str]) -> Callable[[Sequence[float]], list[str]]:
    return lambda values: [text(value) for value in values]


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return NOT_MEASURED if value is None else text(value)


_COLUMNS = (
    _Column("Clip K", lambda _: NOT_APPLICABLE, lambda r: r.clip_k, _each(clip)),
    _Column("Clip V", lambda _: NOT_APPLICABLE, lambda r: r.clip_v, _each(clip)),
    _Column("Output error", lambda _: "0", lambda r: r.output_error, errors),
    _Column("Sequences", _most_sequences, lambda r: r.sequences and float(r.sequences), _whole),
    _Column("KL", lambda _: "0", lambda r: r.divergence, errors),
    _Column(
        "Perplexity",
        lambda all_: _known(all_.bf16_perplexity, perplexity),
        lambda r: r.perplexity,
        _each(perplexity),
    ),
    _Column("vs BF16", lambda _: NOT_APPLICABLE, lambda r: r.change_percent, _each(change)),
    _Column("Std. error", lambda _: NOT_APPLICABLE, lambda r: r.standard_error, _each(percent)),
    _Column("Recall", lambda c: _known(c.bf16_recall, recall), lambda r: r.recall, _each(recall)),
    _Column("Gate", lambda _: NOT_APPLICABLE, lambda r: r.gate, _each(str)),
)
