"""Compiling before a launch: the same code as in the process that launches, each once, and no
failure that anybody but its own kernel notices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_kernels import ahead, nvrtc
from oscar_kernels.decode_attention import cuda, variant
from oscar_kernels.spec import QuantSpec

CHILD = Path(__file__).parents[1] / "support/ahead_child.py"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("OSCAR_KERNELS_CACHE", str(tmp_path / "ahead"))
    return tmp_path / "ahead"


def builds() -> list[nvrtc.Build]:
    """Two variants of decode."""
    spec = QuantSpec(64, 64)
    made = variant.AttentionVariant(spec, spec, 4, 8, "int", "int", "long long", 0, False)
    flags = (made.flags, replace(made, drafts=2).flags)
    return [nvrtc.Build.of(cuda.SOURCE, x, "sm_80", 13000) for x in flags]


def kept(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_at_once_gives_the_same_code_as_one_by_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ahead.compile_all(builds(), 2) == []
    monkeypatch.setenv("OSCAR_KERNELS_CACHE", str(tmp_path / "sequence"))
    for build in builds():
        build.code()
    assert kept(folder) == kept(tmp_path / "sequence")
    assert len(kept(folder)) == 2


def test_what_cannot_be_compiled_is_told_by_whoever_needs_it(folder: Path) -> None:
    good = builds()[0]
    bad = replace(good, arch="sm_1")
    (line,) = ahead.compile_all([bad, good], 2)
    assert line.startswith("CompilationFailed: ")
    assert len(kept(folder)) == 1
    with pytest.raises(nvrtc.CompilationFailed):
        bad.code()


class Killed:
    """A job whose process the system kills, for example because memory is short."""

    def code(self) -> object:
        return os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_no_reason_to_wait() -> None:
    assert ahead.compile_all([Killed()], 1) == ["a process that compiles was killed"]


def test_nobody_compiles_again_what_was_compiled_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
