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
from pathlib import Path

from oscar_zoo.app import targets
from oscar_zoo.app.artifacts import Artifact, pulled_artifact, stored_artifact
from oscar_zoo.app.progress import SILENT
from oscar_zoo.app.sources import Sources
from oscar_zoo.artifact.names import Reference, parse_digest
from oscar_zoo.artifact.outcome import Outcome
from oscar_zoo.hubs import address
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
from oscar_zoo.registry.store import Store
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
    sources = Sources(hubs, offline=offline)
    result = pulling.pull(
        name, sources.hubs, Store(), trust=trust, offline=sources.offline, progress=progress
    )
    folder = export(result.artifact, Path(output)) if output is not None else None
    return pulled_artifact(result, folder)


def installed(name: str | None = None) -> tuple[Artifact, ...]:
    """What the store holds, or what `name` means in it; every file is hashed.

    Raises:
        DigestMismatchError: a file was changed.
    """
    store = Store()
    if name is not None:
        record = find_stored(Reference.parse(name), store)
        return () if record is None else (stored_artifact(store.open(record.digest, record.id)),)
    return tuple(
        stored_artifact(store.open(record.digest, record.id)) for record in store.installed()
    )


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
    parsed = targets.parse(target)
    if isinstance(parsed, targets.NameTarget):
        with targets.looking_up(parsed, SILENT):
            return verification.check_installed(
                parsed.reference, geometry=geometry, digest=digest, strict=strict
            ).outcome
    path = verification.one_artifact(verification.existing_path(parsed.path))
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
