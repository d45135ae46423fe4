"""What a user can do about an error, as data. A step is an instruction by itself."""

from __future__ import annotations

import json
from shlex import quote
from typing import Self

COMMANDS = ("oscar-zoo ", "pip ", "chmod ", "make ")
"""Beginnings of advice that is a command to copy, and gets no capital letter."""


class NextStep(str):
    """One thing to do; `joint` comes before it where it follows other advice."""

    joint = ""


class Pull(NextStep):
    """Fetch the artifact `name`."""

    joint = "to "

    def __new__(cls, name: str) -> Self:
        return super().__new__(cls, f"fetch it: oscar-zoo pull {name}")


class Compute(NextStep):
    """Compute an artifact for the model `name`, by default with `pull`."""

    joint = "to "

    def __new__(cls, name: str, command: str | None = None) -> Self:
        return super().__new__(cls, f"compute one: {command or f'oscar-zoo pull {name} --compute'}")


class ListNames(NextStep):
    """See what there is, on the usual hubs or on `hub`."""

    def __new__(cls, hub: str | None = None) -> Self:
        if hub is None:
            return super().__new__(cls, "see what there is: oscar-zoo list")
        return super().__new__(cls, f"see what is there: oscar-zoo list --hub {quote(hub)}")


class OptionStep(NextStep):
    """Change an option of the command that failed, or of another one."""

    def of(self, command: str) -> Self:
        """The same, where `command` has the option."""
        return str.__new__(type(self), f"{self} (an option of {command})")


class AddOption(OptionStep):
    """Add `option`, with its dashes, and the value that it takes, if any."""

    joint = "or "

    def __new__(cls, option: str, value: str | None = None) -> Self:
        words = option if value is None else f"{option} {value}"
        return super().__new__(cls, f"add {words}")


PINS = {"serve": " 'sglang==0.5.17'"}
"""The release that was measured on GPUs; without it pip takes the newest that the extra allows."""


class Install(NextStep):
    """Install this package with its optional dependencies `extra`, from where it came."""

    def __new__(cls, extra: str) -> Self:
        return super().__new__(cls, f"pip install {_origin(extra)}{PINS.get(extra, '')}")


class Login(NextStep):
    """Log in to a hub."""

    joint = "if it is private, "

    def __new__(cls) -> Self:
        return super().__new__(cls, "log in: oscar-zoo login")


class SuggestedPath(str):
    """A path among the suggestions of an error; `kind` is `file` or `folder`."""

    kind: str

    def __new__(cls, path: str, kind: str) -> Self:
        suggestion = super().__new__(cls, path)
        suggestion.kind = kind
        return suggestion


def capitalized(text: str) -> str:
    """`text` with a capital letter, unless it begins with a command to copy."""
    return text if text.startswith(COMMANDS) else text[:1].upper() + text[1:]


def rendered(suggestions: tuple[str, ...], advice: str | None, step: NextStep | None) -> str | None:
    """The hint of an error: names that may have been meant, advice in words, and the next step."""
    joint = step.joint if step is not None and (advice or suggestions) else ""
    text = "; ".join(filter(None, (advice, step and joint + step)))
    if not suggestions:
        return text or None
    names = (
        f"the {name.kind} {quote(name)}" if isinstance(name, SuggestedPath) else name
        for name in suggestions
    )
    question = f"did you mean {' or '.join(names)}?"
    return f"{question} {capitalized(text)}" if text else question


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
