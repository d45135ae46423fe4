"""The private folder of a server: gone afterwards, and gone at the next start when the process was
killed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_zoo.engines.sglang.launch import staging
from oscar_zoo.errors import StorageError


@pytest.fixture(autouse=True)
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_private_and_gone_afterwards(temp: Path) -> None:
    with staging.private_folder() as folder:
        assert folder.parent == temp and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(temp.iterdir()) == []


def test_what_a_killed_process_left_behind_goes_at_the_next_start(temp: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = Path("/proc/self/ns/pid").stat().st_ino
    left = temp / f"{staging.PREFIX}{here}-{gone.pid}-abc"
    running, elsewhere = (
        f"{staging.PREFIX}{here}-{os.getpid()}-abc",
        f"{staging.PREFIX}{here + 1}-{gone.pid}-abc",
    )
    kept = [temp / name for name in (running, elsewhere, "oscar-zoo-serve-mine", "other")]
    for folder in (left, *kept):
        folder.mkdir()
        (folder / "engine.yaml").write_text("api-key: secret")
    with staging.private_folder():
        assert not left.exists() and all((folder / "engine.yaml").exists() for folder in kept)


def test_compiled_kernels_stay_in_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.paths.cache_dir", lambda: tmp_path / "cache")
    folder = staging.kernels_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "kept").write_text("x")
    assert (staging.kernels_folder() / "kept").exists()
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="0777"):
        staging.kernels_folder()
