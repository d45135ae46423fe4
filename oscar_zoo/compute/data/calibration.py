"""From any source to the tokens of a calibration, and to its block in a manifest.

A source is a path, a name known here, or a Hugging Face dataset; an existing path wins over a name.
It is one or more streams of documents, opened as they are read.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Literal

from oscar_zoo.artifact.manifest import Calibration, Disjoint, LengthStats
from oscar_zoo.compute.data import hf_datasets, overlap
from oscar_zoo.compute.data.documents import (
    JSONL_SUFFIXES,
    TEXT_SUFFIXES,
    Document,
    documents_of,
    folder_files,
    read_file,
)
from oscar_zoo.compute.data.hf_datasets import (
    GRAMMAR,
    DatasetName,
    load_library,
    open_dataset,
    parquet_rows,
)
from oscar_zoo.compute.data.packing import (
    HELDOUT_SEQUENCES,
    HELDOUT_TOKENS,
    Budget,
    Encoder,
    TokenIds,
    Tokenizer,
    pack,
    sequences_sha256,
)
from oscar_zoo.errors import MissingDependency, NetworkError, PathNotFound, UsageError
from oscar_zoo.evaluate import shared

SHUFFLE_WINDOW = 10_000
"""Rows of a dataset among which a seed chooses; files are shuffled whole."""
_TABLES = (".parquet", ".arrow", ".csv", ".gz", ".zst")
_FILES = (*JSONL_SUFFIXES, *TEXT_SUFFIXES, *_TABLES, ".md")


@dataclass(frozen=True)
class HeldOut:
    """Sequences to measure on, none of which was calibrated on; all of one length."""

    sequences: tuple[TokenIds, ...]

    @property
    def tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(map(len, self.sequences))

    @property
    def prompts_sha256(self) -> str:
        """sha256 of the compact JSON list of token-id lists, in order."""
        return sequences_sha256(self.sequences)


@dataclass(frozen=True)
class CalibrationData:
    """Token sequences in the order of the forward passes.

    Attributes:
        sequences: all of one length but possibly the last of a stream.
        tokens_requested: the budget; more than `tokens_used` when the data ended early.
        source: name of the file, without its folder, or of the dataset.
        heldout: for measuring, or `None` when nothing was asked for or nothing was left.
        content: `mixed` when chats hold turns of an assistant.
        disjoint_from: evaluation sets proven disjoint, or `None` when nothing was compared.
        texts: the tokenized texts, held-out text included; for comparison only, never published.
    """

    sequences: tuple[TokenIds, ...]
    tokens_requested: int
    source: str
    seed: int | None = None
    heldout: HeldOut | None = None
    revision: str | None = None
    split: str | None = None
    license: str | None = None
    content: Literal["prefill", "mixed"] = "prefill"
    chat_template: bool = False
    disjoint_from: tuple[Disjoint, ...] | None = None
    overlaps_with: tuple[str, ...] = ()
    texts: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    @property
    def tokens_used(self) -> int:
        """Tokens in all sequences."""
        return sum(map(len, self.sequences))

    @property
    def prompts_sha256(self) -> str:
        """sha256 of the compact JSON list of token-id lists, in order."""
        return sequences_sha256(self.sequences)

    def facts(self) -> Calibration:
        """The calibration block of the manifest."""
        lengths = [len(sequence) for sequence in self.sequences]
        return Calibration(
            dataset=self.source,
            revision=self.revision,
            split=self.split,
            license=self.license,
            prompts_sha256=self.prompts_sha256,
            sequences=len(lengths),
            tokens_requested=self.tokens_requested,
            tokens_used=self.tokens_used,
            length=LengthStats(
                min=min(lengths), median=statistics.median_low(lengths), max=max(lengths)
            ),
            content=self.content,
            chat_template=self.chat_template,
            seed=self.seed,
            disjoint_from=self.disjoint_from,
            overlaps_with=self.overlaps_with,
        )


def load_calibration(
    source: Path | str,
    tokenizer: Tokenizer,
    *,
    tokens: int,
    seq_len: int,
    seed: int | None = None,
    chat_template: bool | None = None,
    heldout_tokens: int = 0,
) -> CalibrationData:
    """Read `source` and pack `tokens` tokens, or all there are, into sequences of `seq_len`. A
    `seed` shuffles the documents; for `chat_template` see `Encoder`."""
    opened = open_source(source)
    encoder = Encoder(tokenizer, chat_template)
    budget = Budget.of(tokens, seq_len, heldout_tokens)
    packed = []
    for at, stream in enumerate(opened.streams):
        if seed is not None:
            shuffled = list(islice(stream, opened.window))
            random.Random(seed).shuffle(shuffled)
            stream = shuffled
        packed.append(pack(stream, encoder, budget.share(at, len(opened.streams))))
    sequences = _dealt([part.sequences for part in packed])
    if not sequences:
        raise UsageError(
            f"{source} has no text to calibrate on.",
            hint='give text, or JSON lines with "text" or "messages"',
        )
    heldout = HeldOut(_dealt([part.heldout for part in packed]))
    given_up = sum(part.given_up for part in packed)
    documents = [document for part in packed for document in part.documents]
    heldout_texts = [text for part in packed for text in part.heldout_texts]
    return CalibrationData(
        sequences,
        tokens,
        opened.name,
        seed,
        heldout=heldout if heldout.sequences else None,
        revision=opened.revision,
        split=opened.split,
        license=opened.license,
        content="mixed" if any(document.answered for document in documents) else "prefill",
        chat_template=any(document.templated for document in documents),
        overlaps_with=opened.overlaps_with,
        texts=(*(document.text for document in documents), *heldout_texts),
        notes=(*opened.notes, *(_about(heldout, given_up) if heldout_tokens > 0 else ())),
    )


def _dealt(parts: Sequence[tuple[TokenIds, ...]]) -> tuple[TokenIds, ...]:
    """One sequence of each part in turn."""
    return tuple(one for row in zip_longest(*parts) for one in row if one is not None)


def _about(heldout: HeldOut, given_up: int) -> list[str]:
    """Remarks on held-out text that is little, and on what it cost."""
    number = len(heldout.sequences)
    if not number:
        return ["the data has no text left to hold out, so nothing can be measured on it."]
    notes = []
    if given_up:
        notes.append(
            f"the data ended early: {given_up:,} tokens were held out instead of calibrated on."
        )
    if number < HELDOUT_SEQUENCES or heldout.tokens < HELDOUT_TOKENS:
        notes.append(
            f"only {heldout.tokens:,} tokens in {number} sequences are held out: figures measured"
            f" on them are rough below {HELDOUT_TOKENS:,} in {HELDOUT_SEQUENCES}."
        )
    return notes


@dataclass(frozen=True)
class TextSource:
    """Documents, and where they are from, named for the manifest without folders of this machine.
    Sequences are dealt to the streams in turn; a seed shuffles `window` documents of each, `None`
    for all."""

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
        if not found.is_dir():
            return _file(found)
        texts = chain.from_iterable(map(read_file, folder_files(found)))
        return TextSource((texts,), found.resolve().name)
    if found == hf_datasets.DEFAULT:
        return _default_mix()
    if found in hf_datasets.NAMED:
        return _dataset(hf_datasets.NAMED[found])
    if found in overlap.KNOWN:
        return _evaluation_set(found)
    text = read_file(shared.text_path(found, "calibration"))
    return TextSource((text,), found, split="calibration")


def check_source(source: Path | str) -> None:
    """Find early what would make `open_source` fail, and raise the same error. Nothing is read or
    fetched."""
    found = _resolve(source)
    absent = isinstance(found, str) and found in overlap.KNOWN and not overlap.copies(found)
    named = found == hf_datasets.DEFAULT or found in hf_datasets.NAMED
    if named or absent or (isinstance(found, DatasetName) and not Path(found.name).is_file()):
        load_library(f"the calibration text {source}")


def _resolve(source: Path | str) -> Path | DatasetName | str:
    """A path that exists and holds text, a dataset, or a name that is known."""
    path, text = Path(source).expanduser(), str(source)
    if path.is_dir() and not folder_files(path):
        if any(one.suffix in _TABLES for one in path.rglob("*")):  # which only `datasets` reads
            return DatasetName(str(path))
        suffixes = ", ".join(JSONL_SUFFIXES + TEXT_SUFFIXES)
        raise PathNotFound(
            f"{path} has no text to calibrate on.", hint=f"files are read by suffix: {suffixes}"
        )
    if path.exists():
        return path
    names = (hf_datasets.DEFAULT, *shared.NAMES, *hf_datasets.NAMED, *overlap.KNOWN)
    if text in names:
        return text
    name = None if isinstance(source, Path) or not text.strip("@:#") else DatasetName.parse(text)
    if name and Path(name.name).expanduser().exists():
        return name
    is_file = name and (name.name.lower().endswith(_FILES) or Path(name.name).parent.is_dir())
    if name and name.is_on_hub and not is_file:
        return name
    raise PathNotFound(
        f"no such calibration file: {source}",
        hint=f"give a file, a folder, a dataset {GRAMMAR}, or one of {', '.join(names)}",
    )


def _file(path: Path, field: str | None = None) -> TextSource:
    if path.suffix.lower() == ".parquet":
        return TextSource((documents_of(parquet_rows([path]), str(path), "row", field),), path.name)
    return TextSource((read_file(path, field),), path.name)


def _dataset(name: DatasetName) -> TextSource:
    documents, revision, license_text = open_dataset(name)
    label = name.name if revision else Path(name.name).expanduser().resolve().name
    notes: tuple[str, ...] = ()
    if revision and revision != name.revision:
        again = f"{label}@{revision} reads the same rows again."
        notes = (f"{label} was read at commit {revision}: {again}",)
    if name.config:
        label += f":{name.config}"
    return TextSource(
        (documents,), label, revision, name.split, license_text, SHUFFLE_WINDOW, notes=notes
    )


def _default_mix() -> TextSource:
    parts = hf_datasets.DEFAULT_PARTS
    try:
        streams = tuple(open_dataset(part)[0] for part in parts)
    except (MissingDependency, NetworkError) as error:
        message = f"the default calibration text is a mix of {len(parts)} datasets: {error.message}"
        raise type(error)(message, hint=error.hint) from None
    revision = hf_datasets.default_revision()
    return TextSource(streams, "oscar-zoo/default", revision, window=SHUFFLE_WINDOW)


def _evaluation_set(name: str) -> TextSource:
    """A set of questions as prompts: from a copy on this machine, else from the hub."""
    warning = (
        f"{name} is an evaluation set: its scores say nothing about a rotation that was calibrated"
        " on it."
    )
    try:
        _, items = overlap.evaluation_set(name)
    except PathNotFound:
        dataset = _dataset(overlap.KNOWN[name][0])
        prompts = (
            one if one.messages else Document.prompt(one.text, one.where)
            for one in dataset.streams[0]
        )
        return TextSource(
            (prompts,),
            name,
            dataset.revision,
            dataset.split,
            overlaps_with=(name,),
            notes=(warning, *dataset.notes),
        )
    documents = [Document.prompt(text, f"item {at} of {name}") for at, text in enumerate(items, 1)]
    return TextSource((documents,), name, overlaps_with=(name,), notes=(warning,))
