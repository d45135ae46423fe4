"""Pages and first tokens in files: a prompt is reused after a restart, with the tokens that the
stock backend gives, and a file that is not what it should be is as good as none.

Slots have exact rows beside the codes, so every answer must be that of the stock backend, whatever
was reused. What would be wrong is wrong in the tokens.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import engine_cases
import pytest
from engine_cases import CASES, DONOR, HOST, LATE, RECENT, answers
from engines import INSTALLED, RELEASES, Engines, needs_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

FEW, NEW, PAGE = 8, 4, 16
REACH = (DONOR - RECENT) // PAGE * PAGE
PAGES = (DONOR + NEW - 1) // PAGE
"""Whole pages of a prompt with its answer, of which the last token is not in the cache."""
SALTED = [release for release in RELEASES if release != "0.5.17"]
DISK = {**HOST, "hicache_storage_prefetch_policy": "wait_complete"}
FIRST, SECOND = (
    [group for group in engine_cases.visits(FEW, new=NEW) if visit in group["name"]]
    for visit in ("first", "second")
)


class Disk:
    """Servers of one release, one after the other, with files in folders by name."""

    def __init__(self, folder: Path, release: str) -> None:
        self.root, self.runs = folder, Engines(folder, release)
        engine_cases.start(self.runs, ["visits_stock"], FIRST)
        self.serve("wrote", "files", FIRST)

    def serve(
        self, name: str, files: str, groups: list[dict[str, Any]], **changes: Any
    ) -> dict[str, Any]:
        env = {**LATE, "OSCAR_INT2_DISK_CACHE": str(self.root / files)}
        case = replace(CASES["host"], engine=DISK, env=env, **changes)
        engine_cases.start(self.runs, [name], groups, cases={name: case})
        return self.runs.result(name)

    def copied(self, name: str) -> list[Path]:
        """A copy of the files of the first server, and what is in it."""
        self.runs.result("wrote")
        shutil.copytree(self.root / "files", self.root / name)
        return sorted((self.root / name).glob("oz1-*/*"))

    def right(self, run: dict[str, Any]) -> bool:
        wanted = list(answers(self.runs.result("visits_stock")).values())
        return list(answers(run).values()) == wanted


def cached(run: dict[str, Any]) -> set[int]:
    return {one for group in answers(run, "cached").values() for one in group}


def counts(run: dict[str, Any]) -> dict[str, int]:
    (report,) = run["reports"]
    assert "storage" in report["fired"]
    return dict(report["disk"])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Disk]]:
    found: dict[str, Disk] = {}

    def of(release: str) -> Disk:
        if release not in found:
            found[release] = Disk(tmp_path_factory.mktemp("disk"), release)
        return found[release]

    yield of
    for one in found.values():
        one.runs.close()


@pytest.mark.parametrize("release", SALTED)
def test_a_restarted_server_finds_what_the_first_one_wrote(
    disk: Callable[[str], Disk], release: str
) -> None:
    servers = disk(release)
    first, second = servers.runs.result("wrote"), servers.serve("restarted", "files", SECOND)
    assert servers.right(first) and servers.right(second)
    assert cached(first) == {0} and cached(second) == {REACH}
    assert counts(first)["written"] == FEW * (PAGES + 1), "a block of first tokens for each"
    assert counts(second)["broken"] == counts(second)["written"] == 0
    assert oct((servers.root / "files").stat().st_mode & 0o777) == "0o700"
    salted = [{**group, "salt": "another"} for group in SECOND]
    third = servers.serve("salted", "files", salted)
    assert servers.right(third) and cached(third) == {0}
    assert counts(third)["written"] == counts(first)["written"]


def test_two_artifacts_do_not_read_each_other(disk: Callable[[str], Disk]) -> None:
    servers = disk(INSTALLED)
    servers.copied("shared")
    other = servers.serve("other", "shared", FIRST, rotations="orthogonal")
    assert servers.right(other) and cached(other) == {0} and counts(other)["broken"] == 0
    again = servers.serve("again", "shared", SECOND)
    assert servers.right(again) and cached(again) == {REACH}
    # Even where a file of one has the place of that of the other.
    tags = sorted((servers.root / "shared").iterdir())
    mine = next(tag for tag in tags if (servers.root / "files" / tag.name).exists())
    (foreign,) = {*tags} - {mine}
    shutil.copytree(foreign, mine, dirs_exist_ok=True)
    mixed = servers.serve("mixed", "shared", SECOND)
    assert servers.right(mixed) and cached(mixed) == {0}
    assert counts(mixed)["broken"] >= FEW


def cut(files: list[Path]) -> None:
    for path in files:
        os.truncate(path, path.stat().st_size - 1)


def flip(files: list[Path]) -> None:
    for path in files:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)


def swap(files: list[Path]) -> None:
    """Give each file the bytes of the next one of its kind."""
    held = [path.read_bytes() for path in files]
    for path, data in zip(files, held[1:] + held[:1], strict=True):
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["page", "sinks"])
@pytest.mark.parametrize("harm", [cut, flip, swap])
def test_a_broken_file_is_a_miss_that_is_counted(
    disk: Callable[[str], Disk], kind: str, harm: Callable[[list[Path]], None]
) -> None:
    servers, name = disk(INSTALLED), f"{kind}_{harm.__name__}"
    harm([path for path in servers.copied(name) if path.suffix == f".{kind}"])
    run = servers.serve(name, name, SECOND)
    assert servers.right(run) and cached(run) == {0}
    assert counts(run)["broken"] == FEW and counts(run)["failed"] == 0
    assert "is damaged or not what it should be" in servers.runs.log(name)


def test_a_server_that_was_killed_before_first_tokens_leaves_a_miss(
    disk: Callable[[str], Disk],
) -> None:
    servers = disk(INSTALLED)
    for path in servers.copied("killed"):
        if path.suffix == ".sinks":
            path.unlink()
    half = servers.serve("half", "killed", SECOND)
    assert servers.right(half) and cached(half) == {0}
    assert counts(half)["broken"] == 0 and counts(half)["written"] == FEW
    healed = servers.serve("healed", "killed", SECOND)
    assert servers.right(healed) and cached(healed) == {REACH}
