"""The page of a report: one HTML file that needs no other file, with the answer first.

It has no script and makes no request, and its content security policy forbids both. Charts are
images inside the file. Every text is escaped, because names of models and notes are not trusted.
The same data gives the same bytes.
"""

from __future__ import annotations

import base64
import importlib.util
from html import escape
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.data import Comparison, ReportData
from oscar_zoo.errors import MissingDependency

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
        title=escape(f"{text.plain(data.title)} · oscar-zoo report"),
        style=_STYLE,
        body="\n".join(part for part in parts if part),
    ).encode()


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency.for_extra("matplotlib", "compute")


def _heading(data: ReportData) -> str:
    kept, rest = text.answer(data)
    lines = [
        '<p class="kicker">oscar-zoo report</p>',
        f"<h1>{_text(data.title)}</h1>",
        (
            f'<p class="answer">{f"<strong>{_text(kept)}</strong>" if kept else ""}{_text(rest, strip=False)}</p>'  # noqa: E501
        ),
    ]
    if data.comparison is not None and data.comparison.reason is not None:
        lines.append(f'<p class="why">{escape(text.sentence(data.comparison.reason))}</p>')
    return "<header>\n" + "\n".join(lines) + "\n</header>"


def _comparison(comparison: Comparison | None) -> str:
    if comparison is None:
        return ""
    table = text.table(comparison)
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in table.heads)
    rows = "\n".join(_row(row) for row in table.rows)
    return (
        f"{_SIDEWAYS}\n<div"
        f' class="table">\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>'  # noqa: E501
    )


def _row(row: text.TableRow) -> str:
    name, *cells = row.cells
    shown = "".join(f"<td{_css(cell, row)}>{escape(cell)}</td>" for cell in cells)
    mark = f' <span class="mark">← {text.KEPT}</span>' if row.kept else ""
    css = ' class="kept"' if row.kept else ""
    return f'<tr{css}><th scope="row">{escape(name)}{mark}</th>{shown}</tr>'


def _css(cell: str, row: text.TableRow) -> str:
    name = (
        "none"
        if cell in (text.NOT_MEASURED, text.NOT_APPLICABLE)
        else row.gate
        if cell == row.gate
        else None
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
    return escape(text.plain(words) if strip else words)
