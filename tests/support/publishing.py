"""`publish` of a folder, which is read for the one hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_zoo.registry import publish as registry
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.publish import Publishable, PublishResult

OF_THE_HUB = ("propose", "dry_run", "create")


def publish(folder: Path, hub: Hub, **options: Any) -> PublishResult:
    """Read `folder` and publish it; `options` are those of `Publishable.read` and of
    `registry.publish.publish`."""
    reading = {name: value for name, value in options.items() if name not in OF_THE_HUB}
    writing = {name: value for name, value in options.items() if name in OF_THE_HUB}
    return registry.publish(Publishable.read(folder, **reading), hub, **writing)
