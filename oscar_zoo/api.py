"""The verbs of the command line as Python calls; everything here is importable from `oscar_zoo`
itself.

    import oscar_zoo

    artifact = oscar_zoo.pull("Qwen3-8B")
    k, v = artifact.rotations()

Every call takes hubs as people write them (`hf:ORG/REPO[@REV]`, `ms:ORG/REPO`, `file:PATH`), raises
the errors of `oscar_zoo.errors`, prints nothing, and needs no torch. `oscar-zoo.lock` is read and
written only where `lock` names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import Reference, is_path, parse_digest
from oscar_zoo.artifact.outcome import Outcome, Verified
from oscar_zoo.errors import ArtifactNotFound, InvalidName, NotFoundError
from oscar_zoo.hubs import address, config
from oscar_zoo.hubs.base import Hub, Progress
from oscar_zoo.models.folder_geometry import geometry_of_folder
from oscar_zoo.registry import mirror as mirroring
from oscar_zoo.registry import publish as publishing
from oscar_zoo.registry import pull as pulling
from oscar_zoo.registry import verification
from oscar_zoo.registry.export import export
from oscar_zoo.registry.known_names import find_stored
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.status import StatusResult, set_status
from oscar_zoo.registry.store import Store, StoredArtifact
from oscar_zoo.registry.trust import Trust

__all__ = [
    "Artifact",
    "deprecate",
    "installed",
    "mirror",
    "publish",
    "pull",
    "unyank",
    "verify",
    "yank",
]

Hubs = str | Sequence[str] | None


@dataclass(frozen=True)
class Artifact:
    """A verified artifact on this machine.

    Attributes:
        id: `<Model>/<tag>`.
        digest: `sha256:<64 hex>` over the payload files.
        path: folder with the files: the store's, whose files are read-only, or the copy in
            `output`.
        files: file name -> path, `oscar.json` included where there is one.
        manifest: `oscar.json`, or `None` where the publisher gave none.
        hub: where it came from.
        revision: commit there, or `None` where the hub has none.
        already_present: whether it was here before.
        first_use: whether nobody had promised its digest before: it is trusted from now on.
        warnings: codes of verification, and sentences about a deprecated or yanked version.
    """

    id: str
    digest: str
    path: Path
    files: dict[str, Path]
    manifest: Manifest | None
    hub: str
    revision: str | None
    already_present: bool = True
    first_use: bool = False
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Artifact({self.id!r}, {self.digest[:19]!r}, path={str(self.path)!r})"

    @property
    def model(self) -> str:
        """Folder of the base model, such as `Qwen3-8B`."""
        return self.id.partition("/")[0]

    @property
    def tag(self) -> str:
        """Version, such as `seq20000_prompt83_group128`."""
        return self.id.partition("/")[2]

    def rotations(self) -> tuple[RotationSet, RotationSet]:
        """The transforms of keys and values, from bytes that are read, hashed and verified now.

        Returns:
            Two `RotationSet`s. `layers[i].forward` is float32 `[head_dim, head_dim]`, or
            `[num_kv_heads, head_dim, head_dim]` for transforms per head; `k' = k @ forward`.

        Raises:
            ArtifactNotFound: it was removed from the store.
            DigestMismatchError: a file was changed.
            VerificationFailed: it must not be used.
        """
        stored = _open(Reference.parse(f"{self.model}:{self.tag}@{self.digest}"))
        outcome = pulling.verify_stored(stored)
        if not isinstance(outcome, Verified):
            pulling.refuse(self.id, outcome)
        assert outcome.k is not None, "a rotation pair has both sides"
        assert outcome.v is not None, "a rotation pair has both sides"
        return outcome.k, outcome.v


def pull(
    name: str,
    *,
    hubs: Hubs = None,
    output: str | Path | None = None,
    lock: str | Path | None = None,
    locked: bool = False,
    accept_new_digest: bool = False,
    offline: bool = False,
    progress: Progress | None = None,
) -> Artifact:
    """Fetch, verify and keep an artifact, or check the copy that is here.

    Args:
        name: `NAME`, `NAME:TAG`, `NAME@sha256:PREFIX`; a Hugging Face id works too.
        hubs: asked in order; default `OSCAR_ZOO_HUB`, `config.toml`, else the zoo of this user and
            the public ones.
        output: also copy the files to `<output>/<Model>/<tag>`.
        lock: an `oscar-zoo.lock` to hold the artifact to, and to pin it in.
        locked: take only what `lock` has; never write it.
        accept_new_digest: take bytes that differ from those seen before, and pin them.
        offline: ask no hub.
        progress: called with file, bytes so far and bytes in total, from several threads.

    Raises:
        NotFoundError: nobody has it.
        AmbiguousName: `name` means several versions.
        NetworkError: no hub answered.
        AccessError: a hub wants a login or refuses.
        IntegrityError: bytes are not what they must be; nothing was kept.
        OutputExists: `output` holds other content.
        NotLocked: `locked`, and `lock` does not have it.
    """
    trust = Trust(
        lock=PinFile(Path(lock)) if lock else None, locked=locked, accept_new=accept_new_digest
    )
    settings = config.load(_texts(hubs), offline=offline)
    opened = address.open_hubs(_texts(hubs), offline=settings.offline)
    result = pulling.pull(
        name, opened, Store(), trust=trust, offline=settings.offline, progress=progress
    )
    folder = export(result.artifact, Path(output)) if output is not None else None
    return _artifact(result.artifact, folder, result)


def installed(name: str | None = None) -> tuple[Artifact, ...]:
    """What the store holds, or what `name` means in it; every file is hashed.

    Raises:
        DigestMismatchError: a file was changed.
    """
    store = Store()
    if name is not None:
        record = find_stored(Reference.parse(name), store)
        return () if record is None else (_artifact(store.open(record.digest, record.id)),)
    return tuple(_artifact(store.open(record.digest, record.id)) for record in store.installed())


def verify(
    target: str | Path,
    *,
    model: str | Path | None = None,
    digest: str | None = None,
    strict: bool = False,
) -> Outcome:
    """Check a rotation file, a folder with a K/V pair, or an installed artifact by name.

    Args:
        target: a `Path`, or a text as on the command line: the name of something pulled before,
            unless it begins with `.`, `/` or `~`, ends in `/`, or names a file.
        model: name of the zoo, or folder of the model, whose geometry must fit; default what the
            folder names say.
        digest: what the artifact must have, `sha256:<64 hex>`.
        strict: apply the rules of publishing.

    Returns:
        `Verified`, `Rejected`, `DigestMismatch`, `Unsupported` or `Unreadable`: a value, not an
            exception.

    Raises:
        PathNotFound, ArtifactNotFound: there is no such thing.
        UsageError: a tree with several artifacts, an unknown `model`, or a `digest` that is none.
    """
    geometry = verification.model_geometry(model, geometry_of_folder) if model is not None else None
    digest = parse_digest(digest) if digest is not None else None
    if isinstance(target, str) and not is_path(target):
        try:
            reference = Reference.parse(target)
            return verification.check_installed(
                reference, geometry=geometry, digest=digest, strict=strict
            ).outcome
        except (NotFoundError, InvalidName) as error:
            place = verification.namesake(target)
            if place is not None:
                verification.suggest_path(place, error)
            raise
    path = verification.one_artifact(verification.existing_path(target))
    return verification.check_one(path, geometry=geometry, digest=digest, strict=strict).outcome


def publish(
    folder: str | Path,
    *,
    hub: str | None = None,
    create: bool = False,
    propose: bool = False,
    aliases: Sequence[str] = (),
    allow_warnings: bool = False,
    dry_run: bool = False,
) -> publishing.PublishResult:
    """Verify an artifact folder strictly and publish it as a version that never changes.

    Args:
        folder: rotation files and their `oscar.json`.
        hub: where to; default the zoo of this user.
        create: create a repository that is not there.
        propose: open a pull request instead.
        aliases: other names of exactly this artifact.
        allow_warnings: publish although verification has warnings.
        dry_run: send nothing; `result.plan` says what would be sent.

    Raises:
        VersionExists: the version exists with other content.
        VerificationFailed: the artifact must not be used.
        NetworkError: no answer; publishing the same again is safe.
    """
    return publishing.publish(
        Path(folder),
        address.publishing_hubs([hub] if hub else [])[0],
        create=create,
        propose=propose,
        aliases=aliases,
        allow_warnings=allow_warnings,
        dry_run=dry_run,
    )


def yank(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Hide exactly one version, `NAME:TAG`, from names; its digest still works, with `reason` as a
    warning."""
    return set_status(_one(hub), name, "yanked", reason=reason, replaced_by=replaced_by)


def unyank(name: str, *, hub: str | None = None) -> StatusResult:
    """Offer a version by name again."""
    return set_status(_one(hub), name, "active")


def deprecate(
    name: str, *, reason: str, hub: str | None = None, replaced_by: str | None = None
) -> StatusResult:
    """Keep a version, and warn whoever pulls it."""
    return set_status(_one(hub), name, "deprecated", reason=reason, replaced_by=replaced_by)


def mirror(
    source: str,
    target: str,
    names: Sequence[str] = (),
    *,
    create: bool = False,
    dry_run: bool = False,
) -> tuple[mirroring.MirrorResult, ...]:
    """Copy artifacts (all of them, or `names`) between hubs, byte for byte, and compare the digests
    of both.

    Raises:
        VersionExists: the target has other content under an id.
        IntegrityError: bytes are not what they must be.
    """
    options = mirroring.MirrorOptions(create=create, dry_run=dry_run)
    return mirroring.mirror(
        address.open_hub(source), address.open_hub(target), names, options=options
    )


def _one(hub: str | None) -> Hub:
    return address.publishing_hubs([hub] if hub else [])[0]


def _texts(hubs: Hubs) -> Sequence[str]:
    return (hubs,) if isinstance(hubs, str) else hubs or ()


def _open(reference: Reference) -> StoredArtifact:
    store = Store()
    record = find_stored(reference, store)
    if record is None:
        raise ArtifactNotFound(
            f"{reference} is not in the store.", hint=f"fetch it: oscar-zoo pull {reference}"
        )
    return store.open(record.digest, record.id)


def _artifact(
    stored: StoredArtifact, folder: Path | None = None, result: pulling.PullResult | None = None
) -> Artifact:
    record, place = stored.record, folder or stored.record.path
    return Artifact(
        id=str(record.id),
        digest=record.digest,
        path=place,
        files={name: place / name for name in stored.files},
        manifest=stored.manifest,
        hub=result.hub if result else record.source,
        revision=record.revision,
        already_present=result.already_present if result else True,
        first_use=result.first_use if result else False,
        warnings=result.warnings if result else record.warnings,
    )
