"""A mirror of the Hugging Face hub that is not ours, in front of the loopback hub."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hub_server import HubServer

from oscar_zoo.engines.sglang.launch.plan import free_port

PROGRAM = Path(sys.prefix) / "olah" / "bin" / "olah-cli"
needs_olah = pytest.mark.skipif(
    not PROGRAM.exists(), reason="no virtual environment with olah in sys.prefix/olah"
)


@contextlib.contextmanager
def olah(server: HubServer, folder: Path) -> Iterator[str]:
    """Address of an olah that mirrors `server` and keeps everything below `folder`."""
    port = free_port()
    place = f"127.0.0.1:{port}"
    options = {
        "host": "127.0.0.1",
        "port": str(port),
        "hf-scheme": "http",
        "hf-netloc": urlsplit(server.url).netloc,
        "hf-lfs-netloc": urlsplit(server.cdn_url).netloc,
        "mirror-scheme": "http",
        "mirror-netloc": place,
        "mirror-lfs-netloc": place,
        "repos-path": str(folder / "repos"),
        "log-path": str(folder / "logs"),
    }
    command = [
        str(PROGRAM),
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]
    environment = server.environment(folder)
    said: list[str] = []
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as mirror:
        assert mirror.stdout is not None
        try:
            for line in mirror.stdout:
                said.append(line)
                if "running on" in line:
                    break
            else:
                pytest.fail(f"olah did not start:\n{''.join(said)}")
            threading.Thread(target=said.extend, args=(mirror.stdout,), daemon=True).start()
            yield f"http://{place}"
        finally:
            mirror.kill()
