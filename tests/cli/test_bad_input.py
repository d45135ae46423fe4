"""Odd input that works, or whose refusal says more than a row of `refusals.txt` can hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cli_output import parsed, ran, refused
from hub_uses import hub_with
from measured_artifacts import measured_files
from random_moments import describe, random_moments
from tiny_artifacts import K_NAME, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.compute.moments_file import save_moments

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
ODD = os.fsdecode(b"d\xff")
"""A folder whose name is no UTF-8."""


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", measured_files())


def test_one_flipped_byte_and_a_known_digest(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def result(code: int, *words: str) -> dict[str, object]:
        assert run(["verify", str(artifact / K_NAME), "--json", *words]) == code
        (found,) = parsed(capsys.readouterr().out)["results"]
        return dict(found)

    digest = result(0)["files"][0]["sha256"]  # type: ignore[index]
    data = bytearray((artifact / K_NAME).read_bytes())
    data[len(data) // 2] ^= 1
    (artifact / K_NAME).write_bytes(data)
    found = result(4, "--digest", f"sha256:{digest}")
    assert found["outcome"] == "digest_mismatch" and digest in str(found["want"])
    assert found["got"] != found["want"]


def test_no_space_left_is_one_line_and_leaves_nothing(
    tmp_path: Path, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real full disk: a tmpfs too small for the artifact, where the machine allows mounting."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        refused(capsys, 8, "publish", artifact, "--hub", f"file:{small}/zoo", "--create")
        assert not list(small.rglob("*.pt"))
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with everything that a command takes in the odd one."""
    monkeypatch.chdir(tmp_path)
    hub_with(tmp_path / "hub", measured_files())
    write_folder(tmp_path / ODD / "artifact", measured_files())
    shutil.copytree(MODEL, tmp_path / ODD / "model")
    (tmp_path / ODD / "text.txt").write_text("some words and others " * 3000)
    moments = random_moments()
    save_moments(tmp_path / ODD / "moments.safetensors", moments, describe(moments))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "verify ./ODD/artifact",
        "verify ODD/",
        "info ./ODD/artifact",
        "card ./ODD/artifact",
        "pull tiny-qwen3-hard --hub file:hub --no-lock --output ODD/out",
        "publish ./ODD/artifact --hub file:copy --create",
        "publish ./ODD/artifact --hub file:copy --create --dry-run",
        f"serve ./ODD/artifact --model {MODEL} --device cpu --print",
        f"compute {MODEL} --calib-data ODD/text.txt --calib-tokens 600 --method hadamard"
        " --output-dir ODD/out",
        "fit ODD/moments.safetensors --method hadamard --output-dir ODD/fitted",
        "plot ODD/moments.safetensors --output ODD/plot.html",
        "scores ./ODD/artifact",
        "site --hub file:hub --output ODD/site",
    ],
)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_path_that_is_no_utf8_works(odd: Path, more: list[str], words: str) -> None:
    code, told, remarks = ran([*(word.replace("ODD", ODD) for word in words.split()), *more])
    assert code == 0, told + remarks
    assert "internal error" not in told + remarks and "udcff" not in remarks
    if more:
        json.loads(told)
    else:
        assert "udcff" not in told


def test_a_command_for_a_shell_names_a_path_that_is_no_utf8(
    odd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cache", "rm", f"./{ODD}/artifact"]) == 2
    assert r"oscar-zoo verify $'./d\xff/artifact'" in capsys.readouterr().err
    serve = ["serve", f"./{ODD}/artifact", "--model", str(MODEL), "--device", "cpu", "--print"]
    assert run(serve) == 0
    words = ["bash", "-c", f"printf '%s\\n' {capsys.readouterr().out}"]
    said = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout
    assert os.fsencode(odd / ODD / "artifact") in said
