"""S16: a server under load, and servers of which a process is killed. Only in the long form; see
`tests/cli/test_bench.py` and `tests/cli/test_serve.py` for short ones."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_faults import state
from experiment import Found, Scale
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.engines.sglang.launch.plan import free_port

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
CLIENTS, SECONDS, KILLS = 200, 300, 20
FLAGS = ("--oscar-sink-size=16", "--oscar-recent-size=32", "--max-total-tokens=4000")
SIZES = ("--context=200", "--new-tokens=16", "--aborts=0.3", "--growth=64")
START, END = 900, 10
"""Seconds in which a server must start, and in which it must be gone after a kill."""


def held_under_load(scale: Scale) -> Found:
    """200 clients for minutes, a fifth of them hang up; then kill processes of servers."""
    artifact = write_folder(scale.work / "rotation", artifact_files())
    report = _bench(scale.work, artifact)
    violations = [f"under load: {line}" for line in report["violations"]]
    ended: Counter[str] = Counter()
    slowest, outlived = 0.0, 0
    for number in range(KILLS):
        folder = scale.work / f"server{number}"
        folder.mkdir()
        killed = _killed(folder, artifact, number)
        ended[killed.victim] += 1
        slowest, outlived = max(slowest, killed.seconds), outlived + killed.outlived
        violations += [f"{killed.victim} killed, server {number}: {line}" for line in killed.wrong]
    memory = report["host_memory"] or {}
    figures: dict[str, int | float | str] = {
        "clients": CLIENTS,
        "seconds of load": SECONDS,
        "requests finished": report["finished"],
        "requests whose client hung up": report["aborted"],
        "peak memory in MiB": int(memory.get("peak", 0)) >> 20,
        "servers killed": ended.total(),
        "processes killed": ", ".join(f"{name}: {count}" for name, count in ended.items()),
        "servers that went on answering, and ended when they were told to": outlived,
        "slowest end after a kill in seconds": round(slowest, 1),
    }
    return Found(figures, tuple(violations))


def lacking_sglang() -> str | None:
    """Why no server can be started, or `None`."""
    return None if importlib.util.find_spec("sglang") else "sglang is not installed"


def _bench(work: Path, artifact: Path) -> dict[str, Any]:
    command = ["bench", "load", str(artifact), "--model", str(MODEL), f"--clients={CLIENTS}"]
    command += [f"--seconds={SECONDS}", *SIZES, "--json", "--", *FLAGS]
    done = subprocess.run(
        [sys.executable, "-m", "oscar_zoo", *command],
        env=environment(work / "bench"),
        capture_output=True,
        text=True,
        timeout=START + 4 * SECONDS,
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        raise RuntimeError(f"bench load ended with {done.returncode}: {done.stderr}") from None


@dataclass(frozen=True)
class _Killed:
    """A server of which one process was killed: which, how long it took to end, what did not hold,
    and whether it went on answering, as without a helper of Python's, until it was told to end."""

    victim: str
    seconds: float
    wrong: tuple[str, ...]
    outlived: bool


def _killed(folder: Path, artifact: Path, number: int) -> _Killed:
    port = free_port()
    command = ["serve", str(artifact), "--model", str(MODEL), "--port", str(port), "--json"]
    serve = subprocess.Popen(
        [sys.executable, "-m", "oscar_zoo", *command, "--", *FLAGS],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        ready = ready_server(serve)
        tree = [serve.pid, *_children(serve.pid)]
        victim = tree[number % len(tree)]
        name = "oscar-zoo" if victim == serve.pid else f"process {tree.index(victim)} of SGLang"
        with _asking(ready["url"], ready["model_id"]):
            os.kill(victim, signal.SIGKILL)
            began = time.monotonic()
            outlived = not _over(serve, tree, END) and _answers(ready["url"], ready["model_id"])
            if outlived:
                serve.terminate()
                began = time.monotonic()
            _over(serve, tree, START)
            seconds = time.monotonic() - began
    finally:
        serve.kill()
        serve.wait()
    wrong = tuple(_left(serve, tree, port, seconds, outlived=outlived))
    return _Killed(name, seconds, wrong, outlived)


def _over(serve: subprocess.Popen[str], tree: list[int], limit: float) -> bool:
    """Wait until all processes have ended; whether they did within `limit` seconds."""
    began = time.monotonic()
    while serve.poll() is None or any(map(_alive, tree)):
        if time.monotonic() - began > limit:
            return False
        time.sleep(0.1)
    return True


def _left(
    serve: subprocess.Popen[str], tree: list[int], port: int, seconds: float, *, outlived: bool
) -> Iterator[str]:
    if seconds > END:
        yield f"it took {seconds:.0f} s until all was over"
    if (serve.returncode == 0) != outlived:
        yield f"the exit code is {serve.returncode}"
    orphans = [pid for pid in tree if _alive(pid)]
    if orphans:
        yield f"{len(orphans)} orphans"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield f"port {port} is not free: {error.strerror}"


def ready_server(serve: subprocess.Popen[str]) -> dict[str, Any]:
    assert serve.stdout is not None
    timer = threading.Timer(START, serve.kill)
    timer.start()
    text = ""
    for line in serve.stdout:
        text += line
        if line.startswith("}"):
            break
    timer.cancel()
    if not text:
        raise RuntimeError(f"the server ended with {serve.wait()} before it was ready")
    return dict(json.loads(text))


def _answers(url: str, model: str) -> bool:
    """Whether the server still answers a short question."""
    try:
        with urllib.request.urlopen(_question(url, model, tokens=2), timeout=END) as answer:
            return bool(json.load(answer)["choices"])
    except (OSError, ValueError, KeyError):
        return False


def _question(url: str, model: str, *, tokens: int) -> urllib.request.Request:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens}
    return urllib.request.Request(
        f"{url.removesuffix('/v1')}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )


@contextlib.contextmanager
def _asking(url: str, model: str) -> Iterator[None]:
    """Requests that run when the process dies."""

    def ask() -> None:
        request = _question(url, model, tokens=200)
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    yield


def environment(folder: Path) -> dict[str, str]:
    """Variables of a user of his own, whose temporary files are in `folder`."""
    folder.mkdir(exist_ok=True)
    own = {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **state(folder), **own}


def _children(pid: int) -> list[int]:
    direct = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            direct += [int(child) for child in task.read_text().split()]
    return [found for child in direct for found in (child, *_children(child))]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
