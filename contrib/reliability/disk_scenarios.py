"""Commands that write, with the folder they begin in and what must hold afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hub_uses import hub_with, put_version
from measured_artifacts import measured, measured_files, write_scores
from tiny_artifacts import write_folder

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.changes import Version

FIRST, SECOND = "tiny-qwen3-hard/seq512_prompt2_group64", "tiny-qwen3-hard/second"
NAME, NEXT = "tiny-qwen3-hard:seq512_prompt2_group64", "tiny-qwen3-hard:second"
HUB, COPY = "file:./hub", "file:./copy"
Words = tuple[str, ...]
Do = Callable[..., None]
"""Runs a command in the folder; it must succeed."""


@dataclass(frozen=True)
class Scenario:
    """A command to disturb.

    Attributes:
        name: of the command.
        begin: fills the folder.
        command: runs in the folder.
        again: how it may end when it is repeated after a fault.
        kept: commands that succeed before the command, and at every moment of it, in a state of
            their own below ./other.
        compared: commands whose output is the same after a fault and a repetition as without.
        still: as `kept`, in the state of the command itself.
        imports: what the command imports that takes long.
        sampled: calls of each kind in the long form, or `None` for all.
    """

    name: str
    begin: Callable[[Path, Do], None]
    command: Words
    kept: tuple[Words, ...]
    compared: tuple[Words, ...]
    again: tuple[int, ...] = (0,)
    still: tuple[Words, ...] = ()
    imports: Words = ()
    sampled: int | None = None


def _project(root: Path) -> None:
    (root / "pyproject.toml").write_text("")


def _one_version(root: Path, do: Do) -> None:
    _project(root)
    hub_with(root / "hub", measured_files(artifact=FIRST), FIRST)


def _two_versions(root: Path, do: Do) -> None:
    _project(root)
    hub = hub_with(root / "hub", measured_files(artifact=FIRST), FIRST)
    put_version(hub, SECOND, measured_files(artifact=SECOND, seed=1))


def _made(root: Path, do: Do) -> None:
    _one_version(root, do)
    write_folder(root / "made", measured_files(artifact=SECOND, seed=1))


def _copied(root: Path, do: Do) -> None:
    _two_versions(root, do)
    hub_with(root / "copy", measured_files(artifact=FIRST), FIRST)


def _pulled(root: Path, do: Do) -> None:
    _two_versions(root, do)
    do("pull", NAME, NEXT, "--hub", HUB, "--no-lock")


def _replaced(root: Path, do: Do) -> None:
    """The hub has other bytes under the name that the lock pins."""
    _one_version(root, do)
    do("pull", NAME, "--hub", HUB)
    shutil.rmtree(root / "hub")
    hub_with(root / "hub", measured_files(artifact=FIRST, seed=2), FIRST)


def _littered(root: Path, do: Do) -> None:
    """A store with a blob that nothing needs, and what a killed process left."""
    _pulled(root, do)
    blobs = root / "home/cache/blobs/sha256"
    (blobs / ("0" * 64)).write_bytes(b"unused" * 1000)
    (blobs / ".tmp.killed").write_bytes(b"half")


def _scored(root: Path, do: Do) -> None:
    _one_version(root, do)
    digest = Version.of(ArtifactId.parse(FIRST), measured_files(artifact=FIRST)).digest
    write_scores(root / "scores.json", measured(digest), digest=digest)


def _modelled(root: Path, do: Do) -> None:
    from tiny_models import write_model

    write_model(root / "model")
    lines = (f"The {n}th line of a text tells {n * n} stories of {n} towns." for n in range(120))
    (root / "text.txt").write_text("\n".join(lines))


FRESH = ("pull", NAME, "--hub", HUB, "--no-lock", "--output", "./other", "--quiet")
"""Shows that the hub is whole."""
HUB_VERIFIES = ("verify", "./hub")
INSTALLED = (("cache", "list", "--json"), ("cache", "verify", "--json"))
OFFERED = (("list", "--hub", HUB, "--json"), ("verify", "./hub", "--json"))
TORCH = ("torch", "transformers.models.qwen3.modeling_qwen3", "oscar_zoo.compute.compute")
FIT = ("--method", "oscar", "--calib-tokens", "300", "--seq-len", "100", "--device", "cpu")

SCENARIOS = (
    Scenario(
        "pull",
        _two_versions,
        ("pull", NAME, NEXT, "--hub", HUB),
        (HUB_VERIFIES,),
        (*INSTALLED, ("verify", NAME, "--json")),
    ),
    Scenario(
        "pull --output",
        _two_versions,
        ("pull", NAME, "--hub", HUB, "--output", "./out"),
        (HUB_VERIFIES,),
        (*INSTALLED, ("verify", "./out", "--json")),
    ),
    Scenario(
        "pull --accept-new-digest",
        _replaced,
        ("pull", NAME, "--hub", HUB, "--accept-new-digest"),
        (HUB_VERIFIES,),
        (*INSTALLED, ("verify", NAME, "--json")),
        still=(("verify", NAME),),
    ),
    Scenario(
        "cache gc",
        _littered,
        ("cache", "gc"),
        (),
        INSTALLED,
        still=(("verify", NAME), ("verify", NEXT)),
    ),
    Scenario(
        "cache rm",
        _pulled,
        ("cache", "rm", NEXT),
        (),
        INSTALLED,
        again=(0, 3),  # it was removed already
        still=(("verify", NAME),),
    ),
    Scenario("publish", _made, ("publish", "./made", "--hub", HUB), (FRESH,), OFFERED),
    Scenario(
        "mirror",
        _copied,
        ("mirror", HUB, COPY, "--all"),
        (("pull", NAME, "--hub", COPY, "--no-lock", "--output", "./other", "--quiet"),),
        (("list", "--hub", COPY, "--json"), ("verify", "./copy", "--json")),
    ),
    Scenario(
        "yank", _two_versions, ("yank", NEXT, "--hub", HUB, "--reason", "wrong"), (FRESH,), OFFERED
    ),
    Scenario(
        "deprecate",
        _two_versions,
        ("deprecate", NEXT, "--hub", HUB, "--reason", "old", "--replaced-by", NAME),
        (FRESH,),
        OFFERED,
    ),
    Scenario(
        "scores add",
        _scored,
        ("scores", "add", NAME, "./scores.json", "--hub", HUB),
        (FRESH,),
        (*OFFERED, ("scores", NAME, "--hub", HUB, "--json")),
    ),
    Scenario(
        "compute",
        _modelled,
        ("compute", "./model", "--calib-data", "./text.txt", "--output-dir", "./out", *FIT),
        (),
        (("verify", "./out", "--json"),),
        again=(0, 7),  # it is there already
        imports=TORCH,
        sampled=50,
    ),
)
