"""The folder of compiled kernels: private, keyed by everything, and able to lose or damage a
file."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_kernels.nvrtc import cubins


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cubins.VARIABLE, str(tmp_path / "a" / "kernels"))
    return tmp_path / "a" / "kernels"


def forbidden() -> bytes:
    raise AssertionError("made again")


def test_what_was_made_once_is_read(folder: Path) -> None:
    assert cubins.kept(["source", "sm_90"], lambda: b"code") == b"code"
    assert cubins.kept(["source", "sm_90"], forbidden) == b"code"
    assert cubins.kept(["source", "sm_80"], lambda: b"other") == b"other"
    assert cubins.kept(["sources", "m_90"], lambda: b"third") == b"third"


def test_folder_and_files_are_private(folder: Path) -> None:
    cubins.kept(["x"], lambda: b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [x.stat().st_mode & 0o077 for x in folder.iterdir()] == [0]


@pytest.mark.parametrize(
    "damage", [b"", b"short", b"\0" * 200, None], ids=["empty", "cut", "zeros", "one bit"]
)
def test_a_damaged_file_is_made_again(folder: Path, damage: bytes | None) -> None:
    cubins.kept(["x"], lambda: b"code" * 50)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    assert cubins.kept(["x"], lambda: b"new") == b"new"
    assert cubins.kept(["x"], forbidden) == b"new"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_open_to_others_is_not_used(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert cubins.kept(["x"], lambda: b"code") == b"code"
    assert list(folder.iterdir()) == []
    assert str(folder) in caplog.text


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert cubins.kept(["x"], lambda: b"code") == b"code"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_place_that_cannot_be_a_folder_is_no_error(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert cubins.kept(["x"], lambda: b"code") == b"code"
