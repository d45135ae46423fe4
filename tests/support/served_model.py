"""`oscar-zoo serve` for real: the example model with a fitted rotation, a server that is started as
users do or forked, and the processes that belong to it."""

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cli_output import check
from engines import MODEL, REPOSITORY
from forked_process import ForkedProcess

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.plan import LaunchPlan, free_port
from oscar_zoo.engines.sglang.launch.processes import Process
from oscar_zoo.serving import records
from oscar_zoo.serving.records import ServerRecord, now

PROGRAM = (sys.executable, "-c", "from oscar_zoo.cli.main import main; main()")
KEY = "key-with-#-and-'quotes'"
CANARY = "token-that-no-child-may-see"
WHOLE_PROMPTS = 8192
"""Chunks as long as this never cut a prompt, whatever else is in the batch."""


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str] | ForkedProcess
    ready: dict[str, Any]
    port: int
    temp: Path
    artifact: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
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


NO_PREFIX = (f"--chunked-prefill-size={WHOLE_PROMPTS}", "--disable-radix-cache", "--enable-metrics")


@contextlib.contextmanager
def serving(
    artifact: Path,
    temp: Path,
    *,
    forked: bool = False,
    flags: tuple[str, ...] = NO_PREFIX,
    options: tuple[str, ...] = (),
) -> Iterator[Running]:
    """A server with a key, by default with metrics, which cuts no prompt and keeps no prefix."""
    port = free_port()
    (temp / "key").write_text(KEY + "\n")
    options = (*options, "--expose", "127.0.0.1", "--api-key-file", str(temp / "key"))
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
    try:
        direct = [child.pid for child in psutil.Process(pid).children()]
    except psutil.NoSuchProcess:
        return []
    return [found for child in direct for found in (child, *all_children(child))]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


SLEEPER = "print('up', flush=True); import time; time.sleep(600)"


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps until a signal comes."""
    process = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def identity(process: subprocess.Popen[str]) -> Process:
    found = Process.of(process.pid)
    assert found is not None
    return found


def record(process: Process, port: int = 30000, model: str = "Qwen/Qwen3-8B") -> ServerRecord:
    url = f"http://127.0.0.1:{port}/v1"
    label = "Qwen3-8B:seq20000_prompt83_group128"
    log = str(records.folder() / f"{port}.log")  # there is none
    return ServerRecord(process, port, url, model, label, log, now(), "ready")


def left(one: ServerRecord) -> Path:
    """The file of `one`, as a killed process leaves it."""
    folder = records.folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{one.port}-{one.process.pid}.json"
    path.write_text(json.dumps(asdict(one)))
    return path


_PROGRAM = """
import json, pathlib, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
memory = {"token_slots": 9, "slot_bytes": 320, "request_rows": 2, "found_bytes": 1,
          "host_tokens": 0, "disk_bytes": 0}
recipe = {"sink": 1, "recent": 2, "bits": "2", "k_clip": 0, "v_clip": 0}
cache = {"bits_per_element": 2.5, "recipe": recipe, "memory": memory}
PAGES = {
    "/health": {},
    "/server_info": {"version": "0", "internal_states": [{"oscar_int2": cache}]},
    "/v1/models": {"data": [{"id": "m"}]},
    "/oscar_front": {"front": json.loads(pathlib.Path(sys.argv[3]).read_text())["id"],
                     "requests": 2},
}
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        self.wfile.write(json.dumps(PAGES[self.path]).encode())
        self.server.done = self.path == "/v1/models" and sys.argv[2] == "dies"
server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler); server.done = False
while not server.done:
    server.handle_request()
sys.stderr.write("RuntimeError: it fell over.\\n"); sys.exit(3)
"""


def take_its_place(monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> int:
    """Let every server be this program; returns the port that it listens on."""
    port = free_port()
    argv = (sys.executable, "-P", "-c", _PROGRAM, str(port), "dies" if dies else "stays")

    def plan(*_: object, front: str, **__: object) -> LaunchPlan:
        return LaunchPlan((*argv, front), dict(os.environ), f"http://127.0.0.1:{port}")

    monkeypatch.setattr("oscar_zoo.serving.serve.require_serve", lambda: None)
    monkeypatch.setattr("oscar_zoo.engines.sglang.launch.plan.plan", plan)
    return port


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has waited for does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it may also go while this reads
        return False
    return status.rpartition(") ")[2][0] != "Z"
