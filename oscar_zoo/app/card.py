"""Write the card of an artifact or of a hub: the `README.md` that hubs show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.files import check_file, write_file
from oscar_zoo.app.known import known_entries
from oscar_zoo.app.sources import Sources
from oscar_zoo.app.targets import PathTarget, Target, parse
from oscar_zoo.artifact.files import read_file
from oscar_zoo.errors import ConflictError, UsageError
from oscar_zoo.hubs.base import INDEX_NAME, MAX_ROOT_BYTES
from oscar_zoo.registry.card import BEGIN, END, is_damaged, merged_card, new_card
from oscar_zoo.registry.card_table import CardRow
from oscar_zoo.registry.hub_queries import look


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
    """

    content: bytes
    artifacts: tuple[str, ...]
    output: Path | None


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
        output: file to write. What somebody wrote outside of our markers stays byte for byte.
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
        rows, title = _rows_of_hub(sources), None
    else:
        (entry,), _ = known_entries([target], sources)
        rows, title = [CardRow.of_entry(entry)], f"INT2 rotation for {entry.id.model}"
    named = {} if title is None else {"title": title}
    content = new_card(rows, where, **named)
    if request.output is not None:
        if request.output.exists():
            before = read_file(request.output, max_bytes=MAX_ROOT_BYTES)
            _check_markers(request.output, before)
            content = merged_card(before, rows, where) if before.strip() else content
        write_file(request.output, content)
    return Card(content, tuple(str(row.id) for row in rows), request.output)


def _rows_of_hub(sources: Sources) -> list[CardRow]:
    if len(sources.named) != 1:
        raise UsageError(
            "a card is of an artifact, or of one hub.",
            hint="oscar-zoo card Qwen3-8B, or oscar-zoo card --hub hf:my-org/zoo",
        )
    views, _ = look(sources.hubs)
    return [CardRow.of_index(entry) for view in views for entry in view.index.artifacts]


def _check_markers(path: Path, content: bytes) -> None:
    if is_damaged(content):
        raise ConflictError(
            f"{path} does not have {BEGIN.decode()} and {END.decode()} once each, in this order.",
            hint="repair the two lines, or delete both: the section then goes to the end",
        )
