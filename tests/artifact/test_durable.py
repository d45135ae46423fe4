from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from oscar_zoo.artifact import durable
from oscar_zoo.errors import ArtifactNotFound, StorageError


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data[:3])))
    durable.write_new(tmp_path / "file", b"0123456789", mode=0o444)
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_a_name_that_is_taken_is_never_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            durable.write_new(tmp_path / name, b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert not (tmp_path / "elsewhere").exists()


def test_a_staged_folder_goes_away_unless_it_was_moved(tmp_path: Path) -> None:
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
    assert list(tmp_path.iterdir()) == []
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
        assert durable.move_into_place(staged, tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_content_is_never_replaced_by_a_move(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "there"
    if kind == "folder":
        target.mkdir()
        (target / "old").write_bytes(b"old")
    elif kind == "file":
        target.write_bytes(b"old")
    else:
        target.symlink_to(tmp_path)
    with durable.staged_folder(tmp_path) as staged:
        durable.write_files(staged, {"a": b"1"})
        assert not durable.move_into_place(staged, target)
        assert (staged / "a").exists()
    assert target.is_symlink() == (kind == "link")
    assert not (target / "a").exists()


def test_sweep_takes_only_old_leftovers_with_our_name(tmp_path: Path) -> None:
    for name in (".tmp.folder", "keep"):
        (tmp_path / name).mkdir()
    (tmp_path / ".tmp.file").write_bytes(b"half")
    assert durable.sweep(tmp_path) == 0
    assert durable.sweep(tmp_path, older_than=-1) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]
    assert durable.sweep(tmp_path / "missing") == 0


def test_the_disks_words_become_one_line_with_a_hint() -> None:
    with (
        pytest.raises(StorageError, match=r"^cannot store: No space left on device\.$") as caught,
        durable.storage_errors("cannot store"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "space" in (caught.value.hint or "")


def test_errors_of_this_library_pass_unchanged() -> None:
    for error in (StorageError("own"), ArtifactNotFound("own")):
        with pytest.raises(type(error)) as caught, durable.storage_errors("cannot"):
            raise error
        assert caught.value is error
