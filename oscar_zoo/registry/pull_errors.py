"""What an error of hubs that could not help means for an artifact, in view of the copy in the
store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.names import Reference
from oscar_zoo.errors import (
    HubUnreachable,
    IntegrityError,
    NetworkError,
    OfflineError,
    OscarZooError,
)
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.failover import own_zoo
from oscar_zoo.registry.installed import find_installed
from oscar_zoo.registry.known_names import knows
from oscar_zoo.registry.pins import Pin, same_hub
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.store import Store

_SHOWN = 3
"""How many installed names an error lists."""


def explained(
    error: OscarZooError,
    reference: Reference,
    store: Store,
    hubs: Sequence[Hub],
    catalog: Catalog,
    *,
    offline: bool,
    go_online: str,
) -> OscarZooError:
    """`error` with what the user can do: use the copy in the store, or fetch it again.

    Args:
        store: where a copy may be.
    """
    record = find_installed(reference, store, catalog)
    if record is None:
        return _missing(
            error, reference, store, hubs, catalog, offline=offline, go_online=go_online
        )
    try:
        store.open(record.digest, record.id)
    except IntegrityError as damage:
        return _damaged(damage, error, record, [hub.name for hub in hubs])
    if isinstance(error, NetworkError):
        again = f"oscar-zoo pull {reference} --offline"
        error.advise(f"a copy of {record.fetched[:10]} is here; to use it: {again}")
    return error


def pinned_missing(
    error: OscarZooError,
    reference: Reference,
    pin: Pin,
    lock: Path,
    store: Store,
    hubs: Sequence[Hub],
) -> OscarZooError:
    """`error` about a version that a lock pins. Its message begins with the lock and the version,
    and its advice says where the version was and which other versions are here.

    Args:
        store: where copies may be.
    """
    others = []
    for record in store.installed():
        if record.id.key == pin.artifact_id.key:
            if pin.same_bytes(record.digest, record.manifest_sha256):
                try:
                    store.open(record.digest, record.id)
                except IntegrityError as damage:
                    return _damaged(damage, error, record, [hub.name for hub in hubs])
        elif record.id.model.casefold() == pin.artifact_id.model.casefold():
            others.append(record.id.reference)
    name = pin.artifact_id.reference
    error.message = (
        f"{lock} pins {reference} to {name}, which is not on this machine and could not be fetched:"
        f" {error.message}"
    )
    error.args = (error.message,)
    fetch = f"fetch it from where it was: oscar-zoo pull {name} --hub {quote(pin.hub)}"
    use = f"; or name the version that is here: {sorted(others)[0]}" if others else ""
    error.advise(f"{fetch}{use}")
    return error


def _damaged(
    damage: IntegrityError, error: OscarZooError, record: Record, asked: Sequence[str]
) -> IntegrityError:
    """`damage` of a copy in the store, with the hub that it came from where that was not `asked`,
    and what the others said."""
    said = f"it could not be fetched again: {error.message}"
    if not any(same_hub(record.source, name) for name in asked):
        said = f"fetch it again from where it came from: {record.fetch_again} ({said.rstrip('.')})"
    damage.advise(said)
    return damage


def _missing(
    error: OscarZooError,
    reference: Reference,
    store: Store,
    hubs: Sequence[Hub],
    catalog: Catalog,
    *,
    offline: bool,
    go_online: str,
) -> OscarZooError:
    """`error` about an artifact that is not here. Its message begins with that, and its advice
    lists what is installed."""
    known = catalog.recipe(reference.name) is not None
    if offline and known and all(hub.name == own_zoo() for hub in hubs):
        if not isinstance(error, OfflineError):
            error = OfflineError.for_name(str(reference), go_online=go_online)
    elif not isinstance(error, NetworkError):
        return error
    here = _installed(store)
    if offline:
        error.advice = "; ".join(filter(None, (error.advice, here)))
        return error
    if isinstance(error, NetworkError):
        error.said = error.message
    unknown = HubUnreachable.for_unknown(str(reference), [error.message], error.suggestions)
    if knows(reference.name):
        error.message = (
            f"{reference} is not on this machine and could not be fetched: {error.message}"
        )
    else:
        error.message = unknown.message
    error.args = (error.message,)
    error.advice = f"{unknown.advice}; {here}"
    return error


def _installed(store: Store) -> str:
    there = sorted({record.id.reference for record in store.installed()})
    if not there:
        return "nothing is installed yet"
    more = f", ... ({len(there)} in all)" if len(there) > _SHOWN else ""
    return f"installed: {', '.join(there[:_SHOWN])}{more}"
