"""Writing to a hub by compare and swap: read its state, make one change from that, commit, and know
what came of it.

A change is made by a function of the state, so that it can be made again: when somebody else was
faster, and when a reply was lost and only the hub knows whether the change arrived. The function
returns `None` when nothing is left to do, which is also how a lost reply turns out to have been a
success.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import (
    ConflictError,
    NetworkError,
    PathNotFound,
    RateLimited,
    RepositoryNotFound,
    StaleRevision,
)
from oscar_zoo.hubs.base import CARD_NAME, INDEX_NAME, TIMESTAMP_NAME, Change, Commit, Hub
from oscar_zoo.registry import timestamp
from oscar_zoo.registry.card import update_card
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.signing_key import SigningKey

ATTEMPTS = 5
"""Commits tried before giving up."""

_JITTER_SECONDS = 0.2


@runtime_checkable
class CanCreate(Protocol):
    """A hub whose repository this tool can create."""

    def create(self, *, private: bool) -> None:
        """Create the repository; one that exists is success."""
        ...


@runtime_checkable
class CanTidy(Protocol):
    """A hub where a killed writer may leave files."""

    def tidy(self) -> None:
        """Remove them."""
        ...


@dataclass(frozen=True)
class HubState:
    """A hub as it was at one moment: what a change is made from.

    Attributes:
        hub: where.
        revision: what the rest refers to.
        artifacts: every artifact listed.
        index: empty where the hub has none.
        card: `README.md`, or `None`.
        stamp: `timestamp.json`, or `None`.
    """

    hub: Hub
    revision: str | None
    artifacts: tuple[ArtifactId, ...]
    index: Index
    card: bytes | None
    stamp: bytes | None = None

    @classmethod
    def read(cls, hub: Hub) -> Self:
        """What `hub` has now."""
        hub.refresh()
        revision = hub.revision
        data = hub.root_file(INDEX_NAME)
        index = (
            Index.empty()
            if data is None
            else Index.from_bytes(data, what=f"{INDEX_NAME} of {hub.title}")
        )
        card, stamp = hub.root_file(CARD_NAME), hub.root_file(TIMESTAMP_NAME)
        return cls(hub, revision, hub.artifacts(), index, card, stamp)

    @classmethod
    def empty(cls, hub: Hub, revision: str | None) -> Self:
        """A hub that is not there yet."""
        return cls(hub, revision, (), Index.empty(), None)

    def spelled(self, artifact: ArtifactId) -> ArtifactId | None:
        """`artifact` as the hub spells it, or `None` when it has none of that name in any case."""
        return next((other for other in self.artifacts if other.key == artifact.key), None)

    def root_files(self, index: Index) -> dict[str, bytes]:
        """The root files to write so that the hub has `index`, a card that fits it, and a timestamp
        where it signs; empty when it has."""
        files = {} if index == self.index else {INDEX_NAME: index.to_bytes()}
        key = SigningKey.configured()
        if self.stamp is not None or key is not None:
            data = files.get(INDEX_NAME) or self.hub.root_file(INDEX_NAME) or index.to_bytes()
            stamp = timestamp.renewed(self.stamp, data, index.serial, key)
            files |= {} if stamp is None else {TIMESTAMP_NAME: stamp}
        card = update_card(self.card, self.index, index, hub=self.hub.name)
        return files if card == self.card else {**files, CARD_NAME: card}


Make = Callable[[HubState], Change | None]


@dataclass(frozen=True)
class Applied:
    """What came of a change.

    Attributes:
        change: what was written; `None` when nothing had to be.
        commit: where the hub stands with it.
        state: of the hub, as it was read last.
    """

    change: Change | None
    commit: Commit
    state: HubState


def apply_change(hub: Hub, make: Make, *, create: bool | None = None) -> Applied:
    """Commit what `make` makes of the state of `hub`, against other writers and lost replies.

    Args:
        make: the change for a state, or `None` when there is nothing to do; what it raises ends the
            attempt.
        create: whether a repository that is not there is created first; `None` where the user
            cannot ask for it.
    """
    sent: Change | None = None
    placed: Change | None = None
    failure: ConflictError | NetworkError | None = None
    for attempt in range(ATTEMPTS + 1):
        try:
            state = read_state(hub, create=create)
            change = make(state)
        except NetworkError as error:
            if sent is None:
                raise
            raise _unknown(hub, error) from error
        if change is None:
            tidy(hub)
            return Applied(sent or placed, Commit(state.revision), state)
        if attempt == ATTEMPTS:
            break
        try:
            commit = hub.commit(change)
            if placed is not None and change.artifact is None:
                change = replace(change, artifact=placed.artifact, files=placed.files)
            return Applied(change, commit, state)
        except RateLimited:
            raise
        except StaleRevision as error:
            failure = error
            placed = change if error.placed else placed
        except NetworkError as error:
            if change.propose:  # whether a proposal arrived cannot be read from the files
                raise _unknown(hub, error) from error
            sent, failure = change, error
        time.sleep(random.uniform(0, _JITTER_SECONDS * (attempt + 1)))
    assert failure is not None
    raise failure


def read_state(hub: Hub, *, create: bool | None = None, dry_run: bool = False) -> HubState:
    """The state of `hub`; a folder that is not there is empty if it may be created, a repository
    once it was.

    Args:
        create: create a repository, or a folder, that is not there; `None` where the user cannot
            ask for it.
        dry_run: create nothing; the state is what it would be.
    """
    try:
        return HubState.read(hub)
    except PathNotFound as error:
        if not create:
            hint = (
                error.advice
                if create is None
                else "check the path; to make a new hub there: --create"
            )
            raise PathNotFound(error.message, hint=hint) from error
        return HubState.empty(hub, hub.revision)  # the first commit creates the folder
    except RepositoryNotFound as error:
        if not create or not isinstance(hub, CanCreate):
            can = create is not None and isinstance(hub, CanCreate)
            hint = "check the name; to make a new repository: --create" if can else error.advice
            raise RepositoryNotFound(error.message, hint=hint) from error
    if dry_run:
        return HubState.empty(hub, None)
    hub.create(private=False)
    return HubState.read(hub)


def tidy(hub: Hub) -> None:
    """Remove what killed writers left on `hub`, for who has nothing to write; every commit does it
    too."""
    if isinstance(hub, CanTidy):
        hub.tidy()


def _unknown(hub: Hub, error: NetworkError) -> NetworkError:
    return NetworkError(
        f"it is not known whether the change of {hub.title} arrived: {error.message}",
        hint="run the same command again, which is safe",
    )
