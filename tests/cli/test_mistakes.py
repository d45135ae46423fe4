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
from cli_output import parsed
from refusals import TINY, refused
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


def test_an_empty_argument_is_never_the_current_folder(
    capsys: pytest.CaptureFixture[str], artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(artifact)
    for arguments in (
        ["verify", ""],
        ["publish", ""],
        ["compute", "model", "--output-dir="],
        ["list", "--hub", ""],
    ):
        assert "empty" in refused(capsys, 2, *arguments)


def test_an_option_with_a_slip_names_the_nearest_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        refused(capsys, 2, "serve", "Qwen3-8B", "--prnt")
        .strip()
        .endswith("No such option '--prnt'. Did you mean --print? Try: oscar-zoo serve --help")
    )


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["serve", "Qwen3-8B", "--bits", "2"], None),
        (["serve", "Qwen3-8B", "--pront"], "--print"),
        (["serve", "Qwen3-8B", "--prot"], "--port"),
        (["compute", "Qwen3-8B", "--calib-tokns", "4"], "--calib-tokens"),
        (["compute", "Qwen3-8B", "--tokens", "4"], "--calib-tokens"),
        (["compute", "Qwen3-8B", "--output", "x"], "--output-dir"),
    ],
)
def test_only_an_option_that_is_close_is_suggested(
    capsys: pytest.CaptureFixture[str], typed: list[str], meant: str | None
) -> None:
    said = refused(capsys, 2, *typed)
    assert f"No such option '{typed[2]}'." in said
    assert (f"Did you mean {meant}?" if meant else "Try: oscar-zoo") in said
    assert meant is not None or "Did you mean" not in said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["compute", "M", "--calib-tokens", "abc"], "'abc' is not a whole number in the range x>="),
        (["chat", "--max-tokens", "1.5"], "'1.5' is not a whole number in the range x>=1."),
        (["chat", "--max-tokens", "0"], "0 is not in the range x>=1."),
    ],
)
def test_a_number_that_is_none_is_told_the_range(
    capsys: pytest.CaptureFixture[str], typed: list[str], said: str
) -> None:
    shown = refused(capsys, 2, *typed)
    assert f"Invalid value for '{typed[-2]}': {said}" in shown and "valid integer" not in shown


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--json", "list"], "put --json behind the command: oscar-zoo list --json"),
        (["--json", "cache", "list"], "oscar-zoo cache list --json"),
        (["cache", "--json", "list"], "oscar-zoo cache list --json"),
        (["--json", "ls"], "oscar-zoo list --json"),
        (["-q", "rm", "x"], "Put -q behind the command: oscar-zoo cache rm -q"),
        (["-q", "verify", "x"], "Put -q behind the command: oscar-zoo verify -q"),
        (["--hub=hf:a/b", "list"], "Put --hub behind the command: oscar-zoo list --hub"),
        (["--nothing", "list"], None),
        (["--versoin"], None),
    ],
)
def test_an_option_in_front_of_its_command(
    capsys: pytest.CaptureFixture[str], typed: list[str], meant: str | None
) -> None:
    assert run(typed) == 2
    out, err = capsys.readouterr()
    said = parsed(out)["error"]["hint"] if "--json" in typed else err
    assert meant in said if meant else "behind" not in said


@pytest.mark.parametrize("command", ["pull", "info", "verify", "serve"])
@pytest.mark.parametrize("hub", ["hf:my-org/zoo", "ms:my-org/zoo@main", "file:/data/zoo"])
def test_a_hub_where_a_name_belongs(
    capsys: pytest.CaptureFixture[str], command: str, hub: str
) -> None:
    line = refused(capsys, 2, command, hub)
    assert f"{hub} is a hub" in line and f"oscar-zoo list --hub {hub}" in line


def test_a_cause_and_a_next_step_are_two_sentences(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert f"{tmp_path}/nowhere. Check" in refused(capsys, 3, "verify", f"{tmp_path}/nowhere")


def test_paths_that_are_neither_file_nor_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "broken").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    for command in ("verify", "eval", "serve"):
        assert "neither a file nor a folder" in refused(capsys, 2, command, tmp_path / "pipe.pt")
        for name in ("broken", "loop"):
            assert "leads nowhere" in refused(capsys, 3, command, tmp_path / name)


@pytest.mark.parametrize("command", ["verify", "eval", "serve"])
def test_a_folder_without_rotations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    (tmp_path / "folder.pt").mkdir()
    assert "no rotation files" in refused(capsys, 3, command, tmp_path / "folder.pt")


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_one_file_where_a_pair_is_needed(
    capsys: pytest.CaptureFixture[str], artifact: Path, command: str
) -> None:
    assert "needs K and V" in refused(capsys, 2, command, artifact / K_NAME)


def test_a_file_where_a_folder_is_meant(capsys: pytest.CaptureFixture[str], artifact: Path) -> None:
    assert "is a file" in refused(capsys, 2, "publish", artifact / K_NAME)
    assert "is a file" in refused(capsys, 2, "compute", artifact / K_NAME)


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


@pytest.mark.parametrize("command", ["pull", "cache rm"])
def test_a_path_where_a_name_is_needed(
    capsys: pytest.CaptureFixture[str],
    artifact: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    """Where nothing is, that is said first, whatever the path begins with."""
    monkeypatch.chdir(artifact.parent)
    monkeypatch.setenv("HOME", str(artifact.parent))
    for begin in ("./", f"{artifact.parent}/", "~/"):
        line = refused(capsys, 2, *command.split(), f"{begin}{artifact.name}")
        assert "is a path" in line and "oscar-zoo verify" in line
        line = refused(capsys, 3, *command.split(), f"{begin}nothing")
        assert "no such file or folder" in line and "oscar-zoo verify" not in line
    assert "nothing/" in refused(capsys, 3, *command.split(), "nothing/")


def test_a_folder_given_as_a_hub_names_the_right_form(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    assert f"file:{hub}" in refused(capsys, 2, "list", "--hub", hub)


def test_a_very_long_name(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("a" * 5000, "/" + "a" * 5000):
        assert len(refused(capsys, 2 if text[0] == "a" else 8, "verify", text)) < 500


def test_an_unknown_tag_lists_the_tags_there_are(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    for command in ("info", "pull"):
        assert TAG in refused(capsys, 3, command, f"{TINY}:seq1", "--hub", f"file:{hub}")
    assert "seq20000_prompt83_group128" in refused(capsys, 3, "info", "Qwen3-8B:seq1")


def test_a_list_for_an_unknown_model_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--for", "qwen3-7b"]) == 0
    done = capsys.readouterr()
    assert done.out == "" and "qwen3-7b" in done.err and "Qwen3-8B" in done.err


def test_list_shows_format_and_bits_of_what_is_here(
    capsys: pytest.CaptureFixture[str], hub: Path
) -> None:
    for arguments in (["--hub", f"file:{hub}"], []):
        assert run(["list", "--json", *arguments]) == 0
        row = next(r for r in parsed(capsys.readouterr().out)["artifacts"] if r["tag"] == TAG)
        assert (row["format_version"], row["bits_per_element"], row["method"]) == (1, 2.5, "oscar")
        assert run(["pull", TINY, "--hub", f"file:{hub}"]) == 0
        capsys.readouterr()


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
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OSCAR_ZOO_HUB", "hf:nobody/asks")
    assert "without --offline" in refused(capsys, 5, "pull", "Qwen3-8B", "--offline")
    monkeypatch.setenv(variable, "1")
    told = refused(capsys, 5, "pull", "Qwen3-8B")
    assert f"nset {variable}" in told and "--offline" not in told


def test_a_wrong_name_in_the_store_brings_close_ones(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, 3, "verify", "qwen3-7b")
    assert "Did you mean " in told and "Qwen3-8B" in told
    assert "Fetch it: oscar-zoo pull Qwen3-8B" in refused(capsys, 3, "verify", "Qwen3-8B")


def test_a_folder_in_an_error_begins_with_a_dot(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it `dmg` would be read as a name by the command that the line proposes."""
    monkeypatch.chdir(tmp_path)
    files = artifact_files()
    write_folder(Path("rotation"), files)
    write_folder(Path("bare"), {name: data for name, data in files.items() if name != "oscar.json"})
    write_folder(Path("my dmg"), files | {K_NAME: files[K_NAME][:-200]})
    for command in (
        ["publish", "./my dmg", "--hub", "file:./hub"],
        ["serve", "./my dmg", "--print"],
    ):
        line = refused(capsys, 4, *command)
        assert (
            "error: ./my dmg failed verification" in line and "oscar-zoo verify './my dmg'" in line
        )
    Path("Qwen3-8B").mkdir()
    for command in (["serve", "./Qwen3-8B", "--print"], ["verify", "./Qwen3-8B"]):
        assert "no rotation files in ./Qwen3-8B" in refused(capsys, 3, *command)
    assert "no such artifact folder: ./nope" in refused(capsys, 3, "publish", "nope")
    assert "error: ./bare has no oscar.json" in refused(
        capsys, 3, "publish", "bare", "--hub", "file:./hub"
    )
    compute = ["compute", MODEL, "--calib-tokens", "64", "--output-dir"]
    assert "error: ./rotation already holds an artifact" in refused(capsys, 7, *compute, "rotation")
    assert "error: ./Qwen3-8B/x holds other files" in refused(
        capsys, 7, *compute, _with_a_file("Qwen3-8B/x")
    )


def _with_a_file(folder: str) -> str:
    write_folder(Path(folder), {"a.txt": b""})
    return folder


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
