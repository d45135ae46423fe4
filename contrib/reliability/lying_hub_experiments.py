"""S11: hubs that lie, one schedule for every named attack, hub and chance.

What is pulled is an honest version as a whole, or nothing; what was pulled before stays.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from disk_faults import state
from experiment import Found, Scale
from hub_repositories import Kind, Repository
from hub_server import HubServer
from hub_uses import publish
from many_commands import Done, Job, ManyCommands
from measured_artifacts import measured_files
from tiny_artifacts import FILE_NAME, K_NAME, V_NAME, write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.hubs.local import LocalHub

FIRST, SECOND = "tiny-qwen3-hard/first", "tiny-qwen3-hard/second"
NAME, NEXT = "tiny-qwen3-hard:first", "tiny-qwen3-hard:second"
KINDS: tuple[Kind, ...] = ("hf", "ms")
TIMES = 3
"""Schedules of each attack on each hub in the long form."""
PATIENCE = "[network]\nread = 3\nmin_rate = 1000\ntries = 1\n"
ENDLESS = 30 << 20
Tree = Mapping[str, bytes]
NOT_FOUND, INTEGRITY, NETWORK = 3, 4, 5


@dataclass(frozen=True)
class Truth:
    """What honest publishers made.

    Attributes:
        older: a hub with the first version.
        newer: the same with the second version.
        evil: what the attacker would like to be taken for `newer`: other bytes, well-formed.
        digests: of the honest versions.
        whole: of the evil ones, too.
    """

    older: Tree
    newer: Tree
    evil: Tree
    digests: frozenset[str]
    whole: frozenset[str]


@dataclass
class Schedule:
    """One attack on one hub; `do` runs a command of the victim."""

    server: HubServer
    repo: Repository
    truth: Truth
    chance: random.Random
    hub: str
    folder: Path
    commands: ManyCommands

    def do(self, *words: str) -> Done:
        """Run a command of the victim."""
        return self.commands([Job(words, str(self.folder), state(self.folder))])[0]

    def pull(self, name: str = NAME, *more: str) -> Done:
        """Pull a version."""
        return self.do("pull", name, "--hub", self.hub, *more)

    def has(self, tree: Tree) -> None:
        """From now on the hub has `tree`."""
        self.repo.commit(tree)


Attack = Callable[[Schedule], Iterator[str]]


def rollback(schedule: Schedule) -> Iterator[str]:
    """An index that the victim has seen a newer one of."""
    yield from _ended(schedule.pull(), 0)
    schedule.has(schedule.truth.older)
    yield from _ended(schedule.pull(NAME, "--no-lock"), INTEGRITY)
    yield from _ended(schedule.pull(NEXT), INTEGRITY)


def freeze(schedule: Schedule) -> Iterator[str]:
    """An old state for ever, of a hub that does not sign the time; nothing shows it."""
    schedule.has(schedule.truth.older)
    schedule.server.clear()
    yield from _ended(schedule.pull(), 0)


def mix_and_match(schedule: Schedule) -> Iterator[str]:
    """Files of two versions, listed as one, or listed honestly and delivered otherwise."""
    name = schedule.chance.choice((K_NAME, V_NAME))
    if schedule.chance.random() < 0.5:
        schedule.server.fault("swap", f"{FIRST}/{name}", other=f"{SECOND}/{name}")
    else:
        schedule.has({f"{FIRST}/{name}": schedule.truth.newer[f"{SECOND}/{name}"]})
    yield from _ended(schedule.pull(), INTEGRITY)


def endless_data(schedule: Schedule) -> Iterator[str]:
    """A body that does not end where the listing says."""
    name = schedule.chance.choice((K_NAME, V_NAME, FILE_NAME))
    honest = schedule.chance.random() < 0.5
    schedule.server.fault("extra", f"{FIRST}/{name}", n=ENDLESS, honest=honest)
    # Without a true length the client may stop reading where the listing says, and go on.
    ends = (INTEGRITY, NETWORK) if honest else (0, INTEGRITY, NETWORK)
    yield from _ended(schedule.pull(), *ends)
    size = sum(path.stat().st_size for path in schedule.folder.rglob("*") if path.is_file())
    if size > ENDLESS // 2:
        yield f"{size >> 20} MiB on the victim's disk"


def wrong_software(schedule: Schedule) -> Iterator[str]:
    """Another artifact under the name of this one, whole and well-formed."""
    known = schedule.chance.random() < 0.5
    if known:
        yield from _ended(schedule.pull(), 0)
        schedule.has(schedule.truth.evil)
    else:
        files = schedule.truth.newer.items()
        moved = {p.replace(SECOND, FIRST): d for p, d in files if p.startswith(SECOND)}
        schedule.has(moved)
    yield from _ended(schedule.pull(NAME, "--no-lock"), INTEGRITY)


def slow_retrieval(schedule: Schedule) -> Iterator[str]:
    """A byte per second, of a listing or of a file."""
    api = "*/api/*" if schedule.hub.startswith("hf") else "*/v1/*"
    path = schedule.chance.choice((f"{FIRST}/{K_NAME}", f"{FIRST}/{V_NAME}", api))
    rate = schedule.chance.choice((1, 50))
    headers = schedule.chance.random() < 0.5
    schedule.server.fault("slow", path, bytes_per_second=rate, headers=headers)
    yield from _ended(schedule.pull(), NETWORK)


def moved_meanwhile(schedule: Schedule) -> Iterator[str]:
    """Other content from some request on, in the middle of a pull."""
    path = schedule.chance.choice((f"{FIRST}/{K_NAME}", f"{FIRST}/{FILE_NAME}", "*/api/*", "*v1*"))
    schedule.server.fault(
        "move", path, times=1, call=lambda: schedule.repo.commit(schedule.truth.evil)
    )
    yield from _ended(schedule.pull(), 0, INTEGRITY, NETWORK)


def history_rewritten(schedule: Schedule) -> Iterator[str]:
    """The commit of the lock is gone, and other bytes have its name."""
    yield from _ended(schedule.pull(), 0)
    lock = (schedule.folder / "oscar-zoo.lock").read_bytes()
    schedule.has(schedule.truth.evil)
    schedule.repo.rewrite_history()
    yield from _ended(schedule.do("cache", "rm", NAME), 0)
    # ModelScope cannot tell a commit that is gone from a file that is gone.
    ends = (INTEGRITY,) if schedule.hub.startswith("hf") else (INTEGRITY, NOT_FOUND)
    yield from _ended(schedule.pull(), *ends)
    if (schedule.folder / "oscar-zoo.lock").read_bytes() != lock:
        yield "the lock was changed"


ATTACKS: tuple[Attack, ...] = (
    rollback,
    mix_and_match,
    endless_data,
    wrong_software,
    slow_retrieval,
    moved_meanwhile,
    history_rewritten,
    freeze,
)


def lies(scale: Scale) -> Found:
    """Every attack, on both hubs, with different chances."""
    outcomes: Counter[str] = Counter()
    violations: list[str] = []
    with ExitStack() as stack:
        server = stack.enter_context(HubServer())
        environment = server.environment(scale.work / "hf")
        commands = stack.enter_context(ManyCommands(scale.work / "out", environment))
        truth = _truth(scale.work)
        for number, (attack, kind) in enumerate(_plan(scale)):
            label = f"{attack.__name__} {number} on {kind}"
            repo = server.repository(f"org/zoo{number}", kind, files=truth.newer)
            folder = scale.work / f"victim{number}"
            (folder / "home/config").mkdir(parents=True)
            (folder / "home/config/config.toml").write_text(PATIENCE)
            (folder / "pyproject.toml").touch()
            hub = f"{kind}:org/zoo{number}"
            chance = random.Random(number)
            schedule = Schedule(server, repo, truth, chance, hub, folder, commands)
            violations += [f"{label}: {line}" for line in attack(schedule)]
            server.clear_faults()
            # Who comes later than the move, and for the first time, gets another version, whole.
            allowed = truth.whole if attack is moved_meanwhile else truth.digests
            violations += [f"{label}: {line}" for line in _poisoned(schedule, allowed)]
            outcomes[attack.__name__.replace("_", " ")] += 1
    figures: dict[str, int | float | str] = {"schedules": outcomes.total(), **outcomes}
    figures["not detected, as documented"] = "freeze without a signed timestamp"
    return Found(figures, tuple(violations))


def _plan(scale: Scale) -> Iterator[tuple[Attack, Kind]]:
    if not scale.whole:
        # A slow one has a minute for each answer; `tests/hubs/test_http.py` shortens that.
        yield from ((attack, "hf") for attack in ATTACKS if attack is not slow_retrieval)
        return
    for attack in ATTACKS[:-1]:
        yield from ((attack, kind) for kind in KINDS for _ in range(TIMES))
    yield from ((attack, kind) for attack in ATTACKS[4:-1:2] for kind in KINDS for _ in range(1))
    yield from ((freeze, kind) for kind in KINDS for _ in range(2))


def _truth(work: Path) -> Truth:
    trees: list[Tree] = []
    digests: dict[str, set[str]] = {"honest": set(), "evil": set()}
    for name, seeds in {"honest": (0, 1), "evil": (8, 9)}.items():
        hub = LocalHub(work / name, must_exist=False)
        for artifact, seed in zip((FIRST, SECOND), seeds, strict=True):
            files = measured_files(artifact=artifact, seed=seed)
            publish(write_folder(work / "made" / name / artifact, files), hub)
            digests[name].add(Version.of(ArtifactId.parse(artifact), files).digest)
            trees.append(_tree(work / name))
    honest = frozenset(digests["honest"])
    return Truth(trees[0], trees[1], trees[3], honest, honest | digests["evil"])


def _tree(hub: Path) -> Tree:
    paths = (path for path in hub.rglob("*") if path.is_file() and "/." not in str(path))
    return {path.relative_to(hub).as_posix(): path.read_bytes() for path in paths}


def _ended(done: Done, *codes: int) -> Iterator[str]:
    if done.code not in codes:
        yield f"ended with {done.code}, not {codes}: {(done.err or done.out).strip()[-300:]}"


def _poisoned(schedule: Schedule, allowed: frozenset[str]) -> Iterator[str]:
    """What the victim has beside the digests `allowed`."""
    checked = schedule.do("cache", "verify", "--json")
    if checked.code != 0:
        yield f"cache verify ended with {checked.code}: {checked.out[-300:]}"
        return
    rows = json.loads(checked.out)["artifacts"]
    strange = {row["digest"] for row in rows} - allowed
    if strange:
        yield f"{strange} is in the store"
