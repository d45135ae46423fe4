"""A version that is stored or locked, and was yanked or deprecated since."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from hub_uses import HARD, publish, pull
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.registry.fetch import PullResult
from oscar_zoo.registry.hubs.huggingface import HuggingFaceHub
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.known_names import locked_warnings, status_warnings
from oscar_zoo.registry.pins import LOCK_NAME, PinFile
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.trust import Trust
from oscar_zoo.site.status import set_status

SENTENCE = f"{HARD.reference} is yanked: wrong data; use tiny-qwen3-hard:better"


@pytest.fixture
def hub(tmp_path: Path) -> LocalHub:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    better = artifact_files(artifact="tiny-qwen3-hard/better", seed=1)
    for name, files in (("made", artifact_files()), ("other", better)):
        publish(write_folder(tmp_path / name, files), hub, allow_warnings=True)
    return hub


def yank(hub: LocalHub) -> None:
    better = "tiny-qwen3-hard:better"
    set_status(hub, HARD.reference, "yanked", reason="wrong data", replaced_by=better)


def pulled(hub: LocalHub, tmp_path: Path, *, cache: str = "cache", **options: bool) -> PullResult:
    trust = Trust(lock=PinFile(tmp_path / "oscar-zoo.lock"))
    return pull(HARD.reference, hub, Store(tmp_path / cache), trust=trust, **options)


def test_a_stored_or_locked_version_says_that_it_was_yanked(hub: LocalHub, tmp_path: Path) -> None:
    assert pulled(hub, tmp_path).warnings == ()
    yank(hub)
    for options in ({}, {"offline": True}, {"prefer_installed": True}, {"cache": "fresh"}):
        assert pulled(hub, tmp_path, **options).warnings == (SENTENCE,)  # type: ignore[arg-type]
    set_status(hub, HARD.reference, "deprecated", reason="old")
    assert pulled(hub, tmp_path).warnings == (f"{HARD.reference} is deprecated: old",)
    set_status(hub, HARD.reference, "active")
    assert pulled(hub, tmp_path).warnings == ()


def test_a_hub_that_is_gone_or_has_other_bytes_says_nothing(hub: LocalHub, tmp_path: Path) -> None:
    record = pulled(hub, tmp_path).artifact.record
    set_status(hub, HARD.reference, "yanked", reason="wrong data")
    assert "wrong data" in status_warnings(record)[0]
    shutil.rmtree(hub.root)
    assert status_warnings(record) == ()
    hub = LocalHub(hub.root, must_exist=False)
    publish(write_folder(tmp_path / "third", artifact_files(seed=7)), hub, allow_warnings=True)
    set_status(hub, HARD.reference, "deprecated", reason="another one")
    assert status_warnings(record) == ()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_remote_hub_is_asked_once_a_day(hub: LocalHub, tmp_path: Path, server: HubServer) -> None:
    def files() -> dict[str, bytes]:
        paths = [path for path in hub.root.rglob("*") if path.is_file()]
        return {path.relative_to(hub.root).as_posix(): path.read_bytes() for path in paths}

    def again(**options: bool) -> PullResult:
        remote = HuggingFaceHub("org/zoo")
        trust = Trust(lock=PinFile(tmp_path / "oscar-zoo.lock"))
        return pull(HARD.reference, remote, Store(), trust=trust, **options)

    repo = server.repository("org/zoo", files=files())
    assert again().warnings == ()
    yank(hub)
    repo.commit(files())
    server.clear()
    assert again().warnings == () and server.requests == []  # a day has not passed
    (answered,) = Store().root.glob("hubs/*/answered")
    os.utime(answered, (1, 1))
    for options in ({"offline": True}, {"prefer_installed": True}):
        assert again(**options).warnings == () and server.requests == []
    assert again().warnings == (SENTENCE,)
    server.clear()
    assert again().warnings == again(offline=True).warnings == (SENTENCE,)
    assert server.requests == []


def test_a_damaged_lock_is_told_with_the_next_step(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_bytes(b"{")
    (said,) = locked_warnings(PinFile(tmp_path / LOCK_NAME))
    assert "is not JSON" in said and said.endswith("; restore it from your repository.")
