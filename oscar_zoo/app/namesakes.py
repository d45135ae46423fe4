"""Files and folders of the current folder that have the name of an artifact.

A name is never taken for them. They are mentioned, so that nobody wonders.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oscar_zoo.app.progress import Note, Observer
from oscar_zoo.app.targets import NameTarget, Target, suggest_path
from oscar_zoo.errors import (
    InvalidName,
    NetworkError,
    NotFoundError,
    OscarZooError,
    PathNotFound,
    RepositoryNotFound,
    RevisionNotFound,
)
from oscar_zoo.registry.model_names import namesake_note

_NO_HUB = (PathNotFound, RepositoryNotFound, RevisionNotFound)
"""Errors of a hub that is not there: another name would not be found on it either."""


@contextmanager
def looking_up(target: Target, observer: Observer) -> Iterator[None]:
    """While `target` is looked up: mention its namesake, in the error or in a note."""
    place = target.namesake if isinstance(target, NameTarget) else None
    try:
        yield
    except (NotFoundError, NetworkError, InvalidName) as error:
        mention_namesake(place, error, observer)
        raise
    mention_namesake(place, None, observer)


def mention_namesake(place: Path | None, error: OscarZooError | None, observer: Observer) -> None:
    """Mention, after a look-up, that `place` has the name that was looked up.

    Args:
        place: a file or folder, or `None`, which needs no mention.
        error: what the look-up raised; it asks whether `place` was meant, unless the hub itself is
            missing. With `None` the observer hears a note.
    """
    if place is None or isinstance(error, _NO_HUB):
        return
    if error is not None:
        suggest_path(place, error)
    else:
        observer.note(Note("target.namesake", namesake_note(place), {"path": str(place)}))
