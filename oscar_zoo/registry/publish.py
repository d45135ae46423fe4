"""Publish a verified folder as one new version on a hub: one commit, which is read back and tagged.

A version never changes. Publishing the same content again succeeds, and other content under the
same id is refused. The commit counts: if the index entry, the card or the tag is missing,
publishing the same folder again repairs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.digest import FileDigest, file_digest
from oscar_zoo.artifact.files import MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, is_payload
from oscar_zoo.artifact.names import ArtifactId, Reference, path_text
from oscar_zoo.artifact.outcome import Verified, refuse
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.errors import PathNotFound, UsageError
from oscar_zoo.hubs.base import CARD_NAME, INDEX_NAME, Hub
from oscar_zoo.registry.card import BEGIN, END, is_damaged
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.changes import apply_change, read_state
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.placing import Placing, check_arrived, put_tag, tag_name
from oscar_zoo.registry.version import Version


@dataclass(frozen=True)
class PublishPlan:
    """What a dry run would send.

    Attributes:
        files: every file by its path in the hub; empty when nothing has to be sent.
        message: of the commit, or `None` without one.
        parent: revision the commit is made for.
        tag: what would be tagged, or `None`.
        serial: of the index after it.
    """

    files: tuple[FileDigest, ...]
    message: str | None
    parent: str | None
    tag: str | None
    serial: int


@dataclass(frozen=True)
class PublishResult:
    """What `publish` did.

    Attributes:
        id: of the artifact.
        digest: of its payload.
        already_published: the same content was there before; index, card or tag may have been
            repaired.
        verified: the outcome of verification.
        revision: where the hub stands with it, or `None` for a dry run or proposal.
        proposal: address of the pull request that has to be merged, or `None`.
        tag: the tag that now names the version, or `None`.
        warnings: what did not work out and how to repair it.
        plan: of a dry run, else `None`.
    """

    id: ArtifactId
    digest: str
    already_published: bool
    verified: Verified
    revision: str | None = None
    proposal: str | None = None
    tag: str | None = None
    warnings: tuple[str, ...] = ()
    plan: PublishPlan | None = None


def publish(
    folder: Path,
    hub: Hub,
    *,
    artifact_id: ArtifactId | None = None,
    catalog: Catalog | None = None,
    allow_warnings: bool = False,
    propose: bool = False,
    aliases: Sequence[str] = (),
    dry_run: bool = False,
    create: bool = False,
) -> PublishResult:
    """Verify the artifact in `folder` strictly and publish it.

    Args:
        folder: payload files and their `oscar.json`.
        hub: where to.
        artifact_id: the id the caller expects; it must be the manifest's.
        catalog: recipes that know the geometry of models; default the packaged ones.
        allow_warnings: publish although verification has warnings.
        propose: open a pull request; no tag.
        aliases: other names of exactly this artifact.
        dry_run: only say what would be sent.
        create: create a repository, or the folder of a hub, that is not there.

    Raises:
        PathNotFound: no such folder, a file that the manifest lists is missing, or no such hub
            without `create`.
        UsageError: no `oscar.json`, another id, rotation files the manifest does not list,
            warnings, a taken alias.
        VerificationFailed: the artifact must not be used.
        VersionExists: the version exists with other content.
        StaleRevision: others kept changing the hub.
        DigestMismatchError: the hub has other bytes than were sent.
        NetworkError, AccessError, RepositoryNotFound: see `Hub`.
    """
    name = path_text(folder)
    files, manifest = _read(folder, name)
    catalog = catalog or Catalog.packaged()
    names = _aliases(aliases, manifest.artifact_id, catalog)
    verified = _verify(name, files, manifest, artifact_id, catalog, allow_warnings)
    placing = Placing(
        Version.of(manifest.artifact_id, files), files, aliases=names, propose=propose
    )
    version = placing.version
    if dry_run:
        return _rehearse(placing, hub, verified, create)
    applied = apply_change(hub, placing.change, create=create)
    commit, already = applied.commit, applied.change is None or applied.change.artifact is None
    if propose:
        where = commit.revision if already else None
        return PublishResult(version.id, version.digest, already, verified, where, commit.proposal)
    if not already:
        check_arrived(hub, version)
    tag, failed = put_tag(hub, version, commit.revision)
    warnings = tuple(text for text in (failed, _left_alone(applied.state.card)) if text)
    return PublishResult(
        version.id, version.digest, already, verified, commit.revision, tag=tag, warnings=warnings
    )


def _rehearse(placing: Placing, hub: Hub, verified: Verified, create: bool) -> PublishResult:
    """What publishing would do, from what the hub has now; nothing is written."""
    version, state = placing.version, read_state(hub, create=create, dry_run=True)
    change = placing.change(state)
    tag = None if placing.propose else tag_name(hub, version.id)
    plan = PublishPlan((), None, None, tag, state.index.serial)
    if change is not None:
        files = tuple(sorted(file_digest(path, data) for path, data in change.paths.items()))
        data = change.root.get(INDEX_NAME)
        serial = plan.serial if data is None else Index.from_bytes(data).serial
        plan = PublishPlan(files, change.message, change.parent, tag, serial)
    already = change is None or change.artifact is None
    return PublishResult(version.id, version.digest, already, verified, plan=plan)


def _verify(
    name: str,
    files: Mapping[str, bytes],
    manifest: Manifest,
    artifact_id: ArtifactId | None,
    catalog: Catalog,
    allow_warnings: bool,
) -> Verified:
    identity = manifest.artifact_id
    if artifact_id is not None and artifact_id != identity:
        raise UsageError(
            f"{name} is {identity}, not {artifact_id}.",
            hint=f"the id is part of {FILE_NAME}, which never changes",
        )
    recipe = catalog.recipe(identity.model)
    outcome = verify_files(
        {file: data for file, data in files.items() if file != FILE_NAME},
        manifest=manifest,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(identity),
        strict=True,
    )
    if not isinstance(outcome, Verified):
        refuse(name, outcome)
    if outcome.warnings and not allow_warnings:
        raise UsageError(
            f"{name} passes every check, with warnings: {', '.join(outcome.warnings)}.",
            hint=(
                f"oscar-zoo verify --strict {quote(name)} explains them; "
                "to publish it anyway: --allow-warnings"
            ),
        )
    return outcome


def _read(folder: Path, name: str) -> tuple[dict[str, bytes], Manifest]:
    if not folder.is_dir():
        raise PathNotFound.for_path(name, "folder")
    try:
        data = read_file(folder / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
    except PathNotFound:
        raise UsageError(
            f"{name} has no {FILE_NAME}, so nobody could tell what it is.",
            hint="publish a folder that oscar-zoo compute wrote",
        ) from None
    manifest = Manifest.from_bytes(data, what=str(folder / FILE_NAME))
    listed = {entry.path for entry in manifest.files}
    extra = sorted(
        path.name for path in folder.iterdir() if is_payload(path.name) and path.name not in listed
    )
    if extra:
        raise UsageError(
            f"{name} has {', '.join(extra)}, which its {FILE_NAME} does not list.",
            hint="one folder is one artifact: move other rotation files away",
        )
    files = {file: read_file(folder / file, max_bytes=MAX_PAYLOAD_BYTES) for file in sorted(listed)}
    return {**files, FILE_NAME: data}, manifest


def _aliases(aliases: Sequence[str], artifact: ArtifactId, catalog: Catalog) -> tuple[str, ...]:
    for alias in aliases:
        reference, recipe = Reference.parse(alias), catalog.recipe(alias)
        if reference.tag is not None or reference.digest is not None:
            raise UsageError(
                f"{alias!r} is not a plain name.", hint="an alias has no tag and no digest"
            )
        if recipe is not None and recipe.name.casefold() != artifact.model.casefold():
            raise UsageError(
                f"the alias {alias!r} is a name of {recipe.name}.", hint="choose another alias"
            )
    return tuple(aliases)


def _left_alone(card: bytes | None) -> str | None:
    if not is_damaged(card):
        return None
    return (
        f"{CARD_NAME} was left as it is: its lines {BEGIN.decode()} and {END.decode()} do not"
        " match."
    )
