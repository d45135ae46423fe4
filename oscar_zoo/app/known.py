"""The one artifact that a name or a folder means, with everything that is known about it."""

from __future__ import annotations

from oscar_zoo.app.sources import Sources
from oscar_zoo.app.targets import NameTarget, PathTarget, Target
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError
from oscar_zoo.registry import known_names, own_scores
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect, entry_of
from oscar_zoo.registry.hub_queries import look


def known_entry(target: Target, sources: Sources) -> Entry:
    """The artifact in a folder, or the one that a name means.

    A name without a tag means the default version of the model, or its only one.

    Raises:
        PathNotFound: there is no such folder, or it holds no artifact with an `oscar.json`.
        ArtifactNotFound: nothing known has this name.
        UsageError: several versions have it.
    """
    if isinstance(target, PathTarget):
        return _in_folder(target)
    catalog = Catalog.packaged()
    views, _ = look(sources.hubs)
    reference = known_names.expand(target.reference, views)
    recipe = catalog.recipe(reference.name)
    model = recipe.name if recipe else reference.name.rpartition("/")[2]
    found = [one for one in collect(catalog, views, model) if _means(reference, one)]
    default = recipe.default_tag if recipe else None
    if len(found) > 1 and reference.tag is None and reference.digest is None:
        found = [one for one in found if one.id.tag == default] or found
    if not found:
        text = target.text if isinstance(target, NameTarget) else str(reference)
        raise ArtifactNotFound.for_name(text, catalog.close_matches(text))
    if len(found) > 1:
        names = ", ".join(one.id.reference for one in found)
        raise UsageError(f"{target.text} has {len(found)} versions.", hint=f"name one: {names}")
    return found[0]


def _in_folder(target: PathTarget) -> Entry:
    path = target.path / FILE_NAME
    if not path.is_file():
        what = "folder of an artifact" if not target.path.is_dir() else FILE_NAME
        raise PathNotFound.for_path(target.path if not target.path.is_dir() else path, what)
    data = read_file(path, max_bytes=strict_json.MAX_BYTES)
    manifest = Manifest.from_bytes(data, what=str(path))
    beside = own_scores.read(own_scores.in_folder(target.path))
    same = beside is not None and beside.digest == manifest.digest
    return entry_of(manifest, beside.scores if beside and same else ())


def _means(reference: Reference, entry: Entry) -> bool:
    tagged = reference.tag is None or entry.id.tag.casefold() == reference.tag.casefold()
    return tagged and (
        reference.digest is None or (entry.digest or "").startswith(reference.digest)
    )
