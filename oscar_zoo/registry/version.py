"""What one artifact is, without its payload in memory: id, payload digests, `oscar.json`.

Made from bytes that are about to be written or from what a hub has, it decides whether two versions
are the same, and is all that an index entry is made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import ArtifactNotFound, DigestMismatchError, MalformedFile
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.index import IndexEntry, Summary
from oscar_zoo.registry.payload_file import PayloadFile
from oscar_zoo.registry.store import BESIDE


@dataclass(frozen=True)
class Version:
    """One artifact.

    Attributes:
        id: as spelled where it is.
        payload: payload files, sorted.
        manifest_bytes: `oscar.json`, or `None`.
    """

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

        When and by which tool a manifest was written makes no other version.
        """
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
