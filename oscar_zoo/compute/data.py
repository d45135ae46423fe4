"""Calibration data: a text or JSONL file becomes token sequences of one length, in one order, with one hash.

Documents are tokenized one by one, an end-of-text token follows each, and the stream is cut into sequences until the
budget is spent: the same file, tokenizer and options always give the same tokens, which `prompts_sha256` names. The
tokens themselves are never published.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.manifest import Calibration, LengthStats
from oscar_zoo.errors import PathNotFound, StorageError, UsageError

SEPARATOR = "<|endoftext|>"
"""Ends a document in plain text files."""

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_PIECE = 1 << 20  # characters tokenized at once: a huge document costs no more than the tokens taken from it


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    eos_token_id: int | None

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Mapping[str, list[int]]:
        """Token ids of `text` under the key `input_ids`."""
        ...


@dataclass(frozen=True)
class CalibrationData:
    """Token sequences in the order of the forward passes.

    Attributes:
        sequences: token ids; all of one length but possibly the last.
        tokens_requested: the budget; more than `tokens_used` when the data ended early.
        source: name of the file, without its folder.
        seed: of the document order, or `None` for the order of the file.
    """

    sequences: tuple[tuple[int, ...], ...]
    tokens_requested: int
    source: str
    seed: int | None = None

    @property
    def tokens_used(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def prompts_sha256(self) -> str:
        """sha256 of the compact JSON list of token-id lists, in order."""
        return sha256_hex(strict_json.canonical_bytes([list(sequence) for sequence in self.sequences]))

    def facts(self) -> Calibration:
        """The calibration block of the manifest; disjointness from evaluation sets is not known here."""
        lengths = [len(sequence) for sequence in self.sequences]
        return Calibration(
            dataset=self.source,
            revision=None,
            split=None,
            license=None,
            prompts_sha256=self.prompts_sha256,
            sequences=len(lengths),
            tokens_requested=self.tokens_requested,
            tokens_used=self.tokens_used,
            length=LengthStats(min=min(lengths), median=statistics.median_low(lengths), max=max(lengths)),
            content="prefill",
            chat_template=False,
            seed=self.seed,
            disjoint_from=None,
            overlaps_with=(),
        )


def load_calibration(
    path: Path, tokenizer: Tokenizer, *, tokens: int, seq_len: int, seed: int | None = None
) -> CalibrationData:
    """Read `path` and pack exactly `tokens` tokens, or all there are, into sequences of `seq_len`.

    Args:
        path: UTF-8 text with documents separated by `<|endoftext|>`, or JSONL (by its suffix) with a "text" field.
        tokenizer: of the model to calibrate.
        tokens: budget, above 0.
        seq_len: tokens of a sequence, above 0; the last one may be shorter.
        seed: shuffles the documents; `None` keeps the order of the file.

    Raises:
        UsageError: a count below 1, no text, or a file that is not what its name says.
        PathNotFound, StorageError: the file is missing or cannot be read.
    """
    check_budget(tokens, seq_len)
    documents: Iterable[str] = read_documents(path)
    if seed is not None:
        documents = list(documents)
        random.Random(seed).shuffle(documents)
    stream = _token_stream(documents, tokenizer)
    prefix = _sequence_prefix(tokenizer)
    sequences: list[tuple[int, ...]] = []
    left = tokens
    while left > 0 and (sequence := _take(stream, prefix, min(seq_len, left))):
        sequences.append(sequence)
        left -= len(sequence)
    if not sequences:
        raise UsageError(f"{path} has no text to calibrate on.", hint='give text, or JSONL with a "text" field')
    return CalibrationData(tuple(sequences), tokens, path.name, seed)


def check_budget(tokens: int, seq_len: int) -> None:
    """Refuse counts that cannot be; raises `UsageError`."""
    if tokens <= 0:
        raise UsageError(f"the number of calibration tokens must be above 0, not {tokens}.", hint="16384 is usual")
    if seq_len <= 0:
        raise UsageError(f"the sequence length must be above 0, not {seq_len}.", hint="2048 or 4096 is usual")


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a calibration file, blank ones left out, read as they are asked for.

    Raises:
        UsageError: not UTF-8 text, or a line of JSONL without a "text" string.
        PathNotFound, StorageError: the file is missing or cannot be read.
    """
    if not path.is_file():
        raise PathNotFound.for_path(path, "calibration file")
    is_jsonl = path.suffix.lower() in JSONL_SUFFIXES
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = _text_lines(file, path)
            for document in _jsonl_documents(lines, path) if is_jsonl else _text_documents(lines):
                if document.strip():
                    yield document.strip("\n")
    except UnicodeDecodeError as error:
        raise _not_text(path, f"byte 0x{error.object[error.start]:02x}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}.", hint="check its permissions") from error


def _text_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    for line in file:
        if "\0" in line:
            raise _not_text(path, "a NUL character")
        yield line


def _text_documents(lines: Iterable[str]) -> Iterator[str]:
    parts: list[str] = []
    for line in lines:
        *ends, rest = line.split(SEPARATOR)
        for end in ends:
            yield "".join([*parts, end])
            parts.clear()
        parts.append(rest)
    yield "".join(parts)


def _jsonl_documents(lines: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            record = None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise UsageError(
                f'line {number} of {path} is not a JSON object with a "text" string.',
                hint='each line: {"text": "..."}; plain text needs another file suffix',
            )
        yield text


def _token_stream(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[int]:
    for document in documents:
        for start in range(0, len(document), _PIECE):
            piece = document[start : start + _PIECE]
            yield from tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id


def _sequence_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that the tokenizer puts before any text (a begin-of-text token for some models); often none."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    full = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
    start = next((i for i in range(len(full)) if full[i : i + len(bare)] == bare), 0)
    return tuple(full[:start])


def _take(stream: Iterator[int], prefix: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The next sequence of at most `length` tokens with its prefix, or nothing when the stream ended."""
    body = tuple(token for _, token in zip(range(max(1, length - len(prefix))), stream, strict=False))
    return (prefix + body)[:length] if body else ()


def _not_text(path: Path, seen: str) -> UsageError:
    return UsageError(f"{path} is not UTF-8 text ({seen}).", hint='give text, or JSONL with a "text" field')
