"""What users of hub clients reported in public: one test for every row of that list, against our
own commands."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_repositories import Kind
from hub_server import HubServer
from hub_uses import VERSIONS
from measured_artifacts import measured_files
from quick_cli import QuickCli
from tiny_artifacts import FILE_NAME, K_NAME, V_NAME, artifact_files, payload, write_folder

ONE = "tiny-qwen3-hard/seq512_prompt2_group64"
NAME = "tiny-qwen3-hard"
HF, MS = ("--hub", "hf:org/zoo"), ("--hub", "ms:org/zoo")


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        files = {f"{ONE}/{name}": data for name, data in artifact_files().items()}
        server.repository("org/zoo", files=files)
        server.repository("org/zoo", "ms", files=files)
        yield server


@pytest.fixture
def cli(server: HubServer, tmp_path: Path) -> QuickCli:
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path)


def installed(cli: QuickCli) -> list[Path]:
    return list((cli.folder / "cache").glob("artifacts/*/*/.complete"))


@pytest.mark.parametrize("version", VERSIONS)
def test_publishing_needs_no_xet_and_is_one_commit(
    server: HubServer, tmp_path: Path, version: int
) -> None:
    assert importlib.util.find_spec("hf_xet") is not None, (
        "the client's Xet library must be installed for this"
    )
    cli = QuickCli(server.environment(tmp_path / "hf"), tmp_path, version)
    repo = server.repository("org/zoo")
    before = len(repo.commits)
    artifact = f"{NAME}/another"
    folder = write_folder(tmp_path / "artifact", measured_files(artifact=artifact, seed=3))
    done = cli("publish", str(folder), *HF, HF_TOKEN="hf_test")
    assert done.code == 0, done.err
    assert len(repo.commits) == before + 1
    assert {
        f"{artifact}/{K_NAME}",
        f"{artifact}/{V_NAME}",
        f"{artifact}/{FILE_NAME}",
        "index.json",
    } <= set(repo.files())


@pytest.mark.parametrize(
    "header", ["X-Repo-Commit", "ETag", "Content-Length", "X-Linked-Etag", "X-Linked-Size"]
)
def test_no_header_that_a_proxy_may_drop_is_needed(
    server: HubServer, cli: QuickCli, header: str
) -> None:
    server.fault("drop_header", "*", name=header)
    done = cli("pull", NAME, *HF)
    assert done.code == 0, done.err


def test_a_page_of_a_proxy_is_named_as_such(server: HubServer, cli: QuickCli) -> None:
    server.fault("html", "*/api/models/*")
    done = cli("pull", NAME, *HF)
    assert done.code == 5
    assert "web page" in done.err or "HTML" in done.err


def test_a_token_stays_with_its_hub(server: HubServer, cli: QuickCli) -> None:
    server.lfs_redirect = "cdn"
    repo = server.repository("org/closed", private=True, token="hf_secret")
    repo.commit({f"{ONE}/{name}": data for name, data in payload().items()})
    done = cli("pull", NAME, "--hub", "hf:org/closed", HF_TOKEN="hf_secret")
    assert done.code == 0, done.err
    seen = {(record.host, record.credentials) for record in server.requests}
    assert seen == {("origin", True), ("cdn", False)}


@pytest.mark.parametrize(("hub", "kind"), [(HF, "hf"), (MS, "ms")], ids=["hf", "ms"])
def test_a_branch_that_moves_while_a_pull_runs_does_not_mix_versions(
    server: HubServer, cli: QuickCli, hub: tuple[str, str], kind: Kind
) -> None:
    repo = server.repository("org/zoo", kind)
    old, changed = repo.head(), {f"{ONE}/{name}": data for name, data in payload(seed=9).items()}
    server.fault("move", f"{ONE}/{K_NAME}", times=1, call=lambda: repo.commit(changed))
    done = cli("pull", NAME, *hub, "--json")
    assert done.code == 0, done.err
    assert done.json["artifacts"][0]["revision"] == old
    assert repo.head() != old
