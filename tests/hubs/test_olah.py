"""A mirror that others wrote stands between our pull and the loopback hub."""

import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cli_child import Cli
from hub_server import HubServer
from tiny_artifacts import artifact_files

from oscar_zoo.engines.sglang.launch.plan import free_port

PROGRAM = Path(sys.prefix) / "olah" / "bin" / "olah-cli"
ONE = "tiny-qwen3-hard/seq512_prompt2_group64"
PULL = ("pull", "tiny-qwen3-hard", "--hub", "hf:org/zoo", "--json")


def start(server: HubServer, folder: Path, place: str) -> subprocess.Popen[str]:
    """An olah that mirrors `server` at `place` and keeps everything below `folder`."""
    host, _, port = place.partition(":")
    options = {
        "host": host,
        "port": port,
        "hf-scheme": "http",
        "hf-netloc": urlsplit(server.url).netloc,
        "hf-lfs-netloc": urlsplit(server.cdn_url).netloc,
        "mirror-scheme": "http",
        "mirror-netloc": place,
        "mirror-lfs-netloc": place,
        "repos-path": str(folder / "repos"),
        "log-path": str(folder / "logs"),
    }
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return subprocess.Popen(
        [str(PROGRAM), *words],
        cwd=folder,
        env=server.environment(folder),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.skipif(not PROGRAM.exists(), reason="no olah in sys.prefix/olah")
def test_our_pull_goes_through_the_mirror(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    place = f"127.0.0.1:{free_port()}"
    with HubServer() as server, start(server, tmp_path / "mirror", place) as mirror:
        try:
            assert mirror.stdout is not None
            assert any("running on" in line for line in mirror.stdout)
            files = {f"{ONE}/{name}": data for name, data in artifact_files().items()}
            repo = server.repository("org/zoo", files=files)
            cli = Cli(server.environment(tmp_path / "hf"), tmp_path)
            pulled = cli(*PULL, HF_ENDPOINT=f"http://{place}")
            assert pulled.code == 0, pulled.err
            row = pulled.json["artifacts"][0]
            assert (row["revision"], row["first_use"]) == (repo.head(), False)
            server.clear()
            fresh = {"HF_ENDPOINT": f"http://{place}", "OSCAR_ZOO_CACHE": str(tmp_path / "fresh")}
            assert cli(*PULL, **fresh).code == 0
            fetched = [seen.path for seen in server.requests if seen.method == "GET"]
            assert not [path for path in fetched if path.endswith(".pt")]
        finally:
            mirror.kill()
