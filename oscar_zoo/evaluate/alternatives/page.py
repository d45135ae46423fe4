"""Loss against bits as a page of its own: the picture, and a table that says the same."""

from __future__ import annotations

import html

from oscar_zoo.evaluate.alternatives.chart import LONG, render
from oscar_zoo.evaluate.alternatives.report import AgainstReport, AgainstRow
from oscar_zoo.evaluate.long_context.grid import length_text
from oscar_zoo.evaluate.long_context.page import STYLE


def render_html(report: AgainstReport, title: str) -> bytes:
    """The SVG and the rows; no network, no script."""
    head = html.escape(title)
    drawn = render(report, title, svg=True).decode()
    picture = drawn[drawn.index("<svg") :]
    titles = (
        "cache", "bits", f"at {length_text(report.facts['length'])}",
        f"at {length_text(int(LONG))}", "KL, nats", "± KL", "perplexity, %", "± perplexity",
        "digits, %", "answers, %",
    )  # fmt: skip
    columns = "".join(f'<th scope="col">{name}</th>' for name in titles)
    rows = "".join(map(_row, report.rows))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        " 'unsafe-inline'\">"
        f"<title>{head}</title><style>{STYLE}</style></head><body><main><h1>{head}</h1>"
        f'<div class="scroll">{picture}</div>'
        "<p>Bits are those of an element with everything that a sequence of so many tokens"
        " occupies. A cache in bold is one that no other beats in bits and in KL at the measured"
        " length.</p>"
        f'<div class="scroll"><table class="plain"><thead><tr>{columns}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></main></body></html>\n"
    ).encode()


def _row(row: AgainstRow) -> str:
    name = html.escape(row.title)
    cells = (
        f"{row.bits_per_element:.2f}",
        f"{row.bits_per_element_with_windows:.2f}",
        f"{row.bits_per_element_at[LONG]:.2f}",
        f"{row.divergence:.2g}",
        _number(row.divergence_error, "{:.1g}"),
        f"{row.perplexity_change:+,.2f}",
        _number(row.perplexity_change_error, "{:,.2f}"),
        f"{100 * row.digits:.1f}",
        f"{100 * row.answers:.1f}",
    )
    values = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{f"<b>{name}</b>" if row.pareto else name}</th>{values}</tr>'


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)
