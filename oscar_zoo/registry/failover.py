"""Asking hubs in order: the next one after network trouble or a plain "not here", never after
anything else.

A wrong digest, a refused token or an ambiguous name ends the search, because another hub's answer
would hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from shlex import quote
from typing import TypeVar

from oscar_zoo import paths
from oscar_zoo.errors import (
    ArtifactNotFound,
    HubUnreachable,
    NetworkError,
    NotFoundError,
    OscarZooError,
    PathNotFound,
    RepositoryNotFound,
    UsageError,
)
from oscar_zoo.hubs import config
from oscar_zoo.hubs.base import Hub
from oscar_zoo.next_step import Compute
from oscar_zoo.registry.known_names import close_names

T = TypeVar("T")


def first_answer(
    hubs: Sequence[Hub], ask: Callable[[Hub], T], *, name: str
) -> tuple[T, tuple[str, ...]]:
    """The first answer to `ask`, and a sentence for every hub that did not answer before.

    Args:
        hubs: in order.
    """
    if not hubs:
        raise UsageError("there is no hub to ask.", hint="name one with --hub, or in config.toml")
    troubles: list[tuple[Hub, OscarZooError]] = []
    for hub in hubs:
        try:
            return ask(hub), tuple(
                error.message for _, error in troubles if isinstance(error, NetworkError)
            )
        except (NetworkError, NotFoundError) as error:
            troubles.append((hub, error))
    raise _suggesting(_nobody(name, troubles), name, troubles)


def own_zoo() -> str:
    """Name of the hub that everybody has: a folder of this user, of which errors need not speak."""
    return f"file:{paths.default_zoo_dir()}"


def _nobody(name: str, troubles: Sequence[tuple[Hub, OscarZooError]]) -> OscarZooError:
    """The error for a search without an answer."""
    silent = [(hub, error) for hub, error in troubles if isinstance(error, NetworkError)]
    if len(troubles) == 1:
        return troubles[0][1]
    if silent:
        facts = _silence(silent)
        answered = [hub for hub, error in troubles if not isinstance(error, NetworkError)]
        facts += [f"{hub.title} has no {name}" for hub in answered if hub.name != own_zoo()]
        return HubUnreachable(
            "; ".join(facts) + ".", hint="here already: oscar-zoo list --installed"
        )
    usual = (own_zoo(), *config.PUBLIC)
    for hub, error in troubles:
        if isinstance(error, PathNotFound | RepositoryNotFound) and hub.name not in usual:
            return error  # the hub itself is missing, so the name may be right
    close = [error for _, error in troubles if error.suggestions]
    if close:
        return close[0]
    asked = ", ".join(hub.title for hub, _ in troubles)
    return ArtifactNotFound(
        f"{name} is on none of the hubs asked: {asked}.",
        hint=f"see what they have: oscar-zoo list{_as_options(hub for hub, _ in troubles)}",
        next_step=Compute("MODEL", "oscar-zoo pull MODEL --compute"),
    )


def _silence(silent: Sequence[tuple[Hub, OscarZooError]]) -> list[str]:
    """What is said of hubs that did not answer; those with one reason share a clause."""
    of_reason: dict[str, list[str]] = {}
    for hub, error in silent:
        text = error.message.rstrip(".")
        title = hub.title if text.startswith(f"{hub.title} ") else ""
        of_reason.setdefault(text.removeprefix(title), []).append(title)
    return [
        " and ".join(titles) + (reason if len(titles) == 1 else reason.replace(": its ", ": the "))
        for reason, titles in of_reason.items()
    ]


def _as_options(hubs: Iterable[Hub]) -> str:
    """`hubs` as options of a command; nothing where it asks them anyway."""
    names = [hub.name for hub in hubs]
    if set(names) <= set(config.load().read):
        return ""
    return "".join(f" --hub {quote(name)}" for name in names)


def _suggesting(
    error: OscarZooError, name: str, troubles: Sequence[tuple[Hub, OscarZooError]]
) -> OscarZooError:
    """`error`, asking first whether another name was meant where hubs did not answer: that needs no
    hub."""
    if isinstance(error, NetworkError) and not error.suggestions:
        known = next((other.suggestions for _, other in troubles if other.suggestions), ())
        error.suggestions = known or close_names(name)
    return error
