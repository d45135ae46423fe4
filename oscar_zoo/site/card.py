"""Write the card of an artifact or of a hub: the `README.md` that hubs show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PlainSerializer

from oscar_zoo.artifact.durable import check_file, write_file
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.outcome import says
from oscar_zoo.compute.report.data import MAX_BYTES
from oscar_zoo.errors import ConflictError, UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import card as cards
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.hubs.base import INDEX_NAME, MAX_ROOT_BYTES
from oscar_zoo.registry.lookup import known_entries, look
from oscar_zoo.registry.targets import PathTarget, parse
from oscar_zoo.site.params import CardParams
from oscar_zoo.verb import python_call

_REPORT_SUFFIXES = (".html", ".png", ".json")


@dataclass(frozen=True)
class Card:
    """What oscar-zoo card prints: the README.md of an artifact or of a hub."""

    content: Annotated[
        bytes,
        PlainSerializer(lambda content: content.decode("utf-8", "replace"), return_type=str),
        Field(serialization_alias="card", description="The whole card, in Markdown."),
    ]
    artifacts: Annotated[tuple[str, ...], says("MODEL/TAG of what it shows.")]
    output: Annotated[Path | None, says("The file that was written.")]
    report: Annotated[
        tuple[Path, ...], says("Files of the report that now lie beside the card.")
    ] = ()
    schema: Literal["oscar-zoo.card/1"] = "oscar-zoo.card/1"


def run(params: CardParams, observer: Observer = SILENT) -> Card:
    """The card of an artifact or of a hub. What somebody wrote outside of our markers stays byte
    for byte. The report that `compute` left beside the folder of an artifact is copied to it.
    """
    target = None if params.target is None else parse(params.target)
    sources, output = Sources(params.hubs, offline=params.offline), params.output
    check_file(output)
    where = sources.named[0] if sources.named else None
    if isinstance(target, PathTarget) and (target.path / INDEX_NAME).is_file():
        folder = f"file:{target.path.absolute()}"
        where, target, sources = where or folder, None, Sources(folder)
    if target is None:
        if len(sources.named) != 1:
            raise UsageError(
                "a card is of an artifact, or of one hub.",
                hint="oscar-zoo card Qwen3-8B, or oscar-zoo card --hub hf:my-org/zoo",
            )
        views, _ = look(sources.hubs)
        rows, title = [row for view in views for row in cards.rows_of(view.index)], cards.TITLE
    else:
        (entry,), _ = known_entries([target], sources)
        rows, title = [entry], f"INT2 rotation for {entry.id.model}"
    attached: tuple[Path, ...] = ()
    if output is not None and isinstance(target, PathTarget):
        attached = _attach(target.path, output.parent)
    report = {path.suffix: path.name for path in attached}
    content = cards.new_card(rows, where, title=title, report=report)
    if output is not None:
        if output.exists():
            before = read_file(output, max_bytes=MAX_ROOT_BYTES)
            _check_markers(output, before)
            if before.strip():
                merged = cards.merged_card(before, rows, where, report)
                content = cards.merged_front(merged, rows, add=True)
        write_file(output, content)
    return Card(content, tuple(str(row.id) for row in rows), output, attached)


card = python_call(CardParams, run)


def _attach(folder: Path, place: Path) -> tuple[Path, ...]:
    """Copy the report that lies beside the folder of an artifact to `place`, as far as it is not
    there; what is of another kind than a plain file is left out."""
    artifact, attached = folder.resolve(), []
    for suffix in _REPORT_SUFFIXES:
        source = artifact.with_name(f"{artifact.name}.report{suffix}")
        if source.is_symlink() or not source.is_file():
            continue
        target = place / source.name
        if not target.exists() or not target.samefile(source):
            write_file(target, read_file(source, max_bytes=MAX_BYTES))
        attached.append(target)
    return tuple(attached)


def _check_markers(path: Path, content: bytes) -> None:
    section, front = cards.is_damaged(content), cards.is_front_damaged(content)
    if section or front:
        begin, end = (cards.BEGIN, cards.END) if section else (cards.FRONT_BEGIN, cards.FRONT_END)
        raise ConflictError(
            f"{path} does not have {begin.decode()} and {end.decode()} once each, in this order.",
            hint="repair the two lines, or delete both: what is between them is added again",
        )
