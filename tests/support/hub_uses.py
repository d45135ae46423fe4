"""Hubs in folders with versions put there directly, past every check of `publish`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.registry import publish as publishing
from oscar_zoo.registry.fetch import PullJob, PullResult
from oscar_zoo.registry.hubs.base import Change, Hub
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.publish import Publishable, PublishResult
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.view import ResolvedArtifact

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


HUB_2 = Path(sys.prefix) / "hub-2"
"""Where a second version of huggingface_hub lies, with what it needs."""

VERSIONS = [
    pytest.param(1, id="huggingface_hub-1"),
    pytest.param(
        2,
        id="huggingface_hub-2",
        marks=pytest.mark.skipif(not HUB_2.is_dir(), reason="no hub-2 folder in sys.prefix"),
    ),
]


OF_THE_HUB = ("propose", "dry_run", "create")


def publish(folder: Path, hub: Hub, **options: Any) -> PublishResult:
    """Read `folder` and publish it; `options` are those of `Publishable.read` and of
    `registry.publish.publish_on`."""
    reading = {name: value for name, value in options.items() if name not in OF_THE_HUB}
    writing = {name: value for name, value in options.items() if name in OF_THE_HUB}
    return publishing.publish_on(hub, Publishable.read(folder, **reading), **writing)


def pull(name: str, hubs: Hub | Sequence[Hub], store: Store, **options: Any) -> PullResult:
    """`PullJob.pull` of what `name` means; `options` are those of the job."""
    return _job(name, hubs, store, **options).pull()


def plan(
    name: str, hubs: Hub | Sequence[Hub], store: Store, **options: Any
) -> ResolvedArtifact | PullResult:
    """`PullJob.plan` of what `name` means; `options` are those of the job."""
    return _job(name, hubs, store, **options).plan()


def _job(name: str, hubs: Hub | Sequence[Hub], store: Store, **options: Any) -> PullJob:
    asked = hubs if isinstance(hubs, Sequence) else [hubs]
    given = {key: value for key, value in options.items() if value is not None}
    return PullJob(Reference.parse(name), asked, store, **given)
