"""Whole commands against Hugging Face and ModelScope over loopback HTTP, with both versions of the
real clients."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer
from hub_uses import VERSIONS
from measured_artifacts import key_file, measured_files
from quick_cli import QuickCli
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.manifest import REPORT_NAME, Manifest
from oscar_zoo.registry.publish import REPORT_HEAD

TAG = "seq512_prompt2_group64"
ONE = f"tiny-qwen3-hard/{TAG}"
TOKENS = {"HF_TOKEN": "hf_test", "MODELSCOPE_API_TOKEN": "ms-test"}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def cli(server: HubServer, tmp_path: Path) -> QuickCli:
    (tmp_path / "pyproject.toml").touch()  # a project: it gets a lock
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path)


@pytest.fixture(params=VERSIONS)
def either(request: pytest.FixtureRequest, server: HubServer, tmp_path: Path) -> QuickCli:
    """The command line with either version of huggingface_hub."""
    (tmp_path / "pyproject.toml").touch()
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path, request.param)


def test_publish_list_pull_verify_mirror_and_yank(
    server: HubServer, either: QuickCli, tmp_path: Path
) -> None:
    folder = str(write_folder(tmp_path / "artifact", measured_files()))
    hub = ("--hub", "hf:me/zoo")
    assert (
        either("publish", folder, *hub, "--allow-warnings", **TOKENS).code == 3
    )  # no such repository yet
    published = either("publish", folder, *hub, "--create", "--allow-warnings", "--json", **TOKENS)
    assert published.code == 0, published.err
    repo = server.repository("me/zoo")
    commits = len(repo.commits)
    assert {path for path in repo.files() if path.startswith(ONE)} == {
        f"{ONE}/{n}" for n in artifact_files()
    }
    assert repo.tags == {f"oz-tiny-qwen3-hard-{TAG}": repo.head()}
    again = either("publish", folder, *hub, "--allow-warnings", "--json", **TOKENS)
    assert (again.code, len(repo.commits)) == (0, commits)
    other = str(write_folder(tmp_path / "other", measured_files(seed=1)))
    assert either("publish", other, *hub, "--allow-warnings", **TOKENS).code == 7

    listed = either("list", *hub, "--json").json["artifacts"]
    digest = next(row["digest"] for row in listed if row["id"] == ONE)
    pulled = either("pull", "tiny-qwen3-hard", *hub, "--json")
    assert pulled.code == 0, pulled.err
    assert pulled.json["artifacts"][0]["digest"] == digest
    assert pulled.json["artifacts"][0]["revision"] == repo.head()
    assert either("verify", "tiny-qwen3-hard", "--json").code == 0

    mirrored = either(
        "mirror", "hf:me/zoo", "ms:me/mirror", "--all", "--create", "--json", **TOKENS
    )
    assert mirrored.code == 0, mirrored.out + mirrored.err
    assert set(server.repository("me/mirror", "ms").files()) >= {
        f"{ONE}/{n}" for n in artifact_files()
    }
    moved = either("pull", "tiny-qwen3-hard", "--hub", "ms:me/mirror", "--no-lock", "--json")
    assert moved.json["artifacts"][0]["digest"] == digest

    assert (
        either("yank", f"tiny-qwen3-hard:{TAG}", *hub, "--reason", "a bad fit", **TOKENS).code == 0
    )
    by_name = either("pull", "tiny-qwen3-hard", *hub, "--no-lock")
    assert (by_name.code, "a bad fit" in by_name.err) == (3, True)
    by_digest = either(
        "pull", f"tiny-qwen3-hard@{digest}", *hub, "--no-lock", OSCAR_ZOO_CACHE=str(tmp_path / "c2")
    )
    assert (by_digest.code, "a bad fit" in by_digest.err) == (0, True)
    locked = either("pull", "tiny-qwen3-hard", *hub)  # the lock of this folder names the digest
    assert (locked.code, "a bad fit" in locked.err) == (0, True)
    assert either("unyank", f"tiny-qwen3-hard:{TAG}", *hub, **TOKENS).code == 0
    assert either("pull", "tiny-qwen3-hard", *hub, "--no-lock").code == 0


def test_an_upstream_zoo_without_manifests_is_pinned_on_first_use(
    server: HubServer, either: QuickCli, tmp_path: Path
) -> None:
    repo = server.repository(
        "Zhongzhu/OSCAR-RotationZoo", files={f"{ONE}/{n}": d for n, d in payload().items()}
    )
    first = either("pull", "tiny-qwen3-hard", "--output", "rotations")
    assert first.code == 0, first.err
    assert "first use" in first.err
    assert {p.name for p in (tmp_path / "rotations" / ONE).iterdir()} == {K_NAME, V_NAME}
    lock = json.loads((tmp_path / "oscar-zoo.lock").read_bytes())["artifacts"][0]
    assert (lock["hub"], lock["revision"]) == ("hf:Zhongzhu/OSCAR-RotationZoo", repo.head())
    server.clear()
    assert either("pull", "tiny-qwen3-hard").code == 0
    assert server.requests == []
    repo.commit({f"{ONE}/{n}": d for n, d in payload(seed=1).items()})
    changed = either("pull", "tiny-qwen3-hard", "--no-lock", "--json")
    assert changed.code == 4
    assert lock["digest"] in changed.json["error"]["message"]
    accepted = either("pull", "tiny-qwen3-hard", "--accept-new-digest", "--json").json["artifacts"][
        0
    ]
    assert accepted["digest"] in changed.json["error"]["message"]
    assert (
        json.loads((tmp_path / "oscar-zoo.lock").read_bytes())["artifacts"][0]["digest"]
        == accepted["digest"]
    )


def test_a_lock_pulls_from_its_commit_and_says_when_that_is_gone(
    server: HubServer, cli: QuickCli, tmp_path: Path
) -> None:
    repo = server.repository("org/zoo", files={f"{ONE}/{n}": d for n, d in payload().items()})
    assert cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo").code == 0
    lock = (tmp_path / "oscar-zoo.lock").read_bytes()
    repo.commit({f"{ONE}/{n}": d for n, d in payload(seed=1).items()})
    fresh = {"OSCAR_ZOO_CACHE": str(tmp_path / "fresh")}
    assert cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo", "--locked", **fresh).code == 0
    repo.rewrite_history()
    gone = cli(
        "pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo", OSCAR_ZOO_CACHE=str(tmp_path / "fresher")
    )
    assert gone.code == 4
    assert "no longer has commit" in gone.err
    assert (tmp_path / "oscar-zoo.lock").read_bytes() == lock
    # the listing of the commit is still here
    assert cli("cache", "rm", "tiny-qwen3-hard").code == 0
    gone = cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo")
    assert gone.code == 4 and "no longer has commit" in gone.err


def patient(cli: QuickCli, *, seconds: float) -> None:
    """Configure how long a hub may be silent."""
    (cli.folder / "config").mkdir()
    (cli.folder / "config" / "config.toml").write_text(f"[network]\nread = {seconds}\n")


def test_a_silent_first_hub_is_passed_over(server: HubServer, cli: QuickCli) -> None:
    server.repository(
        "togethercomputer/OSCAR-RotationZoo",
        "ms",
        files={f"{ONE}/{n}": d for n, d in payload().items()},
    )
    patient(cli, seconds=2)
    done = cli("pull", "tiny-qwen3-hard", "--json", HF_ENDPOINT=server.hang_accept())
    assert done.code == 0, done.err
    row = done.json["artifacts"][0]
    assert row["hub"] == "ms:togethercomputer/OSCAR-RotationZoo"
    assert "Hugging Face" in row["notes"][0]


@pytest.mark.parametrize("how", ["closed port", "black hole"])
def test_without_a_network_the_hubs_are_named(server: HubServer, cli: QuickCli, how: str) -> None:
    address = server.closed_port() if how == "closed port" else server.hang_accept()
    patient(cli, seconds=2)
    done = cli("pull", "Qwen3-8B", HF_ENDPOINT=address, MODELSCOPE_ENDPOINT=address)
    assert done.code == 5
    assert "Hugging Face Zhongzhu/OSCAR-RotationZoo" in done.err
    assert "ModelScope togethercomputer/OSCAR-RotationZoo" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("command", ["pull", "info", "compare Qwen3-8B", "card"])
def test_without_a_network_an_unknown_name_is_said_to_be_unknown(
    server: HubServer, cli: QuickCli, command: str
) -> None:
    """The hubs may have it, so it is no exit code 3."""
    address = server.closed_port()
    silent = {"HF_ENDPOINT": address, "MODELSCOPE_ENDPOINT": address}
    done = cli(*command.split(), "Qwen3-9B", "--json", **silent)
    error = done.json["error"]
    assert (done.code, error["code"]) == (5, "network.unreachable")
    assert error["message"].startswith("Qwen3-9B is unknown on this machine, and not every hub")
    assert "Hugging Face Zhongzhu/OSCAR-RotationZoo" in error["message"]
    assert "did you mean" in error["hint"] and "Qwen3-8B" in error["hint"]
    assert "check the network" in error["hint"].casefold()


def test_an_interrupted_pull_leaves_nothing_that_counts(
    server: HubServer, cli: QuickCli, tmp_path: Path
) -> None:
    files = {f"{ONE}/{n}": d for n, d in artifact_files().items()}
    server.repository("org/zoo", files=files)
    slow = server.fault("slow", f"*{V_NAME}", bytes_per_second=2_000)
    child = cli.start("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo")
    while not slow.hits:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130
    assert err.strip().count("\n") == 0  # after the line that the terminal has ended for ^C
    assert not list((tmp_path / "cache").glob("artifacts/*/*/.complete"))
    assert not (tmp_path / "oscar-zoo.lock").exists()
    server.clear_faults()
    assert cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo").code == 0
    assert cli("verify", "tiny-qwen3-hard").code == 0


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scheme", ["hf", "ms", "file"])
def test_the_report_goes_up_beside_the_manifest_and_a_pull_leaves_it_out(
    server: HubServer, cli: QuickCli, tmp_path: Path, scheme: str, signed: bool
) -> None:
    files = measured_files()
    folder = str(write_folder(tmp_path / "artifact", files))
    digest = Manifest.from_bytes(files["oscar.json"]).digest
    page = f"{REPORT_HEAD.decode()}<title>x</title></head><body>{digest}</body></html>".encode()
    (tmp_path / "artifact.report.html").write_bytes(page)
    keys = {**TOKENS, "OSCAR_ZOO_SIGN_KEY": str(key_file(tmp_path / "zoo.pem"))}
    keys, more = (keys, ["--sign"]) if signed else (TOKENS, [])
    hub = f"file:{tmp_path / 'hub'}" if scheme == "file" else f"{scheme}:me/zoo"
    words = ("publish", folder, "--hub", hub, "--create", "--json", *more)
    (planned,) = cli(*words, "--dry-run", **keys).json["hubs"]
    path = f"{ONE}/{REPORT_NAME}"
    assert {f["path"]: f["sha256"] for f in planned["plan"]["files"]}[path] == sha256_hex(page)
    for already in (False, True):
        done = cli(*words, **keys)
        assert done.code == 0, done.out
        assert done.json["hubs"][0]["already_published"] is already
    if scheme == "file":
        assert (tmp_path / "hub" / path).read_bytes() == page
        assert cli("verify", str((tmp_path / "hub" / path).parent)).code == 0
    else:
        assert server.repository("me/zoo", scheme).files()[path] == page
    pulled = cli("pull", ONE, "--hub", hub, "--no-lock", "--output", "copy", "--json")
    assert pulled.code == 0, pulled.out
    assert (tmp_path / "copy" / ONE / K_NAME).exists()
    assert not list(tmp_path.glob("c*/**/*.html"))
    mirrored = cli("mirror", hub, f"file:{tmp_path / 'mirror'}", "--all", "--create", **keys)
    assert mirrored.code == 0, mirrored.err
    assert not list((tmp_path / "mirror").rglob("*.html"))


@pytest.mark.parametrize("damage", ["<script>alert(1)</script>", "of other bytes"])
def test_a_page_that_is_no_report_of_the_artifact_stays_here(
    cli: QuickCli, tmp_path: Path, damage: str
) -> None:
    files = measured_files()
    folder = str(write_folder(tmp_path / "artifact", files))
    digest = Manifest.from_bytes(files["oscar.json"]).digest or ""
    page = (
        f"{damage}{REPORT_HEAD.decode()}{digest}"
        if "script" in damage
        else f"{REPORT_HEAD.decode()}{digest[::-1]}"
    )
    (tmp_path / "artifact.report.html").write_text(page)
    done = cli("publish", folder, "--hub", f"file:{tmp_path / 'hub'}", "--create")
    assert done.code == 0 and "artifact.report.html" in done.err
    assert not list((tmp_path / "hub").rglob("*.html"))
