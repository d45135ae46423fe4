"""The private folder of a server, which is gone afterwards and at the next start when the process
was killed; and what a server says of itself."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch import starting
from oscar_zoo.engines.sglang.launch.starting import read_facts
from oscar_zoo.errors import ServerFailed, StorageError


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_private_and_gone_afterwards(temp: Path) -> None:
    with starting.private_folder() as folder:
        assert folder.parent == temp and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(temp.iterdir()) == []


def test_what_a_killed_process_left_behind_goes_at_the_next_start(temp: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = Path("/proc/self/ns/pid").stat().st_ino
    left = temp / f"{starting.PREFIX}{here}-{gone.pid}-abc"
    running, elsewhere = (
        f"{starting.PREFIX}{here}-{os.getpid()}-abc",
        f"{starting.PREFIX}{here + 1}-{gone.pid}-abc",
    )
    kept = [temp / name for name in (running, elsewhere, "oscar-zoo-serve-mine", "other")]
    for folder in (left, *kept):
        folder.mkdir()
        (folder / "engine.yaml").write_text("api-key: secret")
    with starting.private_folder():
        assert not left.exists() and all((folder / "engine.yaml").exists() for folder in kept)


def test_compiled_kernels_stay_with_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_zoo.paths.cache_dir", lambda: tmp_path / "cache")
    folder = starting.kernels_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "kept").write_text("x")
    assert (starting.kernels_folder() / "kept").exists()
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="0777"):
        starting.kernels_folder()


ELEMENTS = 36 * 8 * 256
"""Cached numbers of one token of Qwen3-8B."""
GB = 10**9


class Told:
    """A client of a server whose workers have so many slots."""

    url = "http://a-server"

    def __init__(self, *slots: int, **info: Any) -> None:
        memory = {"slot_bytes": ELEMENTS * 9 // 32, "request_rows": 65, "found_bytes": 59 * GB}
        memory |= {"host_tokens": 7, "disk_bytes": GB}
        recipe = {"sink": 64, "recent": 256, "bits": "2", "k_clip": 0.96, "v_clip": 0.92}
        cache = {"bits_per_element": 2.25, "recipe": recipe}
        workers = [{"oscar_int2": cache | {"memory": memory | {"token_slots": n}}} for n in slots]
        known = {"version": "0.5.23", "max_total_tokens": None, "internal_states": workers}
        models = {"data": [{"id": "Qwen/Qwen3-8B", "max_model_len": 40960}]}
        self.pages = {"/server_info": known | info, "/v1/models": models}

    def get(self, path: str) -> dict[str, Any]:
        return self.pages[path]

    @property
    def facts(self) -> dict[str, Any]:
        return read_facts(cast("ServerClient", self))


def test_capacity_beside_that_of_a_plain_cache() -> None:
    facts = Told(2_500_000).facts
    assert (facts["model_id"], facts["version"]) == ("Qwen/Qwen3-8B", "0.5.23")
    numbers = ("capacity", "requests", "bits", "context")
    assert [facts[name] for name in numbers] == [2_500_000, 64, 2.25, 40960]
    assert facts["plain_capacity"] == 59 * GB // (2 * ELEMENTS) == 400_119
    assert facts["windows"] == {"sink": 64, "recent": 256}
    assert facts["clip"] == {"k": 0.96, "v": 0.92}
    workers = Told(100, 200).facts
    assert (workers["capacity"], workers["requests"]) == (300, 128)
    assert (workers["host_tokens"], workers["disk_bytes"]) == (14, GB)
    assert workers["plain_capacity"] == 2 * 400_119
    assert Told(16384, max_total_tokens=16384).facts["plain_capacity"] is None


@pytest.mark.parametrize("states", [[], [{"world_size": 1}], None])
def test_a_server_without_an_int2_cache(states: Any) -> None:
    with pytest.raises(ServerFailed, match="does not describe its INT2 cache"):
        Told(internal_states=states).facts  # noqa: B018
