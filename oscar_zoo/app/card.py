"""Write the card of an artifact or of a hub: the `README.md` that hubs show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.output_files import check_file, write_file
from oscar_zoo.compute.report.data import MAX_BYTES
from oscar_zoo.errors import ConflictError, UsageError
from oscar_zoo.registry import card_front
from oscar_zoo.registry.card import BEGIN, END, TITLE, is_damaged, merged_card, new_card
from oscar_zoo.registry.card_front import with_metadata
from oscar_zoo.registry.card_table import CardRow, ReportFiles
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import INDEX_NAME, MAX_ROOT_BYTES
from oscar_zoo.registry.lookup import known_entries, look
from oscar_zoo.registry.targets import PathTarget, Target, parse

_KINDS = {".html": "page", ".png": "picture", ".json": "numbers"}
"""Suffix of a file of a report -> what it is."""


@dataclass(frozen=True)
class CardRequest:
    """What the card is of, and where it goes.

    Attributes:
        target: an artifact, a folder with one, or the folder of a hub; `None` for the one hub of
            `sources`.
        sources: the hubs. The first one that is named stands in the commands of the card.
        output: file to write, or `None`. What somebody wrote into it stays.
    """

    target: Target | None
    sources: Sources
    output: Path | None = None


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        content: the whole file.
        artifacts: ids of what it shows.
        output: the file that was written, or `None`.
        report: files of the report that now lie beside it.
    """

    content: bytes
    artifacts: tuple[str, ...]
    output: Path | None
    report: tuple[Path, ...] = ()


def card(
    target: str | Path | None = None,
    *,
    hubs: str | Sequence[str] | None = None,
    output: str | Path | None = None,
    offline: bool = False,
) -> Card:
    """The card of an artifact or of a hub.

    Args:
        target: a name, the folder of an artifact, or the folder of a hub; without one, the card is
            of the one hub in `hubs`.
        hubs: hubs as people write them.
        output: file to write. What somebody wrote outside of our markers stays byte for byte. The
            report that `compute` left beside the folder of an artifact is copied to it.
        offline: ask no hub over the network.

    Raises:
        UsageError: there is neither a target nor exactly one hub, or a name means several versions.
        NotFoundError: there is no such artifact or folder.
        ConflictError: the markers in the file are damaged.
    """
    parsed = None if target is None else parse(target)
    where = None if output is None else Path(output)
    return make_card(CardRequest(parsed, Sources(hubs, offline=offline), where))


def make_card(request: CardRequest) -> Card:
    """The card that `request` asks for; raises as `card`."""
    check_file(request.output)
    target, sources = request.target, request.sources
    where = sources.named[0] if sources.named else None
    if isinstance(target, PathTarget) and (target.path / INDEX_NAME).is_file():
        folder = f"file:{target.path.absolute()}"
        where, target, sources = where or folder, None, Sources(folder)
    if target is None:
        rows, title = _rows_of_hub(sources), TITLE
    else:
        (entry,), _ = known_entries([target], sources)
        rows, title = [CardRow.of_entry(entry)], f"INT2 rotation for {entry.id.model}"
    attached: tuple[Path, ...] = ()
    if request.output is not None and isinstance(target, PathTarget):
        attached = _attach(target.path, request.output.parent)
    report = ReportFiles(**{_KINDS[path.suffix]: path.name for path in attached})
    content = new_card(rows, where, title=title, report=report)
    if request.output is not None:
        if request.output.exists():
            before = read_file(request.output, max_bytes=MAX_ROOT_BYTES)
            _check_markers(request.output, before)
            if before.strip():
                content = with_metadata(merged_card(before, rows, where, report), rows)
        write_file(request.output, content)
    return Card(content, tuple(str(row.id) for row in rows), request.output, attached)


def _attach(folder: Path, place: Path) -> tuple[Path, ...]:
    """Copy the report that lies beside the folder of an artifact to `place`, as far as it is not
    there; what is of another kind than a plain file is left out."""
    artifact, attached = folder.resolve(), []
    for suffix in _KINDS:
        source = artifact.with_name(f"{artifact.name}.report{suffix}")
        if source.is_symlink() or not source.is_file():
            continue
        target = place / source.name
        if not target.exists() or not target.samefile(source):
            write_file(target, read_file(source, max_bytes=MAX_BYTES))
        attached.append(target)
    return tuple(attached)


def _rows_of_hub(sources: Sources) -> list[CardRow]:
    if len(sources.named) != 1:
        raise UsageError(
            "a card is of an artifact, or of one hub.",
            hint="oscar-zoo card Qwen3-8B, or oscar-zoo card --hub hf:my-org/zoo",
        )
    views, _ = look(sources.hubs)
    return [CardRow.of_index(entry) for view in views for entry in view.index.artifacts]


def _check_markers(path: Path, content: bytes) -> None:
    for markers, damaged in (
        ((BEGIN, END), is_damaged(content)),
        ((card_front.BEGIN, card_front.END), card_front.is_damaged(content)),
    ):
        if damaged:
            begin, end = (marker.decode() for marker in markers)
            raise ConflictError(
                f"{path} does not have {begin} and {end} once each, in this order.",
                hint="repair the two lines, or delete both: what is between them is added again",
            )
