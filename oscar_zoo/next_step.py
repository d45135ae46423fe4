"""What a user can do about an error, as data. `str` of a step is an instruction by itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from shlex import quote
from typing import ClassVar, Self


class NextStep:
    """One thing to do."""

    joint: ClassVar[str] = ""
    """What comes before the instruction where it follows other advice."""

    @property
    def otherwise(self) -> str:
        """The same instruction, as it follows other advice."""
        return f"{self.joint}{self}"


@dataclass(frozen=True)
class Pull(NextStep):
    """Fetch the artifact `name`."""

    name: str

    joint = "to "

    def __str__(self) -> str:
        return f"fetch it: oscar-zoo pull {self.name}"


@dataclass(frozen=True)
class Compute(NextStep):
    """Compute an artifact for the model `name` with the command line `command`."""

    name: str
    command: str

    joint = "to "

    def __str__(self) -> str:
        return f"compute one: {self.command}"


@dataclass(frozen=True)
class ListNames(NextStep):
    """See what there is, on the usual hubs or on `hub`."""

    hub: str | None = None

    def __str__(self) -> str:
        if self.hub is None:
            return "see what there is: oscar-zoo list"
        return f"see what is there: oscar-zoo list --hub {quote(self.hub)}"


@dataclass(frozen=True)
class AddOption(NextStep):
    """Add an option to the command.

    Attributes:
        option: with its dashes.
        value: what to give it, if it takes a value.
        command: the command that has the option, where that is not the one that failed.
    """

    option: str
    value: str | None = None
    command: str | None = None

    joint = "or "

    def __str__(self) -> str:
        option = self.option if self.value is None else f"{self.option} {self.value}"
        return f"add {option}" + (f" (an option of {self.command})" if self.command else "")


@dataclass(frozen=True)
class DropOption(NextStep):
    """Run the command without `option`; `command` as for `AddOption`."""

    option: str
    command: str | None = None

    def __str__(self) -> str:
        of = f" (an option of {self.command})" if self.command else ""
        return f"run it without {self.option}{of}"


@dataclass(frozen=True)
class Install(NextStep):
    """Install this package with its optional dependencies `extra`, from where it came."""

    extra: str

    def __str__(self) -> str:
        return f"pip install {_origin(self.extra)}"


@dataclass(frozen=True)
class Login(NextStep):
    """Log in to a hub; `hub` is the argument of `oscar-zoo login`."""

    hub: str = "hf"

    joint = "if it is private, "

    def __str__(self) -> str:
        return "log in: oscar-zoo login" + ("" if self.hub == "hf" else f" {self.hub}")


class SuggestedPath(str):
    """A path among the suggestions of an error; `kind` is `file` or `folder`."""

    kind: str

    def __new__(cls, path: str, kind: str) -> Self:
        suggestion = super().__new__(cls, path)
        suggestion.kind = kind
        return suggestion


COMMANDS = ("oscar-zoo ", "pip ", "chmod ", "make ")
"""Beginnings of advice that is a command to copy, and gets no capital letter."""


def capitalized(text: str) -> str:
    """`text` with a capital letter, unless it begins with a command to copy."""
    return text if text.startswith(COMMANDS) else text[:1].upper() + text[1:]


def rendered(suggestions: tuple[str, ...], advice: str | None, step: NextStep | None) -> str | None:
    """The hint of an error: names that may have been meant, advice in words, and the next step."""
    parts = [advice] if advice else []
    if step is not None:
        parts.append(step.otherwise if advice or suggestions else str(step))
    text = "; ".join(parts)
    if not suggestions:
        return text or None
    question = f"did you mean {' or '.join(map(_said, suggestions))}?"
    return f"{question} {capitalized(text)}" if text else question


def _said(suggestion: str) -> str:
    if isinstance(suggestion, SuggestedPath):
        return f"the {suggestion.kind} {quote(suggestion)}"
    return suggestion


def _origin(extra: str) -> str:
    """What to give to `pip install` for `extra`: the checkout or address that this package was
    installed from, or its name where it came from an index."""
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote, urlsplit

    name = f"oscar-zoo[{extra}]"
    try:
        told = json.loads(distribution("oscar-zoo").read_text("direct_url.json") or "{}")
        url = str(told["url"])
    except (PackageNotFoundError, ValueError, KeyError, TypeError, OSError):
        return f"'{name}'"
    if urlsplit(url).scheme == "file":
        flag = "-e " if told.get("dir_info", {}).get("editable") else ""
        return flag + quote(f"{unquote(urlsplit(url).path)}[{extra}]")
    source = told.get("vcs_info", {})
    prefix = f"{source['vcs']}+" if "vcs" in source else ""
    commit = f"@{source['commit_id']}" if "commit_id" in source else ""
    return quote(f"{name} @ {prefix}{url}{commit}")
