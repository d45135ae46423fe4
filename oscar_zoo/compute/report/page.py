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
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.width_selection import WidthStep
from oscar_zoo.compute.report.data import Candidate, Comparison, ReportData, Verdict
from oscar_zoo.errors import MissingDependency

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


class TableRow(NamedTuple):
    """One row of the table: its cells as text, its gate's verdict, and whether it was kept."""

    cells: tuple[str, ...]
    gate: Verdict | None = None
    kept: bool = False


class Table(NamedTuple):
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
    """`value` with that many significant digits: 9.654, 20.50, 4,754. Huge values are written as
    powers of ten."""
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
    """A signed change: +0.22 %, +12.4 %, +49,143 %. From a million percent on, the model counts as
    broken."""
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


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""

HEAD = _PAGE.partition('<meta name="color-scheme"')[0]
"""How every page begins: with the policy that forbids scripts and requests."""

_STYLE = """\
:root { --font: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif;
  --page: #ffffff; --ink: #1c2128; --muted: #5d6670; --rule: #d5dae0; --soft: #f3f5f7;
  --good: #1a7437; --warn: #8f5e00; --bad: #b3261e; }
@media screen and (prefers-color-scheme: dark) { :root {
  --page: #0f1419; --ink: #e3e9f0; --muted: #9aa4af; --rule: #333b45; --soft: #181f27;
  --good: #57c27a; --warn: #dfa83f; --bad: #ff8078; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 var(--font); }
main { max-width: 1024px; margin: 0 auto; padding: 28px 24px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0; }
p { margin: 0 0 8px; }
.kicker, .why, figcaption, footer, .none { color: var(--muted); }
.kicker { font-size: 13px; margin: 0 0 2px; }
.answer { font-size: 18px; }
.table { overflow-x: auto; max-width: 100%; margin: 18px 0 20px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 6px 14px; text-align: right; border-bottom: 1px solid var(--rule); }
th:first-child { text-align: left; padding-left: 8px; position: sticky; left: 0; background: var(--page); }
thead th { color: var(--muted); font-weight: 600; font-size: 13px; border-bottom-width: 2px; }
tbody th { font-weight: 400; }
.kept > *, .kept > th:first-child { background: var(--soft); font-weight: 700; }
.mark { color: var(--good); font-size: 13px; }
.pass { color: var(--good); } .warn { color: var(--warn); } .fail { color: var(--bad); font-weight: 700; }
.facts { display: grid; grid-template-columns: max-content 1fr max-content 1fr; gap: 2px 14px; margin: 0 0 20px;
  font-size: 13.5px; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.notes { margin: 0 0 20px; padding: 8px 14px 8px 30px; border-left: 3px solid var(--warn); background: var(--soft); }
figure { margin: 30px 0 0; min-width: 0; break-inside: avoid; }
figcaption { font-size: 13.5px; margin: 0 0 6px; }
.chart { overflow-x: auto; }
.sideways { display: none; color: var(--muted); font-size: 13px; margin: 8px 0 4px; }
img { width: 100%; min-width: 640px; height: auto; display: block; background: #ffffff; border-radius: 4px; }
footer { font-size: 13px; margin: 36px 0 0; border-top: 1px solid var(--rule); padding-top: 10px; }
@media screen and (max-width: 760px) {
  .facts { grid-template-columns: max-content 1fr; }
  main { padding: 20px 14px 36px; } th, td { padding: 6px 9px; }
  thead th, th:first-child { white-space: normal; } .sideways { display: block; }
  .table, .chart { border-right: 2px dashed var(--rule); }
}
@media print {
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 11px; } main { max-width: none; padding: 0; }
  h1 { font-size: 18px; } h2 { font-size: 13px; } .answer { font-size: 14px; }
  table, thead th, .facts, figcaption, footer, .kicker { font-size: 10.5px; }
  th, td { padding: 3px 7px; } .table, .chart { overflow: visible; } img { min-width: 0; }
  figure { margin-top: 14px; } figcaption { margin: 0; }
}
"""  # noqa: E501


_SIDEWAYS = '<p class="sideways">Scroll sideways to see all of it →</p>'
"""A hint that only a narrow screen shows, above what may be wider than the screen."""


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
    parts = [
        _heading(data),
        _comparison(data.comparison),
        _facts(data),
        _notes(data),
        *_figures(data),
        _footer(),
    ]
    return _PAGE.format(
        title=escape(f"{plain(data.title)} · oscar-zoo report"),
        style=_STYLE,
        body="\n".join(part for part in parts if part),
    ).encode()


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency.for_extra("matplotlib", "compute")


def _heading(data: ReportData) -> str:
    kept, rest = answer(data)
    lines = [
        '<p class="kicker">oscar-zoo report</p>',
        f"<h1>{_text(data.title)}</h1>",
        (
            f'<p class="answer">{f"<strong>{_text(kept)}</strong>" if kept else ""}{_text(rest, strip=False)}</p>'  # noqa: E501
        ),
    ]
    if data.comparison is not None and data.comparison.reason is not None:
        lines.append(f'<p class="why">{escape(sentence(data.comparison.reason))}</p>')
    return "<header>\n" + "\n".join(lines) + "\n</header>"


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    told = table(comparison)
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in told.heads)
    rows = "\n".join(_row(row) for row in told.rows)
    return (
        f"{_SIDEWAYS}\n<div"
        f' class="table">\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>'  # noqa: E501
    )


def _row(row: TableRow) -> str:
    name, *cells = row.cells
    shown = "".join(f"<td{_css(cell, row)}>{escape(cell)}</td>" for cell in cells)
    mark = f' <span class="mark">← {KEPT}</span>' if row.kept else ""
    css = ' class="kept"' if row.kept else ""
    return f'<tr{css}><th scope="row">{escape(name)}{mark}</th>{shown}</tr>'


def _css(cell: str, row: TableRow) -> str:
    name = (
        "none" if cell in (NOT_MEASURED, NOT_APPLICABLE) else row.gate if cell == row.gate else None
    )
    return f' class="{name}"' if name else ""


def _facts(data: ReportData) -> str:
    if not data.facts:
        return ""
    lines = "\n".join(
        f"<dt>{_text(fact.label)}</dt><dd>{_text(fact.value)}</dd>" for fact in data.facts
    )
    return f'<dl class="facts">\n{lines}\n</dl>'


def _notes(data: ReportData) -> str:
    if not data.notes:
        return ""
    return (
        '<ul class="notes">\n'
        + "\n".join(f"<li>{_text(note)}</li>" for note in data.notes)
        + "\n</ul>"
    )


def _figures(data: ReportData) -> list[str]:
    from oscar_zoo.compute.report.charts import charts_of, render_svg

    figures = []
    for chart in charts_of(data):
        image = base64.b64encode(render_svg(chart, data)).decode()
        title, caption = escape(chart.title), escape(chart.caption)
        figures.append(
            f"<figure>\n<h2>{title}</h2>\n<figcaption>{caption}</figcaption>\n"
            f"{_SIDEWAYS}\n"
            f'<div class="chart"><img alt="{title}" src="data:image/svg+xml;base64,{image}"></div>'
            "\n</figure>"
        )
    return figures


def _footer() -> str:
    return (
        "<footer>Drawn by oscar-zoo; draw it again from its JSON with <code>oscar-zoo"
        " plot</code>.</footer>"
    )


def _text(words: str, *, strip: bool = True) -> str:
    """Untrusted text, escaped for HTML and in one line."""
    return escape(plain(words) if strip else words)
