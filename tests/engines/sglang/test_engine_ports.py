"""SGLang picks a port for its ranks before it listens there.

Where another process was faster, a job of the tests starts again. Every other failure is told at
once.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import ATTEMPTS, Engines, needs_sglang

from oscar_zoo.engines.sglang.launch.plan import free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]
JOB = {"groups": [{"name": "one", "prompts": [[5, 6, 7]], "new": 2}]}


class Counted(Engines):
    """Engines that count how often a port was lost, and free it after `patience` times."""

    def __init__(self, folder: Path, taken: socket.socket, patience: int) -> None:
        super().__init__(folder)
        self.taken, self.patience, self.lost = taken, patience, 0

    def lost_a_port(self, log: Path) -> bool:
        found = super().lost_a_port(log)
        self.lost += found
        if self.lost == self.patience:
            self.taken.close()
        return found


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as one:
        one.bind(("0.0.0.0", free_port()))  # one that no connection gets when it is free again
        one.listen()
        yield one


def start(runs: Counted, **engine: object) -> None:
    port = runs.taken.getsockname()[1]
    runs.start("one", env={}, job={**JOB, "engine": {"nccl_port": port, **engine}})


def test_a_job_that_lost_its_port_starts_again(tmp_path: Path, taken: socket.socket) -> None:
    runs = Counted(tmp_path, taken, patience=1)
    start(runs)
    try:
        assert len(runs.result("one")["groups"]["one"]["tokens"][0]) == 2 and runs.lost == 1
        assert "EADDRINUSE" not in runs.log("one")
    finally:
        runs.close()


def test_a_port_that_stays_taken_is_told(tmp_path: Path, taken: socket.socket) -> None:
    runs = Counted(tmp_path, taken, patience=-1)
    start(runs)
    try:
        with pytest.raises(AssertionError, match="EADDRINUSE"):
            runs.result("one")
        assert runs.lost == ATTEMPTS
    finally:
        runs.close()


def test_another_failure_is_told_at_once(tmp_path: Path, taken: socket.socket) -> None:
    runs = Counted(tmp_path, taken, patience=-1)
    start(runs, model_path=str(tmp_path / "nothing"))
    try:
        with pytest.raises(AssertionError, match="engine one ended with"):
            runs.result("one")
        assert runs.lost == 0
    finally:
        runs.close()
