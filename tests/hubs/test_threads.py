import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oscar_zoo.registry.hubs.base import in_parallel, within

SRC = str(Path(__file__).resolve().parents[2])


class TooLate(Exception):
    pass


def test_raises_what_the_call_raises_with_its_traceback() -> None:
    def broken() -> int:
        raise KeyError("what was wrong")

    with pytest.raises(KeyError, match="what was wrong") as caught:
        within(30, broken, error=TooLate)
    assert "broken" in [entry.name for entry in caught.traceback]


def test_a_call_that_never_ends_is_abandoned() -> None:
    release = threading.Event()
    with pytest.raises(TooLate):
        within(0.05, release.wait, error=TooLate)
    release.set()


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_no_time_left_means_no_call(seconds: float) -> None:
    called = threading.Event()
    with pytest.raises(TooLate):
        within(seconds, called.set, error=TooLate)
    assert not called.is_set()


def test_results_come_in_the_order_of_the_calls() -> None:
    late = threading.Event()

    def first() -> int:
        assert late.wait(30)
        return 0

    def last() -> int:
        late.set()
        return 9

    calls = [first, *(lambda n=n: n for n in range(1, 9)), last]  # type: ignore[misc]
    assert in_parallel(calls, workers=3) == list(range(10))
    assert in_parallel([]) == []


def test_the_first_failure_wins_and_nothing_more_starts() -> None:
    release, started = threading.Event(), threading.Event()

    def broken() -> None:
        raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        in_parallel([broken, *[started.set] * 50], workers=1)
    with pytest.raises(KeyError, match="first"):
        in_parallel([release.wait, broken], workers=2)  # does not wait for the one that still runs
    release.set()
    assert not started.is_set()


@pytest.mark.parametrize(
    "wait",
    [
        "within(3600, lambda: threading.Event().wait(), error=RuntimeError)",
        "in_parallel([lambda: threading.Event().wait()] * 3)",
    ],
)
def test_ctrl_c_ends_the_wait_and_the_process(wait: str) -> None:
    code = f"""
import signal, threading
from oscar_zoo.registry.hubs.base import in_parallel, within
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    print("ready", flush=True)
    {wait}
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=SRC
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        os.kill(child.pid, signal.SIGINT)
        child.wait(60)
        assert child.returncode == 0
        assert child.stdout.read() == "interrupted\n"
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
