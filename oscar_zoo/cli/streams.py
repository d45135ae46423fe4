"""Output streams that take any text: what their encoding lacks becomes plain ASCII, never an
error."""

from __future__ import annotations

import codecs
import re
import sys
import unicodedata

_BYTE = re.compile(r"[\udc80-\udcff]|\\udc[89a-f][0-9a-f]")
"""A byte of a path that is no UTF-8, as Python has it, or as `repr` writes that."""
_QUOTED = re.compile(r"(?<!\w)'([^'\n]*[\udc80-\udcff][^'\n]*)'")
"""A word with such bytes, as `shlex` quotes it."""
_HANDLER = "oscar-zoo.ascii"
_WORDS = (
    "→ -> ← <- ↑ ^ ↓ v – - — - ━ - ─ - ╸ - ╺ - │ | · . • * × x ≤ <= ≥ >= ± +- µ u μ u"
    " ✓ ok ‘ ' ’ ' “ \" ” \""
).split()
_PLAIN = dict(zip(_WORDS[::2], _WORDS[1::2], strict=True))


def ascii_text(text: str) -> str:
    """`text` in ASCII: characters with an equivalent become that, letters lose their accents, the
    others become `?`."""
    return "".join(character if character.isascii() else _plain(character) for character in text)


def with_bytes(text: str) -> str:
    """`text` with bytes of paths that are no UTF-8 as `\\xff`, which a shell reads in quoted
    words."""
    text = _QUOTED.sub(lambda word: "$'{}'".format(word[1].replace("\\", r"\\")), text)
    return _BYTE.sub(lambda byte: rf"\x{ascii(byte[0])[-3:-1]}", text)


def accept_any_text() -> None:
    """Let stdout and stderr replace what their encoding cannot write."""
    codecs.register_error(_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_HANDLER)


def can_write(text: str) -> bool:
    """Whether stdout writes every character of `text` as it is."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "ignore").decode(encoding) == text


def _plain(character: str) -> str:
    known = _PLAIN.get(character)
    if known is None:
        known = "".join(part for part in unicodedata.normalize("NFKD", character) if part.isascii())
    return known or "?"


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return ascii_text(with_bytes(error.object[error.start : error.end])), error.end
