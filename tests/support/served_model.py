"""`oscar-zoo serve` for real: the example model with a fitted rotation, a server that is started as
users do or forked, and the processes that belong to it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli_output import check
from engines import MODEL, REPOSITORY
from forked_process import ForkedProcess

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.plan import free_port

PROGRAM = (sys.executable, "-c", "from oscar_zoo.cli.main import main; main()")
KEY = "key-with-#-and-'quotes'"
CANARY = "token-that-no-child-may-see"
WHOLE_PROMPTS = 8192
"""Chunks as long as this never cut a prompt, whatever else is in the batch."""


@dataclass(frozen=True)
class Running:
    """A server that is ready, and what `serve --json` said of it."""

    process: subprocess.Popen[str] | ForkedProcess
    ready: dict[str, Any]
    port: int
    temp: Path
    artifact: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What it answers to a JSON body."""
        return json.loads(self.ask(path, json.dumps(body).encode()))

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        """What it answers to a client with the key."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            return bytes(response.read())


def fitted(folder: Path) -> Path:
    """A rotation of the example model in `folder`, which must not exist."""
    text = REPOSITORY / "examples/text/calibration.txt"
    words = ["--calib-data", text, "--calib-tokens", 2048, "--dtype", "float32"]
    words += ["--output-dir", folder, "--method", "oscar", "-q"]
    assert run(["compute", str(MODEL), *map(str, words)]) == 0
    return folder


@contextlib.contextmanager
def serving(artifact: Path, temp: Path, *, forked: bool = False) -> Iterator[Running]:
    """A server with a key and metrics, which cuts no prompt and keeps no prefix.

    Args:
        forked: whether to start it by `fork` in place of `start`.
    """
    port = free_port()
    flags = (f"--chunked-prefill-size={WHOLE_PROMPTS}", "--disable-radix-cache", "--enable-metrics")
    (temp / "key").write_text(KEY + "\n")
    options = ("--expose", "127.0.0.1", "--api-key-file", str(temp / "key"))
    process = (fork if forked else start)(artifact, port, temp, *flags, options=options)
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    ready = json.loads(text or "{}")
    try:
        assert "url" in ready, (ready, process.stderr and process.stderr.read())
        check(ready)
        yield Running(process, ready, port, temp, artifact)
    finally:
        process.kill() if process.poll() is None else None
        process.wait()


def variables(folder: Path) -> dict[str, str]:
    """Those of a user whose servers' state is in `folder`."""
    own = {"TMPDIR": str(folder), "OSCAR_ZOO_STATE": str(folder), "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"HF_TOKEN": CANARY}


def serve(artifact: Path, port: int, *extra: str, options: tuple[str, ...] = ()) -> list[str]:
    """A command line."""
    command = ["serve", str(artifact), "--model", str(MODEL), "--port", str(port), "--json"]
    return [*command, *options, "--", *extra]


def start(
    artifact: Path, port: int, folder: Path, *extra: str, options: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """As users do: every process is a fresh one."""
    return subprocess.Popen(
        [*PROGRAM, *serve(artifact, port, *extra, options=options)],
        env=variables(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def fork(
    artifact: Path, port: int, folder: Path, *extra: str, options: tuple[str, ...] = ()
) -> ForkedProcess:
    """The same, but every process is a fork of the one that imported SGLang."""
    command = ["-m", "oscar_zoo", *serve(artifact, port, *extra, options=options)]
    return ForkedProcess(command, variables(folder), folder)


def oscar_zoo(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Another command of the user whose servers' state is in `folder`."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=variables(folder),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )


def all_children(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    direct, tasks = [], list[Path]()
    with contextlib.suppress(OSError):  # a process that has ended meanwhile
        tasks += Path(f"/proc/{pid}/task").glob("*/children")
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            direct += [int(child) for child in task.read_text().split()]
    return [found for child in direct for found in (child, *all_children(child))]


def cmdline(pid: int) -> bytes:
    """The command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
