from __future__ import annotations

import os
import threading
import time

import pytest

from oscar_zoo.hubs import patience
from oscar_zoo.hubs.patience import MAX_SLOWDOWN, TICK, Patience


class Machine:
    """A clock, and what Linux says about our threads, both moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.delays, self.slowdown = 1000.0, {"1": 5.0}, 1.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(patience, "run_delays", lambda: dict(self.delays))
        monkeypatch.setattr(patience, "machine_slowdown", lambda: self.slowdown)


class Silence(threading.Event):
    """Is never set; every look at it lasts as long as it asks for, on the clock of `machine`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine, self.looks = machine, 0

    def wait(self, timeout: float | None = None) -> bool:
        self.looks += 1
        self.machine.now += timeout or 0
        return False


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_silence_counts_in_full(machine: Machine) -> None:
    begun = machine.now
    assert not Patience(60).wait(Silence(machine), 7)
    assert 7 <= machine.now - begun <= 7 + 3 * TICK


def test_a_gap_between_two_looks_is_not_silence(machine: Machine) -> None:
    kept = Patience(60)
    machine.now += 3600  # stopped, or suspended
    assert kept.spent <= 2 * TICK
    assert kept.lost >= 3599


def test_waiting_for_a_processor_is_not_silence(machine: Machine) -> None:
    kept = Patience(60)
    for _ in range(100):
        machine.now += TICK
        machine.delays["1"] += 0.3 * TICK
        machine.delays["2"] = (
            machine.delays.get("2", 0.0) + 0.5 * TICK
        )  # a thread that started meanwhile
        spent = kept.spent
    assert spent == pytest.approx(0.2 * 100 * TICK)
    machine.delays = {"1": 0.1}  # threads ended; numbers are given out again
    machine.now += TICK
    assert kept.spent == pytest.approx(spent + TICK)


def test_a_process_that_is_always_starved_gives_up_some_time(machine: Machine) -> None:
    kept = Patience(60)
    begun = machine.now
    while kept.spent < 60:
        machine.now += TICK
        machine.delays["1"] += 20 * TICK  # as of many threads
    assert machine.now - begun == pytest.approx(60 * MAX_SLOWDOWN, rel=0.01)


def test_a_hub_on_a_busy_machine_has_longer_up_to_a_bound(machine: Machine) -> None:
    machine.slowdown = 4.0
    for nearby, factor in ((False, 1), (True, 4)):
        begun = machine.now
        assert not Patience(60, nearby=nearby).wait(Silence(machine), 2)
        assert 2 * factor <= machine.now - begun <= 2 * factor + 3 * TICK
    machine.slowdown = 1e9
    begun = machine.now
    assert not Patience(60, nearby=True).wait(Silence(machine), 2)
    assert machine.now - begun <= 2 * MAX_SLOWDOWN + 3 * TICK


def test_the_whole_budget_grows_too_and_ends(machine: Machine) -> None:
    machine.slowdown = 3.0
    kept = Patience(1, nearby=True)
    for _ in range(11):
        machine.now += TICK
        kept.spent  # noqa: B018  (a look at the clock)
    assert kept.left == pytest.approx(1.9)
    for _ in range(20):
        machine.now += TICK
        kept.spent  # noqa: B018
    assert kept.left <= 0


def test_this_kernel_counts_the_delays_of_our_threads() -> None:
    if not os.path.exists("/proc/self/schedstat"):  # noqa: PTH110
        pytest.skip("the kernel does not count them")
    assert str(os.getpid()) in patience.run_delays()
    assert patience.machine_slowdown() >= 1


def test_without_counts_only_gaps_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(patience, "_TASKS", tmp_path_factory.mktemp("proc") / "none")
    assert patience.run_delays() == {}
    assert Patience(60).spent >= 0
