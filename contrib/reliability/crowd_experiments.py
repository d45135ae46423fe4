"""S9: many processes pull overlapping artifacts into one store, while others collect garbage and
some are killed."""

from __future__ import annotations

import errno
import fcntl
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from disk_faults import state
from experiment import Found, Scale
from hub_server import HubServer
from many_commands import Done, Job, ManyCommands
from tiny_artifacts import artifact_files

TAG = "seq512_prompt2_group64"
MODELS = tuple(f"model-{number}" for number in range(6))
HUB = "hf:org/zoo"
KINDS = ("cold", "killed", "without locks")
KILLED = 0.1


@dataclass
class Crowd:
    """One round: processes that share a folder with store and lock."""

    kind: str
    folder: Path
    chance: random.Random
    size: int

    def jobs(self, seconds: float) -> list[Job]:
        """The commands; `seconds` is about how long one of them takes."""
        return [self._job(number, seconds) for number in range(self.size)]

    def _job(self, number: int, seconds: float) -> Job:
        killed = self.kind == "killed" and self.chance.random() < KILLED
        after = self.chance.uniform(0, seconds) if killed else None
        words = ["cache", "gc"]
        if self.kind == "cold" or number % 8:
            names = self.chance.sample(MODELS, self.chance.randint(2, 4))
            words = ["pull", *names, "--hub", HUB, "--json"]
        environment = state(self.folder)
        before = f"{__name__}:without_locks" if self.kind == "without locks" else None
        return Job(words, str(self.folder), environment, after, before)


def crowded(scale: Scale) -> Found:
    """Rounds of processes that begin at the same moment on an empty store."""
    size, rounds = (32, 50) if scale.whole else (8, 3)
    counts: Counter[str] = Counter()
    violations: list[str] = []
    chance = random.Random(20261120)
    with HubServer() as server:
        files = {
            f"{name}/{TAG}/{n}": data
            for number, name in enumerate(MODELS)
            for n, data in artifact_files(artifact=f"{name}/{TAG}", seed=number).items()
        }
        server.repository("org/zoo", files={**files, "README.md": b"# zoo"})
        with ManyCommands(scale.work / "out", server.environment(scale.work / "hf")) as commands:
            seconds = 1.0
            for number in range(rounds):
                crowd = Crowd(KINDS[number % 3], scale.work / f"round{number}", chance, size)
                crowd.folder.mkdir()
                (crowd.folder / "pyproject.toml").touch()
                server.clear()
                began = time.monotonic()
                done = commands(crowd.jobs(seconds))
                seconds = time.monotonic() - began
                counts.update(processes=size, killed=sum(one.killed for one in done))
                downloads = _downloads(server)
                counts.update(downloads=downloads.total())
                wrong = _wrong(crowd, done, downloads, commands)
                violations += [f"round {number}, {crowd.kind}: {line}" for line in wrong]
                shutil.rmtree(crowd.folder)
    return Found({"rounds": rounds, **counts}, tuple(violations))


def _downloads(server: HubServer) -> Counter[str]:
    """How often the content of each file of an artifact was sent."""
    sent = (
        request.path
        for request in server.requests
        if "/resolve/" in request.path and request.status == 200 and request.method == "GET"
    )
    paths = (path.split("/", 5)[-1] for path in sent)
    return Counter(path for path in paths if path.startswith(MODELS))


def _wrong(
    crowd: Crowd, done: list[Done], downloads: Counter[str], commands: ManyCommands
) -> Iterator[str]:
    for one in done:
        if one.code != 0 and not one.killed:
            yield f"ended with {one.code}: {one.err.strip()[-300:]}"
    pulled = [json.loads(one.out) for one in done if one.code == 0 and one.out.startswith("{")]
    wanted = {row["id"] for report in pulled for row in report["artifacts"]}
    if crowd.kind == "cold" and max(downloads.values()) > 1:
        yield f"downloaded more than once: {downloads.most_common(3)}"
    environment = state(crowd.folder)
    (checked,) = commands([Job(["cache", "verify", "--json"], str(crowd.folder), environment)])
    if checked.code != 0:
        yield f"cache verify ended with {checked.code}: {checked.err.strip()} {checked.out[:300]}"
        return
    there = {row["id"] for row in json.loads(checked.out)["artifacts"]}
    if not wanted <= there:
        yield f"pulled and not there: {sorted(wanted - there)}"
    lock = crowd.folder / "oscar-zoo.lock"
    pinned = {pin["id"] for pin in json.loads(lock.read_bytes())["artifacts"]}
    if crowd.kind != "without locks" and not wanted <= pinned:
        yield f"pulled and not in the lock: {sorted(wanted - pinned)}"
    again = Job(["pull", *MODELS, "--hub", HUB], str(crowd.folder), environment)
    (last,) = commands([again])
    if last.code != 0:
        yield f"the next pull ended with {last.code}: {last.err.strip()}"


def without_locks() -> None:
    """From now on this process is on a file system that has no locks."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    fcntl.flock = flock  # type: ignore[assignment]
