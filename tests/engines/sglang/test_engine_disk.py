"""Pages and first tokens in files: a prompt is reused after a restart, with the tokens that the
stock backend gives, and a file that is not what it should be is as good as none.

Slots have exact rows beside the codes, so every answer must be that of the stock backend, whatever
was reused. What would be wrong is wrong in the tokens.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engine_cases
import pytest
import torch
from engine_cases import CASES, DONOR, HOST, LATE, RECENT, answers
from engines import INSTALLED, RELEASES, Engines, needs_sglang

from oscar_kernels.spec import QuantSpec
from oscar_zoo.engines.sglang import worker
from oscar_zoo.runtime.stores import SlotShape, WindowShape

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
def test_a_restarted_server_finds_what_it_wrote(disk: Callable[[str], Disk], release: str) -> None:
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


def test_codes_come_back_to_the_last_bit(disk: Callable[[str], Disk]) -> None:
    """The first token behind pages of a file has the probability that it has behind pages that
    never left the device, where the same requests share a step: here none does."""
    servers, codes = disk(INSTALLED), {"rotations": "orthogonal", "mode": "int2"}
    together = engine_cases.visits(2 * FEW, new=1)
    visits = [
        {**group, "name": f"{group['name']}-{at}", "prompts": [prompt]}
        for group in together
        for at, prompt in enumerate(group["prompts"])
    ]
    half = len(visits) // 2
    engine_cases.start(servers.runs, ["visits_int2"], visits)
    servers.serve("wrote_codes", "codes", visits[:half], **codes)
    again = servers.serve("read_codes", "codes", visits[half:], **codes)
    stayed = servers.runs.result("visits_int2")
    for what in ("cached", "logprobs"):
        wanted = [*answers(stayed, what).values()][half:]
        assert [*answers(again, what).values()] == wanted
    assert cached(again) == {REACH}


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


NARROW, WIDE = QuantSpec(64, 64, 0.96), QuantSpec(64, 64, 0.0, bits=4)
OTHERS: dict[str, dict[str, Any]] = {
    "bits": {"specs": ((NARROW, NARROW), (WIDE, NARROW))},
    "clip": {"specs": ((NARROW, NARROW), (NARROW, replace(NARROW, clip_ratio=0.92)))},
    "group": {"specs": ((NARROW, NARROW), (NARROW, replace(NARROW, group_size=32)))},
    "scale": {"specs": ((NARROW, NARROW), (NARROW, replace(NARROW, scale_dtype="bfloat16")))},
    "heads": {"heads": 4},
    "sink": {"sink": 8},
    "page": {"page": 64},
    "artifact": {"digest": "sha256:other"},
    "quantized": {"quantization": "fp8"},
    "model": {"config": '{"model_type": "other"}'},
}


def test_a_tag_covers_what_decides_a_record(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")

    def tag(**changes: Any) -> str:
        given: dict[str, Any] = {"specs": ((NARROW, NARROW),) * 2, "heads": 2, "sink": 4}
        given |= {"page": 16, "digest": "sha256:one", "quantization": None, "config": "{}"}
        given |= changes
        (tmp_path / "config.json").write_text(given["config"])
        os.utime(tmp_path / "config.json", ns=(0, 0))
        args = SimpleNamespace(
            model_path=str(tmp_path), revision=None, tp_size=1, dtype="auto",
            quantization=given["quantization"], json_model_override_args="{}",
        )  # fmt: skip
        artifact = SimpleNamespace(digest=given["digest"])
        monkeypatch.setattr(worker, "served", lambda: (None, artifact))
        monkeypatch.setattr(worker.geometry, "attention_ranks", lambda: 1)
        slots = SlotShape(given["specs"], 0, given["heads"])
        windows = WindowShape(2, 2, 2, 64, 64, given["sink"], 8, torch.bfloat16)
        return worker.disk_tag(slots, windows, given["page"], args)

    tags = [tag(), *(tag(**change) for change in OTHERS.values())]
    assert len({*tags}) == len(tags) and tag() == tags[0]
    assert all(re.fullmatch("oz1-[0-9a-f]{16}", one) for one in tags)


def harm(files: list[Path]) -> None:
    """Cut a third of them, flip a bit in another, and give each of the rest the bytes of the next
    one."""
    cut, flipped, swapped = (files[at::3] for at in range(3))
    for path in cut:
        os.truncate(path, path.stat().st_size - 1)
    for path in flipped:
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    held = [path.read_bytes() for path in swapped]
    for path, data in zip(swapped, held[1:] + held[:1], strict=True):
        path.write_bytes(data)


@pytest.mark.parametrize("kind", ["page", "sinks"])
def test_broken_files_are_misses_that_are_counted_and_written_again(
    disk: Callable[[str], Disk], kind: str
) -> None:
    servers = disk(INSTALLED)
    harm([path for path in servers.copied(kind) if path.suffix == f".{kind}"])
    run = servers.serve(kind, kind, SECOND)
    assert servers.right(run) and cached(run) == {0}
    assert counts(run)["broken"] == FEW * (PAGES if kind == "page" else 1)
    assert counts(run)["failed"] == 0
    assert "is damaged or not what it should be" in servers.runs.log(kind)
    healed = servers.serve(f"{kind}_healed", kind, SECOND)
    assert servers.right(healed) and cached(healed) == {REACH} and counts(healed)["broken"] == 0


def test_a_server_killed_before_first_tokens_leaves_a_miss(disk: Callable[[str], Disk]) -> None:
    servers = disk(INSTALLED)
    for path in servers.copied("killed"):
        if path.suffix == ".sinks":
            path.unlink()
    half = servers.serve("half", "killed", SECOND)
    assert servers.right(half) and cached(half) == {0}
    assert counts(half)["broken"] == 0 and counts(half)["written"] == FEW
    healed = servers.serve("healed", "killed", SECOND)
    assert servers.right(healed) and cached(healed) == {REACH}
