"""Commands that write, with the folder they begin in and what must hold afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hub_folders import hub_with, put_version
from measured_artifacts import measured_files
from tiny_artifacts import write_folder

FIRST, SECOND = "tiny-qwen3-hard/seq512_prompt2_group64", "tiny-qwen3-hard/second"
NAME, NEXT = "tiny-qwen3-hard:seq512_prompt2_group64", "tiny-qwen3-hard:second"
HUB, COPY = "file:./hub", "file:./copy"


@dataclass(frozen=True)
class Scenario:
    """A command to disturb.

    Attributes:
        name: of the command.
        begin: fills the folder.
        command: runs in the folder; again after a fault it must succeed.
        kept: commands that succeed before the command, and at every moment of it.
        compared: commands whose output is the same after a fault and a repetition as without.
    """

    name: str
    begin: Callable[[Path], None]
    command: tuple[str, ...]
    kept: tuple[tuple[str, ...], ...]
    compared: tuple[tuple[str, ...], ...]


def _project(root: Path) -> None:
    (root / "pyproject.toml").write_text("")


def _one_version(root: Path) -> None:
    _project(root)
    hub_with(root / "hub", measured_files(artifact=FIRST), FIRST)


def _two_versions(root: Path) -> None:
    _project(root)
    hub = hub_with(root / "hub", measured_files(artifact=FIRST), FIRST)
    put_version(hub, SECOND, measured_files(artifact=SECOND, seed=1))


def _made(root: Path) -> None:
    _one_version(root)
    write_folder(root / "made", measured_files(artifact=SECOND, seed=1))


def _copied(root: Path) -> None:
    _two_versions(root)
    hub_with(root / "copy", measured_files(artifact=FIRST), FIRST)


FRESH = ("pull", NAME, "--hub", HUB, "--no-lock", "--output", "./other", "--quiet")
"""Shows that the hub is whole. What is kept runs with a state of its own, below ./other."""
INSTALLED = (("cache", "list", "--json"), ("cache", "verify", "--json"))
OFFERED = ("list", "--hub", HUB, "--json")

SCENARIOS = (
    Scenario(
        "pull",
        _two_versions,
        ("pull", NAME, NEXT, "--hub", HUB),
        (("verify", "./hub"),),
        (*INSTALLED, ("verify", NAME, "--json")),
    ),
    Scenario(
        "pull --output",
        _two_versions,
        ("pull", NAME, "--hub", HUB, "--output", "./out"),
        (("verify", "./hub"),),
        (*INSTALLED, ("verify", "./out", "--json")),
    ),
    Scenario(
        "publish",
        _made,
        ("publish", "./made", "--hub", HUB),
        (FRESH,),
        (OFFERED, ("verify", "./hub", "--json")),
    ),
    Scenario(
        "mirror",
        _copied,
        ("mirror", HUB, COPY, "--all"),
        (("pull", NAME, "--hub", COPY, "--no-lock", "--output", "./other", "--quiet"),),
        (("list", "--hub", COPY, "--json"), ("verify", "./copy", "--json")),
    ),
    Scenario(
        "yank",
        _two_versions,
        ("yank", NEXT, "--hub", HUB, "--reason", "wrong"),
        (FRESH,),
        (OFFERED, ("verify", "./hub", "--json")),
    ),
)
