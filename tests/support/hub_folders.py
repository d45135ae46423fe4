"""Hubs in folders with versions put there directly, past every check of `publish`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.hubs.base import Change, Hub
from oscar_zoo.registry.hubs.local import LocalHub

HARD = ArtifactId.parse("tiny-qwen3-hard/seq512_prompt2_group64")


def put_version(
    hub: Hub,
    artifact: ArtifactId | str,
    files: Mapping[str, bytes],
    *,
    root: Mapping[str, bytes] | None = None,
) -> None:
    """Add `files` as a version, and `root` files, in one commit."""
    artifact = ArtifactId.parse(artifact) if isinstance(artifact, str) else artifact
    hub.refresh()
    hub.commit(Change(artifact, files, root or {}, hub.revision, "test"))


def hub_with(root: Path, files: Mapping[str, bytes], artifact: ArtifactId | str = HARD) -> LocalHub:
    """A hub in the folder `root` that offers `files`."""
    hub = LocalHub(root, must_exist=False)
    put_version(hub, artifact, files)
    return hub
