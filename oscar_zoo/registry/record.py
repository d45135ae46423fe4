"""The record of a store entry: which artifact it is, its files with their digests, and where it
came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any, Self

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, read_file
from oscar_zoo.artifact.names import ArtifactId, check_digest, check_part
from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.measured import Measured

SCHEMA = "oscar-zoo.record/1"
FILE_NAME = "record.json"


@dataclass(frozen=True)
class Record:
    """What the store knows about an entry without reading its payload.

    Attributes:
        id: artifact id.
        digest: `sha256:<hex>` over `files`.
        files: payload files, sorted.
        manifest_sha256: sha256 of `oscar.json`, or `None` when the hub had none.
        source: the hub it came from.
        fetched: RFC 3339 UTC.
        path: folder of the entry.
        revision: commit of the hub, or `None` where it has none.
        level: what verification reached before the entry was stored, or `None` in entries of older
            versions.
        warnings: codes of what it remarked.
        signature_sha256: sha256 of the signature file, or `None` when there was none.
        accepted: what it was published in spite of, as the index of its hub said.
        measured: perplexity and recall as the index of its hub said, or `None`.
    """

    id: ArtifactId
    digest: str
    files: tuple[FileDigest, ...]
    manifest_sha256: str | None
    source: str
    fetched: str
    path: Path
    revision: str | None = None
    level: str | None = None
    warnings: tuple[str, ...] = ()
    signature_sha256: str | None = None
    accepted: tuple[str, ...] = ()
    measured: Measured | None = None

    @property
    def fetch_again(self) -> str:
        """The command that fetches the version again, from the hub that it came from."""
        return f"oscar-zoo pull {self.id.reference} --hub {quote(self.source)}"

    def to_bytes(self) -> bytes:
        """The content of `record.json`; the folder is not part of it."""
        beside: dict[str, Any] = {
            "signature_sha256": self.signature_sha256,
            "accepted": list(self.accepted),
            "measured": self.measured.model_dump(mode="json") if self.measured else None,
        }
        return strict_json.pretty_bytes(
            {
                "schema": SCHEMA,
                "id": str(self.id),
                "digest": self.digest,
                "files": [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in self.files],
                "manifest_sha256": self.manifest_sha256,
                "source": self.source,
                "fetched": self.fetched,
                "revision": self.revision,
                "level": self.level,
                "warnings": list(self.warnings),
                **{name: said for name, said in beside.items() if said},
            }
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The record in `folder`, or `None` when there is none that this version wrote for this
        place."""
        try:
            value = strict_json.loads(
                read_file(folder / FILE_NAME, max_bytes=strict_json.MAX_BYTES), what=FILE_NAME
            )
            files = tuple(
                FileDigest(check_part(row["path"]), _checked_hex(row["sha256"]), int(row["size"]))
                for row in value["files"]
            )
            manifest, signature = value["manifest_sha256"], value.get("signature_sha256")
            record = cls(
                id=ArtifactId.parse(value["id"]),
                digest=artifact_digest(files),
                files=files,
                manifest_sha256=None if manifest is None else _checked_hex(manifest),
                source=str(value["source"]),
                fetched=str(value["fetched"]),
                path=folder,
                revision=_text_or_none(value.get("revision")),
                level=_text_or_none(value.get("level")),
                warnings=tuple(str(code) for code in value.get("warnings", ())),
                signature_sha256=None if signature is None else _checked_hex(signature),
                accepted=tuple(str(what) for what in value.get("accepted", ())),
                measured=Measured.from_json(value.get("measured")),
            )
        except (MalformedFile, LookupError, TypeError, ValueError):
            return None
        expected = (SCHEMA, record.digest, "sha256:" + folder.parent.name)
        return record if expected == (value["schema"], value["digest"], record.digest) else None


def _checked_hex(text: str) -> str:
    return check_digest(f"sha256:{text}").removeprefix("sha256:")


def _text_or_none(value: object) -> str | None:
    return None if value is None else str(value)
