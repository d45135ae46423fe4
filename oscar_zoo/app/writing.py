"""What the use cases that write to hubs share: which hubs, in which order, and what a failure of a
later one leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from oscar_zoo.app.progress import Observer
from oscar_zoo.errors import HubTimeout, HubUnreachable, OfflineError, OscarZooError
from oscar_zoo.hubs import address, config
from oscar_zoo.hubs.base import Hub

R = TypeVar("R")
WRITE_AGAIN = "check the connection, then run the same command again, which is safe"


@dataclass(frozen=True)
class Written(Generic[R]):
    """What was done on one hub; `hub` is its name."""

    hub: str
    result: R


@dataclass(frozen=True)
class WriteReport(Generic[R]):
    """What was done on several hubs.

    Attributes:
        done: one entry for each hub that took the change, in order.
        error: why the next hub did not take it; no hub after it was tried.
    """

    done: tuple[Written[R], ...]
    error: OscarZooError | None = None


def writable_hubs(names: Sequence[str]) -> tuple[Hub, ...]:
    """The hubs to write to, in order, those without commits last; without names, `publish` of
    `config.toml`, or the zoo of this user.
    """
    hubs = address.publishing_hubs(names)
    for hub in hubs:
        check_online(hub)
    return hubs


def check_online(hub: Hub) -> None:
    """Raise `OfflineError` when offline mode forbids asking `hub`."""
    settings = config.load()
    if address.is_remote(hub.name) and settings.offline:
        raise OfflineError(
            f"{hub.title} cannot be reached in offline mode.",
            hint=settings.go_online,
        )


def write_to_each(
    hubs: Sequence[Hub],
    write: Callable[[Hub], R],
    doing: str,
    observer: Observer,
    told: Callable[[Written[R]], None],
) -> WriteReport[R]:
    """Run `write` on one hub after the other, until one fails.

    Args:
        hubs: where, in order.
    """
    done: list[Written[R]] = []
    for hub in hubs:
        observer.advance(f"{doing} {hub.title}", 0, 0)
        try:
            written = Written(hub.name, write(hub))
        except OscarZooError as error:
            if isinstance(error, HubUnreachable | HubTimeout):
                error.advise(WRITE_AGAIN)
            if not done:
                raise
            return WriteReport(tuple(done), error)
        finally:
            observer.begin((), timed=False)
        told(written)
        done.append(written)
    return WriteReport(tuple(done))


def ignore(result: object) -> None:
    """For callers who wait for the whole report."""
