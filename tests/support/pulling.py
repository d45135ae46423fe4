"""`pull` and `plan` by the text of a name, as people type it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_zoo.artifact.names import Reference
from oscar_zoo.registry import pull as registry
from oscar_zoo.registry.hubs.base import Hub
from oscar_zoo.registry.pull import PullResult
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.view import ResolvedArtifact


def pull(name: str, hubs: Hub | Sequence[Hub], store: Store, **options: Any) -> PullResult:
    """`registry.pull.pull` of what `name` means; `options` are its own."""
    return registry.pull(Reference.parse(name), hubs, store, **options)


def plan(
    name: str, hubs: Hub | Sequence[Hub], store: Store, **options: Any
) -> ResolvedArtifact | PullResult:
    """`registry.pull.plan` of what `name` means; `options` are its own."""
    return registry.plan(Reference.parse(name), hubs, store, **options)
