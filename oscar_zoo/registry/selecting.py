"""Which versions of a hub a name means, for commands that change a hub: nothing is chosen by
default.

Unlike `resolve`, these find yanked versions too, and never prefer one version over another.
"""

from __future__ import annotations

from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.errors import AmbiguousName, ArtifactNotFound, UsageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.changes import HubState
from oscar_zoo.registry.version import Version

_SHOWN = 5


def named_versions(state: HubState, name: str) -> tuple[ArtifactId, ...]:
    """Every version that `name` fits, in any case: `NAME`, `NAME:TAG`, `<Model>/<tag>`, an alias,
    `[NAME@]sha256:PREFIX`.
    """
    bare = name.startswith("sha256:")
    reference = Reference.parse(f"any@{name}" if bare else name)
    known = {entry.artifact_id.key: entry.artifact_id for entry in state.index.artifacts}
    found = sorted((known | {artifact.key: artifact for artifact in state.artifacts}).values())
    if not bare:
        exact = (
            [a for a in found if a.key == reference.name.casefold()]
            if reference.tag is None
            else []
        )
        found = (
            exact
            or [a for a in found if _is_model(state, a, reference.name)]
            or [a for a in found if a.key in _aliased(state, reference)]
        )
    if reference.tag is not None:
        found = [a for a in found if a.tag.casefold() == reference.tag.casefold()]
    if reference.digest is not None:
        found = [a for a in found if _digest(state, a).startswith(reference.digest)]
    if not found:
        raise ArtifactNotFound(f"{state.hub.title} has no {name}.", hint=_content(state))
    return tuple(found)


def exact_version(state: HubState, name: str) -> ArtifactId:
    """The one version that `name` names exactly, as an alias does. The name of a model does not,
    even if the model has a single version.
    """
    found = named_versions(state, name)
    if len(found) > 1:
        raise AmbiguousName.for_name(name, [artifact.reference for artifact in found])
    is_id = name.casefold() == found[0].key
    if not (is_id or ":" in name or _is_alias(state, found[0], name)):
        raise UsageError(
            f"{name} does not say which version.", hint=f"name it exactly: {found[0].reference}"
        )
    return found[0]


def _is_model(state: HubState, artifact: ArtifactId, name: str) -> bool:
    entry = state.index.entry(artifact)
    names = {artifact.model.casefold(), (entry.model or artifact.model).casefold() if entry else ""}
    return name.casefold() in names


def _aliased(state: HubState, reference: Reference) -> set[str]:
    """Keys of the versions that have the name of `reference` as an alias, by the hub's index or the
    packaged manifests."""
    if reference.tag is not None:
        return set()
    packaged = Catalog.packaged().aliased(reference.name)
    listed = [entry.artifact_id for entry in state.index.aliased(reference.name)]
    return {artifact.key for artifact in (*listed, *packaged)}


def _is_alias(state: HubState, artifact: ArtifactId, name: str) -> bool:
    return not _is_model(state, artifact, name) and artifact.key in _aliased(
        state, Reference.parse(name)
    )


def _digest(state: HubState, artifact: ArtifactId) -> str:
    entry = state.index.entry(artifact)
    return entry.digest if entry is not None else Version.on(state.hub, artifact).digest


def _content(state: HubState) -> str:
    names = [artifact.reference for artifact in state.artifacts]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"it has {', '.join(names[:_SHOWN])}{more}" if names else "it has no artifacts"
