"""Look after the artifacts in the local store: list, check, remove, free disk space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.artifacts import Artifact, stored_artifact
from oscar_zoo.artifact.outcome import Verified, why
from oscar_zoo.errors import ArtifactNotFound, IntegrityError
from oscar_zoo.registry import gc
from oscar_zoo.registry.known_names import find_stored
from oscar_zoo.registry.pull import verify_stored
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.registry.targets import NameTarget, parse_name


@dataclass(frozen=True)
class Stored:
    """The store's folder and what it holds."""

    folder: Path
    records: tuple[Record, ...]


@dataclass(frozen=True)
class StoredCheck:
    """What hashing and verifying one entry of the store gave.

    Attributes:
        path: its folder.
        record: what the store says of it, or `None` if that cannot be read.
        problem: why it must not be used, or `None`.
    """

    path: Path
    record: Record | None
    problem: str | None

    @property
    def repair(self) -> str | None:
        """The command that repairs it."""
        if self.problem is None:
            return None
        if self.record is None:
            return "oscar-zoo cache gc, then pull what is missing"
        return self.record.fetch_again


def stored() -> Stored:
    """What the store holds; nothing is hashed."""
    store = Store()
    return Stored(store.root, tuple(store.installed()))


def check() -> tuple[StoredCheck, ...]:
    """Hash every stored file again and verify every artifact; damage is a result."""
    store = Store()
    checks = [_check(store, record) for record in store.installed()]
    rotten = filter(gc.is_rotten, store.entry_folders())
    checks += [StoredCheck(entry, None, "its record cannot be read") for entry in rotten]
    return tuple(checks)


def collect(*, dry_run: bool) -> gc.GcReport:
    """Remove what no stored artifact needs; with `dry_run` only say what would go."""
    return gc.gc(Store(), dry_run=dry_run)


def remove(targets: Sequence[NameTarget]) -> tuple[Record, ...]:
    """Remove artifacts from the store, all or none, and what killed processes left in it."""
    store = Store()
    store.tidy()
    records = {record.path: record for record in (_find(store, target) for target in targets)}
    for record in records.values():
        store.remove(record)
    return tuple(records.values())


def installed(name: str | None = None) -> tuple[Artifact, ...]:
    """What the store holds, or what `name` means in it; every file is hashed.

    Raises:
        DigestMismatchError: a file was changed.
    """
    store = Store()
    if name is None:
        records = list(store.installed())
    else:
        found = find_stored(parse_name(name).reference, store)
        records = [] if found is None else [found]
    return tuple(stored_artifact(store.open(record.digest, record.id)) for record in records)


def _check(store: Store, record: Record) -> StoredCheck:
    try:
        outcome = verify_stored(store.open(record.digest, record.id))
    except IntegrityError as error:
        return StoredCheck(record.path, record, error.message)
    problem = None if isinstance(outcome, Verified) else why(outcome)
    return StoredCheck(record.path, record, problem)


def _find(store: Store, target: NameTarget) -> Record:
    record = find_stored(target.reference, store)
    if record is None:
        raise ArtifactNotFound(
            f"{target} is not in the store.", hint="oscar-zoo cache list shows what is"
        )
    return record
