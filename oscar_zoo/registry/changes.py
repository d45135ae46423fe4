"""Writing to hubs by compare and swap: read the state of a hub, make one change from that, commit,
and know what came of it. Publish, mirror and the changes of an index share this.

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
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, InstanceOf, PlainSerializer, ValidationError
from typing_extensions import TypedDict

from oscar_zoo import errors
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, is_payload
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.outcome import says
from oscar_zoo.artifact.specs import Score
from oscar_zoo.observer import Observer
from oscar_zoo.registry import trust
from oscar_zoo.registry.card import update_card
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import CARD_NAME, INDEX_NAME, TIMESTAMP_NAME, Change, Commit, Hub
from oscar_zoo.registry.index import Accepted, Index, IndexEntry, Summary
from oscar_zoo.registry.score_file import merged
from oscar_zoo.registry.signatures import SigningKey
from oscar_zoo.registry.store import BESIDE

ATTEMPTS = 5
"""Commits tried before giving up."""
_JITTER_SECONDS = 0.2
_SHOWN = 5
_OTHER_TAG = "a published version never changes: give the new one another tag"


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
        hub.refresh()
        revision, data = hub.revision, hub.root_file(INDEX_NAME)
        what = f"{INDEX_NAME} of {hub.title}"
        index = Index.empty() if data is None else Index.from_bytes(data, what=what)
        card, stamp = hub.root_file(CARD_NAME), hub.root_file(TIMESTAMP_NAME)
        return cls(hub, revision, hub.artifacts(), index, card, stamp)

    @classmethod
    def empty(cls, hub: Hub, revision: str | None) -> Self:
        return cls(hub, revision, (), Index.empty(), None)

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

    def named(self, name: str) -> tuple[ArtifactId, ...]:
        """Every version that `name` fits, in any case: `NAME`, `NAME:TAG`, `<Model>/<tag>`, an
        alias, `[NAME@]sha256:PREFIX`. Unlike `resolve`, a name means yanked versions too."""
        bare = name.startswith("sha256:")
        reference = Reference.parse(f"any@{name}" if bare else name)
        known = {entry.artifact_id.key: entry.artifact_id for entry in self.index.artifacts}
        found = sorted((known | {artifact.key: artifact for artifact in self.artifacts}).values())
        if not bare:
            aliased, wanted = self._aliased(reference), reference.name.casefold()
            found = (
                [a for a in found if reference.tag is None and a.key == wanted]
                or [a for a in found if self._is_model(a, reference.name)]
                or [a for a in found if a.key in aliased]
            )
        if reference.tag is not None:
            found = [a for a in found if a.tag.casefold() == reference.tag.casefold()]
        if reference.digest is not None:
            found = [a for a in found if self._digest(a).startswith(reference.digest)]
        if not found:
            names = [artifact.reference for artifact in self.artifacts]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            has = f"it has {', '.join(names[:_SHOWN])}{more}" if names else "it has no artifacts"
            raise errors.ArtifactNotFound(f"{self.hub.title} has no {name}.", hint=has)
        return tuple(found)

    def exact(self, name: str) -> ArtifactId:
        """The one version that `name` names exactly, as an alias does. The name of a model does
        not, even if the model has a single version."""
        found = self.named(name)
        if len(found) > 1:
            raise errors.AmbiguousName.for_name(name, [artifact.reference for artifact in found])
        (version,) = found
        if ":" in name or name.casefold() == version.key:
            return version
        if self._is_model(version, name) or version.key not in self._aliased(Reference.parse(name)):
            raise errors.UsageError(
                f"{name} does not say which version.", hint=f"name it exactly: {version.reference}"
            )
        return version

    def _is_model(self, artifact: ArtifactId, name: str) -> bool:
        entry = self.index.entry(artifact)
        names = {artifact.model, entry.model if entry and entry.model else artifact.model}
        return name.casefold() in map(str.casefold, names)

    def _aliased(self, reference: Reference) -> set[str]:
        """Keys of the versions with that alias, by the hub's index or the packaged manifests."""
        if reference.tag is not None:
            return set()
        listed = [entry.artifact_id for entry in self.index.aliased(reference.name)]
        packaged = Catalog.packaged().aliased(reference.name)
        return {artifact.key for artifact in (*listed, *packaged)}

    def _digest(self, artifact: ArtifactId) -> str:
        entry = self.index.entry(artifact)
        return entry.digest if entry is not None else Version.on(self.hub, artifact).digest


def apply_change(
    hub: Hub, make: Callable[[HubState], Change | None], *, create: bool | None = None
) -> tuple[Change | None, Commit, HubState]:
    """Commit what `make` makes of the state of `hub`, against other writers and lost replies: what
    was written, or `None` when nothing had to be; the commit; the state before it. `create` makes a
    repository that is not there; `None` where the user cannot ask for it."""
    sent: Change | None = None
    placed: Change | None = None
    failure: errors.ConflictError | errors.NetworkError | None = None
    for attempt in range(ATTEMPTS + 1):
        try:
            state = read_state(hub, create=create)
            change = make(state)
        except errors.NetworkError as error:
            if sent is None:
                raise
            raise _unknown(hub, error) from error
        if change is None:
            tidy(hub)
            return sent or placed, Commit(state.revision), state
        if attempt == ATTEMPTS:
            break
        try:
            commit = hub.commit(change)
            if placed is not None and change.artifact is None:
                change = replace(change, artifact=placed.artifact, files=placed.files)
            return change, commit, state
        except errors.RateLimited:
            raise
        except errors.StaleRevision as error:
            failure = error
            placed = change if error.placed else placed
        except errors.NetworkError as error:
            if change.propose:  # whether a proposal arrived cannot be read from the files
                raise _unknown(hub, error) from error
            sent, failure = change, error
        time.sleep(random.uniform(0, _JITTER_SECONDS * (attempt + 1)))
    assert failure is not None
    raise failure


def read_state(hub: Hub, *, create: bool | None = None, dry_run: bool = False) -> HubState:
    """The state of `hub`; a folder that is not there is empty if it may be created, a repository
    once it was. `create` is as for `apply_change`; with `dry_run` nothing is created."""
    make = getattr(hub, "create", None)
    try:
        return HubState.read(hub)
    except errors.PathNotFound as error:
        if create:
            return HubState.empty(hub, hub.revision)  # the first commit creates the folder
        make_it = "check the path; to make a new hub there: --create"
        hint = error.advice if create is None else make_it
        raise errors.PathNotFound(error.message, hint=hint) from error
    except errors.RepositoryNotFound as error:
        if not create or make is None:
            can = create is not None and make is not None
            hint = "check the name; to make a new repository: --create" if can else error.advice
            raise errors.RepositoryNotFound(error.message, hint=hint) from error
    if dry_run:
        return HubState.empty(hub, None)
    make()
    return HubState.read(hub)


def tidy(hub: Hub) -> None:
    """Remove what killed writers left on `hub`, as every commit does."""
    getattr(hub, "tidy", lambda: None)()


def _unknown(hub: Hub, error: errors.NetworkError) -> errors.NetworkError:
    return errors.NetworkError(
        f"it is not known whether the change of {hub.title} arrived: {error.message}",
        hint="run the same command again, which is safe",
    )


@dataclass(frozen=True)
class Version:
    """One artifact: its payload, and its `oscar.json` if it has one."""

    id: ArtifactId
    payload: tuple[FileDigest, ...]
    manifest_bytes: bytes | None

    @classmethod
    def of(cls, artifact: ArtifactId, files: Mapping[str, bytes]) -> Self:
        """The version made of `files`, by plain name; a signature is passed over."""
        payload = (file_digest(name, data) for name, data in files.items() if name not in BESIDE)
        return cls(artifact, tuple(sorted(payload)), files.get(FILE_NAME))

    @classmethod
    def on(cls, hub: Hub, artifact: ArtifactId) -> Self:
        """The version that `hub` lists; a file without a told sha256 is fetched and hashed."""
        listing = {file.path: file for file in hub.files(artifact)}
        data = None
        if FILE_NAME in listing:
            data = hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
        manifest = Manifest.readable(data)
        names = filter(is_payload, listing)
        if manifest:
            names = filter(listing.__contains__, (file.path for file in manifest.files))
        payload = []
        for file in map(listing.__getitem__, names):
            if file.sha256 is not None:
                payload.append(FileDigest(file.path, file.sha256, file.size))
            else:
                content = hub.fetch(artifact, file.path, limit=file.size)
                payload.append(file_digest(file.path, content))
        if not payload:
            raise errors.ArtifactNotFound(
                f"{artifact} on {hub.title} has no rotation files.",
                hint="the version is incomplete; tell its owner",
            )
        return cls(artifact, tuple(sorted(payload)), data)

    @property
    def digest(self) -> str:
        return artifact_digest(self.payload)

    @property
    def manifest(self) -> Manifest | None:
        return Manifest.readable(self.manifest_bytes)

    @property
    def hashes(self) -> dict[str, str | None]:
        """sha256 of each file by its name; `None` where there is no `oscar.json`."""
        own = None if self.manifest_bytes is None else sha256_hex(self.manifest_bytes)
        return {file.path: file.sha256 for file in self.payload} | {FILE_NAME: own}

    def changed_files(self, other: Version) -> list[str]:
        """Names of the files in which `other` differs. When and by which tool a manifest was
        written makes no other version."""
        mine, theirs = self.hashes, other.hashes
        changed = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
        one, two = self.manifest, other.manifest
        if one and two and one.model_copy(update={"created": two.created, "tool": two.tool}) == two:
            changed = [name for name in changed if name != FILE_NAME]
        return changed

    def entry(
        self, previous: IndexEntry | None = None, *, aliases: Sequence[str] = ()
    ) -> IndexEntry:
        manifest = self.manifest
        kept = ("status", "scores", "accepted", "hubs") if previous else ()
        given = (*(previous.aliases if previous else ()), *aliases)
        names = {alias.casefold(): alias for alias in given}
        try:
            return IndexEntry(
                id=str(self.id),
                digest=self.digest,
                files=self.payload,
                manifest_sha256=self.hashes[FILE_NAME],
                model=manifest.model.id if manifest else previous.model if previous else None,
                summary=Summary.of(manifest) if manifest else None,
                aliases=tuple(names[key] for key in sorted(names)),
                **{name: getattr(previous, name) for name in kept},
            )
        except ValidationError as error:
            raise errors.MalformedFile(
                "index.entry", f"{self.id}: {error.errors()[0]['msg']}."
            ) from None


def placed(
    state: HubState,
    version: Version,
    files: Mapping[str, bytes],
    *,
    aliases: Sequence[str] = (),
    scores: Sequence[Score] = (),
    accepted: Sequence[Accepted] = (),
    like: IndexEntry | None = None,
    propose: bool = False,
    verb: str = "Publish",
) -> Change | None:
    """What has to be written to a hub in `state` so that it has `version`; `None` when everything
    is there. A new entry of the index takes over what `like`, one of another hub, says."""
    artifact, digest = version.id, version.digest
    there = _same_there(state, version, files)
    known = state.index.entry(artifact)
    if there is None and known is not None and known.digest != digest:
        raise errors.VersionExists(
            f"the index of {state.hub.title} knows {artifact} as {known.digest}, this is {digest}.",
            hint=_OTHER_TAG,
        )
    previous = known if known is not None and known.digest == digest else like
    entry = (there or version).entry(previous, aliases=aliases)
    more = {
        "scores": merged(entry.scores, scores),
        "accepted": tuple(sorted({*entry.accepted, *accepted})),
    }
    entry = entry.model_copy(update=more)
    root = state.root_files(state.index if entry == known else state.index.with_entry(entry))
    if there is None:
        message = f"{verb} {artifact} ({digest[:19]})"
        return Change(artifact, files, root, state.revision, message, propose)
    message = f"Update index and card for {artifact}"
    return Change(None, {}, root, state.revision, message, propose) if root else None


def _same_there(state: HubState, version: Version, files: Mapping[str, bytes]) -> Version | None:
    """The same version as the hub has it, or `None`; only when it was written may differ."""
    artifact, hub = version.id, state.hub
    spelled = next((other for other in state.artifacts if other.key == artifact.key), None)
    if spelled is None:
        return None
    if spelled != artifact:
        raise errors.VersionExists(
            f"{artifact} is already on {hub.title}, spelled {spelled}.", hint=_OTHER_TAG
        )
    try:
        there = Version.on(hub, artifact)
        changed = version.changed_files(there)
    except errors.ArtifactNotFound:
        changed = sorted(files)
    if changed:
        raise errors.VersionExists(
            f"{artifact} is already on {hub.title}, with other content ({', '.join(changed)}).",
            hint=_OTHER_TAG,
        )
    return there


def check_arrived(hub: Hub, version: Version, beside: Mapping[str, bytes]) -> None:
    """List what was written by a fresh request, and compare every byte's sha256."""
    hub.refresh()
    try:
        got = Version.on(hub, version.id).hashes
    except errors.ArtifactNotFound:
        raise errors.DigestMismatchError.for_content(
            f"{version.id} on {hub.title}", want=version.digest, got=None
        ) from None
    except errors.NetworkError as error:
        raise errors.NetworkError(
            f"{version.id} was written to {hub.title}, but could not be read back: {error.message}",
            hint="run the same command again, which is safe and checks it",
        ) from error
    want = version.hashes | {name: sha256_hex(data) for name, data in beside.items()}
    for file in hub.files(version.id) if beside else ():
        if file.path in beside:
            size = len(beside[file.path])
            got[file.path] = file.sha256 or sha256_hex(hub.fetch(version.id, file.path, limit=size))
    for name in sorted(want.keys() | got.keys()):
        if want.get(name) != got.get(name):
            raise errors.DigestMismatchError.for_content(
                f"{name} of {version.id} on {hub.title}",
                want=want.get(name) or "no file",
                got=got.get(name),
            )


def tag_name(hub: Hub, artifact: ArtifactId) -> str | None:
    """The tag of `artifact`, without a slash; `None` for a hub on this machine, which has none."""
    return f"oz-{artifact.model}-{artifact.tag}" if address.is_remote(hub.name) else None


def put_tag(hub: Hub, version: Version, revision: str | None) -> tuple[str | None, str | None]:
    """Tag `revision`: the tag that names this version, or `None`, and a warning. The commit is the
    truth, so that a tag that fails is no error."""
    name = tag_name(hub, version.id)
    if name is None:
        return None, None
    try:
        hub.tag(name, revision, f"{version.id} {version.digest}")
    except errors.ConflictError:
        if not _names(hub, name, version):
            return None, f"the tag {name} of {hub.title} names other content."
    except errors.OscarZooError as error:
        text = f"the tag {name} could not be made: {error.message} Publishing this again makes it."
        return None, text
    return name, None


def _names(hub: Hub, tag: str, version: Version) -> bool:
    """Whether `tag`, made by an earlier run, stands on a commit that has this version."""
    try:
        return not version.changed_files(Version.on(hub.at(tag), version.id))
    except errors.OscarZooError:
        return False


R = TypeVar("R")


@dataclass(frozen=True)
class ErrorFacts:
    """Why a command, or a part of it, failed."""

    code: Annotated[
        str, says("What went wrong, in a word that does not change, such as not_found.artifact.")
    ]
    message: Annotated[str, says("The cause, in a sentence for people.")]
    hint: Annotated[str | None, says("What to do next, for people; null where nobody can say.")]


class ErrorReport(TypedDict):
    """What every command prints with --json when it fails as a whole. The exit code says the kind:
    2 usage, 3 not found, 4 integrity, 5 network, 6 access, 7 conflict, 8 disk, 130 interrupted, 143
    terminated, 1 any other."""

    schema: Literal["oscar-zoo.error/1"]
    error: ErrorFacts


def facts_of(errors: Sequence[errors.OscarZooError]) -> list[ErrorFacts]:
    return [ErrorFacts(error.code, error.message, error.hint) for error in errors]


Failure = Annotated[
    InstanceOf[errors.OscarZooError] | None,
    PlainSerializer(
        lambda error: facts_of([] if error is None else [error]), return_type=list[ErrorFacts]
    ),
    Field(serialization_alias="errors", description="Why the next hub did not take it, if any."),
]


def writable_hubs(names: Sequence[str]) -> tuple[Hub, ...]:
    """The hubs to write to, in order, those without commits last."""
    hubs = address.Sources(names).publishing_hubs
    for hub in hubs:
        check_online(hub)
    return hubs


def check_online(hub: Hub) -> None:
    sources = address.Sources()
    if address.is_remote(hub.name) and sources.offline:
        text = f"{hub.title} cannot be reached in offline mode."
        raise errors.OfflineError(text, hint=sources.go_online)


def write_to_each(
    hubs: Sequence[Hub], write: Callable[[Hub], R], doing: str, observer: Observer
) -> tuple[tuple[R, ...], errors.OscarZooError | None]:
    """Run `write` on one hub after the other: what it gave, and why the next hub failed, after
    which no other is tried."""
    done: list[R] = []
    for hub in hubs:
        observer.advance(f"{doing} {hub.title}", 0, 0)
        try:
            done.append(write(hub))
        except (KeyboardInterrupt, SystemExit) as error:
            for before in hubs[: len(done)]:
                error.add_note(f"written before that: {before.name}")
            raise
        except errors.OscarZooError as error:
            if isinstance(error, errors.HubUnreachable | errors.HubTimeout):
                error.advise("check the connection, then run the same command again, which is safe")
            if not done:
                raise
            return tuple(done), error
        finally:
            observer.begin((), timed=False)
    return tuple(done), None
