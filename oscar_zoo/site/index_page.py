"""The first page: all artifacts in one table that can be searched and sorted."""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.site import frame, numbers
from oscar_zoo.site.charts import Pair, pair_chart
from oscar_zoo.site.exhibit import Exhibit
from oscar_zoo.site.html import Html, element

_REPORTERS = {"upstream": "upstream", "third_party": "third party", "measured": "measured"}
_COLUMNS = (
    ("Model", "text"),
    ("Family", "text"),
    ("Bits", "number"),
    ("GPQA BF16", "number"),
    ("GPQA INT2", "number"),
    ("Perplexity", "number"),
    ("Recall", "number"),
    ("Size", "number"),
    ("Status", "text"),
    ("Digest", "text"),
)
"""Heads of the table and how they sort. A cell has the head too, for narrow screens."""
_ACCEPTED = {"poor": "poor perplexity", "unmeasured": "not measured"}
"""What was published in spite of the quality gate, below the status."""


def index_page(exhibits: Sequence[Exhibit], recipes: Sequence[ModelRecipe]) -> bytes:
    """The page.

    Args:
        recipes: models without an artifact.
    """
    scale = _scale(exhibits)
    main = element(
        "div",
        _heading(exhibits),
        _controls(exhibits),
        element(
            "div",
            element(
                "table",
                element(
                    "caption",
                    "Artifacts. GPQA is accuracy in percent with its standard error where one is"
                    " known. Perplexity is its change over BF16, lower is better. Recall is the"
                    " share of facts answered right beyond the part of the cache that stays in"
                    " BF16. On a line below two scores, BF16 is hollow and INT2 filled.",
                ),
                element("thead", element("tr", _heads(), role="row"), role="rowgroup"),
                element("tbody", [_row(exhibit, scale) for exhibit in exhibits], role="rowgroup"),
                id="zoo",
                role="table",
                class_="stack",
            ),
            class_="table",
            role="region",
            tabindex="0",
            aria_label="Artifacts of the zoo",
        ),
        element("p", "No artifact has all these words.", id="none", hidden=True),
        _without(recipes),
    )
    return frame.page(
        title=frame.TITLE,
        description=f"{len(exhibits)} rotations for 2-bit KV caches, with their quality.",
        root="",
        main=main,
        scripts=("table.js",),
        wide=True,
    )


def _heading(exhibits: Sequence[Exhibit]) -> Html:
    models = len({exhibit.entry.id.model.casefold() for exhibit in exhibits})
    artifacts = "1 artifact" if len(exhibits) == 1 else f"{len(exhibits):,} artifacts"
    of = "1 model" if models == 1 else f"{models:,} models"
    return element(
        "div",
        element("h1", "The zoo"),
        element(
            "p",
            "A rotation mixes the numbers of a key or a value before they are stored, so that two"
            " bits are enough for each. One small pair of files makes the KV cache of a model"
            " about seven times smaller. The method is ",
            element("a", "OSCAR", href=frame.PAPER, rel="noopener noreferrer"),
            ".",
            class_="lede",
        ),
        element("p", f"{artifacts} for {of}.", class_="count", id="count", role="status"),
        class_="intro",
    )


def _controls(exhibits: Sequence[Exhibit]) -> Html:
    families = sorted({e.entry.family for e in exhibits if e.entry.family}, key=str.casefold)
    return element(
        "div",
        element(
            "p",
            element("label", "Search", for_="search"),
            element(
                "input",
                id="search",
                type="search",
                autocomplete="off",
                spellcheck="false",
                placeholder="model, tag, digest …",
            ),
        ),
        element(
            "p",
            element("label", "Family", for_="family"),
            element(
                "select",
                element("option", "All", value=""),
                [element("option", name, value=name) for name in families],
                id="family",
            ),
        ),
        element(
            "p",
            element("label", "Sort by", for_="order"),
            element(
                "select",
                [
                    element("option", head, value=number)
                    for number, (head, _) in enumerate(_COLUMNS)
                ],
                id="order",
            ),
            class_="narrow",
        ),
        class_="controls",
        id="controls",
        hidden=True,
    )


def _heads() -> list[Html]:
    return [
        element(
            "th",
            head,
            scope="col",
            role="columnheader",
            data_kind=kind,
            class_="n" if kind == "number" else None,
        )
        for head, kind in _COLUMNS
    ]


def _row(exhibit: Exhibit, scale: tuple[float, float] | None) -> Html:
    entry = exhibit.entry
    gpqa = entry.gpqa
    before = gpqa.baseline if gpqa else None
    state = entry.status.state
    bits = entry.summary.bits_per_element
    accepted = [_ACCEPTED[one] for one in entry.accepted]
    facts = (str(entry.id), entry.model_id, entry.digest, entry.family, state, *accepted)
    words = " ".join(filter(None, facts))
    name = element(
        "a",
        element("span", entry.id.model, class_="model"),
        element("span", entry.id.tag, class_="tag"),
        href=exhibit.path,
    )
    return element(
        "tr",
        element("th", name, scope="row", role="rowheader", data_sort=str(entry.id)),
        _text("Family", entry.family),
        _number("Bits", bits, None if bits is None else f"{bits:.2f}"),
        _number("GPQA BF16", before.value if before else None, numbers.value_of(before)),
        _number(
            "GPQA INT2",
            gpqa.value if gpqa else None,
            numbers.value_of(gpqa),
            *_evidence(gpqa, scale),
        ),
        _number(
            "Perplexity", entry.perplexity_change, numbers.percent_change(entry.perplexity_change)
        ),
        _number("Recall", entry.recall, numbers.share(entry.recall)),
        _number("Size", entry.payload_bytes, numbers.size(entry.payload_bytes)),
        _cell("Status", state, _status(entry), class_="s"),
        _cell("Digest", entry.digest or "", _digest(entry.digest), class_="d"),
        role="row",
        data_words=words.casefold(),
        data_family=entry.family or "",
    )


def _status(entry: Entry) -> list[Html]:
    state = entry.status.state
    accepted = [
        element("span", _ACCEPTED[one], class_=f"below accepted {one}") for one in entry.accepted
    ]
    return [element("span", state, class_=f"state {state}"), *accepted]


def _evidence(gpqa: Score | None, scale: tuple[float, float] | None) -> list[Html]:
    """Who says so, and both values on the scale of all rows."""
    if gpqa is None:
        return []
    said = element("span", _REPORTERS[gpqa.reporter], class_=f"who {gpqa.reporter}")
    if scale is None or gpqa.baseline is None or gpqa.baseline.value is None:
        return [said]
    return [pair_chart(Pair(gpqa.baseline, gpqa), scale), said]


def _scale(exhibits: Sequence[Exhibit]) -> tuple[float, float] | None:
    """The range of all GPQA values with their errors."""
    ends: list[float] = []
    for score in filter(None, (exhibit.entry.gpqa for exhibit in exhibits)):
        for one in filter(None, (score, score.baseline)):
            if one.value is not None:
                ends += [one.value - (one.stderr or 0), one.value + (one.stderr or 0)]
    return (min(ends) - 1, max(ends) + 1) if ends else None


def _digest(digest: str | None) -> Html:
    short = numbers.short_digest(digest)
    if short is None:
        return element("span", numbers.NONE, class_="gap")
    return element("code", short, title=digest)


def _text(head: str, value: str | None) -> Html:
    shown = value or element("span", numbers.NONE, class_="gap")
    return _cell(head, (value or "").casefold(), shown)


def _number(head: str, value: float | None, text: str | None, *more: Html) -> Html:
    shown = [
        element("span", text, class_="v") if text else element("span", numbers.NONE, class_="gap"),
        *more,
    ]
    return _cell(head, "" if value is None else f"{value:.10g}", shown, class_="n")


def _cell(
    head: str, key: str, shown: Html | str | Sequence[Html], *, class_: str | None = None
) -> Html:
    inside = element("div", shown, class_="cell")
    return element("td", inside, role="cell", data_head=head, data_sort=key, class_=class_)


def _without(recipes: Sequence[ModelRecipe]) -> Html | None:
    """Models that can be served as soon as somebody computes a rotation."""
    if not recipes:
        return None
    named = [
        element("li", recipe.name, " ", element("span", recipe.family, class_="gap"))
        for recipe in recipes
    ]
    return element(
        "section",
        element("h2", f"{len(recipes)} models without a published rotation"),
        element(
            "p",
            "The zoo knows their shapes and settings. One command computes a rotation: ",
            element("code", "oscar-zoo pull MODEL --compute"),
        ),
        element("details", element("summary", "Show the models"), element("ul", named)),
        class_="without",
    )
