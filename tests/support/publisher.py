"""Processes that publish round after round against a twin; module-level, so that a spawned child
can import them."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from publishing import publish
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.errors import StaleRevision, VersionExists
from oscar_zoo.registry.hubs.base import INDEX_NAME, Change
from oscar_zoo.registry.hubs.local import LocalHub

FILES = 12


def content(who: int) -> dict[str, bytes]:
    """The files of publisher `who`: same names and sizes for all, other bytes."""
    return {f"file{i}.pt": bytes([who]) * 4096 for i in range(FILES)}


def without_locks(publish: Any, *arguments: Any) -> None:
    """Run `publish` on a file system whose locks say yes to everybody."""
    fcntl.flock = lambda *_: None
    publish(*arguments)


def publish_rounds(root: str, who: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Commit `<root>/Model/round<i>` and an index at the same moment as the other process; report
    'new' or 'stale'."""
    hub = LocalHub(Path(root))
    for number in range(rounds):
        hub.refresh()
        parent = hub.revision
        barrier.wait(300)
        index = {INDEX_NAME: f"round {number} of {who}".encode()}
        try:
            hub.commit(
                Change(ArtifactId("Model", f"round{number}"), content(who), index, parent, "race")
            )
            answer = "new"
        except StaleRevision:
            answer = "stale"
        answers.put((number, who, answer))
        barrier.wait(300)


def publish_folders(root: str, who: int, rounds: int, barrier: Any, answers: Any) -> None:
    """Publish real artifacts against a twin: in odd rounds under the same id, in even rounds under
    ids of its own."""
    for number in range(rounds):
        tag = f"round{number}" if number % 2 else f"round{number}-{who}"
        files = artifact_files(artifact=f"tiny-qwen3-hard/{tag}", seed=who)
        folder = write_folder(Path(root) / str(who) / str(number), files)
        hub = LocalHub(Path(root) / "hub", must_exist=False)
        barrier.wait(300)
        try:
            answer = "exists" if publish(folder, hub).already_published else "new"
        except VersionExists:
            answer = "exists"
        answers.put((number, who, answer))
