"""Look after the artifacts in the local store: list, check, remove, free disk space."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from oscar_zoo import paths
from oscar_zoo.artifact.outcome import Digest, Verified, says, why
from oscar_zoo.errors import ArtifactNotFound, IntegrityError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import gc
from oscar_zoo.registry.artifacts import Artifact, stored_artifact
from oscar_zoo.registry.known_names import find_stored
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.registry.targets import parse_name
from oscar_zoo.registry.verify import verify_stored
from oscar_zoo.site import facts
from oscar_zoo.site.facts import Name, Size, StoredArtifact
from oscar_zoo.site.params import (
    CacheDirParams,
    CacheGcParams,
    CacheListParams,
    CacheRmParams,
    CacheVerifyParams,
)


@dataclass(frozen=True)
class Stored:
    """What oscar-zoo cache list prints: the store and what it holds."""

    folder: Annotated[Path, says("Of the store.")]
    artifacts: tuple[StoredArtifact, ...]
    nbytes: Annotated[Size, says("Of all files.", serialization_alias="bytes")]
    schema: Literal["oscar-zoo.cache-list/1"] = "oscar-zoo.cache-list/1"


def stored(params: CacheListParams, observer: Observer = SILENT) -> Stored:
    """What the store holds; nothing is hashed."""
    store = Store()
    rows = tuple(map(facts.stored_artifact, store.installed()))
    return Stored(store.root, rows, sum(row["bytes"] for row in rows))


@dataclass(frozen=True)
class StoredCheck:
    """What hashing and verifying one entry of the store gave."""

    id: Annotated[Name | None, says("Null where the entry cannot be read.")]
    reference: Annotated[str | None, says("The name as it is typed: MODEL:TAG.")]
    digest: Digest | None
    path: Annotated[Path, says("Its folder.")]
    problem: Annotated[str | None, says("Why it must not be used.")]
    repair: Annotated[str | None, says("What repairs it.")]


@dataclass(frozen=True)
class CacheChecks:
    """What oscar-zoo cache verify prints."""

    ok: Annotated[bool, says("Whether all are intact.")]
    artifacts: tuple[StoredCheck, ...]
    schema: Literal["oscar-zoo.cache-verify/1"] = "oscar-zoo.cache-verify/1"

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 4


def check(params: CacheVerifyParams, observer: Observer = SILENT) -> CacheChecks:
    """Hash every stored file again and verify every artifact; damage is a result."""
    store, checks = Store(), list[StoredCheck]()
    for record in store.installed():
        try:
            outcome = verify_stored(store.open(record.digest, record.id))
            problem = None if isinstance(outcome, Verified) else why(outcome)
        except IntegrityError as error:
            problem = error.message
        named = (record.id, record.id.reference, record.digest, record.path)
        checks.append(StoredCheck(*named, problem, record.fetch_again if problem else None))
    unreadable = "its record cannot be read", "oscar-zoo cache gc, then pull what is missing"
    for entry in filter(gc.is_rotten, store.entry_folders()):
        checks.append(StoredCheck(None, None, None, entry, *unreadable))
    return CacheChecks(all(one.problem is None for one in checks), tuple(checks))


@dataclass(frozen=True)
class Removed:
    """What nothing needs."""

    kind: Literal["leftover", "incomplete entry", "empty folder", "blob", "hub metadata"]
    path: Path
    nbytes: Annotated[Size, Field(serialization_alias="bytes")]


@dataclass(frozen=True)
class Freed:
    """What oscar-zoo cache gc prints."""

    dry_run: Annotated[bool, says("Whether nothing was removed.")]
    removed: tuple[Removed, ...]
    freed_bytes: Annotated[Size, says("Of disk; a file that has a name elsewhere gives none.")]
    exclusive: Annotated[
        bool, says("Whether others were kept out; without that, files younger than an hour stay.")
    ]
    schema: Literal["oscar-zoo.cache-gc/1"] = "oscar-zoo.cache-gc/1"


def collect(params: CacheGcParams, observer: Observer = SILENT) -> Freed:
    report = gc.gc(Store(), dry_run=params.dry_run)
    sizes = [sum(file.size for file in item.files) for item in report.removed]
    pairs = zip(report.removed, sizes, strict=True)
    rows = tuple(Removed(cast(Any, item.kind), item.path, size) for item, size in pairs)
    return Freed(params.dry_run, rows, report.freed, report.exclusive)


@dataclass(frozen=True)
class RemovedArtifacts:
    """What oscar-zoo cache rm prints."""

    removed: tuple[StoredArtifact, ...]
    schema: Literal["oscar-zoo.cache-rm/1"] = "oscar-zoo.cache-rm/1"


def remove(params: CacheRmParams, observer: Observer = SILENT) -> RemovedArtifacts:
    """Remove artifacts from the store, all or none, and what killed processes left in it."""
    store, records = Store(), dict[Path, Record]()
    targets = [parse_name(name) for name in params.names]
    store.tidy()
    for target in targets:
        record = find_stored(target.reference, store)
        if record is None:
            hint = "oscar-zoo cache list shows what is"
            raise ArtifactNotFound(f"{target} is not in the store.", hint=hint)
        records[record.path] = record
    for record in records.values():
        store.remove(record)
    return RemovedArtifacts(tuple(map(facts.stored_artifact, records.values())))


@dataclass(frozen=True)
class CacheFolder:
    """What oscar-zoo cache dir prints."""

    path: Annotated[Path, says("The folder of the store.")]
    schema: Literal["oscar-zoo.cache-dir/1"] = "oscar-zoo.cache-dir/1"


def folder(params: CacheDirParams, observer: Observer = SILENT) -> CacheFolder:
    return CacheFolder(paths.cache_dir())


def installed(name: str | None = None) -> tuple[Artifact, ...]:
    """What the store holds, or what `name` means in it; every file is hashed.

    Raises:
        DigestMismatchError: a file was changed.
    """
    store = Store()
    found = [find_stored(parse_name(name).reference, store)] if name else store.installed()
    return tuple(stored_artifact(store.open(one.digest, one.id)) for one in found if one)
