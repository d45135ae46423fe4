"""S10: two publishers at the same moment, on hubs over HTTP and in folders, with and without locks,
and replies that are lost after the commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiment import Found, Scale
from hub_server import HubServer
from hub_uses import HUB_2
from publishing_child import Publisher
from tiny_artifacts import FILE_NAME, manifest, payload, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.index import Index

RACES, FEW = 100, 6
TOKENS = {"HF_TOKEN": "hf_test", "MODELSCOPE_API_TOKEN": "ms-test"}
SITE = """
import errno, fcntl
def flock(*arguments): raise OSError(errno.ENOLCK, "no locks here")
fcntl.flock = flock
"""
CONFLICT = "conflict.version"


@dataclass(frozen=True)
class Field:
    """A hub with two publishers.

    Attributes:
        name: what is special about it.
        hub: its address.
        files: what is there now, by path.
        rivals: the publishers.
    """

    name: str
    hub: str
    files: Callable[[], Mapping[str, bytes]]
    rivals: tuple[Publisher, Publisher]

    def race(self, folders: tuple[str, str]) -> list[Any]:
        """What both are told when they publish at the same moment."""
        for child, folder in zip(self.rivals, folders, strict=True):
            child.start("publish", folder=folder, hub=self.hub)
        return [child.answer() for child in self.rivals]


def publishers(scale: Scale) -> Found:
    """Race for the same name and for different ones, then lose replies."""
    races = RACES if scale.whole else FEW
    figures: dict[str, int | float | str] = {}
    violations: list[str] = []
    with ExitStack() as stack:
        server = stack.enter_context(HubServer())
        for field in _fields(scale.work, server, stack):
            work = scale.work / field.name
            lines = [*_same_name(field, work, races), *_other_names(field, work, races)]
            figures[f"races {field.name}"] = 2 * races
            violations += [f"{field.name}, {line}" for line in lines]
            if field.name == "over HTTP":
                violations += _lost_replies(field, work, races, server)
                figures["replies lost after the commit"] = races
    return Found(figures, tuple(violations))


def _fields(work: Path, server: HubServer, stack: ExitStack) -> Iterator[Field]:
    def two(name: str, *versions: int, more: Mapping[str, str]) -> tuple[Publisher, Publisher]:
        children = []
        for side, version in enumerate(versions):
            folder = work / name / f"rival{side}"
            folder.mkdir(parents=True)
            environment = server.environment(folder) | TOKENS | dict(more)
            children.append(Publisher(environment, folder, version))
            stack.callback(children[-1].close)
        return children[0], children[1]

    second = 2 if HUB_2.is_dir() else 1
    repo = server.repository("org/races")
    yield Field("over HTTP", "hf:org/races", repo.files, two("over HTTP", 1, second, more={}))
    site = work / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    for name, more in {"in a folder": {}, "without locks": {"PYTHONPATH": str(site)}}.items():
        hub = work / name / "hub"
        hub.mkdir(parents=True)
        yield Field(name, f"file:{hub}", partial(_tree, hub), two(name, 1, 1, more=more))


def _tree(hub: Path) -> dict[str, bytes]:
    """All files of a hub in a folder, but for what is temporary."""
    paths = (path for path in hub.rglob("*") if path.is_file() and ".tmp" not in str(path))
    return {path.relative_to(hub).as_posix(): path.read_bytes() for path in paths}


def _folders(work: Path, ids: tuple[str, str]) -> tuple[str, str]:
    """Folders of two publishers, with different content."""
    made = []
    for side, artifact in enumerate(ids):
        files = CONTENT[side] | {FILE_NAME: manifest(CONTENT[side], artifact=artifact).to_bytes()}
        made.append(str(write_folder(work / str(side) / artifact, files)))
    return made[0], made[1]


CONTENT = (payload(seed=1), payload(seed=2))


def _same_name(field: Field, work: Path, races: int) -> Iterator[str]:
    """One of two wins, and what is there is all of what it published."""
    for number in range(races):
        name = f"Same/round{number}"
        folders = _folders(work, (name, name))
        answers = field.race(folders)
        winners = [side for side in (0, 1) if "error" not in answers[side]]
        if len(winners) != 1 or answers[1 - winners[0]]["error"] != CONFLICT:
            yield f"race {number} for one name: {answers}"
            continue
        won = Path(folders[winners[0]])
        yield from _differs(field.files(), name, won, answers[winners[0]]["digest"])


def _other_names(field: Field, work: Path, races: int) -> Iterator[str]:
    """Both win, and the index has both."""
    names = []
    for number in range(races):
        pair = (f"One/round{number}", f"Two/round{number}")
        names += pair
        answers = field.race(_folders(work, pair))
        if [answer.get("already_published") for answer in answers] != [False, False]:
            yield f"race {number} for two names: {answers}"
    listed = {entry.id for entry in _index(field.files()).artifacts}
    lost = sorted(set(names) - listed)
    if lost:
        yield f"{len(lost)} of {len(names)} versions are not in the index: {lost[:4]}"


def _lost_replies(field: Field, work: Path, count: int, server: HubServer) -> Iterator[str]:
    """The commit arrives and its reply does not: success, and no second commit."""
    repo, child = server.repository("org/races"), field.rivals[0]
    for number in range(count):
        name = f"Lost/round{number}"
        folder = _folders(work, (name, f"Lost/other{number}"))[0]
        commits = len(repo.commits)
        fault = server.fault("lose_reply", "*/commit/*", times=1, method="POST")
        answer = child.do("publish", folder=folder, hub=field.hub)
        server.clear_faults()
        if "error" in answer or not fault.hits or len(repo.commits) != commits + 1:
            yield f"lost reply {number}: {answer}, {len(repo.commits) - commits} commits"
        else:
            yield from _differs(field.files(), name, Path(folder), answer["digest"])


def _differs(files: Mapping[str, bytes], name: str, folder: Path, digest: str) -> Iterator[str]:
    """What a hub has under `name` in place of the files of `folder`."""
    there = {path: data for path, data in files.items() if path.startswith(f"{name}/")}
    if there != {f"{name}/{path.name}": path.read_bytes() for path in folder.iterdir()}:
        yield f"{name} has {sorted(there)}, and not just what {folder} has"
    entry = _index(files).entry(ArtifactId.parse(name))
    if entry is None or entry.digest != digest:
        yield f"{name} is {entry} in the index, not {digest}"


def _index(files: Mapping[str, bytes]) -> Index:
    return Index.from_bytes(files["index.json"])
