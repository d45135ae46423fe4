"""A reference -> one artifact on one hub, with everything needed to check it.

Names are compared without case, in this order: exact id `<Model>/<tag>`, model name or hub id (the
organisation may be dropped where that is unique), alias. A name that means several versions is an
error that lists them, never a guess; deprecated versions count only where none is active. Withdrawn
(yanked) versions are not found by name; a digest still finds them, with the reason as a warning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound
from oscar_zoo.hubs import config
from oscar_zoo.hubs.base import Hub
from oscar_zoo.next_step import ListNames
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.view import HubView, ResolvedArtifact, status_sentence


def resolve(
    reference: Reference | str,
    hub: Hub,
    catalog: Catalog | None = None,
    *,
    trust: Trust | None = None,
) -> ResolvedArtifact:
    """Find the artifact that `reference` means on `hub`.

    Args:
        reference: `NAME`, `NAME:TAG`, `NAME@sha256:PREFIX` or `<Model>/<tag>`.
        catalog: recipes and manifests to know names by; default the packaged ones.
        trust: what was seen before; an index that went back is refused.
    """
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    return find(reference, HubView.open(hub, catalog, trust=trust))


def every_version(hubs: Iterable[Hub]) -> list[Reference]:
    """The full name of every version of every hub, each once, sorted, without the withdrawn
    ones."""
    found: dict[str, Reference] = {}
    for hub in hubs:
        view = HubView.open(hub)
        for artifact in hub.artifacts():
            if view.status(artifact).state != "yanked":
                found.setdefault(artifact.key, Reference(artifact.model, artifact.tag))
    return [found[key] for key in sorted(found)]


def find(reference: Reference, view: HubView) -> ResolvedArtifact:
    """The artifact that `reference` means in `view`; see `resolve`."""
    on_hub = view.hub.artifacts()
    exact = [a for a in on_hub if a.key == reference.name.casefold()]
    versions = exact if exact and not reference.tag else _versions(reference.name, on_hub, view)
    if not versions:
        raise _not_found(reference, on_hub, view)
    if reference.tag is not None:
        tagged = [a for a in versions if a.tag.casefold() == reference.tag.casefold()]
        if not tagged:
            raise ArtifactNotFound(
                f"{versions[0].model} has no version {reference.tag} on {view.hub.title}.",
                hint=f"it has {', '.join(a.reference for a in versions)}",
            )
        versions = tagged
    if reference.digest is not None:
        return _with_digest(reference, reference.digest, versions, view)
    return view.offer(_choose(reference, versions, view))


def _versions(name: str, on_hub: Sequence[ArtifactId], view: HubView) -> list[ArtifactId]:
    recipe = view.catalog.recipe(name)
    if recipe is None:
        aliased = view.aliased(name)
        if aliased:
            return [a for a in on_hub if a.key in aliased]
    folder = recipe.name if recipe else name.rsplit("/", 1)[-1]
    found = [a for a in on_hub if a.model.casefold() == folder.casefold()]
    if recipe is not None or "/" not in name:
        return found
    # An organisation the zoo does not know: only what the hub's own index or manifests say is that
    # model.
    if view.catalog.recipe(folder) is not None:
        return []
    return [a for a in found if (_base_model(a, view) or "").casefold() == name.casefold()]


def _base_model(artifact: ArtifactId, view: HubView) -> str | None:
    entry = view.index.entry(artifact)
    if entry is not None and entry.model is not None:
        return entry.model
    manifest = view.offer(artifact).manifest
    return manifest.model.id if manifest is not None else None


def _with_digest(
    reference: Reference, prefix: str, versions: Iterable[ArtifactId], view: HubView
) -> ResolvedArtifact:
    """The one version whose digest starts with `prefix`; withdrawn ones too, with their warning."""
    offers = [view.offer(artifact) for artifact in versions]
    found = [o for o in offers if (o.digest or o.expected_digest or "").startswith(prefix)]
    if not found:
        offered = ", ".join(f"{o.id.reference}@{o.digest}" for o in offers)
        raise ArtifactNotFound(
            f"nothing called {reference} is on {view.hub.title}.", hint=f"it has {offered}"
        )
    if len(found) > 1:
        raise AmbiguousName.for_name(str(reference), [o.id.reference for o in found])
    return found[0]


def _choose(reference: Reference, versions: list[ArtifactId], view: HubView) -> ArtifactId:
    usable = [a for a in versions if view.status(a).state != "yanked"]
    if not usable:
        raise _withdrawn(reference, versions, view)
    # A deprecated version is taken only when no version is active.
    usable = [a for a in usable if view.status(a).state == "active"] or usable
    if len(usable) == 1:
        return usable[0]
    recipe = view.catalog.recipe(reference.name)
    default = recipe.default_tag.casefold() if recipe and recipe.default_tag else None
    chosen = [a for a in usable if a.tag.casefold() == default]
    if len(chosen) != 1:  # none is the default, or a hub in a folder has two that differ in case
        raise AmbiguousName.for_name(str(reference), [a.reference for a in usable])
    return chosen[0]


def _withdrawn(
    reference: Reference, versions: Sequence[ArtifactId], view: HubView
) -> ArtifactNotFound:
    first = versions[0]
    if len(versions) == 1:
        what = status_sentence(first, view.status(first))
    else:
        what = f"every version of {reference} on {view.hub.title} was withdrawn"
    entry = view.index.entry(first)
    digest = entry.digest if entry else "sha256:..."
    return ArtifactNotFound(
        f"{what}.", hint=f"to use it anyway, name its digest: {first.model}@{digest}"
    )


def _not_found(
    reference: Reference, on_hub: Sequence[ArtifactId], view: HubView
) -> ArtifactNotFound:
    recipe = view.catalog.recipe(reference.name)
    if recipe is None:
        models = {a.model for a in on_hub} | {
            alias for e in view.index.artifacts for alias in e.aliases
        }
        error = ArtifactNotFound.for_name(
            str(reference), view.catalog.close_matches(reference.name, models)
        )
        error.next_step = ListNames(None if view.hub.name in config.load().read else view.hub.name)
        return error
    elsewhere = sorted(
        f"{scheme}:{place.repo}"
        for m in view.catalog.manifests(recipe.name)
        if m.registry
        for scheme, place in m.registry.hubs.items()
    )
    return ArtifactNotFound(
        f"{recipe.name} is not on {view.hub.title}.",
        hint=f"another hub has it: --hub {elsewhere[0]}" if elsewhere else None,
        next_step=ListNames(view.hub.name),
    )
