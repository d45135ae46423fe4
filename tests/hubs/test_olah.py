"""A mirror that others wrote stands between clients and the loopback hub."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from cli_child import Cli
from hub_server import HubServer
from hub_uses import run_client
from raw_server import needs_olah, olah
from tiny_artifacts import artifact_files

pytestmark = needs_olah
ONE = "tiny-qwen3-hard/seq512_prompt2_group64"
FILES = {"m/t/k.pt": bytes(range(256)) * 4000, "m/t/oscar.json": b"{}", "README.md": b"# card\n"}
DOWNLOAD = """
import hashlib, json, pathlib
from huggingface_hub import snapshot_download
folder = pathlib.Path(snapshot_download("org/name", revision="oz-m-t"))
files = [path for path in folder.rglob("*") if path.is_file()]
hashes = {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
print(json.dumps({"commit": folder.name, "files": hashes}))
"""  # noqa: E501


@pytest.mark.parametrize("redirect", [None, "cdn"])
def test_a_snapshot_comes_through_the_mirror(tmp_path: Path, redirect: str | None) -> None:
    with HubServer() as server:
        server.lfs_redirect = "cdn" if redirect else None
        repo = server.repository("org/name", files=FILES)
        repo.move("oz-m-t", repo.head())
        for folder in ("mirror", "first", "second"):
            (tmp_path / folder).mkdir()
        with olah(server, tmp_path / "mirror") as address:
            environment = server.environment(tmp_path / "first")
            told = run_client(DOWNLOAD, environment, HF_ENDPOINT=address)
            hashes = {path: hashlib.sha256(data).hexdigest() for path, data in FILES.items()}
            assert told == {"commit": repo.head(), "files": hashes}
            server.clear()
            again = run_client(
                DOWNLOAD, server.environment(tmp_path / "second"), HF_ENDPOINT=address
            )
            assert again == told
        fetched = [
            record.path
            for record in server.requests
            if record.method == "GET" and record.path.endswith(".pt")
        ]
        assert fetched == [], "the mirror keeps content"


def test_our_pull_goes_through_the_mirror(tmp_path: Path) -> None:
    with HubServer() as server:
        files = {f"{ONE}/{name}": data for name, data in artifact_files().items()}
        repo = server.repository("org/zoo", files={**files, "README.md": b"# zoo"})
        (tmp_path / "mirror").mkdir()
        with olah(server, tmp_path / "mirror") as address:
            cli = Cli(server.environment(tmp_path / "hf"), tmp_path)
            pulled = cli(
                "pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo", "--json", HF_ENDPOINT=address
            )
            assert pulled.code == 0, pulled.err
            row = pulled.json["artifacts"][0]
            assert (row["revision"], row["first_use"]) == (repo.head(), False)
            server.clear()
            fresh = {"HF_ENDPOINT": address, "OSCAR_ZOO_CACHE": str(tmp_path / "fresh")}
            assert cli("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo", **fresh).code == 0
        fetched = [
            record.path
            for record in server.requests
            if record.method == "GET" and record.path.endswith(".pt")
        ]
        assert fetched == [], "the mirror keeps content"
