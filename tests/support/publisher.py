"""A process that publishes round after round against a twin; module-level, so that a spawned child can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import StaleRevision
from oscar_zoo.hubs.base import INDEX_NAME, Change
from oscar_zoo.hubs.local import LocalHub

FILES = 12


def content(who: int) -> dict[str, bytes]:
    """The files of publisher `who`: same names and sizes for all, other bytes."""
    return {f"file{i}.pt": bytes([who]) * 4096 for i in range(FILES)}


def publish_rounds(root: str, who: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Commit `<root>/Model/round<i>` and an index at the same moment as the other process; report 'new' or 'stale'."""
    hub = LocalHub(Path(root))
    for number in range(rounds):
        hub.refresh()
        parent = hub.revision
        barrier.wait(60)
        index = {INDEX_NAME: f"round {number} of {who}".encode()}
        try:
            hub.commit(Change(ArtifactId("Model", f"round{number}"), content(who), index, parent, "race"))
            answer = "new"
        except StaleRevision:
            answer = "stale"
        answers.put((number, who, answer))
        barrier.wait(60)
