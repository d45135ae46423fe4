"""What this machine knows without asking a hub: names, for completion and suggestions, and the
status of versions that are here.

Names come from the package, the local store, hubs in folders, and the last index of every other
hub; unreadable sources are left out. A stored copy is used without asking a hub, so nobody would
hear that it was yanked: the index of its hub counts, which a command that may use the network asks
for again once a day. A hub that does not answer is no error here, and no request waits long.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, Status
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import MalformedFile, OscarZooError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs import address
from oscar_zoo.registry.hubs.base import INDEX_NAME, Hub, within
from oscar_zoo.registry.hubs.remote import RemoteHub, newest_files
from oscar_zoo.registry.index import ACCEPTED, Index
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.store import Record, Store, find_installed
from oscar_zoo.registry.view import HubView, status_sentence

DAY = 24 * 3600.0
"""A remote hub is asked again when nobody has for so long, in seconds."""
PATIENCE = 4.0
"""Seconds that asking may take."""


def stored_versions() -> list[ArtifactId]:
    with contextlib.suppress(OscarZooError, OSError):
        return _once(record.id for record in Store().installed())
    return []


def known_versions() -> list[ArtifactId]:
    """The artifacts that are stored, packaged, or listed by a folder or a kept index."""
    ids = stored_versions() + [m.artifact_id for m in Catalog.packaged().manifests()]
    for hub in _folders():
        with contextlib.suppress(OscarZooError, OSError):
            ids += hub.artifacts()
    for index in _indexes():
        ids += [entry.artifact_id for entry in index.artifacts]
    return _once(ids)


def known_models() -> list[str]:
    """Every name of a model or of a single version, aliases too, sorted without case."""
    names = [version.model for version in known_versions()]
    catalog = Catalog.packaged()
    for recipe in catalog.recipes():
        names += recipe.names
    for manifest in catalog.manifests():
        names += manifest.registry.aliases if manifest.registry else ()
    for index in _indexes():
        for entry in index.artifacts:
            names += entry.aliases
    return sorted({name.casefold(): name for name in reversed(names)}.values(), key=str.casefold)


def close_names(name: str) -> tuple[str, ...]:
    """Names of models like `name`, best first; none where it is known itself."""
    bare = re.split("[:@]", name, maxsplit=1)[0]
    if knows(bare):
        return ()
    known = [other for other in known_models() if "/" not in other]
    return Catalog.packaged().close_matches(bare, known)


def knows(name: str) -> bool:
    if Catalog.packaged().recipe(name) is not None:
        return True
    return name.casefold() in {other.casefold() for other in known_models()}


def aliased(name: str, views: Iterable[HubView] = ()) -> ArtifactId | None:
    """The one version that lists `name` as an alias, or `None` where none or several do."""
    found = list(Catalog.packaged().aliased(name))
    for index in (*(view.index for view in views), *_indexes()):
        found += [entry.artifact_id for entry in index.aliased(name)]
    return found[0] if len({version.key for version in found}) == 1 else None


def expand(reference: Reference, views: Iterable[HubView] = ()) -> Reference:
    """`reference`, with the version that is meant in place of an alias."""
    if reference.tag is not None or Catalog.packaged().recipe(reference.name) is not None:
        return reference
    version = aliased(reference.name, views)
    return reference if version is None else Reference(version.model, version.tag, reference.digest)


def find_stored(reference: Reference, store: Store) -> Record | None:
    """`find_installed`, which also knows the aliases that hubs give to versions."""
    record = find_installed(reference, store)
    return record if record is not None else find_installed(expand(reference), store)


def stored_reference(reference: Reference, store: Store) -> Reference:
    """`reference` as the store knows it: without aliases."""
    known = find_stored(reference, store)
    if known is None or find_installed(reference, store) is not None:
        return reference
    return Reference(known.id.model, known.id.tag, reference.digest)


def _once(ids: Iterable[ArtifactId]) -> list[ArtifactId]:
    found = {version.key: version for version in reversed([*ids])}
    return [found[key] for key in sorted(found)]


def _folders() -> list[Hub]:
    with contextlib.suppress(OscarZooError, OSError):
        return list(address.Sources(offline=True).hubs)
    return []


def _indexes() -> Iterator[Index]:
    for data in newest_files(INDEX_NAME):
        with contextlib.suppress(OscarZooError):
            yield Index.from_bytes(data)
    for hub in _folders():
        with contextlib.suppress(OscarZooError, OSError):
            root = hub.root_file(INDEX_NAME)
            if root is not None:
                yield Index.from_bytes(root)


def status_warnings(
    record: Record, catalog: Catalog | None = None, *, ask: bool = False, hub: str | None = None
) -> tuple[str, ...]:
    """Sentences where `record` was yanked or deprecated on `hub`, by default its own, or is poor.
    `ask` allows to ask a remote hub."""
    status = _warnings(record.id, record.digest, hub or record.source, catalog, ask=ask)
    return (*status, *quality_warnings(record))


def quality_warnings(record: Record) -> tuple[str, ...]:
    """A sentence where the last known index of its hub, its record or its manifest says that it is
    poor."""
    accepted: set[str] = {*record.accepted}
    entry = _index(record.source, ask=False).entry(record.id)
    if entry is not None and entry.digest == record.digest:
        accepted |= {*entry.accepted}
    if "poor" in accepted:
        return (f"{record.id.reference} {ACCEPTED['poor']}",)
    said = (one.poor for one in (record.measured, measured_when_made(record)) if one)
    return tuple(f"{record.id.reference} {poor}" for poor in said if poor)[:1]


def measured_when_made(record: Record) -> Measured | None:
    with contextlib.suppress(OscarZooError):
        data = read_file(record.path / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
        manifest = Manifest.readable(data)
        return Measured.of(manifest) if manifest else None
    return None


def locked_warnings(lock: PinFile, catalog: Catalog | None = None) -> tuple[str, ...]:
    """A sentence for every version in a lock that was yanked or deprecated since, or what is wrong
    with the lock; no hub is asked."""
    try:
        pinned = lock.read().artifacts
    except MalformedFile as error:
        return (f"{error.message.rstrip('.')}; {error.hint}.",)
    return tuple(
        f"{lock.path.name}: {text}"
        for pin in pinned
        for text in _warnings(pin.artifact_id, pin.digest, pin.hub, catalog, ask=False)
    )


def _warnings(
    artifact: ArtifactId, digest: str, source: str, catalog: Catalog | None, *, ask: bool
) -> tuple[str, ...]:
    status = Status()
    packaged = (catalog or Catalog.packaged()).manifest(artifact)
    if packaged is not None and packaged.registry and packaged.digest in (None, digest):
        status = packaged.registry.status
    entry = _index(source, ask=ask).entry(artifact)
    if entry is not None and entry.digest == digest:
        status = entry.status
    return () if status.state == "active" else (status_sentence(artifact, status),)


def _index(source: str, *, ask: bool) -> Index:
    """The last known index of the hub `source`; an empty one where none can be had."""
    documents: list[bytes | None] = []
    with contextlib.suppress(OscarZooError, OSError):  # it may be a hub of another time
        hub = address.open_hub(source)
        if isinstance(hub, RemoteHub):
            age = hub.cache.seconds_since_answer()
            if ask and (age is None or age > DAY):
                with contextlib.suppress(OscarZooError):
                    late = OscarZooError("late")
                    within(PATIENCE, lambda: hub.root_file(INDEX_NAME), error=lambda: late)
            documents += hub.cache.copies(INDEX_NAME)
        else:
            documents.append(hub.root_file(INDEX_NAME))
    known = []
    for data in filter(None, documents):
        with contextlib.suppress(OscarZooError):
            known.append(Index.from_bytes(data))
    return max(known, key=lambda index: index.serial, default=Index.empty())
