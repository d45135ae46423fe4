"""From any source to the tokens of a calibration, and to its block in a manifest.

A source is a path, a name known here, or a Hugging Face dataset; an existing path wins over a name.
Its documents are read as they are needed.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
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
    Encoder,
    Packed,
    TokenIds,
    Tokenizer,
    pack,
    sequences_sha256,
)
from oscar_zoo.errors import PathNotFound, UsageError
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
    documents = opened.documents
    if seed is not None:
        shuffled = list(islice(documents, opened.window))
        random.Random(seed).shuffle(shuffled)
        documents = shuffled
    packed = pack(documents, Encoder(tokenizer, chat_template), tokens, seq_len, heldout_tokens)
    if not packed.sequences:
        raise UsageError(
            f"{source} has no text to calibrate on.",
            hint='give text, or JSON lines with "text" or "messages"',
        )
    return CalibrationData(
        packed.sequences,
        tokens,
        opened.name,
        seed,
        heldout=HeldOut(packed.heldout) if packed.heldout else None,
        revision=opened.revision,
        split=opened.split,
        license=opened.license,
        content="mixed" if any(one.answered for one in packed.documents) else "prefill",
        chat_template=any(one.templated for one in packed.documents),
        overlaps_with=opened.overlaps_with,
        texts=(*(one.text for one in packed.documents), *packed.heldout_texts),
        notes=(*opened.notes, *_kinds(packed), *(_about(packed) if heldout_tokens > 0 else ())),
    )


def _kinds(packed: Packed) -> list[str]:
    """How much of each kind was read, where records name kinds."""
    used, held = packed.kinds
    names = sorted(name for name in used | held if name is not None)
    told = ", ".join(f"{name} {used[name]:,} and {held[name]:,}" for name in names)
    return [f"tokens calibrated on and held out, by kind: {told}."] if names else []


def _about(packed: Packed) -> list[str]:
    """Remarks on held-out text that is little, and on what it cost."""
    number, tokens = len(packed.heldout), sum(map(len, packed.heldout))
    if not number:
        return ["the data has no text left to hold out, so nothing can be measured on it."]
    notes = []
    if packed.given_up:
        notes.append(
            f"the data ended early: {packed.given_up:,} tokens were held out instead of calibrated"
            " on."
        )
    if number < HELDOUT_SEQUENCES or tokens < HELDOUT_TOKENS:
        notes.append(
            f"only {tokens:,} tokens in {number} sequences are held out: figures measured on them"
            f" are rough below {HELDOUT_TOKENS:,} in {HELDOUT_SEQUENCES}."
        )
    return notes


@dataclass(frozen=True)
class TextSource:
    """Documents, and where they are from, named for the manifest without folders of this machine.
    A seed shuffles the first `window` of them, `None` for all."""

    documents: Iterable[Document]
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
        return TextSource(texts, found.resolve().name)
    if found in hf_datasets.NAMED:
        return _dataset(hf_datasets.NAMED[found])
    if found in overlap.KNOWN:
        return _evaluation_set(found)
    text = read_file(shared.text_path(found, "calibration"))
    return TextSource(text, found, split="calibration")


def check_source(source: Path | str) -> None:
    """Find early what would make `open_source` fail, and raise the same error. Nothing is read or
    fetched."""
    found = _resolve(source)
    absent = isinstance(found, str) and found in overlap.KNOWN and not overlap.copies(found)
    named = found in hf_datasets.NAMED
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
    names = (*shared.TEXTS, *hf_datasets.NAMED, *overlap.KNOWN)
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
        return TextSource(documents_of(parquet_rows([path]), str(path), "row", field), path.name)
    return TextSource(read_file(path, field), path.name)


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
        documents, label, revision, name.split, license_text, SHUFFLE_WINDOW, notes=notes
    )


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
            for one in dataset.documents
        )
        return TextSource(
            prompts,
            name,
            dataset.revision,
            dataset.split,
            overlaps_with=(name,),
            notes=(warning, *dataset.notes),
        )
    documents = [Document.prompt(text, f"item {at} of {name}") for at, text in enumerate(items, 1)]
    return TextSource(documents, name, overlaps_with=(name,), notes=(warning,))
