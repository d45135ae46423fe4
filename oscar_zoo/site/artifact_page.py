"""The page of one artifact: how good it is, how to use it, whether it fits, how it was made."""

from __future__ import annotations

from shlex import quote

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.index import ACCEPTED
from oscar_zoo.site import frame, numbers
from oscar_zoo.site.exhibit import Exhibit
from oscar_zoo.site.facts import contamination, fact_section
from oscar_zoo.site.figures import figure_section
from oscar_zoo.site.fit_table import fit_section
from oscar_zoo.site.html import Html, element, join
from oscar_zoo.site.score_table import score_section

ROOT = "../../"


def artifact_page(exhibit: Exhibit) -> bytes:
    """The page."""
    entry = exhibit.entry
    main = element(
        "article",
        element(
            "nav",
            element("a", "All artifacts", href=f"{ROOT}index.html"),
            aria_label="Breadcrumb",
            class_="crumbs",
        ),
        element("h1", entry.id.model),
        element("p", entry.id.tag, class_="tag title-tag"),
        _banner(entry),
        _tiles(exhibit),
        _use(entry),
        fit_section(exhibit),
        score_section(entry),
        figure_section(exhibit),
        fact_section(entry),
    )
    return frame.page(
        title=f"{entry.id.model} {entry.id.tag}",
        description=_summary(entry),
        root=ROOT,
        main=main,
        scripts=("fit.js", "copy.js"),
    )


def _summary(entry: Entry) -> str:
    facts = [
        ("GPQA", numbers.value_of(entry.gpqa, unit=True)),
        ("perplexity", numbers.percent_change(entry.perplexity_change)),
        ("recall", numbers.share(entry.recall)),
    ]
    known = ", ".join(f"{name} {value}" for name, value in facts if value)
    return f"A rotation for a 2-bit KV cache of {entry.id.model}" + (
        f": {known}." if known else "."
    )


def _banner(entry: Entry) -> Html | None:
    """Words that a reader needs before using it."""
    status, lines = entry.status, []
    if status.state != "active":
        reason = (status.reason or "no reason given").rstrip(".")
        instead = f" Use {status.replaced_by} instead." if status.replaced_by else ""
        gone = " No name finds it any more." if status.state == "yanked" else ""
        lines.append(f"This version is {status.state}: {reason}.{gone}{instead}")
    lines += [f"It {ACCEPTED[one]}." for one in entry.accepted]
    seen = contamination(entry)
    lines += [seen] if seen else []
    if not lines:
        return None
    bad = status.state == "yanked" or "poor" in entry.accepted
    css = "banner bad" if bad else "banner"
    return element("div", [element("p", line) for line in lines], class_=css, role="note")


def _tiles(exhibit: Exhibit) -> Html:
    entry = exhibit.entry
    gpqa = entry.gpqa
    tiles = [
        ("GPQA, INT2", numbers.value_of(gpqa), _beside(gpqa)),
        ("Perplexity", numbers.percent_change(entry.perplexity_change), "over BF16"),
        ("Recall", numbers.share(entry.recall), _recall_before(entry)),
        ("Cache of a token", *_token(exhibit)),
    ]
    return element(
        "dl",
        [
            element(
                "div",
                element("dt", name),
                element("dd", value or numbers.UNKNOWN, class_="value" if value else "value gap"),
                element("dd", beside, class_="beside") if value and beside else None,
            )
            for name, value, beside in tiles
        ],
        class_="tiles",
    )


def _beside(gpqa: Score | None) -> str | None:
    before = numbers.value_of(gpqa.baseline) if gpqa else None
    who = {"upstream": "reported upstream", "third_party": "by a third party"}
    said = who.get(gpqa.reporter, "measured") if gpqa else None
    return ", ".join(filter(None, (f"BF16 {before}" if before else None, said))) or None


def _recall_before(entry: Entry) -> str | None:
    measured = entry.measured
    before = numbers.share(measured.recall_bf16) if measured else None
    return f"BF16 {before}" if before else None


def _token(exhibit: Exhibit) -> tuple[str | None, str | None]:
    kinds = {cache.kind: cache.token for cache in exhibit.caches.get(1, ())}
    if not kinds:
        return None, None
    times = kinds["BF16"] / kinds["INT2"]
    return numbers.size(kinds["INT2"]), f"{times:.1f} times less than in BF16"


def _use(entry: Entry) -> Html | None:
    """The commands to copy; `None` for what no name finds."""
    if entry.status.state == "yanked":
        return None
    name = entry.id.reference
    hub = f" --hub {quote(entry.hubs[0])}" if entry.hubs else ""
    found = can_be_found(entry.model_id or entry.id.model)
    model = "" if found else " --model FOLDER"
    commands = [f"oscar-zoo serve {name}{hub}{model}", f"oscar-zoo pull {name}{hub}"]
    return element(
        "section",
        element("h2", "Use it", id="use"),
        [
            element("div", element("pre", _code(one), tabindex="0"), class_="command")
            for one in commands
        ],
        None if found else element("p", "FOLDER is the folder of the model.", class_="remark"),
    )


def _code(command: str) -> Html:
    """A command that breaks between its words, and not behind the hyphens of an option."""
    first, *rest = command.split(" ")
    words = [element("span", first), *(join((Html(" "), element("span", w))) for w in rest)]
    return element("code", words)
