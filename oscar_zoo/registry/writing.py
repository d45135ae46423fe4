"""What publish, mirror and the changes of an index share: which hubs are written, in which order,
putting a version on one, and the check that it arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from pydantic import Field, InstanceOf, PlainSerializer

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import says
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import (
    ArtifactNotFound,
    ConflictError,
    DigestMismatchError,
    HubTimeout,
    HubUnreachable,
    NetworkError,
    OfflineError,
    OscarZooError,
    VersionExists,
)
from oscar_zoo.observer import Observer
from oscar_zoo.registry.changes import HubState, Version
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import Change, Hub
from oscar_zoo.registry.index import Accepted, IndexEntry
from oscar_zoo.registry.score_file import merged


@dataclass(frozen=True)
class Placing:
    """A version to be put on a hub.

    Attributes:
        aliases: names to add to its index entry.
        scores: claims about these bytes to add to its index entry.
        accepted: what it is published in spite of, for its index entry.
        like: an entry of another hub, whose status, scores, aliases and places a new entry takes
            over.
    """

    version: Version
    files: Mapping[str, bytes]
    aliases: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    like: IndexEntry | None = None
    propose: bool = False
    verb: str = "Publish"

    def change(self, state: HubState) -> Change | None:
        """What has to be written to a hub in `state`; `None` when everything is there."""
        artifact = self.version.id
        there = self._there(state)
        known = state.index.entry(artifact)
        if there is None and known is not None and known.digest != self.version.digest:
            raise VersionExists(
                f"the index of {state.hub.title} knows {artifact} as {known.digest}, this is"
                f" {self.version.digest}.",
                hint=_OTHER_TAG,
            )
        previous = known if known is not None and known.digest == self.version.digest else self.like
        entry = (there or self.version).entry(previous, aliases=self.aliases)
        scores = merged(entry.scores, self.scores)
        accepted = tuple(sorted({*entry.accepted, *self.accepted}))
        entry = entry.model_copy(update={"scores": scores, "accepted": accepted})
        root = state.root_files(state.index if entry == known else state.index.with_entry(entry))
        if there is not None and not root:
            return None
        if there is not None:
            message = f"Update index and card for {artifact}"
            return Change(None, {}, root, state.revision, message, self.propose)
        message = f"{self.verb} {artifact} ({self.version.digest[:19]})"
        return Change(artifact, self.files, root, state.revision, message, self.propose)

    def _there(self, state: HubState) -> Version | None:
        """The same version as the hub has it, or `None`; when it differs, only in when its manifest
        was written."""
        artifact, hub = self.version.id, state.hub
        spelled = state.spelled(artifact)
        if spelled is None:
            return None
        if spelled != artifact:
            raise VersionExists(
                f"{artifact} is already on {hub.title}, spelled {spelled}.", hint=_OTHER_TAG
            )
        try:
            there = Version.on(hub, artifact)
            changed = self.version.changed_files(there)
        except ArtifactNotFound:
            changed = sorted(self.files)
        if changed:
            raise VersionExists(
                f"{artifact} is already on {hub.title}, with other content ({', '.join(changed)}).",
                hint=_OTHER_TAG,
            )
        return there


_OTHER_TAG = "a published version never changes: give the new one another tag"


def check_arrived(hub: Hub, version: Version, beside: Mapping[str, bytes]) -> None:
    """List what was written by a fresh request, and compare every byte's sha256."""
    hub.refresh()
    try:
        there = Version.on(hub, version.id)
    except ArtifactNotFound:
        raise DigestMismatchError.for_content(
            f"{version.id} on {hub.title}", want=version.digest, got=None
        ) from None
    except NetworkError as error:
        raise NetworkError(
            f"{version.id} was written to {hub.title}, but could not be read back: {error.message}",
            hint="run the same command again, which is safe and checks it",
        ) from error
    want = {f.path: f.sha256 for f in version.payload} | {FILE_NAME: version.manifest_sha256}
    got = {f.path: f.sha256 for f in there.payload} | {FILE_NAME: there.manifest_sha256}
    listing = {file.path: file for file in hub.files(version.id)} if beside else {}
    for name, data in beside.items():
        want[name] = sha256_hex(data)
        if name in listing:
            got[name] = listing[name].sha256 or sha256_hex(
                hub.fetch(version.id, name, limit=len(data))
            )
    for name in sorted(want.keys() | got.keys()):
        if want.get(name) != got.get(name):
            raise DigestMismatchError.for_content(
                f"{name} of {version.id} on {hub.title}",
                want=want.get(name) or "no file",
                got=got.get(name),
            )


def tag_name(hub: Hub, artifact: ArtifactId) -> str | None:
    """The tag of `artifact`, without a slash; `None` for a hub on this machine, which has none."""
    return f"oz-{artifact.model}-{artifact.tag}" if address.is_remote(hub.name) else None


def put_tag(hub: Hub, version: Version, revision: str | None) -> tuple[str | None, str | None]:
    """Tag `revision`. The commit is the truth, so that a tag that fails is a warning.

    Returns:
        The tag that names this version, or `None`; and the warning, or `None`.
    """
    name = tag_name(hub, version.id)
    if name is None:
        return None, None
    try:
        hub.tag(name, revision, f"{version.id} {version.digest}")
    except ConflictError:
        if not _names(hub, name, version):
            return None, f"the tag {name} of {hub.title} names other content."
    except OscarZooError as error:
        return (
            None,
            f"the tag {name} could not be made: {error.message} Publishing this again makes it.",
        )
    return name, None


def _names(hub: Hub, tag: str, version: Version) -> bool:
    """Whether `tag` stands on a commit that has this version, as when it was made by an earlier
    run."""
    try:
        return not version.changed_files(Version.on(hub.at(tag), version.id))
    except OscarZooError:
        return False


R = TypeVar("R")
WRITE_AGAIN = "check the connection, then run the same command again, which is safe"


@dataclass(frozen=True)
class ErrorFacts:
    """Why a command, or a part of it, failed."""

    code: Annotated[
        str,
        says("What went wrong, in a word that does not change, such as not_found.artifact."),
    ]
    message: Annotated[str, says("The cause, in a sentence for people.")]
    hint: Annotated[str | None, says("What to do next, for people; null where nobody can say.")]


def facts_of(errors: Sequence[OscarZooError]) -> list[ErrorFacts]:
    """Errors as JSON has them."""
    return [ErrorFacts(error.code, error.message, error.hint) for error in errors]


def _failure(error: OscarZooError | None) -> list[ErrorFacts]:
    return facts_of([] if error is None else [error])


Failure = Annotated[
    InstanceOf[OscarZooError] | None,
    PlainSerializer(_failure, return_type=list[ErrorFacts]),
    Field(serialization_alias="errors", description="Why the next hub did not take it, if any."),
]


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
    `config.toml`, or the zoo of this user."""
    hubs = address.publishing_hubs(names)
    for hub in hubs:
        check_online(hub)
    return hubs


def check_online(hub: Hub) -> None:
    """Raise `OfflineError` when offline mode forbids asking `hub`."""
    settings = address.load()
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
    """Run `write` on one hub after the other, until one fails."""
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
