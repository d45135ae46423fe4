"""When `pull` writes `oscar-zoo.lock`, where, and what it says about it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from cli_output import Cli
from hub_uses import HARD, hub_with
from tiny_artifacts import artifact_files


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def pull(tmp_path: Path) -> tuple[str, ...]:
    hub = hub_with(tmp_path / "hub", artifact_files())
    return ("pull", HARD.model, "--hub", f"file:{hub.root}")


def locks(tmp_path: Path) -> list[str]:
    return [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("oscar-zoo.lock")]


def test_outside_of_a_project_no_lock_is_written_unless_asked_for(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cli(0, *pull)
    assert locks(tmp_path) == [] and "oscar-zoo.lock" not in cli.err
    cli(2, *pull, "--locked")
    assert "oscar-zoo.lock" in cli.err and "--lock" in cli.err
    cli(0, *pull, "--lock")
    assert locks(tmp_path) == ["work/oscar-zoo.lock"]
    note = "note: pinned in ./oscar-zoo.lock; commit it, or pull with --no-lock to do without"
    assert note in cli.err.splitlines()
    cli(0, *pull)  # it is there now: it is used, and no longer mentioned
    assert "oscar-zoo.lock" not in cli.err
    cli(0, *pull, "--locked")


@pytest.mark.parametrize("marker", [".git", ".hg", "pyproject.toml"])
def test_a_project_gets_a_lock_in_its_root_and_is_told_once(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marker: str
) -> None:
    inner = tmp_path / "project" / "src"
    inner.mkdir(parents=True)
    (tmp_path / "project" / marker).touch()
    monkeypatch.chdir(inner)
    cli(0, *pull, "--no-lock")
    assert locks(tmp_path) == []
    assert cli.json(0, *pull)["new_lock"] == str(tmp_path / "project" / "oscar-zoo.lock")
    assert locks(tmp_path) == ["project/oscar-zoo.lock"]
    assert [
        pin["id"] for pin in json.loads((tmp_path / locks(tmp_path)[0]).read_bytes())["artifacts"]
    ] == [str(HARD)]
    assert cli.json(0, *pull)["new_lock"] is None
    (tmp_path / "project" / "oscar-zoo.lock").unlink()
    cli(0, *pull)
    assert cli.err.count("pinned in ../oscar-zoo.lock") == 1
    cli(0, *pull, "-q")
    assert cli.err == ""


def test_a_home_folder_stays_clean(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / ".git").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    cli(0, *pull)
    assert locks(tmp_path) == []


def test_what_is_not_locked_is_proposed_with_the_options_that_were_typed(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cli(2, *pull, "--locked", "--output", "./here", "--dry-run")
    again = shlex.join(("oscar-zoo", *pull, "--output", "here"))
    said = f"Add it without --locked: {again}; outside of a project: {again} --lock\n"
    assert cli.err.endswith(said)
    cli(2, *pull, "--locked", "--lock")
    assert cli.err.endswith(f"Add it without --locked: {shlex.join(('oscar-zoo', *pull))} --lock\n")
    cli(0, *pull, "--lock")
    cli(0, *pull, "--locked", "--lock")


def test_a_locked_copy_says_that_the_hub_was_not_asked(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    assert "no hub was asked" not in cli(0, *pull)
    assert cli.json(0, *pull)["artifacts"][0]["pinned_by"] == str(
        tmp_path / "project" / "oscar-zoo.lock"
    )
    typo = (*pull[:-1], f"file:{tmp_path}/typo")
    told = "no hub was asked, because ./oscar-zoo.lock pins it\n"
    shown = cli(0, *typo)
    assert "Already here and intact: " in shown and told in shown
    assert told in cli(0, *typo, "--dry-run")
    assert "no hub was asked" not in cli(0, *pull, "--no-lock")
    assert cli.json(0, *pull, "--no-lock")["artifacts"][0]["pinned_by"] is None


def test_what_is_locked_and_gone_is_an_offline_error(
    cli: Cli, pull: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    cli(0, *pull)
    cli(0, "rm", HARD.model)
    (tmp_path / "empty").mkdir()
    offline = ("pull", HARD.model, "--hub", f"file:{tmp_path}/empty", "--offline")
    error = cli.json(5, *offline)["error"]
    assert error["code"] == "network.offline" and "oscar-zoo.lock" in error["message"]
