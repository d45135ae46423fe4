"""Find what a name means in the local store. Names follow the same rules as on a hub, and no hub is
asked."""

from __future__ import annotations

from oscar_zoo.artifact.names import Reference
from oscar_zoo.errors import AmbiguousName
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.store import Store


def find_installed(
    reference: Reference, store: Store, catalog: Catalog | None = None
) -> Record | None:
    """The store's record of what `reference` means, or `None` when nothing stored matches.

    The latest fetched entry of an id wins; a bare name that several stored versions match means the
    recipe's default.
    """
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
    if len(found) > 1 and recipe is not None and recipe.default_tag is not None:
        default = f"{recipe.name}/{recipe.default_tag}".casefold()
        if default in found:
            return found[default]
    if len(found) > 1:
        raise AmbiguousName.for_name(
            str(reference), sorted(record.id.reference for record in found.values())
        )
    return next(iter(found.values()), None)
