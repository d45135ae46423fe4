"""Everything that was said about the quality of an artifact: scores, their history, and what was
measured when it was made."""

from __future__ import annotations

from collections.abc import Iterable

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.entries import Entry
from oscar_zoo.site import numbers
from oscar_zoo.site.charts import history_chart
from oscar_zoo.site.html import Html, element

_WHO = {
    "upstream": "its authors",
    "third_party": "a third party",
    "measured": "oscar-zoo eval",
}


def score_section(entry: Entry) -> Html:
    """All scores with their reporters, and the figures of the fit."""
    found = [*_scores(entry.scores), *_measured(entry)]
    if not found:
        text = "Nobody has reported how good it is. Measure it yourself: "
        found = [element("p", text, element("code", "oscar-zoo eval"), class_="gap")]
    return element("section", element("h2", "Quality", id="quality"), found)


def _scores(scores: tuple[Score, ...]) -> list[Html]:
    if not scores:
        return []
    heads = ("Task", "BF16", "INT2", "Questions", "Runs", "Reported by")
    right = {"BF16", "INT2", "Questions", "Runs"}
    table = element(
        "table",
        element("caption", "Scores, each beside BF16 under the same settings where that is known"),
        element(
            "thead",
            element(
                "tr",
                [
                    element("th", head, scope="col", class_="n" if head in right else None)
                    for head in heads
                ],
            ),
        ),
        element("tbody", [_row(score) for score in scores]),
    )
    box = element("div", table, class_="table", role="region", tabindex="0", aria_label="Scores")
    charts = [history_chart([score]) for score in scores]
    drawn = [element("figure", chart) for chart in charts if chart is not None]
    return [box, *(remark for score in scores for remark in _remarks(score)), *drawn]


def _row(score: Score) -> Html:
    before = score.baseline
    source = [element("span", score.who or _WHO[score.reporter], class_=f"who {score.reporter}")]
    source += [element("br"), element("span", _source(score), class_="gap small")]
    runs = score.repeats or (len(score.seeds) if score.seeds else None)
    return element(
        "tr",
        element("th", score.task, scope="row"),
        _figure(before),
        _figure(score),
        element("td", str(score.n) if score.n else numbers.NONE, class_="n"),
        element("td", str(runs) if runs else numbers.NONE, class_="n"),
        element("td", source),
    )


def _figure(score: Score | None) -> Html:
    text = numbers.value_of(score, unit=True)
    if score is None or text is None:
        return element("td", numbers.NONE, class_="n gap")
    spread = None
    if score.stderr is None and score.spread is not None:
        kind = score.spread.kind or "of a kind that the source does not name"
        spread = element("span", f"spread {score.spread.value:g}, {kind}", class_="gap small")
    return element("td", text, [element("br"), spread] if spread else None, class_="n")


def _source(score: Score) -> str:
    harness = score.harness
    tool = None if harness is None else " ".join(filter(None, (harness.name, harness.version)))
    facts = (score.source, tool, score.hardware, score.date)
    return ", ".join(fact for fact in facts if fact) or "source not named"


def _remarks(score: Score) -> Iterable[Html]:
    """The comparison question by question, and earlier values, which are never dropped."""
    paired, unit = score.paired, numbers.unit_of(score)
    if paired is not None:
        points = "points" if unit == "%" else unit
        yield element(
            "p",
            f"{score.task}: on the same {paired.n} questions INT2 differs from BF16 by"
            f" {paired.difference:+.2f} {points} (95 % confidence: {paired.lower95:+.2f} to"
            f" {paired.upper95:+.2f}), so it is no worse than {paired.no_worse_than:.2f} {points}.",
            class_="remark",
        )
    if score.calibrated_on:
        yield element(
            "p", f"{score.task}: the calibration has seen questions of this set.", class_="remark"
        )
    for one, name in ((score, "INT2"), (score.baseline, "BF16")):
        for old in one.history if one else ():
            when = f" ({old.date})" if old.date else ""
            yield element(
                "p",
                f"Earlier value of {name} in {score.task}: {old.value:g}{when}, {old.source}.",
                class_="remark",
            )


def _measured(entry: Entry) -> list[Html]:
    """Perplexity and recall as they were found when it was made."""
    measured = entry.summary.measured
    if measured is None:
        return []
    lines = {"Perplexity": measured.perplexity_line, "Recall": measured.recall_line}
    facts = [(name, text) for name, text in lines.items() if text is not None]
    return [
        element("h3", "When it was made"),
        element(
            "dl",
            [part for name, text in facts for part in (element("dt", name), element("dd", text))],
            class_="facts",
        ),
        element("p", f"{measured.by[0].upper()}{measured.by[1:]}.", class_="remark"),
    ]
