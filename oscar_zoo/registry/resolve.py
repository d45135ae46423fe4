"""A reference -> one artifact on one hub, with everything needed to check it.

Names are compared without case, in this order: exact id `<Model>/<tag>`, model name or hub id (the organisation may be
dropped where that is unique), alias. A name that means several versions is an error that lists them, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.digest import FileDigest, artifact_digest
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.stages import is_payload
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, MalformedFile
from oscar_zoo.hubs.base import Hub, HubFile
from oscar_zoo.registry.catalog import Catalog


@dataclass(frozen=True)
class ResolvedArtifact:
    """One artifact as a hub offers it now.

    Attributes:
        id: as the hub spells it.
        files: the payload files, as listed.
        manifest_bytes: `oscar.json` of the hub, or `None` when the artifact has none.
        manifest: the same, parsed.
        packaged: the manifest shipped with this package, or `None`; its checksums, where known, are what we expect.
        geometry: shape of the model by its recipe, or `None` when the zoo does not know the model.
        warnings: what a person should read before using it.
    """

    id: ArtifactId
    files: tuple[HubFile, ...]
    manifest_bytes: bytes | None
    manifest: Manifest | None
    packaged: Manifest | None
    geometry: Geometry | None
    warnings: tuple[str, ...] = ()

    @property
    def digest(self) -> str | None:
        """Digest of what the hub offers, or `None` when its listing lacks a sha256."""
        known = [FileDigest(f.path, f.sha256, f.size) for f in self.files if f.sha256 is not None]
        return artifact_digest(known) if len(known) == len(self.files) else None

    @property
    def expected_digest(self) -> str | None:
        """Digest the packaged manifest promises, or `None`."""
        return self.packaged.digest if self.packaged else None


def resolve(reference: Reference | str, hub: Hub, catalog: Catalog | None = None) -> ResolvedArtifact:
    """Find the artifact that `reference` means on `hub`.

    Args:
        reference: `NAME`, `NAME:TAG`, `NAME@sha256:PREFIX` or `<Model>/<tag>`.
        hub: where to look.
        catalog: recipes and manifests to know names by; default the packaged ones.

    Raises:
        InvalidName: `reference` is none.
        AmbiguousName: several versions, none of them the default.
        ArtifactNotFound: unknown, or not on this hub.
    """
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    catalog = catalog or Catalog.packaged()
    on_hub = hub.artifacts()
    exact = [a for a in on_hub if a.key == reference.name.casefold()]
    versions = exact if exact and not reference.tag else _versions(reference.name, on_hub, hub, catalog)
    if not versions:
        raise _not_found(reference, on_hub, hub, catalog)
    if reference.tag is not None:
        tagged = [a for a in versions if a.tag.casefold() == reference.tag.casefold()]
        if not tagged:
            raise ArtifactNotFound(
                f"{versions[0].model} has no version {reference.tag} on {hub.name}.",
                hint=f"it has {', '.join(a.reference for a in versions)}",
            )
        versions = tagged
    if reference.digest is not None:
        return _with_digest(reference, reference.digest, versions, hub, catalog)
    return offer(_choose(reference, versions, hub, catalog), hub, catalog)


def offer(artifact: ArtifactId, hub: Hub, catalog: Catalog) -> ResolvedArtifact:
    """What `hub` offers for `artifact`: its listing and its `oscar.json`, nothing verified yet.

    Raises:
        ArtifactNotFound: the hub does not have it, or not a file that its manifest lists.
        MalformedFile: the manifest is none.
    """
    listing = {file.path: file for file in hub.files(artifact)}
    data = manifest = None
    if FILE_NAME in listing:
        data = hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
        manifest = Manifest.from_bytes(data, what=f"{FILE_NAME} of {artifact}")
        if manifest.artifact_id.key != artifact.key:
            raise MalformedFile("manifest.id", f"{artifact} has the {FILE_NAME} of {manifest.id}.")
    names = [f.path for f in manifest.files] if manifest else [n for n in listing if is_payload(n)]
    missing = [name for name in names if name not in listing]
    if missing or not names:
        what = ", ".join(missing) or "rotation files"
        raise ArtifactNotFound(
            f"{artifact} on {hub.name} has no {what}.", hint="the version is incomplete; tell its owner"
        )
    packaged = catalog.manifest(artifact)
    recipe = catalog.recipe(artifact.model)
    warnings: tuple[str, ...] = ()
    if packaged and packaged.registry and packaged.registry.status.state != "active":
        status = packaged.registry.status
        warnings = (f"{artifact} is {status.state}: {status.reason or 'no reason given'}",)
    return ResolvedArtifact(
        artifact,
        tuple(sorted(listing[name] for name in names)),
        data,
        manifest,
        packaged,
        recipe.geometry if recipe else None,
        warnings,
    )


def _versions(name: str, on_hub: Sequence[ArtifactId], hub: Hub, catalog: Catalog) -> list[ArtifactId]:
    recipe = catalog.recipe(name)
    if recipe is None:
        aliased = {a.key for a in catalog.aliased(name)}
        if aliased:
            return [a for a in on_hub if a.key in aliased]
    folder = recipe.name if recipe else name.rsplit("/", 1)[-1]
    found = [a for a in on_hub if a.model.casefold() == folder.casefold()]
    if recipe is not None or "/" not in name:
        return found
    # An organisation the zoo does not know: only what the hub's own manifests say is that model.
    if catalog.recipe(folder) is not None:
        return []
    offers = (offer(a, hub, catalog) for a in found)
    return [o.id for o in offers if o.manifest is not None and o.manifest.model.id.casefold() == name.casefold()]


def _with_digest(
    reference: Reference, prefix: str, versions: Iterable[ArtifactId], hub: Hub, catalog: Catalog
) -> ResolvedArtifact:
    """The one version whose digest starts with `prefix`; withdrawn ones too, with their warning."""
    offers = [offer(artifact, hub, catalog) for artifact in versions]
    found = [o for o in offers if (o.digest or o.expected_digest or "").startswith(prefix)]
    if not found:
        offered = ", ".join(f"{o.id.reference}@{o.digest}" for o in offers)
        raise ArtifactNotFound(f"nothing called {reference} is on {hub.name}.", hint=f"it has {offered}")
    if len(found) > 1:
        raise AmbiguousName.for_name(str(reference), [o.id.reference for o in found])
    return found[0]


def _choose(reference: Reference, versions: list[ArtifactId], hub: Hub, catalog: Catalog) -> ArtifactId:
    usable = [a for a in versions if not _yanked(a, catalog)]
    if not usable:
        raise ArtifactNotFound(
            f"every version of {reference} on {hub.name} was withdrawn.", hint="name one by its digest to use it anyway"
        )
    if len(usable) == 1:
        return usable[0]
    recipe = catalog.recipe(reference.name)
    default = recipe.default_tag.casefold() if recipe and recipe.default_tag else None
    chosen = [a for a in usable if a.tag.casefold() == default]
    if len(chosen) != 1:  # none is the default, or a hub in a folder has two that differ in case
        raise AmbiguousName.for_name(str(reference), [a.reference for a in usable])
    return chosen[0]


def _yanked(artifact: ArtifactId, catalog: Catalog) -> bool:
    packaged = catalog.manifest(artifact)
    return bool(packaged and packaged.registry and packaged.registry.status.state == "yanked")


def _not_found(reference: Reference, on_hub: Sequence[ArtifactId], hub: Hub, catalog: Catalog) -> ArtifactNotFound:
    recipe = catalog.recipe(reference.name)
    if recipe is None:
        models = {a.model for a in on_hub}
        return ArtifactNotFound.for_name(str(reference), catalog.close_matches(reference.name, models))
    elsewhere = sorted({h for m in catalog.manifests(recipe.name) if m.registry for h in m.registry.hubs})
    where = f"it is published on {', '.join(elsewhere)}; " if elsewhere else ""
    return ArtifactNotFound(
        f"{recipe.name} is not on {hub.name}.", hint=f"{where}see what is there: oscar-zoo list --hub {hub.name}"
    )
