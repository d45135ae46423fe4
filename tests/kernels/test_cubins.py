"""The folder of compiled kernels: private, keyed by everything, able to lose or damage a file, and
shared by processes that want the same code at once."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from oscar_kernels import nvrtc


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(nvrtc.VARIABLE, str(tmp_path / "a" / "kernels"))
    return tmp_path / "a" / "kernels"


def forbidden() -> bytes:
    raise AssertionError("made again")


def test_what_was_made_once_is_read(folder: Path) -> None:
    assert nvrtc.kept(["source", "sm_90"], lambda: b"code") == b"code"
    assert nvrtc.kept(["source", "sm_90"], forbidden) == b"code"
    assert nvrtc.kept(["source", "sm_80"], lambda: b"other") == b"other"
    assert nvrtc.kept(["sources", "m_90"], lambda: b"third") == b"third"


def test_folder_and_files_are_private(folder: Path) -> None:
    nvrtc.kept(["x"], lambda: b"code")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [x.stat().st_mode & 0o077 for x in folder.iterdir()] == [0]


@pytest.mark.parametrize(
    "damage", [b"", b"short", b"\0" * 200, None], ids=["empty", "cut", "zeros", "one bit"]
)
def test_a_damaged_file_is_made_again(folder: Path, damage: bytes | None) -> None:
    nvrtc.kept(["x"], lambda: b"code" * 50)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]) if damage is None else damage)
    assert nvrtc.kept(["x"], lambda: b"new") == b"new"
    assert nvrtc.kept(["x"], forbidden) == b"new"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o777])
def test_a_folder_open_to_others_is_not_used(
    folder: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"
    assert list(folder.iterdir()) == []
    assert str(folder) in caplog.text


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.parent.mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_place_that_cannot_be_a_folder_is_no_error(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"


def test_of_many_one_makes_it_and_the_others_wait(folder: Path) -> None:
    others, made = 7, list[int]()
    arrived = threading.Semaphore(0)

    def make() -> bytes:
        for _ in range(others):
            arrived.acquire()  # all others ask while this one makes it
        made.append(1)
        return b"code"

    def ask(_: int) -> bytes:
        arrived.release()
        return nvrtc.kept(["x"], make)

    with ThreadPoolExecutor(others + 1) as pool:
        assert list(pool.map(ask, range(others + 1))) == [b"code"] * (others + 1)
    assert made == [1]
    assert [x.suffix for x in folder.iterdir()] == [".cubin"]


def test_who_waited_for_a_failure_makes_it_again(folder: Path) -> None:
    making, asked = threading.Event(), threading.Event()

    def fail() -> bytes:
        making.set()
        asked.wait()
        raise RuntimeError("refused")

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(nvrtc.kept, ["x"], fail)
        making.wait()
        asked.set()
        assert nvrtc.kept(["x"], lambda: b"code") == b"code"
        with pytest.raises(RuntimeError, match="refused"):
            first.result()
    assert nvrtc.kept(["x"], forbidden) == b"code"


def _holds(told: Connection) -> None:
    def make() -> bytes:
        told.send("making")
        threading.Event().wait()
        return b""

    nvrtc.kept(["x"], make)


def test_a_killed_process_holds_nobody_up(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=_holds, args=(there,))
    child.start()
    assert here.recv() == "making"
    child.kill()
    child.join()
    assert [x.suffix for x in folder.iterdir()] == [".lock"]
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"
    assert [x.suffix for x in folder.iterdir()] == [".cubin"]


def test_without_patience_both_make_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "PATIENCE", 0.05)

    def make() -> bytes:
        assert nvrtc.kept(["x"], lambda: b"code") == b"code"  # waits for this very call
        return b"code"

    assert nvrtc.kept(["x"], make) == b"code"
    assert [x.suffix for x in folder.iterdir()] == [".cubin"]
