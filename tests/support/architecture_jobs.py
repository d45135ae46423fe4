"""Attempts side by side, each in a process and a folder of its own.

A process that crashes or takes too long is one failed attempt, and the others go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from architecture_attempts import Attempt

RESULT, OUTPUT = "attempt.json", "attempt.log"
"""What an attempt writes into its folder at its end, and everything that it prints."""
KEPT = ("*.log", "*.stderr")


def all_attempts(
    names: Sequence[str],
    command: Callable[[str, Path], Sequence[str]],
    folder: Path,
    *,
    jobs: int,
    limit: float,
    logs: Path | None = None,
    ended: Callable[[Path], None] = lambda folder: None,
) -> Iterator[tuple[str, Attempt]]:
    """Run one command per name, and yield what came of each as soon as it is known.

    Args:
        command: makes the command line from a name and the folder of that name, which is empty. It
            writes an attempt to `RESULT` there.
        folder: of all these folders.
        jobs: how many run side by side.
        limit: seconds for one of them.
        logs: gets a folder with the logs of every attempt that failed.
        ended: called with the folder of a process that crashed or was killed.
    """

    def one(name: str) -> tuple[str, Attempt]:
        own = folder / name
        own.mkdir(parents=True)
        attempt = _attempt(command(name, own), own, limit)
        if not (own / RESULT).exists():
            ended(own)
        if logs is not None:
            _keep(own, logs / name, failed=attempt.outcome in ("fails", "stock fails"))
        shutil.rmtree(own, ignore_errors=True)
        return name, attempt

    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, name) for name in names]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def write_attempt(attempt: Attempt, folder: Path) -> None:
    """Write the result of a process."""
    (folder / RESULT).write_text(json.dumps([attempt.outcome, attempt.said]), "utf-8")


def _attempt(command: Sequence[str], folder: Path, limit: float) -> Attempt:
    with (folder / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Attempt("fails", f"The attempt took more than {limit:.0f} seconds.")
    if not (folder / RESULT).exists():
        return Attempt("fails", f"The attempt ended with status {status}.")
    return Attempt(*json.loads((folder / RESULT).read_text("utf-8")))


def _keep(folder: Path, logs: Path, *, failed: bool) -> None:
    """Replace what is in `logs` by the logs in `folder`, or by nothing where nothing failed."""
    shutil.rmtree(logs, ignore_errors=True)
    found = [path for kind in KEPT for path in folder.rglob(kind)] if failed else []
    for path in found:
        logs.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, logs / "-".join(path.relative_to(folder).parts))
