"""Processes that stand for servers, and the records of servers as killed processes leave them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from oscar_zoo.engines.sglang.launch.processes import Process
from oscar_zoo.serving import records
from oscar_zoo.serving.records import ServerRecord, now

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
    """What a record keeps of a process that runs."""
    found = Process.of(process.pid)
    assert found is not None
    return found


def record(process: Process, port: int = 30000, model: str = "Qwen/Qwen3-8B") -> ServerRecord:
    """The record of a server that is ready."""
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
