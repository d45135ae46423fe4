"""The tag of a version on a hub, which people and other tools find it by."""

from __future__ import annotations

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import ConflictError, OscarZooError
from oscar_zoo.hubs import address
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.version import Version


def tag_name(hub: Hub, artifact: ArtifactId) -> str | None:
    """The tag of `artifact`, without a slash; `None` for a hub on this machine, which has none."""
    return f"oz-{artifact.model}-{artifact.tag}" if address.is_remote(hub.name) else None


def put_tag(hub: Hub, version: Version, revision: str | None) -> tuple[str | None, str | None]:
    """Tag `revision`. The commit is the truth, so that a tag that fails is a warning.

    Returns:
        The tag that names this version, or `None`; and the warning, or `None`.
    """
    name = tag_name(hub, version.id)
    if name is None:
        return None, None
    try:
        hub.tag(name, revision, f"{version.id} {version.digest}")
    except ConflictError:
        if not _names(hub, name, version):
            return None, f"the tag {name} of {hub.title} names other content."
    except OscarZooError as error:
        return (
            None,
            f"the tag {name} could not be made: {error.message} Publishing this again makes it.",
        )
    return name, None


def _names(hub: Hub, tag: str, version: Version) -> bool:
    """Whether `tag` stands on a commit that has this version, as when it was made by an earlier
    run."""
    try:
        return not version.changed_files(Version.on(hub.at(tag), version.id))
    except OscarZooError:
        return False
