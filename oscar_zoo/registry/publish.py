"""Use case: a verified folder -> one new version on a hub, read back and compared.

A version never changes: the same bytes again are success, other bytes under the same id are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_file
from oscar_zoo.artifact.stages import is_payload
from oscar_zoo.artifact.verify import MAX_PAYLOAD_BYTES, verify_files
from oscar_zoo.errors import (
    DigestMismatchError,
    MalformedFile,
    NotFoundError,
    PathNotFound,
    UsageError,
    VersionExists,
)
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.pull import refuse


@dataclass(frozen=True)
class PublishResult:
    """What `publish` did; `already_published` means the same bytes were there before."""

    id: ArtifactId
    digest: str
    already_published: bool
    verified: Verified


def publish(
    folder: Path, hub: Hub, *, artifact_id: ArtifactId | None = None, catalog: Catalog | None = None
) -> PublishResult:
    """Verify the artifact in `folder` strictly and publish it.

    Args:
        folder: payload files and their `oscar.json`.
        hub: where to.
        artifact_id: the id the caller expects; it must be the manifest's.
        catalog: recipes that know the geometry of models; default the packaged ones.

    Raises:
        PathNotFound: no such folder, or a file that the manifest lists is missing.
        UsageError: no `oscar.json`, another id, or rotation files the manifest does not list.
        VerificationFailed: the artifact must not be used.
        VersionExists: the version exists with other bytes.
    """
    files, manifest = _read(folder)
    identity = manifest.artifact_id
    if artifact_id is not None and artifact_id != identity:
        raise UsageError(
            f"{folder} is {identity}, not {artifact_id}.",
            hint=f"the id is part of {FILE_NAME}, which never changes",
        )
    recipe = (catalog or Catalog.packaged()).recipe(identity.model)
    outcome = verify_files(
        {name: data for name, data in files.items() if name != FILE_NAME},
        manifest=manifest,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(identity),
        strict=True,
    )
    if not isinstance(outcome, Verified):
        refuse(str(folder), outcome)
    try:
        created = hub.commit(identity, files)
    except VersionExists:
        if not _same_version(hub, manifest):
            raise
        return PublishResult(identity, outcome.digest, True, outcome)
    _read_back(hub, identity, files)
    return PublishResult(identity, outcome.digest, not created, outcome)


def _read(folder: Path) -> tuple[dict[str, bytes], Manifest]:
    if not folder.is_dir():
        raise PathNotFound.for_path(folder, "folder")
    try:
        data = read_file(folder / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
    except PathNotFound:
        raise UsageError(
            f"{folder} has no {FILE_NAME}, so nobody could tell what it is.",
            hint="publish a folder that oscar-zoo compute wrote",
        ) from None
    manifest = Manifest.from_bytes(data, what=str(folder / FILE_NAME))
    listed = {entry.path for entry in manifest.files}
    extra = sorted(path.name for path in folder.iterdir() if is_payload(path.name) and path.name not in listed)
    if extra:
        raise UsageError(
            f"{folder} has {', '.join(extra)}, which its {FILE_NAME} does not list.",
            hint="one folder is one artifact: move other rotation files away",
        )
    files = {name: read_file(folder / name, max_bytes=MAX_PAYLOAD_BYTES) for name in sorted(listed)}
    return {**files, FILE_NAME: data}, manifest


def _same_version(hub: Hub, manifest: Manifest) -> bool:
    """Whether the hub's version differs from ours only in when and by which tool its manifest was written."""
    try:
        there = Manifest.from_bytes(hub.fetch(manifest.artifact_id, FILE_NAME, limit=strict_json.MAX_BYTES))
    except (NotFoundError, MalformedFile):
        return False
    return there.model_copy(update={"created": manifest.created, "tool": manifest.tool}) == manifest


def _read_back(hub: Hub, artifact: ArtifactId, files: dict[str, bytes]) -> None:
    there = {file.path: file.sha256 for file in hub.files(artifact)}
    for name, data in files.items():
        want, got = sha256_hex(data), there.get(name, "no file")
        if got is not None and got != want:
            raise DigestMismatchError.for_content(f"{name} of {artifact} on {hub.name}", want=want, got=got)
