"""The page of a report: one HTML file that needs no other file, with the answer first.

It has no script and makes no request, and its content security policy forbids both. Charts are
images inside the file. Every text is escaped, because names of models and notes are not trusted.
The same data gives the same bytes.
"""

from __future__ import annotations

import base64
import importlib.util
import math
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.width_selection import VerifiedWidths
from oscar_zoo.compute.report.data import Candidate, Comparison, ReportData
from oscar_zoo.errors import MissingDependency

NOT_MEASURED, NOT_APPLICABLE = "not measured", "–"
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


def plain(text: str) -> str:
    """`text` in one line, without control characters and without changes of writing direction."""
    return "".join(
        c for c in " ".join(text.split()) if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co")
    )


def perplexity(value: float) -> str:
    """Four significant digits: 9.654, 20.50, 4,754; a power of ten where it is huge."""
    if value >= _HUGE:
        return f"{value:.3e}"
    decimals = 3 - math.floor(math.log10(float(f"{value:.3e}")))
    return f"{value:,.{max(decimals, 0)}f}"


def change(percent: float) -> str:
    """A signed change: +0.22 %, +12.4 %, +49,143 %. From a million percent on, the model counts as
    broken."""
    if percent >= BROKEN:
        return "broken"
    decimals = 2 if abs(percent) < 9.995 else 1 if abs(percent) < 99.95 else 0
    return f"{percent:+,.{decimals}f} %"


def tick(percent: float) -> str:
    """A change on an axis, as short as it can be: 0, +10 %, -5 %."""
    return "0" if percent == 0 else f"{percent:+,.10g} %"


def share(value: float) -> str:
    """A share on an axis, in percent: 100 %, 1 %, 0.01 %."""
    return f"{100 * value:.6g} %" if value >= 9e-8 else f"{100 * value:.0e} %"


def clip(ratio: float) -> str:
    """A clip ratio; 0 and 1 clip nothing."""
    return "none" if ratio in (0, 1) else f"{ratio:.4g}"


def errors(values: Sequence[float]) -> list[str]:
    """Errors of one column with common decimals: three significant digits for the smallest."""
    smallest = min((value for value in values if value > 0), default=1.0)
    decimals = min(max(2 - math.floor(math.log10(smallest)), 3), 9)
    return [f"{value:,.{decimals}f}" if value < _HUGE else f"{value:.2e}" for value in values]


def target(estimator: str) -> str:
    """The matrix of an estimator in words, with its id."""
    known = _TARGETS.get(estimator)
    return f"{known} ({estimator})" if known else plain(estimator)


def answer(data: ReportData) -> tuple[str, str]:
    """Which method was kept, and the rest of that sentence."""
    chosen = data.comparison.chosen if data.comparison else None
    if data.widths is not None and (chosen is not None or data.comparison is None):
        # Candidates were measured with 2 bits, which only the first step has.
        bits, first = f"{data.widths.kept.bits:.4g} bits per element", data.widths.chosen == 0
        facts = _facts(data.widths.kept.verified or (first and chosen) or VerifiedWidths())
        if chosen is None:
            return bits, f" were chosen{facts}"
        return plain(chosen.method), f" was kept, with {bits}{facts}"
    if data.comparison is None:
        return "", "No method was measured; the spectra show what a fit would see."
    if chosen is None:
        return "", "No method was kept."
    return plain(chosen.method), f" was kept{_facts(chosen)}"


def _facts(found: Candidate | VerifiedWidths) -> str:
    """What was measured, behind the beginning of a sentence."""
    facts = []
    rise = None if found.change_percent is None else f"{change(found.change_percent)} against BF16"
    if isinstance(found, VerifiedWidths):
        facts += [f"perplexity {rise}"] if rise else []
    elif found.perplexity is not None:
        facts.append(f"perplexity {perplexity(found.perplexity)}" + (f" ({rise})" if rise else ""))
    if found.recall is not None:
        facts.append(f"recall {_recall(found.recall)}")
    if isinstance(found, Candidate) and found.output_error is not None:
        facts.append(f"output error {errors([found.output_error])[0]}")
    return f": {', '.join(facts)}." if facts else "."


def _recall(value: float) -> str:
    return f"{100 * value:.1f} %"


def _each(text: Callable[[float], str]) -> Callable[[Sequence[float]], list[str]]:
    return lambda values: [text(value) for value in values]


_COLUMNS: tuple[tuple[str, str, Callable[[Sequence[float]], list[str]]], ...] = (
    ("Clip K", "clip_k", _each(clip)),
    ("Clip V", "clip_v", _each(clip)),
    ("Output error", "output_error", errors),
    ("Sequences", "sequences", _each(str)),
    ("KL", "divergence", errors),
    ("Perplexity", "perplexity", _each(perplexity)),
    ("vs BF16", "change_percent", _each(change)),
    (
        "Std. error",
        "standard_error",
        _each(lambda x: NOT_APPLICABLE if x >= BROKEN else change(x).removeprefix("+")),
    ),
    ("Recall", "recall", _each(_recall)),
    ("Gate", "gate", _each(str)),
)
"""Head, field of a candidate, and its numbers as text."""


def table(comparison: Comparison) -> tuple[list[str], list[tuple[Candidate | None, list[str]]]]:
    """The comparison: its heads, and a row of text for BF16 and for each candidate. Columns that
    nothing was measured for are left out."""
    rows, own = comparison.candidates, comparison
    bf16 = {
        "output_error": "0",
        "divergence": "0",
        "sequences": str(max(row.sequences or 0 for row in rows)),
        "perplexity": NOT_MEASURED
        if own.bf16_perplexity is None
        else perplexity(own.bf16_perplexity),
        "recall": NOT_MEASURED if own.bf16_recall is None else _recall(own.bf16_recall),
    }
    heads, cells = ["Method"], [["BF16"], *([plain(row.method)] for row in rows)]
    for head, name, text in _COLUMNS:
        values = [getattr(row, name) for row in rows]
        known = iter(text([value for value in values if value is not None]))
        if any(value is not None for value in values):
            heads.append(head)
            shown = [NOT_MEASURED if value is None else next(known) for value in values]
            for line, one in zip(cells, [bf16.get(name, NOT_APPLICABLE), *shown], strict=True):
                line.append(one)
    return heads, list(zip([None, *rows], cells, strict=True))


def write_report(data: ReportData, html: Path, png: Path) -> None:
    """Write the page and the picture, and replace files of these names."""
    drawn = {html: render_html(data), png: render_png(data)}
    for path, content in drawn.items():
        with durable.storage_errors(f"cannot write {path}"):
            durable.replace_file(path, content)


def render_png(data: ReportData) -> bytes:
    """The picture, 1500 pixels wide; raises `MissingDependency` without matplotlib."""
    _require_matplotlib()
    from oscar_zoo.compute.report import charts

    return charts.render_png(data)


def render_html(data: ReportData) -> bytes:
    """The page; raises `MissingDependency` without matplotlib."""
    _require_matplotlib()
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from oscar_zoo.compute.report.charts import charts_of, render_svg

    environment = Environment(
        loader=PackageLoader("oscar_zoo.compute", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    kept, rest = answer(data)
    heads, rows = table(data.comparison) if data.comparison else ([], [])
    page = environment.get_template("page.html").render(
        data=data,
        kept=kept,
        rest=rest,
        heads=heads,
        rows=[(row, name, cells) for row, (name, *cells) in rows],
        nothing=(NOT_MEASURED, NOT_APPLICABLE),
        figures=[
            (chart, base64.b64encode(render_svg(chart, data)).decode()) for chart in charts_of(data)
        ],
    )
    return f"{page}\n".encode()


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency.for_extra("matplotlib", "compute")
