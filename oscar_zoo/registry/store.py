"""The content-addressed store of this machine: verified artifacts, named by the digest of their
bytes.

```
<cache>/blobs/sha256/<hex>                    one payload file, mode 0444
<cache>/artifacts/<digest>/<id hash>/   the files, oscar.json and model.sig if any, record.json,
                                        .complete
```

An entry is absent or complete: it is staged, forced to disk, marked `.complete` and renamed. Every
use hashes every file again, so bit rot and tampering show. Two ids may share one digest (a Hadamard
pair fits two models); the last part of the path keeps them apart. Files in an entry are hard links
to blobs where the file system has them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer

from oscar_zoo import errors, paths
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import (
    MAX_PAYLOAD_BYTES,
    FileDigest,
    artifact_digest,
    file_digest,
    read_file,
    sha256_hex,
)
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference, check_digest, check_part
from oscar_zoo.artifact.specs import Digest, Document, Hex64
from oscar_zoo.next_step import Pull
from oscar_zoo.registry.catalog import Catalog, PayloadFile
from oscar_zoo.registry.measured import Measured

COMPLETE = ".complete"
BESIDE = (FILE_NAME, SIGNATURE_NAME)
"""Files of an artifact that are no payload."""


RECORD_SCHEMA: Final = "oscar-zoo.record/1"
RECORD_NAME: Final = "record.json"


def _parsed(text: str | ArtifactId) -> ArtifactId:
    return text if isinstance(text, ArtifactId) else ArtifactId.parse(text)


class Record(Document):
    """What the store knows about an entry without reading its payload; entries of older versions
    have no `level`, and keys of newer ones are passed over. What it was published in spite of, and
    the perplexity and recall, are what the index of its hub said."""

    model_config = ConfigDict(extra="ignore")
    NAME, CODE, REMEDY = RECORD_NAME, "record", "fetch it again"

    schema_: Literal["oscar-zoo.record/1"] = Field(alias="schema")
    id: Annotated[ArtifactId, BeforeValidator(_parsed), PlainSerializer(str)]
    digest: Digest
    files: tuple[PayloadFile, ...]
    manifest_sha256: Hex64 | None
    source: str
    fetched: str
    path: Annotated[Path, Field(exclude=True)] = Path()
    revision: str | None = None
    level: str | None = None
    warnings: tuple[str, ...] = ()
    signature_sha256: Hex64 | None = None
    accepted: tuple[str, ...] = ()
    measured: Annotated[Measured | None, BeforeValidator(Measured.from_json)] = None

    @property
    def fetch_again(self) -> str:
        return f"oscar-zoo pull {self.id.reference} --hub {quote(self.source)}"

    def to_json(self) -> dict[str, Any]:
        optional = ("signature_sha256", "accepted", "measured")
        value = super().to_json()
        return {name: said for name, said in value.items() if said or name not in optional}

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The record in `folder`, if this version wrote one for this place."""
        try:
            record = cls.from_bytes(read_file(folder / RECORD_NAME, max_bytes=cls.MAX_BYTES))
        except (errors.MalformedFile, errors.PathNotFound):
            return None
        expected = (record.digest, "sha256:" + folder.parent.name)
        is_here = expected == (artifact_digest(record.files), record.digest)
        return record.model_copy(update={"path": folder}) if is_here else None


@dataclass(frozen=True)
class StoredArtifact:
    """An entry whose bytes were hashed just now: `files` holds exactly those bytes, `oscar.json`
    and the signature included."""

    record: Record
    files: Mapping[str, bytes]
    manifest: Manifest | None

    @property
    def payload(self) -> dict[str, bytes]:
        return {name: data for name, data in self.files.items() if name not in BESIDE}

    @property
    def signature(self) -> bytes | None:
        return self.files.get(SIGNATURE_NAME)

    @property
    def signed_files(self) -> dict[str, bytes]:
        """What a signature is of: all files without it."""
        return {name: data for name, data in self.files.items() if name != SIGNATURE_NAME}


class Store:
    """The store in the folder `root` (default: the cache folder of this user)."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = (root or paths.cache_dir()).absolute()
        self.blobs = self.root / "blobs" / "sha256"
        self.artifacts = self.root / "artifacts"

    def put(
        self,
        artifact: ArtifactId,
        files: Mapping[str, bytes],
        *,
        source: str,
        revision: str | None = None,
        level: str | None = None,
        warnings: tuple[str, ...] = (),
        accepted: tuple[str, ...] = (),
        measured: Measured | None = None,
    ) -> StoredArtifact:
        """Store verified `files` by name, `oscar.json` and signature included when there are such;
        an intact entry with the same bytes stays, any other is replaced. An intact entry keeps its
        signature where these bring none. `source` says for people where the bytes came from."""
        for name in files:
            if check_part(name, "file name").casefold() == RECORD_NAME:
                raise errors.InvalidName(
                    f"no file of an artifact may be called {RECORD_NAME}.", hint="rename the file"
                )
        payload = {name: data for name, data in files.items() if name not in BESIDE}
        digests = tuple(sorted(file_digest(name, data) for name, data in payload.items()))
        digest = artifact_digest(digests)
        folder = self.artifacts / check_digest(digest).removeprefix("sha256:")
        beside = {name: sha256_hex(files[name]) for name in BESIDE if name in files}
        record = Record(
            schema=RECORD_SCHEMA,
            id=artifact,
            digest=digest,
            files=digests,
            manifest_sha256=beside.get(FILE_NAME),
            source=source,
            fetched=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            path=folder / sha256_hex(artifact.key.encode())[:12],
            revision=revision,
            level=level,
            warnings=warnings,
            signature_sha256=beside.get(SIGNATURE_NAME),
            accepted=accepted,
            measured=measured,
        )
        present = self._present(record)
        if present is not None:
            return present
        try:
            with durable.storage_errors(f"cannot store {artifact} in {self.root}", cache=True):
                self._add(record, files)
        except BaseException:
            # Nothing links the blobs of an entry that is not there, and the disk may be full.
            with contextlib.suppress(OSError):
                self._drop_blobs(digests)
            raise
        return self.open(digest, artifact)

    def told(self, stored: StoredArtifact, **said: Any) -> StoredArtifact:
        """The same entry, with what the hub that offered it last `said`, its `source` above all."""
        record = stored.record.model_copy(update=said)
        if record != stored.record:
            with durable.storage_errors(f"cannot write {record.path}", cache=True):
                durable.replace_file(record.path / RECORD_NAME, record.to_bytes(), mode=0o444)
        return replace(stored, record=record)

    def open(self, digest: str, artifact: ArtifactId | None = None) -> StoredArtifact:
        """An entry, every file hashed again: that of `artifact`, or the first of the digest."""
        for record in self.installed():
            if record.digest == digest and (artifact is None or record.id.key == artifact.key):
                return self._read(record)
        raise errors.ArtifactNotFound(
            f"{artifact or digest} is not in the store.",
            next_step=None if artifact is None else Pull(artifact.reference),
        )

    def intact(self, record: Record | None) -> StoredArtifact | None:
        """As `open`; `None` when there is none or it rotted."""
        if record is None:
            return None
        try:
            return self.open(record.digest, record.id)
        except (errors.DigestMismatchError, errors.MalformedFile):
            return None

    def find(self, artifact: ArtifactId) -> Record | None:
        found = [record for record in self.installed() if record.id.key == artifact.key]
        return max(found, key=lambda record: record.fetched, default=None)

    def installed(self) -> tuple[Record, ...]:
        """Records of all complete entries, by id; without a readable record one is absent."""
        with durable.storage_errors(f"cannot read {self.root}", cache=True):
            self.check_owner()
            found = []
            for entry in self.entry_folders():
                if (entry / COMPLETE).exists():
                    # It may be from a time when others could write.
                    durable.check_private(entry.parent, entry)
                    found.append(Record.read(entry))
            records = [record for record in found if record is not None]
            return tuple(sorted(records, key=lambda record: (record.id.key, record.digest)))

    def entry_folders(self) -> Iterator[Path]:
        """All entries, complete or not, in one order; those that go meanwhile are left out."""
        for digest in inside(self.artifacts):
            if not digest.name.startswith(".") and not digest.is_symlink():
                yield from (entry for entry in inside(digest) if not entry.is_symlink())

    def remove(self, record: Record) -> None:
        """Remove an entry and those of its blobs that no other entry links."""
        with durable.storage_errors(f"cannot remove {record.path}", cache=True):
            self.check_owner()
            self._retire(record.path)
            with contextlib.suppress(OSError):  # another id has the same digest
                record.path.parent.rmdir()
            self._drop_blobs(record.files)

    def keep_only(self, record: Record) -> None:
        """Remove all other entries of the id, with what killed processes left of them."""
        for other in self.installed():
            if other.id.key == record.id.key and other.path != record.path:
                self.remove(other)
        with durable.storage_errors(f"cannot tidy {self.root}", cache=True):
            durable.sweep(self.artifacts)

    def tidy(self) -> None:
        """Remove what killed processes left; a failure is none: it is not what was asked for."""
        for folder in (self.root, self.blobs, self.artifacts):
            with contextlib.suppress(OSError):
                durable.sweep(folder)

    def _add(self, record: Record, files: Mapping[str, bytes]) -> None:
        self.check_owner()
        for folder in (self.root, self.blobs, self.artifacts):
            durable.make_folders(folder, mode=0o700)
            durable.sweep(folder)
        with durable.staged_folder(self.artifacts, mode=0o700) as staged:
            for entry in record.files:
                self._link(entry, files[entry.path], staged / entry.path)
            for name in BESIDE:
                if name in files:
                    durable.write_new(staged / name, files[name], mode=0o444)
            durable.write_new(staged / RECORD_NAME, record.to_bytes(), mode=0o444)
            durable.write_new(staged / COMPLETE, b"", mode=0o444)
            while not self._place(staged, record.path):
                if self._present(record) is not None:
                    break
                self._retire(record.path)

    def _drop_blobs(self, files: Sequence[FileDigest]) -> None:
        for entry in files:
            blob = self.blobs / entry.sha256
            # Another process may remove it just now.
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                if blob.lstat().st_nlink == 1:
                    blob.unlink()

    def _read(self, record: Record) -> StoredArtifact:
        expected: dict[str, str | None] = {entry.path: entry.sha256 for entry in record.files}
        expected |= {FILE_NAME: record.manifest_sha256, SIGNATURE_NAME: record.signature_sha256}
        files = {}
        for name, want in expected.items():
            if want is None:
                continue
            got = None
            with contextlib.suppress(errors.PathNotFound, errors.MalformedFile):
                files[name] = read_file(record.path / name, max_bytes=MAX_PAYLOAD_BYTES)
                got = sha256_hex(files[name])
            if got != want:
                what = f"{name} of {record.id} in the store"
                hint = f"fetch it again: {record.fetch_again}"
                raise errors.DigestMismatchError.for_content(what, want=want, got=got, hint=hint)
        manifest = Manifest.from_bytes(files[FILE_NAME]) if FILE_NAME in files else None
        return StoredArtifact(record, files, manifest)

    def _present(self, wanted: Record) -> StoredArtifact | None:
        """The intact entry of the same bytes; it may have a signature where `wanted` has none."""
        try:
            stored = self.open(wanted.digest, wanted.id)
        except (errors.ArtifactNotFound, errors.DigestMismatchError, errors.MalformedFile):
            return None
        there = stored.record
        signed = wanted.signature_sha256 in (None, there.signature_sha256)
        return stored if there.manifest_sha256 == wanted.manifest_sha256 and signed else None

    def check_owner(self) -> None:
        """Raise where others could write; `put`, `installed` and `remove` do so first."""
        with durable.storage_errors(f"cannot read {self.root}", cache=True):
            for folder in (self.blobs, self.artifacts):
                durable.refuse_links(self.root, *folder.relative_to(self.root).parts)
            durable.check_private(self.root, self.blobs.parent, self.blobs, self.artifacts)

    def _link(self, entry: FileDigest, data: bytes, place: Path) -> None:
        blob = self.blobs / entry.sha256
        try:
            intact = sha256_hex(read_file(blob, max_bytes=entry.size)) == entry.sha256
        except (errors.MalformedFile, errors.PathNotFound):
            intact = False
        if not intact:
            durable.replace_file(blob, data, mode=0o444)
        try:
            os.link(blob, place)
        except OSError:
            # No hard links here, or another process removed the blob just now: the entry keeps its
            # own copy.
            durable.write_new(place, data, mode=0o444)

    def _place(self, staged: Path, target: Path) -> bool:
        """`move_into_place`, also when the empty folder around `target` is removed just now."""
        while True:
            durable.refuse_links(self.artifacts, target.parent.name, target.name)
            durable.make_folders(target.parent, mode=0o700)
            try:
                return durable.move_into_place(staged, target)
            except FileNotFoundError:
                if not staged.exists():
                    raise

    def _retire(self, entry: Path) -> None:
        """Take an entry out of sight in one step, then delete it."""
        away = durable.temp_path(self.artifacts)
        try:
            os.rename(entry, away)  # noqa: PTH104
        except FileNotFoundError:
            return
        with contextlib.suppress(FileNotFoundError):
            durable.sync_folder(entry.parent)
        durable.remove_tree(away)


def inside(folder: Path) -> list[Path]:
    """What is in `folder`, sorted; nothing when it is no folder or goes just now."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def export(artifact: StoredArtifact, folder: Path, *, replace: bool = False) -> Path:
    """Copy the files of `artifact` into `folder`; other content there goes only with `replace`."""
    identity = artifact.record.id
    target = folder.expanduser().absolute() / identity.model / identity.tag
    with durable.storage_errors(f"cannot write {target}"):
        if _has(target, artifact):
            return target
        durable.make_folders(target.parent)
        with durable.staged_folder(target.parent) as staged:
            durable.write_files(staged, artifact.files)
            while not durable.move_into_place(staged, target):
                if _has(target, artifact):
                    return target
                if not replace:
                    raise errors.OutputExists(
                        f"{target} exists with other content.",
                        hint="move it away, or replace it: --force",
                    )
                if target.is_dir() and durable.exchange(staged, target):
                    return target
                away = durable.temp_path(target.parent)
                target.rename(away)
                durable.remove_tree(away) if away.is_dir() else away.unlink()
    return target


def _has(target: Path, artifact: StoredArtifact) -> bool:
    """Whether `target` holds exactly the files of `artifact`."""
    if not target.is_dir() or {path.name for path in target.iterdir()} != set(artifact.files):
        return False
    try:
        return all(
            read_file(target / name, max_bytes=MAX_PAYLOAD_BYTES) == data
            for name, data in artifact.files.items()
        )
    except (errors.PathNotFound, errors.MalformedFile):
        return False


def find_installed(
    reference: Reference, store: Store, catalog: Catalog | None = None
) -> Record | None:
    """The store's record of what `reference` means. The latest entry of an id wins; a bare name
    that several versions match means the recipe's default."""
    catalog = catalog or Catalog.packaged()
    recipe = catalog.recipe(reference.name)
    wanted = reference.name.casefold()
    models = {wanted, recipe.name.casefold()} if recipe else {wanted, wanted.rsplit("/", 1)[-1]}
    found: dict[str, Record] = {}
    for record in store.installed():
        named = record.id.key == wanted or record.id.model.casefold() in models
        tagged = reference.tag is None or record.id.tag.casefold() == reference.tag.casefold()
        digested = reference.digest is None or record.digest.startswith(reference.digest)
        if named and tagged and digested:
            newest = found.get(record.id.key)
            if newest is None or record.fetched > newest.fetched:
                found[record.id.key] = record
    if len(found) < 2:
        return next(iter(found.values()), None)
    default = f"{recipe.name}/{recipe.default_tag}".casefold() if recipe else ""
    if default not in found:
        choices = sorted(record.id.reference for record in found.values())
        raise errors.AmbiguousName.for_name(str(reference), choices)
    return found[default]
