"""The part of a hub's `README.md` that this tool keeps: a table of the index between two markers.

Everything outside the markers belongs to the owner of the hub and stays byte for byte; a card with
damaged markers is left alone. Values come from manifests, which anybody may have written, so they
are escaped to plain text.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.index import Index, IndexEntry, Summary
from oscar_zoo.registry.measured import Measured, is_figure
from oscar_zoo.registry.score_history import in_order

BEGIN = b"<!-- oscar-zoo:begin -->"
END = b"<!-- oscar-zoo:end -->"

_COLUMNS = ("Model", "Tag", "Method", "Format", "Bits", "Measured", "Scores", "Digest", "Status")
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|~$#&:@!^]|(?<=www)\.", re.IGNORECASE)
"""What could begin markup, an entity, a reference or, in some renderers, a link."""
_LONGEST = 120
_UNKNOWN = "not reported"
_ACCEPTED = {"poor": "poor quality accepted", "unmeasured": "published without measurements"}
_WHO = {"upstream": "upstream", "third_party": "a third party", "measured": "measured"}


def update_card(card: bytes | None, old: Index, new: Index, *, hub: str) -> bytes:
    """The card that fits the index `new`.

    Args:
        card: the present `README.md`, or `None` when there is none.
        old: the index it was made for.
        new: the index to show.
        hub: the hub as commands take it.

    Returns:
        A whole new card where there was none, or one that nobody edited; else `card` with its
        section replaced, or added at the end. `card` itself where its markers are damaged.
    """
    if card is None or card == _new_card(old, hub):
        return _new_card(new, hub)
    begin, end = card.find(BEGIN), card.find(END)
    if begin < 0 and end < 0:
        gap = b"" if not card else b"\n" if card.endswith(b"\n") else b"\n\n"
        return card + gap + _section(new, hub) + b"\n"
    if card.count(BEGIN) != 1 or card.count(END) != 1 or end < begin:
        return card
    return card[:begin] + _section(new, hub) + card[end + len(END) :]


def is_damaged(card: bytes | None) -> bool:
    """Whether the markers of `card` do not enclose exactly one section."""
    if card is None or (BEGIN not in card and END not in card):
        return False
    return card.count(BEGIN) != 1 or card.count(END) != 1 or card.find(END) < card.find(BEGIN)


def escape(text: str) -> str:
    """`text` as one line of plain Markdown in a table cell: no markup, no links, no HTML, no hidden
    characters."""
    kept = "".join(
        " " if c.isspace() else c for c in text if c.isspace() or unicodedata.category(c)[0] != "C"
    )
    line = " ".join(kept.split())
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return _SPECIAL.sub(r"\\\g<0>", line)


def _new_card(index: Index, hub: str) -> bytes:
    licenses = {entry.summary.license if entry.summary else None for entry in index.artifacts}
    license_id = next(iter(licenses)) if len(licenses) == 1 else None
    front = ["---", "library_name: oscar-zoo", "tags:", "- kv-cache", "- quantization"]
    if license_id is not None and _SPDX.fullmatch(license_id):
        front.append(f"license: {license_id.lower()}")
    text = "\n".join([*front, "---", "", "# Rotations for 2-bit KV caches", "", ""])
    return text.encode() + _section(index, hub) + b"\n"


def _section(index: Index, hub: str) -> bytes:
    lines = [
        _row(_COLUMNS),
        _row(["---"] * len(_COLUMNS)),
        *(_row(_cells(entry)) for entry in index.artifacts),
    ]
    active = [entry for entry in index.artifacts if entry.status.state == "active"]
    if any(_figures(entry) for entry in index.artifacts):
        lines += [
            "",
            "Measured figures compare the INT2 cache with BF16 on text that was not calibrated on.",
        ]
    if any(entry.scores for entry in index.artifacts):
        lines += [
            "",
            (
                "Scores name who reports them; BF16 is the same measurement without a compressed"
                " cache."
            ),
        ]
    if active:
        name, where = (
            active[0].artifact_id.reference,
            shlex.quote("".join(c for c in hub if c.isprintable())),
        )
        found = can_be_found(active[0].model or active[0].artifact_id.model)
        serve = f"oscar-zoo serve {name}" if found else f"oscar-zoo serve {name} --model FOLDER"
        lines += ["", "```", f"oscar-zoo pull {name} --hub {where}", serve, "```"]
        lines += [] if found else ["", "FOLDER is the folder of the model."]
    return b"\n".join([BEGIN, "\n".join(lines).encode(), END])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(entry: IndexEntry) -> list[str]:
    summary = entry.summary or Summary()
    name = entry.artifact_id
    model = escape(entry.model or name.model)
    return [
        model,
        f"`{name.tag}`",
        escape(summary.method or _UNKNOWN),
        str(summary.format_version or _UNKNOWN),
        f"{summary.bits_per_element:.2f}" if summary.bits_per_element else _UNKNOWN,
        _measured(_figures(entry)),
        "; ".join(_score(score) for score in in_order(entry.scores) if not is_figure(score))
        or _UNKNOWN,
        f"`{entry.digest[:19]}`",
        _status(entry),
    ]


def _figures(entry: IndexEntry) -> Measured | None:
    """Perplexity and recall, as measured last or when the artifact was made."""
    return Measured.best(entry.scores, entry.summary.measured if entry.summary else None)


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
    measured = f"{escape(score.task)}{cache} {_value(score)}{unit}{before}{times}{runs}"
    return f"{measured}, {escape(who)}{seen}"


def _value(score: Score) -> str:
    if score.value is None:
        return _UNKNOWN
    return f"{score.value:.2f}" + (f" ± {score.stderr:.2f}" if score.stderr is not None else "")


def _status(entry: IndexEntry) -> str:
    status = entry.status
    if status.state == "active":
        return "; ".join(("active", *(_ACCEPTED[what] for what in entry.accepted)))
    instead = f"; use {escape(status.replaced_by)}" if status.replaced_by else ""
    return f"{status.state}: {escape(status.reason or 'no reason given')}{instead}"
