"""Names that this machine knows without asking a hub, for completion and suggestions. Unreadable
sources are left out.

Sources: recipes and manifests of the package, the local store, hubs in folders, and the last index
of every other hub.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import OscarZooError
from oscar_zoo.hubs import address
from oscar_zoo.hubs.base import INDEX_NAME, Hub
from oscar_zoo.hubs.metadata import newest_files
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.index import Index
from oscar_zoo.registry.installed import find_installed
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.view import HubView


def stored_versions() -> list[ArtifactId]:
    """The artifacts in the local store, by id."""
    with contextlib.suppress(OscarZooError, OSError):
        return _once(record.id for record in Store().installed())
    return []


def known_versions() -> list[ArtifactId]:
    """The artifacts that are stored, listed by a hub in a folder or by a kept index, or packaged,
    by id."""
    ids = [
        *stored_versions(),
        *(manifest.artifact_id for manifest in Catalog.packaged().manifests()),
    ]
    for hub in _folders():
        with contextlib.suppress(OscarZooError, OSError):
            ids += hub.artifacts()
    for index in _indexes():
        ids += [entry.artifact_id for entry in index.artifacts]
    return _once(ids)


def known_models() -> list[str]:
    """Every name of a model, its aliases and those of single versions included, sorted without
    case, each once."""
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
    """Names of models like `name`, best first; none where `name` itself is known. `name` may have
    tag and digest."""
    bare = re.split("[:@]", name, maxsplit=1)[0]
    if knows(bare):
        return ()
    known = [other for other in known_models() if "/" not in other]
    return Catalog.packaged().close_matches(bare, known)


def knows(name: str) -> bool:
    """Whether `name`, without tag and digest, is that of a model or an alias, in any case."""
    if Catalog.packaged().recipe(name) is not None:
        return True
    return name.casefold() in {other.casefold() for other in known_models()}


def aliased(name: str, views: Iterable[HubView] = ()) -> ArtifactId | None:
    """The one version that lists `name` (any case) as an alias, or `None` where none or several do.

    Args:
        name: without tag.
    """
    found = list(Catalog.packaged().aliased(name))
    for index in (*(view.index for view in views), *_indexes()):
        found += [entry.artifact_id for entry in index.aliased(name)]
    return found[0] if len({version.key for version in found}) == 1 else None


def expand(reference: Reference, views: Iterable[HubView] = ()) -> Reference:
    """`reference`, with the version that is meant in place of an alias; arguments as for
    `aliased`."""
    if reference.tag is not None or Catalog.packaged().recipe(reference.name) is not None:
        return reference
    version = aliased(reference.name, views)
    return reference if version is None else Reference(version.model, version.tag, reference.digest)


def find_stored(reference: Reference, store: Store) -> Record | None:
    """`find_installed`, which also knows the aliases that hubs give to versions."""
    record = find_installed(reference, store)
    return record if record is not None else find_installed(expand(reference), store)


def stored_reference(reference: Reference, store: Store) -> Reference:
    """`reference`, with the stored version that is meant in place of an alias; the store itself
    knows no aliases."""
    if find_installed(reference, store) is not None:
        return reference
    known = expand(reference)
    record = None if known == reference else find_installed(known, store)
    if record is None:
        return reference
    return Reference(record.id.model, record.id.tag, reference.digest)


def _once(ids: Iterable[ArtifactId]) -> list[ArtifactId]:
    found: dict[str, ArtifactId] = {}
    for version in ids:
        found.setdefault(version.key, version)
    return [found[key] for key in sorted(found)]


def _folders() -> list[Hub]:
    with contextlib.suppress(OscarZooError, OSError):
        return list(address.open_hubs((), offline=True))
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
