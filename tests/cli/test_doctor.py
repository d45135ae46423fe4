"""`oscar-zoo doctor`: what it finds with real hubs over loopback HTTP, and that it tells no
secret."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_child import Finished
from hub_server import HubServer
from hub_uses import VERSIONS
from quick_cli import QuickCli
from tiny_artifacts import artifact_files, payload

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.registry.store import Store
from oscar_zoo.serving import doctor

BOTH = "hf:org/zoo ms:org/zoo"
CANARY = "hf_CANARY0123456789abcdefghijklmnop"
MS_CANARY = "ms-CANARY01-2345-6789-abcd-efghijklmnop"
CARDS = "".join(f"echo '{i}, GPU-{i}f, NVIDIA H200, 143771, 143000'\n" for i in range(2))
Driver = Callable[..., dict[str, dict[str, Any]]]
SECRETS = {"HF_TOKEN": CANARY, "MODELSCOPE_API_TOKEN": MS_CANARY}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as started:
        for kind in ("hf", "ms"):
            files = {f"model/tag/{name}": data for name, data in payload().items()}
            started.repository("org/zoo", kind, files=files)  # type: ignore[arg-type]
        yield started


@pytest.fixture
def cli(server: HubServer, tmp_path: Path) -> QuickCli:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("[network]\nanswer = 20\ntries = 1\n")
    return QuickCli(server.environment(tmp_path / "hf"), tmp_path)


def findings(done: Finished, topic: str) -> dict[str, dict[str, Any]]:
    """The findings of one topic by name."""
    return {row["name"]: row for row in done.json["findings"] if row["topic"] == topic}


@pytest.mark.parametrize("version", VERSIONS)
def test_hubs_that_answer_are_counted_and_timed(
    server: HubServer, cli: QuickCli, version: int
) -> None:
    cli = QuickCli(cli.environment, cli.folder, version)
    done = cli("doctor", "--json", OSCAR_ZOO_HUB=BOTH, **SECRETS)
    assert done.code == 0 and done.err == "" and done.json["usable"] is True
    hubs = findings(done, "hub")
    assert [(name, row["state"], row["artifacts"]) for name, row in hubs.items()] == [
        ("hf:org/zoo", "ok", 1),
        ("ms:org/zoo", "ok", 1),
    ]
    assert all(type(row["milliseconds"]) is int for row in hubs.values())
    tokens = findings(done, "token")
    assert (tokens["Hugging Face"]["source"], tokens["Hugging Face"]["user"]) == (
        "HF_TOKEN",
        "tester",
    )
    assert tokens["ModelScope"]["source"] == "MODELSCOPE_API_TOKEN"
    assert findings(done, "version")["huggingface_hub"]["version"].startswith(f"{version}.")
    assert findings(done, "setting")["HF_ENDPOINT"]["value"] == server.url


def test_people_get_a_state_and_a_next_step_per_line(server: HubServer, cli: QuickCli) -> None:
    (cli.folder / "empty").mkdir()
    done = cli("doctor", "--hub", f"file:{cli.folder}/empty", "--hub", "hf:org/missing")
    assert done.code == 1 and done.err == "Usable; 1 failed.\n"
    states = ("ok   ", "warning   ", "FAILED   ", "not checked   ", "            next: ")
    assert all(line.startswith(states) for line in done.out.splitlines())
    assert f"ok          hub      file:{cli.folder}/empty: 0 artifacts" in done.out
    assert "FAILED      hub      hf:org/missing: Hugging Face org/missing does not" in done.out


def test_a_hub_that_hangs_in_any_other_way_is_given_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECONDS", 0.05)
    monkeypatch.setattr(
        "oscar_zoo.registry.hubs.local.LocalHub.artifacts", lambda hub: os.read(pipe[0], 1)
    )
    pipe = os.pipe()
    try:
        found = [f for f in doctor.examine(["file:/somewhere"]) if f.topic == "hub"]
    finally:
        os.close(pipe[1])
    assert [f.state for f in found] == ["failed"] and "did not answer within 0 s" in found[0].detail


def test_offline_no_hub_is_asked(server: HubServer, cli: QuickCli) -> None:
    for arguments, variables in (
        (["--offline"], {}),
        ([], {"OSCAR_ZOO_OFFLINE": "1"}),
        ([], {"HF_HUB_OFFLINE": "1"}),
    ):
        done = cli("doctor", "--json", *arguments, OSCAR_ZOO_HUB=BOTH, **SECRETS, **variables)
        assert done.code == 0
        assert {row["state"] for row in findings(done, "hub").values()} == {"not checked"}
    assert server.requests == []


def test_a_refused_token_and_one_that_others_can_read_are_named(
    server: HubServer, cli: QuickCli
) -> None:
    def told(**variables: str) -> dict[str, Any]:
        done = cli("doctor", "--json", OSCAR_ZOO_HUB="file:.", **variables)
        assert CANARY not in done.out + done.err
        return findings(done, "token")["Hugging Face"]

    server.fault("status", "/api/whoami-v2", code=401)
    row = told(**SECRETS)
    assert (row["state"], row["next"]) == ("failed", "replace or unset HF_TOKEN")
    server.clear_faults()
    saved = Path(cli.environment["HF_HOME"]) / "token"
    for mode, state in ((0o600, "ok"), (0o644, "warning")):
        saved.write_text(CANARY)
        saved.chmod(mode)
        row = told()
        assert (row["state"], row["source"], row["present"]) == (state, str(saved), True)


@pytest.mark.parametrize("broken", ["file in the way", "writable by others", "configuration"])
def test_what_every_command_needs_decides_the_verdict(cli: QuickCli, broken: str) -> None:
    cache = cli.folder / "cache"
    if broken == "file in the way":
        cache.write_bytes(b"")
    elif broken == "writable by others":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        (cli.folder / "config" / "config.toml").write_text("hubs = 3\n")
    done = cli("doctor", "--offline", "--json")
    assert done.code == 1 and done.json["usable"] is False
    failed = [row for row in done.json["findings"] if row["state"] == "failed"]
    assert failed and all(row["next"] for row in failed)
    if broken == "configuration":  # one verdict on one file
        assert sum("config.toml" in row["name"] + row["detail"] for row in failed) == 1
    text = cli("doctor", "--offline")
    assert text.code == 1 and "FAILED" in text.out and text.err.startswith("Not usable")


HEAVY = """
import sys
from oscar_zoo.cli.main import run
assert run(["doctor", "--offline", "--json"]) == 0
heavy = {"torch", "transformers", "sglang", "triton", "modelscope_hub", "huggingface_hub"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_nothing_is_created_and_nothing_heavy_is_imported(cli: QuickCli) -> None:
    before = set(cli.folder.rglob("*"))
    command = [sys.executable, "-c", HEAVY]
    done = subprocess.run(
        command, env=cli.variables, cwd=cli.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(cli.folder.rglob("*")) == before


@pytest.fixture
def driver(cli: QuickCli, tmp_path: Path) -> Driver:
    """What `doctor` says of the machine where `nvidia-smi` is this script."""

    def found(script: str, **variables: str) -> dict[str, dict[str, Any]]:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f"#!/bin/sh\n{script}")
        tool.chmod(0o755)
        path = f"{tool.parent}:{os.environ['PATH']}"
        return findings(cli("doctor", "--offline", "--json", PATH=path, **variables), "machine")

    return found


def test_the_driver_names_the_gpus_and_sees_no_token(driver: Driver, tmp_path: Path) -> None:
    row = driver(f"env > {tmp_path}/seen\n{CARDS}", **SECRETS)["GPU"]
    assert row["gpus"] == [{"name": "NVIDIA H200", "memory_bytes": 143771 << 20}] * 2
    assert "PATH=" in (seen := (tmp_path / "seen").read_text()) and "CANARY" not in seen
    assert driver("echo no devices were found\nexit 6\n")["GPU"]["gpus"] == []


@pytest.mark.parametrize(
    ("capability", "state", "words"),
    [
        ("9.0", "ok", "decode in CUDA C++, write in CUDA C++, the rest in Triton; measured"),
        ("8.9", "ok", "write in Triton, the rest in Triton; compiled and checked on another chip"),
        ("7.5", "warning", "none for compute capability 7.5"),
    ],
)
def test_the_path_of_the_kernels_is_that_of_the_gpu(
    capability: str, state: str, words: str, driver: Driver
) -> None:
    asked = f"case $* in *compute_cap*) echo {capability};; *) {CARDS.strip()};; esac\n"
    row = driver(asked)["INT2 kernels"]
    assert (row["state"], row["paths"][0]["compute_capability"]) == (state, capability)
    assert words in row["detail"] and (row["next"] is None) == (state == "ok")
    known = [(one["name"], one["state"]) for one in row["known_gpus"]]
    assert ("RTX 4090", "compiled and checked on another chip") in known
    assert [name for name, one in known if one == "measured"] == ["H100", "H200"]


@pytest.mark.parametrize("debug", ["0", "1"])
def test_no_command_shows_a_secret(server: HubServer, cli: QuickCli, debug: str) -> None:
    Store(cli.folder / "cache").put(
        ArtifactId("model", "tag"), artifact_files(), source="hf:org/zoo"
    )
    server.fault("status", "/api/models/org/closed*", code=401)
    server.fault("status", "/api/whoami-v2", code=500)
    port = server.closed_port().rpartition(":")[2]
    variables = SECRETS | {
        "OSCAR_ZOO_DEBUG": debug,
        "OSCAR_ZOO_HUB": (
            f"hf:org/zoo,hf:org/closed,ms:org/missing,https://someone:{CANARY}@example.org/zoo"
        ),
        "HF_ENDPOINT": server.url,
        "MODELSCOPE_ENDPOINT": f"http://someone:{MS_CANARY}@127.0.0.1:{port}",
        "HTTPS_PROXY": f"http://{CANARY}@127.0.0.1:{port}",
        "ALL_PROXY": "",
    }
    for words in (["doctor"], ["cache", "list"], ["login"], ["login", "ms"]):
        for more in ([], ["--json"]):
            done = cli(*words, *more, **variables)
            assert "CANARY" not in done.out + done.err, (words, more)
            assert done.out or done.err
    done = cli("doctor", **variables)
    assert "http://***@127.0.0.1" in done.out and "HF_TOKEN" in done.out
    assert ": not a hub\n" in done.out
    own = [path.read_bytes() for path in cli.folder.rglob("*") if path.is_file()]
    assert not any(b"CANARY" in content for content in own)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:secret@host:8080/path?token=abc#x", "https://***@host:8080/path?***"),
        ("user:secret@proxy:3128", "***@proxy:3128"),
        ("hf:org/name@main", "hf:org/name@main"),
        ("file:/srv/zoo hf:org/name", "file:/srv/zoo hf:org/name"),
        ("file:/a/very/long/path/" + "x" * 90, "file:/a/very/long/path/" + "x" * 90),
        (f"hf:{CANARY}/name", "hf:hf_***/name"),
    ],
)
def test_masking_keeps_what_people_need(text: str, shown: str) -> None:
    assert doctor.masked(text) == shown


@pytest.mark.parametrize(
    ("version", "supported", "inside"),
    [
        ("1.31.0", ">=1.31,<3", True),
        ("1.30.9", ">=1.31,<3", False),
        ("3.0.0rc1", "<3,>=1.31", False),
        ("2.13.0+cpu", ">=2.6", True),
        ("5.3", ">=5.3.0,<6", True),
    ],
)
def test_versions_are_compared_as_numbers(version: str, supported: str, inside: bool) -> None:
    assert doctor.is_inside(version, supported) is inside
