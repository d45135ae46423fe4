"""The section of a card: a table of artifacts, and the words below it.

Values come from manifests, which anybody may have written, so they are escaped to plain text.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote

from oscar_zoo.artifact.manifest import Calibration, Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.index import Accepted, IndexEntry, Summary
from oscar_zoo.registry.measured import Measured, is_figure
from oscar_zoo.registry.score_file import in_order

_COLUMNS = ("Model", "Tag", "Method", "Format", "Bits", "Measured", "Scores", "Digest", "Status")
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|~$#&:@!^]|(?<=www)\.", re.IGNORECASE)
"""What could begin markup, an entity, a reference or, in some renderers, a link."""
_LONGEST = 120
_UNKNOWN = "not reported"
_ACCEPTED = {"poor": "poor quality accepted", "unmeasured": "published without measurements"}
_WHO = {"upstream": "upstream", "third_party": "a third party", "measured": "measured"}
_MEASURED = "Measured figures compare the INT2 cache with BF16 on text that was not calibrated on."
_SCORES = "Scores name who reports them; BF16 is the same measurement without a compressed cache."
_CITATION = """```bibtex
@misc{oscar,
  title = {OSCAR},
  archivePrefix = {arXiv},
  eprint = {2605.17757}
}
```"""


@dataclass(frozen=True)
class ReportFiles:
    """The report of a fit as it lies beside a card.

    Attributes:
        page, picture, numbers: names of the .html, .png and .json file, or `None`.
    """

    page: str | None = None
    picture: str | None = None
    numbers: str | None = None


@dataclass(frozen=True)
class CardRow:
    """One artifact as a card shows it.

    Attributes:
        calibration: the text that the fit saw, or `None` where only an index is known.
    """

    id: ArtifactId
    model: str | None
    summary: Summary
    scores: tuple[Score, ...]
    digest: str | None
    status: Status
    accepted: tuple[Accepted, ...] = ()
    calibration: Calibration | None = None

    @classmethod
    def of_index(cls, entry: IndexEntry) -> Self:
        """What the index of a hub says."""
        return cls(
            id=entry.artifact_id,
            model=entry.model,
            summary=entry.summary or Summary(),
            scores=entry.scores,
            digest=entry.digest,
            status=entry.status,
            accepted=entry.accepted,
        )

    @classmethod
    def of_entry(cls, entry: Entry) -> Self:
        """What the manifest says, too."""
        return cls(
            id=entry.id,
            model=entry.model_id,
            summary=entry.summary,
            scores=entry.scores,
            digest=entry.digest,
            status=entry.status,
            accepted=entry.accepted,
            calibration=entry.manifest.fit.calibration if entry.manifest else None,
        )

    @property
    def figures(self) -> Measured | None:
        """Perplexity and recall, as measured last or when the artifact was made."""
        return Measured.best(self.scores, self.summary.measured)


def section(rows: Sequence[CardRow], where: str | None, report: ReportFiles | None = None) -> str:
    """The table, how to get and serve what it lists, report, calibration, licences and citation.

    Args:
        report: of the only artifact, if it lies beside the card.
    """
    blocks = [[_row(_COLUMNS), _row(["---"] * len(_COLUMNS)), *(_row(_cells(row)) for row in rows)]]
    blocks += [[_MEASURED]] if any(row.figures for row in rows) else []
    blocks += [[_SCORES]] if any(row.scores for row in rows) else []
    blocks += _commands(rows, where)
    blocks += _report(report) if report else []
    blocks += [lines for lines in (list(_calibrations(rows)), list(_licenses(rows))) if lines]
    blocks.append(["The method is OSCAR, arXiv 2605.17757. To cite it:"])
    blocks.append([_CITATION])
    return "\n\n".join("\n".join(lines) for lines in blocks)


def escape(text: str) -> str:
    """`text` as one line of plain Markdown in a table cell: no markup, no links, no HTML, no hidden
    characters."""
    kept = "".join(
        " " if c.isspace() else c for c in text if c.isspace() or unicodedata.category(c)[0] != "C"
    )
    line = " ".join(kept.split())
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return _SPECIAL.sub(r"\\\g<0>", line)


def license_of(rows: Sequence[CardRow]) -> str | None:
    """The licence of all artifacts, or `None` where they differ or one has none."""
    found = {row.summary.license for row in rows}
    return next(iter(found)) if len(found) == 1 else None


def _commands(rows: Sequence[CardRow], where: str | None) -> list[list[str]]:
    """What to type for the first artifact that is offered by name."""
    active = [row for row in rows if row.status.state == "active"]
    if not active:
        return []
    name = active[0].id.reference
    shown = "".join(c for c in where or "" if c.isprintable())
    hub = f" --hub {shlex.quote(shown)}" if shown else ""
    found = can_be_found(active[0].model or active[0].id.model)
    serve = f"oscar-zoo serve {name}" + ("" if found else " --model FOLDER")
    blocks = [["```", f"oscar-zoo pull {name}{hub}", serve, "```"]]
    return blocks if found else [*blocks, ["FOLDER is the folder of the model."]]


def _report(report: ReportFiles) -> list[list[str]]:
    """The picture, and links to the page and its numbers."""
    blocks = []
    if report.picture is not None:
        blocks.append([f"![Report of the fit: methods, spectra, clips]({quote(report.picture)})"])
    named = (("Report of the fit", report.page), ("its numbers", report.numbers))
    links = [f"[{words}]({quote(name)})" for words, name in named if name is not None]
    return [*blocks, [", ".join(links)]] if links else blocks


def _calibrations(rows: Sequence[CardRow]) -> Iterable[str]:
    """A line for each fit whose text is known."""
    for row in rows:
        used = row.calibration
        if used is None:
            continue
        tokens = used.tokens_used or used.tokens_requested
        facts = [escape(used.dataset or "text that is not named")]
        facts += [f"{tokens:,} tokens"] if tokens else []
        seen = ", ".join(map(escape, used.overlaps_with))
        facts += [f"with questions of {seen}"] if seen else []
        yield f"- Calibration of `{row.id.reference}`: {', '.join(facts)}"


def _licenses(rows: Sequence[CardRow]) -> Iterable[str]:
    """One line where all have one licence, else a line for each that is known."""
    same = license_of(rows)
    if same is not None:
        yield f"Licence of the rotations: {escape(same)}"
        return
    for row in rows:
        if row.summary.license is not None:
            yield f"- Licence of `{row.id.reference}`: {escape(row.summary.license)}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: CardRow) -> list[str]:
    summary = row.summary
    model = escape(row.model or row.id.model)
    return [
        model,
        f"`{row.id.tag}`",
        escape(summary.method or _UNKNOWN),
        str(summary.format_version or _UNKNOWN),
        f"{summary.bits_per_element:.2f}" if summary.bits_per_element else _UNKNOWN,
        _measured(row.figures),
        "; ".join(_score(score) for score in in_order(row.scores) if not is_figure(score))
        or _UNKNOWN,
        f"`{row.digest[:19]}`" if row.digest else _UNKNOWN,
        _status(row),
    ]


def _measured(measured: Measured | None) -> str:
    """Both values of each, and who measured."""
    if measured is None:
        return _UNKNOWN
    facts = {"perplexity": measured.perplexity_line, "recall": measured.recall_line}
    return "; ".join(
        escape(text)
        for text in (*(f"{n} {line}" for n, line in facts.items() if line), measured.by)
    )


def _score(score: Score) -> str:
    who = score.who or _WHO[score.reporter]
    unit = "" if score.unit == "percent" else f" {escape(score.unit)}"
    before = f" (BF16 {_value(score.baseline)})" if score.baseline else ""
    times = "" if score.n is None else f", n {score.n}"
    runs = "" if score.repeats is None else f", {score.repeats} runs"
    cache = "" if score.kv_dtype == "int2" else f" with {score.kv_dtype.upper()}"
    seen = ", calibrated on this set" if score.calibrated_on else ""
    changes = ", ".join(f"{name} {value}" for name, value in score.recipe_changes.items())
    other = f", with {escape(changes)}" if changes else ""
    measured = f"{escape(score.task)}{cache} {_value(score)}{unit}{before}{times}{runs}"
    return f"{measured}, {escape(who)}{other}{seen}"


def _value(score: Score) -> str:
    if score.value is None:
        return _UNKNOWN
    return f"{score.value:.2f}" + (f" ± {score.stderr:.2f}" if score.stderr is not None else "")


def _status(row: CardRow) -> str:
    status = row.status
    if status.state == "active":
        return "; ".join(("active", *(_ACCEPTED[what] for what in row.accepted)))
    instead = f"; use {escape(status.replaced_by)}" if status.replaced_by else ""
    return f"{status.state}: {escape(status.reason or 'no reason given')}{instead}"
