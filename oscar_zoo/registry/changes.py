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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, runtime_checkable

from pydantic import ValidationError

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import (
    ArtifactNotFound,
    ConflictError,
    DigestMismatchError,
    MalformedFile,
    NetworkError,
    PathNotFound,
    RateLimited,
    RepositoryNotFound,
    StaleRevision,
)
from oscar_zoo.registry import trust
from oscar_zoo.registry.card import update_card
from oscar_zoo.registry.catalog import PayloadFile
from oscar_zoo.registry.hubs.base import CARD_NAME, INDEX_NAME, TIMESTAMP_NAME, Change, Commit, Hub
from oscar_zoo.registry.index import Index, IndexEntry, Summary
from oscar_zoo.registry.signing_key import SigningKey
from oscar_zoo.registry.store import BESIDE

ATTEMPTS = 5
"""Commits tried before giving up."""

_JITTER_SECONDS = 0.2


@runtime_checkable
class CanCreate(Protocol):
    """A hub whose repository this tool can create."""

    def create(self, *, private: bool) -> None:
        """Create the repository; one that exists is success."""


@runtime_checkable
class CanTidy(Protocol):
    """A hub where a killed writer may leave files."""

    def tidy(self) -> None:
        """Remove them."""


@dataclass(frozen=True)
class HubState:
    """A hub as it was at one moment: what a change is made from."""

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
            stamp = trust.renewed(self.stamp, data, index.serial, key)
            files |= {} if stamp is None else {TIMESTAMP_NAME: stamp}
        card = update_card(self.card, self.index, index, hub=self.hub.name)
        return files if card == self.card else {**files, CARD_NAME: card}


Make = Callable[[HubState], Change | None]


@dataclass(frozen=True)
class Applied:
    """What came of a change.

    Attributes:
        change: what was written; `None` when nothing had to be.
    """

    change: Change | None
    commit: Commit
    state: HubState


def apply_change(hub: Hub, make: Make, *, create: bool | None = None) -> Applied:
    """Commit what `make` makes of the state of `hub`, against other writers and lost replies.

    Args:
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


@dataclass(frozen=True)
class Version:
    """One artifact."""

    id: ArtifactId
    payload: tuple[FileDigest, ...]
    manifest_bytes: bytes | None

    @classmethod
    def of(cls, artifact: ArtifactId, files: Mapping[str, bytes]) -> Self:
        """The version made of `files`, by plain name, `oscar.json` and a signature among them or
        not."""
        payload = (file_digest(name, data) for name, data in files.items() if name not in BESIDE)
        return cls(artifact, tuple(sorted(payload)), files.get(FILE_NAME))

    @classmethod
    def on(cls, hub: Hub, artifact: ArtifactId) -> Self:
        """The version that `hub` lists; a file without a told sha256 is fetched and hashed."""
        listing = {file.path: file for file in hub.files(artifact)}
        data = None
        if FILE_NAME in listing:
            data = hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
            want, got = listing[FILE_NAME].sha256, sha256_hex(data)
            if want not in (None, got):
                what = f"{FILE_NAME} of {artifact} on {hub.title}"
                raise DigestMismatchError.for_content(what, want=want, got=got)
        manifest = Manifest.readable(data)
        names = (
            [f.path for f in manifest.files if f.path in listing]
            if manifest
            else list(filter(is_payload, listing))
        )
        if not names:
            raise ArtifactNotFound(
                f"{artifact} on {hub.title} has no rotation files.",
                hint="the version is incomplete; tell its owner",
            )
        payload = []
        for file in (listing[name] for name in names):
            if file.sha256 is not None:
                payload.append(FileDigest(file.path, file.sha256, file.size))
            else:
                content = hub.fetch(artifact, file.path, limit=file.size)
                payload.append(file_digest(file.path, content))
        return cls(artifact, tuple(sorted(payload)), data)

    @property
    def digest(self) -> str:
        """Digest of the payload."""
        return artifact_digest(self.payload)

    @property
    def manifest(self) -> Manifest | None:
        """`oscar.json`, or `None` when there is none that can be read."""
        return Manifest.readable(self.manifest_bytes)

    @property
    def manifest_sha256(self) -> str | None:
        """sha256 of `oscar.json`, or `None`."""
        return None if self.manifest_bytes is None else sha256_hex(self.manifest_bytes)

    def changed_files(self, other: Version) -> list[str]:
        """Names of the files in which `other` differs; none when both are the same version.

        When and by which tool a manifest was written makes no other version."""
        mine, theirs = ({f.path: f.sha256 for f in version.payload} for version in (self, other))
        changed = sorted(
            name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)
        )
        return changed if _same_manifest(self, other) else [FILE_NAME, *changed]

    def entry(
        self, previous: IndexEntry | None = None, *, aliases: Sequence[str] = ()
    ) -> IndexEntry:
        """The index entry of this version."""
        manifest = self.manifest
        kept = (
            {name: getattr(previous, name) for name in ("status", "scores", "accepted", "hubs")}
            if previous
            else {}
        )
        names = {
            alias.casefold(): alias for alias in (*(previous.aliases if previous else ()), *aliases)
        }
        try:
            return IndexEntry(
                id=str(self.id),
                digest=self.digest,
                files=tuple(
                    PayloadFile(path=f.path, sha256=f.sha256, size=f.size) for f in self.payload
                ),
                manifest_sha256=self.manifest_sha256,
                model=manifest.model.id if manifest else previous.model if previous else None,
                summary=Summary.of(manifest) if manifest else None,
                aliases=tuple(names[key] for key in sorted(names)),
                **kept,
            )
        except ValidationError as error:
            raise MalformedFile("index.entry", f"{self.id}: {error.errors()[0]['msg']}.") from None


def _same_manifest(one: Version, two: Version) -> bool:
    if one.manifest_bytes == two.manifest_bytes:
        return True
    first, second = one.manifest, two.manifest
    if first is None or second is None:
        return False
    return first.model_copy(update={"created": second.created, "tool": second.tool}) == second
