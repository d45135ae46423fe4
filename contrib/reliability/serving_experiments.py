"""S13 and S14: what was verified is what is served, and no argument opens the server."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import swapping
import tiny_artifacts as tiny
from experiment import Found, Scale
from tiny_artifacts import write_folder

from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines import served_artifact
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.launch import starting
from oscar_zoo.errors import OscarZooError
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.artifacts import open_folder
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.verify import verify_stored

SWAPS, FEW_SWAPS = 10_000, 300
ATTACKED = ("a folder", "the store", "the folder of a printed command")
SIDES = {"k": "k_rotation_qqt_r_h_pbr.pt", "v": "v_rotation_sst_r_h_pbr.pt"}
NAME = ArtifactId.parse("tiny/attacked")
ARGUMENTS, FEW_ARGUMENTS = 10_000, 60
SEED = 20261120


@dataclass
class Attacked:
    """A place that an attacker writes to while it is served from again and again.

    Attributes:
        folder: with the files.
        digest: of the good artifact.
        serve: verifies and loads; the digest that was verified, and what the server would have.
        known: sha256 of a file -> its canonical content, of all files that may be there.
    """

    folder: Path
    digest: str
    serve: Callable[[], tuple[str, Mapping[str, bytes]]]
    known: Mapping[str, Mapping[str, bytes]]
    outcomes: Counter[str] = field(default_factory=Counter)

    def once(self) -> Iterator[str]:
        """Serve once: a win of the attacker, or nothing."""
        try:
            digest, served = self.serve()
        except OscarZooError as error:
            self.outcomes[f"refused: {error.code}"] += 1
            return
        except OSError as error:
            self.outcomes["refused: the system"] += 1
            if not isinstance(error, FileNotFoundError | PermissionError):
                yield f"{type(error).__name__}: {error}"
            return
        self.outcomes["served"] += 1
        if self.known.get(digest) != served:
            yield f"{digest} was verified, and other bytes are served"


def verified_is_served(scale: Scale) -> Found:
    """Serve from places that an attacker writes to meanwhile, and from a staged copy that he has
    replaced."""
    swaps = (SWAPS if scale.whole else FEW_SWAPS) // len(ATTACKED)
    good, other = (_pair(scale.work / name, seed) for name, seed in (("good", 1), ("other", 2)))
    known = _known(good, other)
    figures: dict[str, int | float | str] = {"swaps": swaps * len(ATTACKED)}
    violations: list[str] = []
    for number, name in enumerate(ATTACKED):
        attacked = _place(name, scale.work, good, known)
        words = [swaps, number, attacked.folder, good, other]
        attacker = subprocess.Popen(
            [sys.executable, swapping.__file__, *map(str, words)], stdin=subprocess.PIPE
        )
        assert attacker.stdin is not None
        while attacker.poll() is None:
            violations += [f"{name}: {line}" for line in attacked.once()]
            if attacked.outcomes["served"]:
                attacker.stdin.close()
        if attacker.returncode != 0 or not attacked.outcomes["served"]:
            violations.append(f"{name}: attacker {attacker.returncode}, {attacked.outcomes}")
        figures[f"served from {name}"] = attacked.outcomes["served"]
        figures[f"refused from {name}"] = attacked.outcomes.total() - attacked.outcomes["served"]
    replaced, wins = _staged_copies(scale.work, good, other, max(10, swaps // 20))
    figures["staged copies replaced"] = replaced
    return Found(figures, (*violations, *wins))


def _pair(folder: Path, seed: int) -> Path:
    """A folder with K and V of one fit."""
    files = {}
    for side, name in SIDES.items():
        objective = "qqt_r_h_pbr" if side == "k" else "sst_r_h_pbr"
        matrices = tiny.covariances(2, seed=10 * seed + ord(side))
        files[name] = rotation_bytes(tiny.rotation_set(objective, matrices=matrices))
    return write_folder(folder, files)


def _known(*folders: Path) -> dict[str, dict[str, bytes]]:
    """Digest of every pair that could be made of the files of `folders` -> what is served of it."""
    known = {}
    for k_folder in folders:
        for v_folder in folders:
            k, v = (k_folder / SIDES["k"]).read_bytes(), (v_folder / SIDES["v"]).read_bytes()
            digest = artifact_digest([file_digest(SIDES["k"], k), file_digest(SIDES["v"], v)])
            known[digest] = {"k": k, "v": v}
    return known


def _place(name: str, work: Path, good: Path, known: Mapping[str, Mapping[str, bytes]]) -> Attacked:
    files = {path.name: path.read_bytes() for path in good.iterdir()}
    digest = artifact_digest([file_digest(name, data) for name, data in sorted(files.items())])
    if name == "the store":
        store = Store(work / "store")
        folder = store.put(NAME, files, source="test").record.path
        return Attacked(folder, digest, lambda: _stage(_stored(store, digest)), known)
    folder = write_folder(work / name, files)
    if name == "a folder":
        return Attacked(folder, digest, lambda: _stage(open_folder(folder, SILENT).verified), known)
    return Attacked(folder, digest, lambda: _printed(folder, digest), known)


def _stored(store: Store, digest: str) -> Verified:
    outcome = verify_stored(store.open(digest, NAME))
    assert isinstance(outcome, Verified), outcome
    return outcome


def _stage(verified: Verified) -> tuple[str, Mapping[str, bytes]]:
    with starting.private_folder() as private:
        staged = private / "rotations"
        starting.stage_rotations(verified, staged)
        return verified.digest, {
            side: (staged / name).read_bytes() for side, name in starting.FILES.items()
        }


def _printed(folder: Path, digest: str) -> tuple[str, Mapping[str, bytes]]:
    """What the plugin loads for a command that was printed before."""
    loaded = served_artifact.load(ArtifactSource(folder=str(folder)), digest)
    return loaded.digest, {"k": rotation_bytes(loaded.k), "v": rotation_bytes(loaded.v)}


def _staged_copies(work: Path, good: Path, other: Path, count: int) -> tuple[int, list[str]]:
    """Replace files of the staged copy in every way: the plugin and the check see it."""
    wins = []
    chance = random.Random(SEED)
    for number in range(count):
        with starting.private_folder() as private:
            staged = private / "rotations"
            digest = starting.stage_rotations(open_folder(good, SILENT).verified, staged)
            side = chance.choice(tuple(SIDES))
            swap = swapping.SWAPS[number % len(swapping.SWAPS)]
            swap(staged / starting.FILES[side], (other / SIDES[side]).read_bytes())
            looks = {
                "the plugin": partial(served_artifact.load, ArtifactSource(str(staged)), digest),
                "the check": partial(starting.check_unchanged, staged, digest),
            }
            for who, look in looks.items():
                try:
                    look()
                    wins.append(f"{who} did not see that {side} was {swap.__name__}")
                except OscarZooError:
                    pass
    return count, wins


def closed_by_default(scale: Scale) -> Found:
    """Give `serve --print` arguments that try to smuggle flags, and its output to SGLang."""
    from sglang_forks import shared

    count = ARGUMENTS if scale.whole else FEW_ARGUMENTS
    work, out, log = scale.work / "work", scale.work / "out", scale.work / "log"
    work.mkdir()
    given = {"count": count, "seed": SEED, "work": str(work), "out": str(out)}
    status = shared().call("generated_arguments:check", work, log, **given)
    if status != 0:
        raise RuntimeError(log.read_text()[-2000:])
    told = json.loads(out.read_text())
    figures = {"command lines": count, **told["outcomes"]}
    return Found(figures, tuple(told["violations"]))


def lacking_sglang() -> str | None:
    """Why SGLang's parser cannot be asked, or `None`."""
    return None if importlib.util.find_spec("sglang") else "sglang is not installed"
