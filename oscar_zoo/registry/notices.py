"""What is known about the status of a version that is here already: whether it was yanked or
deprecated since, and whether it is poor.

A stored copy is used without asking a hub, so nobody would hear of it. What counts is the index of
the hub that it came from. A hub in a folder is read. Of a remote hub the indexes count that this
machine has read before; a command that may use the network asks again once a day. A hub that does
not answer is no error here, and no request waits long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import MalformedFile, OscarZooError
from oscar_zoo.hubs import address
from oscar_zoo.hubs.base import INDEX_NAME, Hub
from oscar_zoo.hubs.deadline import within
from oscar_zoo.hubs.remote import RemoteHub
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.index import ACCEPTED, Index
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.view import status_sentence

DAY = 24 * 3600.0
"""A remote hub is asked again when nobody has for so long, in seconds."""
PATIENCE = 4.0
"""Seconds that asking may take."""


def status_warnings(
    record: Record, catalog: Catalog | None = None, *, ask: bool = False
) -> tuple[str, ...]:
    """A sentence where `record` was yanked or deprecated, with the reason, and one where it is
    poor; nothing where it is offered and good.

    Args:
        ask: whether a remote hub may be asked.
    """
    status = _warnings(record.id, record.digest, record.source, catalog, ask=ask)
    return (*status, *quality_warnings(record))


def quality_warnings(record: Record) -> tuple[str, ...]:
    """A sentence where the last known index of its hub, its own record or its manifest says that
    `record` is poor; no hub is asked."""
    accepted: set[str] = {*record.accepted}
    for hub in _source(record.source):
        entry = _index(hub, ask=False).entry(record.id)
        if entry is not None and entry.digest == record.digest:
            accepted |= {*entry.accepted}
    if "poor" in accepted:
        return (f"{record.id.reference} {ACCEPTED['poor']}",)
    figures = (record.measured, measured_when_made(record))
    worst = max((one.change_percent or 0 for one in figures if one and one.is_poor), default=None)
    if worst is None:
        return ()
    return (f"the perplexity of {record.id.reference} is {worst:.1f} % above BF16",)


def measured_when_made(record: Record) -> Measured | None:
    """The figures in the `oscar.json` of `record`, which is not hashed for it."""
    with contextlib.suppress(OscarZooError):
        data = read_file(record.path / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
        manifest = Manifest.readable(data)
        return Measured.of(manifest) if manifest else None
    return None


def locked_warnings(lock: PinFile, catalog: Catalog | None = None) -> tuple[str, ...]:
    """A sentence for every version in the lock of a project that was yanked or deprecated since,
    whether or not it is here, or what is wrong with the lock; no hub is asked."""
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
    for hub in _source(source):
        entry = _index(hub, ask=ask).entry(artifact)
        if entry is not None and entry.digest == digest:
            if entry.status.state != "active":
                return (status_sentence(artifact, entry.status),)
            return ()
    packaged = (catalog or Catalog.packaged()).manifest(artifact)
    same = packaged is not None and packaged.digest in (None, digest)
    status = packaged.registry.status if packaged and packaged.registry and same else Status()
    return () if status.state == "active" else (status_sentence(artifact, status),)


def _source(name: str) -> Iterator[Hub]:
    with contextlib.suppress(OscarZooError):  # it may have been a hub of another time
        yield address.open_hub(name)


def _index(hub: Hub, *, ask: bool) -> Index:
    """The last known index of `hub`; an empty one where none can be had."""
    if not isinstance(hub, RemoteHub):
        with contextlib.suppress(OscarZooError):
            return _parsed(hub.root_file(INDEX_NAME))
        return Index.empty()
    age = hub.seconds_since_answer()
    if ask and (age is None or age > DAY):
        with contextlib.suppress(OscarZooError):
            late = OscarZooError("late")
            within(PATIENCE, lambda: hub.root_file(INDEX_NAME), error=lambda: late)
    known = []
    for data in hub.kept_root_files(INDEX_NAME):
        with contextlib.suppress(OscarZooError):
            known.append(_parsed(data))
    return max(known, key=lambda index: index.serial, default=Index.empty())


def _parsed(data: bytes | None) -> Index:
    return Index.empty() if data is None else Index.from_bytes(data)
