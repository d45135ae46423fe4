"""Everything that was said about the quality of an artifact: scores, their history, and what was
measured when it was made."""

from __future__ import annotations

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.entries import Entry
from oscar_zoo.site import numbers, tables
from oscar_zoo.site.html import Html, element
from oscar_zoo.site.score_details import score_details
from oscar_zoo.site.tables import Row

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
    name = "Scores, each beside BF16 under the same settings where that is known"
    heads = ("Task", "Cache", "Score", "BF16", "Questions", "Runs", "Reported by")
    right = ("Score", "BF16", "Questions", "Runs")
    details = [score_details(score) for score in scores]
    return [
        tables.table(name, heads, map(_row, scores), right=right),
        *(one for one in details if one is not None),
    ]


def _row(score: Score) -> Row:
    runs = score.repeats or (len(score.seeds) if score.seeds else None)
    reported = [
        element("span", score.who or _WHO[score.reporter], class_=f"who {score.reporter}"),
        element("span", _source(score), class_="gap small below"),
    ]
    if score.date:
        reported.append(element("span", score.date, class_="gap small below date"))
    cells = (
        score.kv_dtype.upper(),
        _figure(score),
        _figure(score.baseline),
        str(score.n) if score.n else None,
        str(runs) if runs else None,
        reported,
    )
    return Row(score.task, cells)


def _figure(score: Score | None) -> list[Html] | None:
    text = numbers.value_of(score, unit=True)
    if score is None or text is None:
        return None
    parts = [element("span", text)]
    if score.stderr is None and score.spread is not None:
        spread = f"spread {score.spread.value:g}"
        parts.append(element("span", spread, class_="gap small below"))
    return parts


def _source(score: Score) -> str:
    harness = score.harness
    tool = None if harness is None else " ".join(filter(None, (harness.name, harness.version)))
    facts = (score.source, tool, score.hardware)
    return ", ".join(fact for fact in facts if fact) or "source not named"


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
