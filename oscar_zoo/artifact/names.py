"""Names as frozen types: artifact ids, references, calibration tags.

An id is `<Model>/<tag>`, a reference `NAME[:TAG|@sha256:PREFIX]`. Names are ASCII, compared without
case, and safe as parts of a path: no `..`, no trailing dot, no device names. `str(parse(text))`
gives `text` back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Self

from oscar_zoo.errors import InvalidName

CACHED = "models--"
FILE_SUFFIXES = (".pt", ".json", ".safetensors")
"""Endings of files; no name ends in one."""

_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_TAG = re.compile(
    r"seq([1-9][0-9]*)_prompt([1-9][0-9]*)_group([1-9][0-9]*)"
    r"(?:_bits([1-9][0-9]?(?:\.[0-9]{0,2}[1-9])?))?(?:-([a-z0-9]+(?:-[a-z0-9]+)*))?"
)
_DIGEST_PREFIX = re.compile(r"sha256:[0-9a-f]{12,64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_DEVICES = {"con", "prn", "aux", "nul"} | {f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10)}


def check_part(text: str, what: str = "name") -> str:
    """Return `text` when it may be one part of a name or path, else raise `InvalidName`."""
    bad = (
        _PART.fullmatch(text) is None
        or ".." in text
        or text.endswith(".")
        or text.split(".")[0].casefold() in _DEVICES
    )
    if bad:
        hint = "use up to 100 letters, digits, '.', '_' and '-', a letter or digit first"
        raise InvalidName(f"{text[:120]!r} is not a valid {what}.", hint=hint)
    return text


def safe_part(text: str) -> str:
    """`text` as one part of a name: what cannot stand in one becomes a hyphen."""
    try:
        return check_part(text)
    except InvalidName:
        kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text)
        kept = re.sub(r"\.{2,}", "-", kept[:100]).strip(".-_")
        return check_part(kept or "model")


def cached_model(folder: Path) -> tuple[str, str] | None:
    """The id and the commit of a model in the cache of a hub's client,
    `models--ORG--NAME/snapshots/<commit>`; `None` for another folder."""
    place, commit = folder.parent.parent.name, folder.name
    if folder.parent.name != "snapshots" or not place.startswith(CACHED):
        return None
    if re.fullmatch("[0-9a-f]{40}", commit) is None:
        return None
    return place.removeprefix(CACHED).replace("--", "/", 1), commit


def is_path(text: str) -> bool:
    """Whether `text` is written as a path: it begins with `.`, `/` or `~`, or ends in `/` or one of
    `FILE_SUFFIXES`. All else is a name, even when a folder of that name exists."""
    return text.startswith((".", "/", "~")) or text.endswith(("/", *FILE_SUFFIXES))


def check_utf8(path: PurePath, what: str) -> None:
    """Raise `InvalidName` where the bytes of `path` are no UTF-8; `what` is that path, in words."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise InvalidName(f"{what} must be UTF-8: {path}", hint="rename the folder") from None


def path_text(path: PurePath) -> str:
    """`path` written such that `is_path` holds, as people can type it."""
    text = str(path)
    return text if is_path(text) else f"./{text}"


def typed(path: PurePath | str) -> str:
    """`path` as one types it; a relative one always begins with `./` or `../`."""
    text = path_text(PurePath(path))
    return text if text.startswith(("/", "./", "../")) or text in (".", "..") else f"./{text}"


def check_digest(text: str) -> str:
    if _DIGEST.fullmatch(text) is None:
        raise InvalidName(
            f"{text[:120]!r} is not a digest.", hint="a digest is sha256: and 64 hex digits"
        )
    return text


def parse_digest(text: str) -> str:
    """A full digest as people type it, in any case, with or without `sha256:`."""
    return check_digest("sha256:" + text.lower().removeprefix("sha256:"))


@dataclass(frozen=True, order=True)
class ArtifactId:
    """`<Model>/<tag>`: the folder of one artifact (one K/V pair) in every hub."""

    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Self:
        model, slash, tag = text.partition("/")
        if not slash:
            raise InvalidName(
                f"{text[:120]!r} is not an artifact id.", hint="an id is <Model>/<tag>"
            )
        return cls(check_part(model, "model name"), check_part(tag, "tag"))

    def __str__(self) -> str:
        return f"{self.model}/{self.tag}"

    @property
    def reference(self) -> str:
        return f"{self.model}:{self.tag}"

    @property
    def key(self) -> str:
        return str(self).casefold()


@dataclass(frozen=True)
class Reference:
    """What a user types: `NAME`, `NAME:TAG` or `NAME@sha256:PREFIX`, with or without an
    organisation."""

    name: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        name, at, digest = text.partition("@")
        if at and _DIGEST_PREFIX.fullmatch(digest) is None:
            message = f"{digest[:120]!r} is not a digest."
            raise InvalidName(message, hint="write NAME@sha256: and at least 12 hex digits")
        name, colon, tag = name.partition(":")
        parts = name.split("/")
        if len(parts) > 2:
            message = f"{text[:120]!r} is not an artifact name."
            raise InvalidName(message, hint="names look like Qwen3-8B or Qwen/Qwen3-8B")
        for part in parts:
            check_part(part, "model name")
        return cls(name, check_part(tag, "tag") if colon else None, digest if at else None)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.name}{tag}" + (f"@{self.digest}" if self.digest else "")


@dataclass(frozen=True)
class CalibrationTag:
    """A tag of the form `seq<T>_prompt<N>_group<G>[_bits<B>][-variant]`; a label, not a proof.
    `bits` are the average bits of a stored element where codes do not have 2 bits everywhere; the
    tag has three decimals of them at most."""

    tokens: int
    prompts: int
    group_size: int
    variant: str | None = None
    bits: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The parts of `text`, or `None` when it is an opaque tag (never an error)."""
        match = _TAG.fullmatch(text)
        if match is None:
            return None
        bits = None if match[4] is None else float(match[4])
        return cls(int(match[1]), int(match[2]), int(match[3]), match[5], bits)

    def __str__(self) -> str:
        tail = "" if self.bits is None else f"_bits{round(self.bits, 3):.5g}"
        tail += f"-{self.variant}" if self.variant else ""
        return f"seq{self.tokens}_prompt{self.prompts}_group{self.group_size}{tail}"
