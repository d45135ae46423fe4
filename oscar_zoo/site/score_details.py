"""What is known about one score besides its value: the comparison question by question, earlier
values, and how it was measured."""

from __future__ import annotations

from collections.abc import Iterable

from oscar_zoo.artifact.specs import Score
from oscar_zoo.site import numbers
from oscar_zoo.site.charts import history_chart
from oscar_zoo.site.html import Html, element


def score_details(score: Score) -> Html | None:
    """All of it, below the name of the task; `None` where nobody said more than a value."""
    said = [*_remarks(score), *_chart(score), *_settings(score)]
    if not said:
        return None
    cache = "" if score.kv_dtype == "int2" else f", {score.kv_dtype.upper()} cache"
    return element("div", element("h3", f"{score.task}{cache}"), said)


def _remarks(score: Score) -> Iterable[Html]:
    """The comparison, and earlier values, which are never dropped."""
    for text in _sentences(score):
        yield element("p", text, class_="remark")


def _sentences(score: Score) -> Iterable[str]:
    paired, unit = score.paired, numbers.unit_of(score)
    kind = score.kv_dtype.upper()
    if paired is not None:
        points = "points" if unit == "%" else f"in {score.metric}"
        many = "question" if paired.n == 1 else f"{paired.n:,} questions"
        yield (
            f"On the same {many} {kind} differs from BF16 by {paired.difference:+.2f} {points}"
            f" (95 % confidence: {paired.lower95:+.2f} to {paired.upper95:+.2f}), so it is no worse"
            f" than {paired.no_worse_than:.2f} {points}."
        )
    for one, name in ((score, kind), (score.baseline, "BF16")):
        spread = one.spread if one and one.stderr is None else None
        if spread is not None:
            what = spread.kind or "of a kind that the source does not name"
            yield f"Spread of {name}: {spread.value:g}, {what}."
    if score.calibrated_on:
        yield "The calibration has seen questions of this set."
    if score.recipe_changes:
        changes = ", ".join(f"{name} {value}" for name, value in score.recipe_changes.items())
        yield f"Not measured under the recipe, but with {changes}."
    for one, name in ((score, kind), (score.baseline, "BF16")):
        for old in one.history if one else ():
            when = f" ({old.date})" if old.date else ""
            yield f"Earlier value of {name} in {score.task}: {old.value:g}{when}, {old.source}."


def _chart(score: Score) -> Iterable[Html]:
    drawn = history_chart([score])
    if drawn is not None:
        kind = score.kv_dtype.upper()
        caption = f"{score.task} over time, {kind} filled and BF16 hollow"
        figure = element("figure", element("figcaption", caption), drawn)
        yield element("div", figure, class_="charts")


def _settings(score: Score) -> Iterable[Html]:
    facts = [(name, text) for name, text in _facts(score) if text]
    if facts:
        parts = [one for name, text in facts for one in (element("dt", name), element("dd", text))]
        summary = element("summary", "How it was measured")
        yield element("details", summary, element("dl", parts, class_="facts"))


def _facts(score: Score) -> Iterable[tuple[str, str | Html | None]]:
    engine = score.engine
    yield "Engine", " ".join(filter(None, (engine.name, engine.version))) if engine else None
    yield "Data", _code(score.dataset_revision)
    yield "Sampling", ", ".join(f"{k} {v:g}" for k, v in (score.sampling or {}).items())
    yield "Thinking", None if score.thinking is None else "on" if score.thinking else "off"
    if score.generation_cap is not None:
        yield "Longest answer", f"{score.generation_cap:,} tokens"
    yield "Answers cut there", _cut(score)
    yield "Seeds", ", ".join(map(str, score.seeds or ()))
    yield "Value of each run", ", ".join(f"{value:.2f}" for value in score.values or ())
    if score.tokens is not None:
        asked, answered = score.tokens.prompt, score.tokens.completion
        yield "Tokens", f"{asked:,} read, {answered:,} generated"
    if score.paired is not None and score.paired.p_value is not None:
        yield "McNemar's exact test", f"p = {score.paired.p_value:.3g}"
    yield "Measured with", _code(score.artifact_digest)
    yield "Answers kept", _code(score.responses_sha256 and f"sha256:{score.responses_sha256}")


def _cut(score: Score) -> str | None:
    pairs = ((score.kv_dtype.upper(), score), ("BF16", score.baseline))
    shares = [
        f"{name} {100 * one.exhausted_rate:.1f} %"
        for name, one in pairs
        if one is not None and one.exhausted_rate is not None
    ]
    return ", ".join(shares) or None


def _code(text: str | None) -> Html | None:
    return element("code", text) if text else None
