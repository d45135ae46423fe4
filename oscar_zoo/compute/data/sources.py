"""Where calibration text comes from: a path, a name known here, or a Hugging Face dataset.

An existing path wins over a name. A source is one or more streams of documents, opened as they are
read, together with the facts about it for the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from oscar_zoo.compute.data import evaluation_sets, known
from oscar_zoo.compute.data.dataset_names import GRAMMAR, DatasetName
from oscar_zoo.compute.data.documents import (
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    Document,
    Message,
    documents_of,
    folder_files,
    read_file,
)
from oscar_zoo.compute.data.hf_datasets import load_library, open_dataset, parquet_rows
from oscar_zoo.errors import MissingDependency, NetworkError, PathNotFound
from oscar_zoo.evaluate import shared

SHUFFLE_WINDOW = 10_000
"""Rows of a dataset among which a seed chooses; files are shuffled whole."""

_TABLES = (".parquet", ".arrow", ".csv", ".gz", ".zst")
_FILES = (*JSONL_SUFFIXES, *TEXT_SUFFIXES, *_TABLES, ".md")


@dataclass(frozen=True)
class TextSource:
    """Documents, and where they are from.

    Attributes:
        streams: sequences are dealt to them in turn; mostly one.
        name: for the manifest, without folders of this machine.
        revision, split, license: of a dataset, where known.
        window: how many documents of a stream a seed shuffles; `None` for all.
        overlaps_with: the evaluation set that this is.
        notes: remarks for the user, in sentences.
    """

    streams: tuple[Iterable[Document], ...]
    name: str
    revision: str | None = None
    split: str | None = None
    license: str | None = None
    window: int | None = None
    overlaps_with: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_source(source: Path | str) -> TextSource:
    """Find what `source` means; `FILE#FIELD` reads another field of a JSONL file."""
    found = _resolve(source)
    if isinstance(found, DatasetName):
        path = Path(found.name).expanduser()
        return _file(path, found.field) if path.is_file() else _dataset(found)
    if isinstance(found, Path):
        return _folder(found) if found.is_dir() else _file(found)
    if found == known.DEFAULT:
        return _default_mix()
    if found in known.NAMED:
        return _dataset(known.NAMED[found])
    if found in evaluation_sets.KNOWN:
        return _evaluation_set(found)
    return TextSource(
        (read_file(shared.text_path(found, "calibration")),), found, split="calibration"
    )


def check_exists(source: Path | str) -> None:
    """Raise `PathNotFound` when `source` means nothing, and for a folder without text;
    no library is imported."""
    found = _resolve(source)
    if isinstance(found, Path) and found.is_dir():
        _files_of(found)


def check_source(source: Path | str) -> None:
    """Find early what would make `open_source` fail, and raise the same error.

    Nothing is read or fetched.
    """
    found = _resolve(source)
    if isinstance(found, Path) and found.is_dir():
        _files_of(found)
    absent = (
        isinstance(found, str)
        and found in evaluation_sets.KNOWN
        and not evaluation_sets.copies(found)
    )
    named = found == known.DEFAULT or found in known.NAMED
    if named or absent or (isinstance(found, DatasetName) and not Path(found.name).is_file()):
        load_library(f"the calibration text {source}")


def _resolve(source: Path | str) -> Path | DatasetName | str:
    """A path that exists, a dataset, or a name that is known."""
    path = Path(source).expanduser()
    if path.exists():
        return DatasetName(str(path)) if _holds_tables(path) else path
    text = str(source)
    names = (known.DEFAULT, *shared.NAMES, *known.NAMED, *evaluation_sets.KNOWN)
    if text in names:
        return text
    name = None if isinstance(source, Path) or not text.strip("@:#") else DatasetName.parse(text)
    if name and Path(name.name).expanduser().exists():
        return name
    if (
        name
        and name.is_on_hub
        and not name.name.lower().endswith(_FILES)
        and not Path(name.name).parent.is_dir()
    ):
        return name
    raise PathNotFound(
        f"no such calibration file: {source}",
        hint=f"give a file, a folder, a dataset {GRAMMAR}, or one of {', '.join(names)}",
    )


def _holds_tables(path: Path) -> bool:
    """Whether a folder is a dataset that only `datasets` reads."""
    return (
        path.is_dir()
        and not folder_files(path)
        and any(p.suffix in _TABLES for p in path.rglob("*"))
    )


def _file(path: Path, field: str | None = None) -> TextSource:
    if path.suffix.lower() == ".parquet":
        return TextSource((documents_of(parquet_rows([path]), str(path), "row", field),), path.name)
    return TextSource((read_file(path, field),), path.name)


def _files_of(folder: Path) -> Sequence[Path]:
    paths = folder_files(folder)
    if not paths:
        suffixes = ", ".join(JSONL_SUFFIXES + TEXT_SUFFIXES)
        raise PathNotFound(
            f"{folder} has no text to calibrate on.", hint=f"files are read by suffix: {suffixes}"
        )
    return paths


def _folder(folder: Path) -> TextSource:
    paths = _files_of(folder)
    return TextSource(
        (chain.from_iterable(read_file(path) for path in paths),), folder.resolve().name
    )


def _dataset(name: DatasetName) -> TextSource:
    opened = open_dataset(name)
    label = name.name if opened.revision else Path(name.name).expanduser().resolve().name
    notes: tuple[str, ...] = ()
    if opened.revision and opened.revision != name.revision:
        notes = (
            (
                f"{label} was read at commit {opened.revision}: {label}@{opened.revision} reads the"
                " same rows again."
            ),
        )
    if name.config:
        label += f":{name.config}"
    return TextSource(
        (opened.documents,),
        label,
        opened.revision,
        name.split,
        opened.license,
        window=SHUFFLE_WINDOW,
        notes=notes,
    )


def _default_mix() -> TextSource:
    try:
        opened = [open_dataset(part) for part in known.DEFAULT_PARTS]
    except (MissingDependency, NetworkError) as error:
        message = (
            f"the default calibration text is a mix of {len(known.DEFAULT_PARTS)} datasets:"
            f" {error.message}"
        )
        raise type(error)(message, hint=error.hint) from None
    revision = known.default_revision()
    return TextSource(
        tuple(part.documents for part in opened),
        "oscar-zoo/default",
        revision,
        window=SHUFFLE_WINDOW,
    )


def _evaluation_set(name: str) -> TextSource:
    """A set of questions as prompts: from a copy on this machine, else from the hub."""
    warning = (
        f"{name} is an evaluation set: its scores say nothing about a rotation that was calibrated"
        " on it."
    )
    try:
        items = evaluation_sets.evaluation_set(name).items
    except PathNotFound:
        dataset = _dataset(evaluation_sets.KNOWN[name].dataset)
        prompts: Iterable[Document] = (_as_prompt(document) for document in dataset.streams[0])
        return TextSource(
            (prompts,),
            name,
            dataset.revision,
            dataset.split,
            None,
            overlaps_with=(name,),
            notes=(warning, *dataset.notes),
        )
    documents = [
        Document.chat([Message("user", text)], f"item {at} of {name}")
        for at, text in enumerate(items, 1)
    ]
    return TextSource((documents,), name, overlaps_with=(name,), notes=(warning,))


def _as_prompt(document: Document) -> Document:
    return (
        document
        if document.messages
        else Document.chat([Message("user", document.text)], document.where)
    )
