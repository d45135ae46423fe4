"""The commands that write to hubs, in process: what they print, their JSON, their exit codes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from cli_output import Cli
from hub_uses import HARD, put_version
from measured_artifacts import measured_files
from tiny_artifacts import FILE_NAME, manifest, payload, write_folder

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.index import Index

NAME = HARD.reference


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "out", measured_files())


@pytest.fixture
def hub(tmp_path: Path) -> str:
    (tmp_path / "hub").mkdir()
    return f"file:{tmp_path}/hub"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


def index_in(folder: Path) -> Index:
    return Index.from_bytes((folder / "index.json").read_bytes())


def test_publish_tells_what_it_did_and_the_next_step(cli: Cli, folder: Path, hub: str) -> None:
    assert cli(0, "publish", folder, "--hub", hub).startswith(
        f"Published: {NAME} on {hub}  sha256:"
    )
    assert cli.err == f"Next: oscar-zoo pull {NAME} --hub {hub}\n"
    assert cli(0, "publish", folder, "--hub", hub, "-q").startswith("Already published: ")
    assert cli.err == ""


def test_publish_as_json_has_one_row_per_hub(
    cli: Cli, folder: Path, hub: str, tmp_path: Path
) -> None:
    second = f"file:{tmp_path}/second"
    (tmp_path / "second").mkdir()
    value = cli.json(0, "publish", folder, "--hub", hub, "--hub", second, "--alias", "hard")
    assert (value["schema"], value["errors"]) == ("oscar-zoo.publish/1", [])
    assert [row["hub"] for row in value["hubs"]] == [hub, second]
    assert {row["id"] for row in value["hubs"]} == {str(HARD)}
    assert [e.aliases for e in index_in(tmp_path / "second").artifacts] == [("hard",)]


def test_a_hub_that_is_not_there_is_made_only_when_asked_for(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    typo = f"file:{tmp_path}/tpyo/zoo"
    for words in (
        ["publish", folder, "--hub", typo],
        ["publish", folder, "--hub", typo, "--dry-run"],
    ):
        cli(3, *words)
        assert f"no such folder for a hub: {tmp_path}/tpyo/zoo" in cli.err and "--create" in cli.err
        assert not (tmp_path / "tpyo").exists()
    cli(0, "publish", folder, "--hub", typo, "--create", "--dry-run")
    assert not (tmp_path / "tpyo").exists()
    cli(0, "publish", folder, "--hub", typo, "--create")
    copy = f"file:{tmp_path}/copy"
    cli(3, "mirror", typo, copy, "--all")
    assert "--create" in cli.err and not (tmp_path / "copy").exists()
    cli(0, "mirror", typo, copy, "--all", "--create")
    cli(3, "yank", NAME, "--hub", f"file:{tmp_path}/nowhere", "--reason", "x")
    assert not (tmp_path / "nowhere").exists()


def test_the_first_hub_decides_and_a_later_one_is_reported(
    cli: Cli, folder: Path, hub: str, tmp_path: Path
) -> None:
    taken = f"file:{tmp_path}/taken"
    put_version(LocalHub(tmp_path / "taken", must_exist=False), HARD, measured_files(seed=1))
    assert (
        cli.json(7, "publish", folder, "--hub", taken, "--hub", hub)["error"]["code"]
        == "conflict.version"
    )
    assert not list((tmp_path / "hub").iterdir())
    value = cli.json(7, "publish", folder, "--hub", hub, "--hub", taken)
    assert [row["hub"] for row in value["hubs"]] == [hub]
    assert [error["code"] for error in value["errors"]] == ["conflict.version"]
    cli(7, "publish", folder, "--hub", hub, "--hub", taken)
    assert "Already published" in cli.out and "error: " in cli.err


def test_without_a_network_the_next_step_is_to_publish_again(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # of its import
        error = cli.json(5, "publish", folder, "--hub", "hf:org/zoo")["error"]
    assert "cannot be reached" in error["message"]
    assert error["hint"] == "check the connection, then run the same command again, which is safe"


def test_a_dry_run_lists_what_would_be_sent(
    cli: Cli, folder: Path, hub: str, tmp_path: Path
) -> None:
    (row,) = cli.json(0, "publish", folder, "--hub", hub, "--dry-run")["hubs"]
    text = cli(0, "publish", folder, "--hub", hub, "--dry-run")
    assert "commit" not in text  # a folder has none
    assert not list((tmp_path / "hub").iterdir())
    cli(0, "publish", folder, "--hub", hub)
    root = tmp_path / "hub"
    sent = {
        str(p.relative_to(root)): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and not p.name.startswith((".lock", ".after."))
    }
    plan = row["plan"]
    assert {f["path"]: (f["size"], f["sha256"]) for f in plan["files"]} == {
        name: (len(data), sha256_hex(data)) for name, data in sent.items()
    }
    assert (plan["serial"], plan["tag"], plan["message"]) == (
        1,
        None,
        f"Publish {HARD} ({row['digest'][:19]})",
    )
    assert all(file["path"] in text and file["sha256"] in text for file in plan["files"])
    assert cli(0, "publish", folder, "--hub", hub, "--dry-run").startswith("Already published: ")


def test_warnings_stop_a_publish_until_they_are_allowed(cli: Cli, hub: str, tmp_path: Path) -> None:
    files = payload(proven=False)
    folder = write_folder(tmp_path / "out", files | {FILE_NAME: manifest(files).to_bytes()})
    cli(2, "publish", folder, "--hub", hub)
    assert "pair.unproven" in cli.err and "--allow-warnings" in cli.err
    cli(0, "publish", folder, "--hub", hub, "--allow-warnings", "--unmeasured")
    assert "nothing in the files says" in cli.err


@pytest.mark.parametrize("hub", ["hf:org/zoo", "ms:org/zoo"])
def test_offline_mode_publishes_to_folders_only(
    cli: Cli, folder: Path, hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCAR_ZOO_OFFLINE", "1")
    for words in (
        ["publish", folder, "--hub", hub],
        ["yank", NAME, "--reason", "x", "--hub", hub],
        ["mirror", hub, f"file:{tmp_path}/hub", "--all"],
    ):
        assert cli.json(5, *words)["error"]["code"] == "network.offline"
    assert not (tmp_path / "hub").exists()


def test_yank_unyank_and_deprecate(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    other = write_folder(
        tmp_path / "other", measured_files(artifact="tiny-qwen3-hard/other", seed=1)
    )
    cli(0, "publish", folder, "--hub", hub)
    cli(0, "publish", other, "--hub", hub)
    assert cli(0, "yank", NAME, "--reason", "wrong data", "--hub", hub).startswith(
        f"Now yanked: wrong data  {NAME}"
    )
    assert cli(0, "yank", NAME, "--reason", "wrong data", "--hub", hub).startswith("Already yanked")
    cli(3, "pull", NAME, "--hub", hub)
    assert "wrong data" in cli.err
    assert cli(0, "unyank", NAME, "--hub", hub).startswith(f"Now active  {NAME}")
    cli(0, "pull", NAME, "--hub", hub)
    words = [
        "deprecate",
        NAME,
        "--reason",
        "old",
        "--replaced-by",
        "tiny-qwen3-hard:other",
        "--hub",
        hub,
    ]
    (row,) = cli.json(0, *words)["hubs"]
    assert (row["status"]["state"], row["status"]["replaced_by"]) == (
        "deprecated",
        "tiny-qwen3-hard:other",
    )
    assert (row["changed"], row["serial"]) == (True, index_in(tmp_path / "hub").serial)


@pytest.mark.parametrize("command", ["yank", "deprecate"])
def test_a_reason_is_required(cli: Cli, folder: Path, hub: str, command: str) -> None:
    cli(0, "publish", folder, "--hub", hub)
    cli(2, command, NAME, "--hub", hub)
    assert "--reason" in cli.err
    assert cli.json(2, command, NAME, "--reason", "  ", "--hub", hub)["error"]["code"] == "usage"
    assert (
        cli.json(3, command, "nothing:tag", "--reason", "x", "--hub", hub)["error"]["code"]
        == "not_found.artifact"
    )
    assert (
        cli.json(2, command, "tiny-qwen3-hard", "--reason", "x", "--hub", hub)["error"]["code"]
        == "usage"
    )


def test_mirror_copies_and_says_so(cli: Cli, folder: Path, hub: str, tmp_path: Path) -> None:
    target = f"file:{tmp_path}/target"
    cli(0, "publish", folder, "--hub", hub)
    assert cli(0, "mirror", hub, target, "--all", "--dry-run", "--create").startswith(
        f"Would copy: {NAME}"
    )
    assert not (tmp_path / "target").exists()
    assert cli(0, "mirror", hub, target, "tiny-qwen3-hard", "--create").startswith(
        f"Copied: {NAME}"
    )
    assert "the same digests" in cli.err
    (row,) = cli.json(0, "mirror", hub, target, "--all")["artifacts"]
    assert (row["id"], row["outcome"]) == (str(HARD), "already_there")
    for words in ([], ["tiny-qwen3-hard", "--all"]):
        cli(2, "mirror", hub, target, *words)
        assert "--all" in cli.err
    assert cli.json(2, "mirror", hub, hub, "--all")["error"]["code"] == "usage"
    assert cli.json(3, "mirror", hub, target, "missing")["error"]["code"] == "not_found.artifact"
