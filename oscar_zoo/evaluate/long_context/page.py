"""The heat maps as a page of its own: tables with colours, which need no picture and no script."""

from __future__ import annotations

import html

from oscar_zoo.evaluate.cache_names import cache_title
from oscar_zoo.evaluate.long_context.families import FAMILIES
from oscar_zoo.evaluate.long_context.grid import RulerReport, length_text

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2128;--muted:#5d6670;--rule:#d5dae0}
@media(prefers-color-scheme:dark){:root{--paper:#14181d;--ink:#e8ebee;--muted:#a4adb7;--rule:#343b43}}
body{margin:2rem auto;max-width:75rem;padding:0 1rem;background:var(--paper);color:var(--ink);
font:1rem/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.05rem;margin:0 0 .3rem}p,caption{color:var(--muted)}
.maps{display:flex;flex-wrap:wrap;gap:1.5rem}.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:.3rem 0}th{font-weight:500;color:var(--muted);padding:.25rem .6rem}
td{padding:.25rem .7rem;text-align:right;border:1px solid var(--paper)}
.plain td{border-color:var(--rule)}
"""


def render_html(report: RulerReport, title: str) -> bytes:
    """A table per cache, length by depth, then all families and lengths; no network, no script."""
    maps = "".join(_map(report, cache) for cache in report.caches) if report.depths else ""
    head = html.escape(title)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
        " 'unsafe-inline'\">"
        f"<title>{head}</title><style>{STYLE}</style></head><body><main><h1>{head}</h1>"
        "<p>The share of right answers in percent, each answer counted as a whole. Facts lie at a"
        " depth of the prompt: 0 % is its beginning, 100 % is right before the question.</p>"
        f'<div class="maps">{maps}</div>{_families(report)}</main></body></html>\n'
    ).encode()


def _map(report: RulerReport, cache: str) -> str:
    head = "".join(f'<th scope="col">{length_text(n)}</th>' for n in report.lengths)
    rows = "".join(
        f'<tr><th scope="row">{depth:.0%}</th>'
        + "".join(_cell(report.place(cache, n, depth)) for n in report.lengths)
        + "</tr>"
        for depth in report.depths
    )
    return (
        f'<section><h2>{html.escape(cache_title(cache))}</h2><div class="scroll"><table>'
        "<caption>depth by tokens of the prompt</caption>"
        f'<thead><tr><th scope="col">depth</th>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div></section>"
    )


def _cell(share: float | None) -> str:
    if share is None:
        return "<td></td>"
    return f'<td style="{_colours(share)}">{100 * share:.0f}</td>'


def _colours(share: float) -> str:
    """Orange at 0, pale at 1/2, blue at 1, with text that is legible on it."""
    low, middle, high = (179, 74, 6), (243, 234, 217), (11, 106, 168)
    one, other, part = (low, middle, 2 * share) if share < 0.5 else (middle, high, 2 * share - 1)
    mixed = tuple(round(a + (b - a) * part) for a, b in zip(one, other, strict=True))
    ink = "#fff" if abs(share - 0.5) > 0.32 else "#1c2128"
    return f"background:rgb{mixed};color:{ink}".replace(" ", "")


def _families(report: RulerReport) -> str:
    """Every family and length, facts at all depths together."""
    head = "".join(f'<th scope="col">{length_text(n)}</th>' for n in report.lengths)
    rows = ""
    for cache in report.caches:
        for family in report.families:
            shares = (report.family(cache, family, n) for n in report.lengths)
            values = "".join(f"<td>{100 * share:.1f}</td>" for share in shares)
            name = html.escape(f"{cache_title(cache)}: {FAMILIES[family].title}")
            rows += f'<tr><th scope="row">{name}</th>{values}</tr>'
    return (
        '<h2>By family</h2><div class="scroll"><table class="plain">'
        "<caption>share of right answers in percent, by tokens of the prompt</caption>"
        f'<thead><tr><th scope="col">cache and family</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
