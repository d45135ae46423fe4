"""Mistakes of a hurried person, in process: what is said, the exit code, and one JSON object for
programs."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from cli_output import TINY, parsed, refused
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.cli.main import run

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TAG = "seq512_prompt2_group64"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", artifact_files())


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    write_folder(tmp_path / "hub" / TINY / TAG, artifact_files())
    return tmp_path / "hub"


def test_a_manifest_means_its_folder_and_a_linked_folder_its_target(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(artifact)
    for path in (artifact / "oscar.json", tmp_path / "link"):
        assert run(["verify", str(path)]) == 0
        assert capsys.readouterr().out.startswith(f"{artifact}  OK")


def test_files_that_are_links_come_with_the_command_that_copies_them(
    capsys: pytest.CaptureFixture[str], artifact: Path, tmp_path: Path
) -> None:
    """As in the cache of a hub's client; one link among files, and a folder of links alone."""
    for number, names in enumerate(([K_NAME], [file.name for file in artifact.iterdir()])):
        linked = tmp_path / f"linked {number}"
        shutil.copytree(artifact, linked)
        for name in names:
            (linked / name).unlink()
            (linked / name).symlink_to(artifact / name)
        step = f"cp -rL '{linked}' '{linked}-copy'"
        for command in ("publish", "eval", "serve"):
            line = refused(capsys, 4, command, linked)
            assert "symbolic link" in line and line.endswith(f"{step}\n")
        assert run(["verify", str(linked)]) == 4
        assert step in capsys.readouterr().err
        subprocess.run(shlex.split(step), check=True)
        assert run(["verify", f"{linked}-copy"]) == 0
        capsys.readouterr()


def test_a_list_for_an_unknown_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--for", "qwen3-7b"]) == 0
    done = capsys.readouterr()
    assert done.out == "" and "qwen3-7b" in done.err and "Qwen3-8B" in done.err


def test_list_survives_a_manifest_that_is_none(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    (hub / TINY / TAG / "oscar.json").write_text("{")
    assert run(["list", "--hub", f"file:{hub}"]) == 0
    assert TAG in capsys.readouterr().out


def test_a_rotten_entry_of_the_store(
    capsys: pytest.CaptureFixture[str], hub: Path, tmp_path: Path
) -> None:
    """`verify` fails with both digests and the next command, `info` and `list` still work, `pull`
    repairs."""
    pull = ["pull", TINY, "--hub", f"file:{hub}"]
    assert run(pull) == 0
    entry = next(Path(os.environ["OSCAR_ZOO_CACHE"]).rglob(f"artifacts/*/*/{K_NAME}"))
    entry.chmod(0o600)
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 1
    entry.write_bytes(data)
    capsys.readouterr()
    assert run(["verify", TINY, "--json"]) == 4
    result = parsed(capsys.readouterr().out)["results"][0]
    assert (
        result["outcome"] == "digest_mismatch"
        and len(result["want"]) == 64
        and result["got"] != result["want"]
    )
    assert run(["verify", TINY]) == 4
    assert f"oscar-zoo pull {TINY}:{TAG}" in capsys.readouterr().err
    for arguments in (["info", TINY], ["list", "--installed"]):
        assert run(arguments) == 0
        assert TAG in capsys.readouterr().out
    entry.unlink()
    assert "missing" in refused(capsys, 4, "eval", TINY, "--model", "Qwen3-8B")
    assert run(pull) == 0 and run(["verify", TINY]) == 0


@pytest.mark.parametrize("variable", ["OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"])
def test_what_asked_for_offline_mode_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # which the option replaces
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    assert "without --offline" in refused(capsys, 5, "pull", "Qwen3-8B", "--offline")
    for name in ("OSCAR_ZOO_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1" if name == variable else "")
    told = refused(capsys, 5, "pull", "Qwen3-8B")
    assert f"nset {variable}" in told and "--offline" not in told


def test_a_copy_that_is_here_while_no_hub_answers(
    capsys: pytest.CaptureFixture[str], hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hint is a command that runs."""
    assert run(["pull", TINY, "--hub", f"file:{hub}", "--no-lock"]) == 0
    capsys.readouterr()
    for name in ("HF_HUB_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:  # bound, never listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        line = refused(capsys, 5, "pull", TINY, "--hub", "hf:org/zoo")
    command = line.rstrip().rpartition("to use it: oscar-zoo ")[2].partition(";")[0]
    assert command == f"pull {TINY} --offline"
    assert run(command.split()) == 0 and "Already here and intact" in capsys.readouterr().out
