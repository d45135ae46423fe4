"""What is said when asking a benchmark comes to an early end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oscar_zoo.app import benchmark
from oscar_zoo.app.benchmark_plan import PreparedTask
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.errors import ServerFailed
from oscar_zoo.evaluate.benchmarks import run
from oscar_zoo.evaluate.benchmarks.answers import Answers
from oscar_zoo.observer import SILENT, Note, Observer

KEPT = "answers until now are kept; the same command goes on from there"


class Hearing(Observer):
    """Keeps the texts of notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, note: Note) -> None:
        self.notes.append(note.text)


def ask(error: BaseException, observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(run, "run_arm", ended)
    monkeypatch.setattr(benchmark, "_requests", lambda one: 1)
    one = cast(PreparedTask, SimpleNamespace(task=None, settings=None, place=Path("a")))
    answers, client = cast(Answers, None), cast(ServerClient, None)
    benchmark._ask_one("int2", one, answers, client, "label", observer)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143)], ids=["INT", "TERM"])
def test_a_signal_says_that_answers_are_kept(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)) as raised:
        ask(error, SILENT, monkeypatch)
    assert raised.value.__notes__ == [KEPT]


def test_a_dead_server_says_that_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hearing = Hearing()
    with pytest.raises(ServerFailed):
        ask(ServerFailed("it died."), hearing, monkeypatch)
    assert hearing.notes == [f"{KEPT}."]
