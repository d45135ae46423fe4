"""The `README.md` of a hub or of an artifact: metadata in its front matter, and a section with a
table, each between two markers.

Everything outside the markers belongs to the owner and stays byte for byte; what has damaged
markers is left alone, and a key of the metadata that the owner has is not written. Values come from
manifests, which anybody may have written, so they are escaped to plain text.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.entries import Entry, entry_of_index
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.measured import Measured, is_figure
from oscar_zoo.registry.score_file import in_order, is_of_recipe, value_text

BEGIN = b"<!-- oscar-zoo:begin -->"
END = b"<!-- oscar-zoo:end -->"
TITLE = "Rotations for 2-bit KV caches"
Report = Mapping[str, str]
"""Suffix (`.html`, `.png`, `.json`) -> name of a file of a report that lies beside a card."""


def update_card(card: bytes | None, old: Index, new: Index, *, hub: str) -> bytes:
    """The card that fits the index `new`: a whole new one where nobody edited it, else `card` with
    what stands between its markers replaced, or a section added."""
    rows = rows_of(new)
    if card is None or card == new_card(rows_of(old), hub):
        return new_card(rows, hub)
    return card if is_damaged(card) else merged_front(merged_card(card, rows, hub), rows)


def rows_of(index: Index) -> list[Entry]:
    return [entry_of_index(entry) for entry in index.artifacts]


def merged_card(
    card: bytes, rows: Sequence[Entry], where: str | None, report: Report | None = None
) -> bytes:
    """`card` with its section replaced or added; itself where the markers are damaged."""
    begin, end = card.find(BEGIN), card.find(END)
    made = _section(rows, where, report)
    if begin < 0 and end < 0:
        gap = b"" if not card else b"\n" if card.endswith(b"\n") else b"\n\n"
        return card + gap + made + b"\n"
    return card if is_damaged(card) else card[:begin] + made + card[end + len(END) :]


def is_damaged(card: bytes | None) -> bool:
    return _is_unpaired(card or b"", BEGIN, END)


def _is_unpaired(text: bytes, begin: bytes, end: bytes) -> bool:
    if begin not in text and end not in text:
        return False
    return text.count(begin) != 1 or text.count(end) != 1 or text.find(end) < text.find(begin)


def new_card(
    rows: Sequence[Entry], where: str | None, *, title: str = TITLE, report: Report | None = None
) -> bytes:
    """A whole card; `where` is the hub as commands take it."""
    head = f"---\n{_kept(rows, frozenset())}\n---\n\n# {escape(title)}\n\n"
    return head.encode() + _section(rows, where, report) + b"\n"


FRONT_BEGIN = b"# oscar-zoo:begin"
FRONT_END = b"# oscar-zoo:end"
TAGS = ("sglang", "kv-cache", "int2", "oscar", "quantization")
_BLOCK = re.compile(rb"\A---[ \t]*\r?\n(.*?\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_KEY = re.compile(rb"^([A-Za-z_-]+)[ \t]*:", re.MULTILINE)
_SPDX = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]{0,63}")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_GPQA = "Idavidrein/gpqa"
"""Data set of all tasks whose name begins with `gpqa_`, which are its parts."""
_LONGEST = 120
_NOT_PLAIN = re.compile(r"[^\w .,+/()%-]|(?<=www)\.", re.IGNORECASE)


def merged_front(card: bytes, rows: Sequence[Entry], *, add: bool = False) -> bytes:
    """`card` with new keys between the markers of its front matter, if it has them. With `add`, for
    an owner who asks for the metadata, what is missing is added."""
    found = _BLOCK.match(card)
    if found is None:
        return f"---\n{_kept(rows, frozenset())}\n---\n\n".encode() + card if add else card
    front = found[1]
    is_marked = FRONT_BEGIN in front or FRONT_END in front
    if is_front_damaged(card) or not (is_marked or add):
        return card
    begin = end = len(front)
    if is_marked:
        begin, end = front.find(FRONT_BEGIN), front.find(FRONT_END) + len(FRONT_END)
    before, after = front[:begin], front[end:] if is_marked else b"\n"
    keys = _kept(rows, frozenset(key.decode() for key in _KEY.findall(before + after)))
    if not is_marked and keys.count("\n") == 1:  # the owner has every key
        return card
    return card[: found.start(1)] + before + keys.encode() + after + card[found.end(1) :]


def is_front_damaged(card: bytes) -> bool:
    found = _BLOCK.match(card)
    return _is_unpaired(found[1] if found else b"", FRONT_BEGIN, FRONT_END)


def _kept(rows: Sequence[Entry], taken: frozenset[str]) -> str:
    """The keys between the markers, without those that are `taken`."""
    license_id = _license_of(rows) or ""
    ids = {row.model_id or "" for row in rows}
    models = sorted(filter(_REPO.fullmatch, ids))
    index = [entry for row in rows if (entry := _evaluations(row)) is not None]
    keys: dict[str, Any] = {
        "pipeline_tag": "text-generation",
        "library_name": "oscar-zoo",
        "license": license_id.lower() if _SPDX.fullmatch(license_id) else None,
        "base_model": models,
        "tags": list(TAGS),
        "model-index": index,
    }
    lines = [line for key, value in keys.items() if key not in taken for line in _lines(key, value)]
    return "\n".join([FRONT_BEGIN.decode(), *lines, FRONT_END.decode()])


def _lines(key: str, value: Any) -> Iterable[str]:
    if not value:
        return
    if isinstance(value, str):
        yield f"{key}: {value}"
        return
    yield f"{key}:"
    for item in value:
        plain = item if isinstance(item, str) else json.dumps(item, ensure_ascii=False)
        yield f"- {plain}"


def _evaluations(row: Entry) -> dict[str, Any] | None:
    """An entry of `model-index`: every value of INT2 under the recipe, beside BF16."""
    shown = [score for score in in_order(row.scores) if is_of_recipe(score)]
    if not shown or row.status.state == "yanked":
        return None
    return {"name": row.id.reference, "results": [_result(row, score) for score in shown]}


def _result(row: Entry, score: Score) -> dict[str, Any]:
    task = _text(score.task)
    dataset: dict[str, Any] = {"name": task, "type": re.sub(r"[^A-Za-z0-9._/-]+", "-", task)}
    if re.fullmatch(r"gpqa_[a-z]+", task):
        dataset |= {"type": _GPQA, "config": task}
    if re.fullmatch(r"[0-9a-f]{40}", score.dataset_revision or ""):
        dataset["revision"] = score.dataset_revision
    pair = [("INT2", score), *([("BF16", score.baseline)] if score.baseline else [])]
    metrics = [
        {
            "type": _text(one.metric),
            "value": round(one.value, 4),
            "name": _text(f"{one.metric}, {kind} KV cache, {score.who or score.reporter}"),
        }
        for kind, one in pair
        if one.value is not None and abs(one.value) < 1e15
    ]
    name = f"{task}, {row.id.reference}"
    asked = {"type": "text-generation", "name": name}
    return {"task": asked, "dataset": dataset, "metrics": metrics}


def _text(words: str) -> str:
    """`words` in one line, with nothing that a hub could take for markup or for a link."""
    return " ".join(_NOT_PLAIN.sub(" ", words).split())[:_LONGEST].rstrip() or "-"


_COLUMNS = ("Model", "Tag", "Method", "Format", "Bits", "Measured", "Scores", "Digest", "Status")
_SPECIAL = re.compile(r"[\\`*_{}\[\]<>|~$#&:@!^]|(?<=www)\.", re.IGNORECASE)
"""What could begin markup, an entity, a reference or, in some renderers, a link."""
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


def _section(rows: Sequence[Entry], where: str | None, report: Report | None) -> bytes:
    """The table, how to get and serve what it lists, report, calibration, licences and citation."""
    table = [_row(_COLUMNS), _row(["---"] * len(_COLUMNS)), *(_row(_cells(row)) for row in rows)]
    blocks = ["\n".join(table)]
    blocks += [_MEASURED] if any(row.measured for row in rows) else []
    blocks += [_SCORES] if any(row.scores for row in rows) else []
    blocks += _commands(rows, where)
    blocks += _report(report or {})
    blocks += ["\n".join(lines) for lines in (_calibrations(rows), _licenses(rows)) if lines]
    blocks += ["The method is OSCAR, arXiv 2605.17757. To cite it:", _CITATION]
    return b"\n".join([BEGIN, "\n\n".join(blocks).encode(), END])


def escape(text: str) -> str:
    """`text` as one line of a table cell: no markup, links, HTML or hidden characters."""
    kept = "".join(
        " " if c.isspace() else c for c in text if c.isspace() or unicodedata.category(c)[0] != "C"
    )
    line = " ".join(kept.split())
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
    return _SPECIAL.sub(r"\\\g<0>", line)


def _license_of(rows: Sequence[Entry]) -> str | None:
    found = {row.summary.license for row in rows}
    return next(iter(found)) if len(found) == 1 else None


def _commands(rows: Sequence[Entry], where: str | None) -> Iterator[str]:
    """What to type for the first artifact that is offered by name."""
    active = [row for row in rows if row.status.state == "active"]
    if active:
        name, shown = active[0].id.reference, "".join(c for c in where or "" if c.isprintable())
        hub = f" --hub {shlex.quote(shown)}" if shown else ""
        found = can_be_found(active[0].model_id or active[0].id.model)
        model = "" if found else " --model FOLDER"
        yield f"```\noscar-zoo pull {name}{hub}\noscar-zoo serve {name}{model}\n```"
        if not found:
            yield "FOLDER is the folder of the model."


def _report(report: Report) -> Iterator[str]:
    if ".png" in report:
        yield f"![Report of the fit: methods, spectra, clips]({quote(report['.png'])})"
    named = (("Report of the fit", ".html"), ("its numbers", ".json"))
    links = [f"[{words}]({quote(report[kind])})" for words, kind in named if kind in report]
    if links:
        yield ", ".join(links)


def _calibrations(rows: Sequence[Entry]) -> list[str]:
    lines = []
    for row in rows:
        if (used := row.calibration) is not None:
            tokens = used.tokens_used or used.tokens_requested
            facts = [escape(used.dataset or "text that is not named")]
            facts += [f"{tokens:,} tokens"] if tokens else []
            seen = ", ".join(map(escape, used.overlaps_with))
            facts += [f"with questions of {seen}"] if seen else []
            lines.append(f"- Calibration of `{row.id.reference}`: {', '.join(facts)}")
    return lines


def _licenses(rows: Sequence[Entry]) -> list[str]:
    same = _license_of(rows)
    if same is not None:
        return [f"Licence of the rotations: {escape(same)}"]
    known = ((row.id.reference, row.summary.license) for row in rows)
    return [f"- Licence of `{name}`: {escape(text)}" for name, text in known if text is not None]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Entry) -> list[str]:
    summary = row.summary
    return [
        escape(row.model_id or row.id.model),
        f"`{row.id.tag}`",
        escape(summary.method or _UNKNOWN),
        str(summary.format_version or _UNKNOWN),
        f"{summary.bits_per_element:.2f}" if summary.bits_per_element else _UNKNOWN,
        _measured(row.measured),
        "; ".join(_score(score) for score in in_order(row.scores) if not is_figure(score))
        or _UNKNOWN,
        f"`{row.digest[:19]}`" if row.digest else _UNKNOWN,
        _status(row),
    ]


def _measured(measured: Measured | None) -> str:
    if measured is None:
        return _UNKNOWN
    facts = {"perplexity": measured.perplexity_line, "recall": measured.recall_line}
    lines = [f"{name} {line}" for name, line in facts.items() if line]
    return "; ".join(map(escape, (*lines, measured.by)))


def _score(score: Score) -> str:
    who = score.who or _WHO[score.reporter]
    unit = "" if score.unit == "percent" else f" {escape(score.unit)}"
    before = f" (BF16 {value_text(score.baseline) or _UNKNOWN})" if score.baseline else ""
    times = "" if score.n is None else f", n {score.n}"
    runs = "" if score.repeats is None else f", {score.repeats} runs"
    cache = "" if score.kv_dtype == "int2" else f" with {score.kv_dtype.upper()}"
    seen = ", calibrated on this set" if score.calibrated_on else ""
    changes = ", ".join(f"{name} {value}" for name, value in score.recipe_changes.items())
    other = f", with {escape(changes)}" if changes else ""
    measured = (
        f"{escape(score.task)}{cache} {value_text(score) or _UNKNOWN}{unit}{before}{times}{runs}"
    )
    return f"{measured}, {escape(who)}{other}{seen}"


def _status(row: Entry) -> str:
    status = row.status
    if status.state == "active":
        return "; ".join(("active", *(_ACCEPTED[what] for what in row.accepted)))
    instead = f"; use {escape(status.replaced_by)}" if status.replaced_by else ""
    return f"{status.state}: {escape(status.reason or 'no reason given')}{instead}"
