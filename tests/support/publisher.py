"""A process that publishes round after round against a twin; module-level, so that a spawned child can import it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import VersionExists
from oscar_zoo.hubs.local import LocalHub

FILES = 12


def content(who: int) -> dict[str, bytes]:
    """The files of publisher `who`: same names and sizes for all, other bytes."""
    return {f"file{i}.pt": bytes([who]) * 4096 for i in range(FILES)}


def publish_rounds(root: str, who: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Publish `<root>/Model/round<i>` at the same moment as the other process; report 'new', 'same' or 'exists'."""
    hub = LocalHub(Path(root))
    for number in range(rounds):
        barrier.wait(60)
        try:
            answer = "new" if hub.commit(ArtifactId("Model", f"round{number}"), content(who)) else "same"
        except VersionExists:
            answer = "exists"
        answers.put((number, who, answer))
