"""Files and records become documents: plain text, or the messages of a chat.

Files are read line by line as documents are asked for, so only the needed part of a large file is
read. Every error names its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oscar_zoo.errors import PathNotFound, StorageError, UsageError

SEPARATOR = "<|endoftext|>"
"""Ends a document in plain text files."""
TEXT_SUFFIXES = (".txt", ".text")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
FIELDS = ("text", "messages", "prompt")
"""Fields a record is read from, first match first; `text` holds plain text, the others hold a
chat."""
_FORMS = 'text, or JSON lines with "text", "messages" or "prompt"'

Message = dict[str, str]
"""One turn of a chat: its `role` and `content`."""


@dataclass(frozen=True)
class Document:
    """One text or one chat; the text of a chat is the contents of its messages with a blank line
    between them. `where` is file and line, for messages of errors; `kind` is the record's own word
    for what it is, such as `code`."""

    text: str
    where: str
    messages: tuple[Message, ...] | None = None
    kind: str | None = None

    @classmethod
    def chat(cls, messages: Sequence[Message], where: str) -> Document:
        """A chat of at least one message."""
        return cls("\n\n".join(one["content"] for one in messages), where, tuple(messages))

    @classmethod
    def prompt(cls, text: str, where: str) -> Document:
        """What a user asks."""
        return cls.chat([{"role": "user", "content": text}], where)


def read_file(path: Path, field: str | None = None) -> Iterator[Document]:
    """The documents of a text file, or of a JSON lines file by its suffix, without blank ones.
    Without a `field`, lines are read from the first of `FIELDS` that the first line has."""
    if path.suffix.lower() in JSONL_SUFFIXES:
        yield from documents_of(read_records(path), str(path), "line", field)
        return
    parts: list[str] = []
    start = 1

    def document() -> Iterator[Document]:
        text = "".join(parts).strip("\n")
        if text.strip():
            yield Document(text, f"line {start} of {path}")

    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            *ends, rest = line.split(SEPARATOR)
            for end in ends:
                parts.append(end)
                yield from document()
                parts.clear()
                start = number
            parts.append(rest)
        yield from document()


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and content of the lines of a JSONL file that are not blank; raises as `read_file`."""
    with open_lines(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError):
                    raise UsageError(
                        f"line {number} of {path} is not JSON.",
                        hint='each line: {"text": "..."}; plain text needs another file suffix',
                    ) from None


@contextmanager
def open_lines(path: Path) -> Iterator[Iterator[str]]:
    """The lines of a text file. Errors while they are read are raised as by `read_file`."""
    if not path.is_file():
        raise PathNotFound.for_path(path, "text file")
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
            yield _text_lines(file, path)
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}.", hint="check its permissions"
        ) from error


def _text_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    """Refuse what is no UTF-8, with its line; a byte of it was read as half a surrogate pair."""
    for number, line in enumerate(file, 1):
        seen = "a NUL character" if "\0" in line else None
        try:
            line.encode()
        except UnicodeEncodeError as error:
            seen = f"byte 0x{ord(line[error.start]) - 0xDC00:02x}"
        if seen is not None:
            raise UsageError(
                f"line {number} of {path} is not UTF-8 text ({seen}).", hint=f"give {_FORMS}"
            )
        yield line


def folder_files(folder: Path) -> list[Path]:
    """The text and JSONL files in `folder` and its subfolders, in order of reading. Hidden files
    are left out."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(folder).parts
        hidden = any(part.startswith(".") for part in parts)
        if path.suffix.lower() in TEXT_SUFFIXES + JSONL_SUFFIXES and not hidden:
            found.append((parts, path))
    return [path for _, path in sorted(found) if path.is_file()]


def documents_of(
    records: Iterable[tuple[int, Any]], what: str, unit: str, field: str | None = None
) -> Iterator[Document]:
    """Turn records of one kind into documents."""
    for number, record in records:
        where = f"{unit} {number} of {what}"
        if not isinstance(record, dict):
            raise UsageError(f"{where} is not a JSON object.", hint=f"give {_FORMS}")
        if field is None:
            field = next((name for name in FIELDS if name in record), None)
        if field is None or field not in record:
            seen = ", ".join(f'"{name}"' for name in list(record)[:5]) or "nothing"
            wanted = f'"{field}"' if field else '"text", "messages" or "prompt"'
            raise UsageError(
                f"{where} has no {wanted}, only {seen}.",
                hint="one file holds one kind; name another field behind it: SOURCE#FIELD",
            )
        document = _document(record[field], field, where)
        if document.text.strip():
            kind = record.get("kind")
            yield replace(document, kind=kind) if isinstance(kind, str) else document


def _document(value: Any, field: str, where: str) -> Document:
    if isinstance(value, str):
        _check_text(value, field, where)
        if field == "prompt":
            return Document.prompt(value, where)
        return Document(value.strip("\n"), where)
    if isinstance(value, list) and value and field != "text":
        return Document.chat([_message(turn, where, at) for at, turn in enumerate(value, 1)], where)
    wanted = "a string" if field == "text" else "a string or a list of messages"
    raise UsageError(f'"{field}" in {where} is not {wanted}.', hint=f"give {_FORMS}")


def _message(turn: Any, where: str, at: int) -> Message:
    given = turn if isinstance(turn, dict) else {}
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise UsageError(
            f'message {at} in {where} has no "role" and "content" of text.',
            hint='each message: {"role": "user", "content": "..."}',
        )
    _check_text(content, f"message {at}", where)
    return {"role": role, "content": content}


def _check_text(text: str, name: str, where: str) -> None:
    """JSON can spell half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f'"{name}" in {where} has half a surrogate pair at character {error.start}.',
            hint="write it as UTF-8 again",
        ) from None
