"""NVRTC: the folder of compiled kernels (private, keyed by everything, able to lose or damage a
file, shared by processes that want the same code at once), and compiling before a launch."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_kernels import ahead, nvrtc
from oscar_kernels.decode_attention import cuda, variant
from oscar_kernels.spec import QuantSpec

CHILD = Path(__file__).parents[1] / "support/ahead_child.py"


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


@pytest.mark.parametrize("place", [0o755, 0o770, 0o777, "a link", "a file"])
def test_what_others_could_change_is_not_used(
    folder: Path, place: int | str, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700, parents=True)
    if place == "a link":
        folder.symlink_to(elsewhere)
    elif place == "a file":
        folder.write_text("a file")
    else:
        folder.mkdir()
        folder.chmod(place)
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"
    assert place == "a file" or list(folder.iterdir()) == list(elsewhere.iterdir()) == []
    assert "not kept" in caplog.text and str(folder) in caplog.text


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


def test_without_patience_both_make_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "PATIENCE", 0.05)

    def make() -> bytes:
        assert nvrtc.kept(["x"], lambda: b"code") == b"code"  # waits for this very call
        return b"code"

    assert nvrtc.kept(["x"], make) == b"code"
    assert [x.suffix for x in folder.iterdir()] == [".cubin"]


def builds() -> list[nvrtc.Build]:
    """Two variants of decode."""
    spec = QuantSpec(64, 64)
    made = variant.AttentionVariant(spec, spec, 4, 8, "int", "int", "long long", 0, False)
    flags = (made.flags, replace(made, drafts=2).flags)
    return [nvrtc.Build.of(cuda.SOURCE, x, "sm_80", 13000) for x in flags]


def kept(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_at_once_gives_the_same_code_as_one_by_one(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ahead.compile_all(builds(), 2) == []
    monkeypatch.setenv(nvrtc.VARIABLE, str(tmp_path / "sequence"))
    for build in builds():
        build.code()
    assert kept(compiler) == kept(tmp_path / "sequence")
    assert len(kept(compiler)) == 2


def test_what_cannot_be_compiled_is_told_by_whoever_needs_it(compiler: Path) -> None:
    good = builds()[0]
    bad = replace(good, flags=())
    (line,) = ahead.compile_all([bad, good], 2)
    assert re.match(r"CompilationFailed: .*\.cuh?\(\d+\): error", line)
    assert len(kept(compiler)) == 1
    with pytest.raises(nvrtc.CompilationFailed):
        bad.code()


class Killed:
    """A job whose process the system kills, for example because memory is short."""

    def code(self) -> object:
        return nvrtc.kept(["x"], lambda: os.kill(os.getpid(), signal.SIGKILL))  # type: ignore[arg-type, return-value]


def test_a_killed_process_holds_nobody_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "PATIENCE", 1e6)
    assert ahead.compile_all([Killed()], 1) == ["a process that compiles was killed"]
    assert nvrtc.kept(["x"], lambda: b"code") == b"code"


def test_what_was_compiled_ahead_is_used(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = builds()[0]
    ahead.compile_all([good], 1)

    def forbidden(*_: object) -> bytes:
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "compile_source", forbidden)
    assert good.code().startswith(b"\x7fELF")


def test_kernels_in_triton_are_found_by_the_process_that_launches(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    ran = subprocess.run([sys.executable, CHILD], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout)
    assert told == {"failed": [], "compiled": 1, "compiled by the launcher": 0}
