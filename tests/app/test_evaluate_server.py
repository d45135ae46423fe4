"""`app.evaluate_server`: which servers a sweep starts, and that the failure of one is a result."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.app import evaluate_server, server_answers
from oscar_zoo.app.evaluate_server import ServerEvaluation, sweep
from oscar_zoo.app.server_answers import ServerFailure
from oscar_zoo.engines.sglang.launch.variants import ServerVariant
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Note, Silent


@pytest.mark.parametrize(("device", "gpus", "ranks"), [("cpu", 2, {1}), (None, 2, {1, 2})])
def test_a_sweep_uses_two_ranks_where_there_are_two_gpus(
    monkeypatch: pytest.MonkeyPatch, device: str | None, gpus: int, ranks: set[int]
) -> None:
    monkeypatch.setattr(evaluate_server.nvidia_smi, "default_device", lambda: "cuda")
    monkeypatch.setattr(evaluate_server.nvidia_smi, "visible", lambda cards: range(gpus))
    wanted = sweep(device)
    assert {one.tp for one in wanted} == ranks
    assert {(one.chunk, one.page_size) for one in wanted} == {
        (chunk, page) for chunk in (512, 8192) for page in (1, 16)
    }
    assert len(sweep(device, full=True)) == 8 * len(ranks) > len(wanted)


class Recorder(Silent):
    def __init__(self) -> None:
        self.notes: list[Note] = []

    def note(self, note: Note) -> None:
        self.notes.append(note)


@dataclass
class Servers:
    """Starts servers that are no servers; those of `broken` fail."""

    broken: tuple[ServerVariant, ...]

    @contextmanager
    def start(self, wanted: ServerVariant, news: object) -> Iterator[Any]:
        if wanted in self.broken:
            raise ServerFailed("it died.", hint="see the log")
        yield SimpleNamespace(client=wanted)


def ask(monkeypatch: pytest.MonkeyPatch, wanted: list[ServerVariant], servers: Servers) -> Any:
    monkeypatch.setattr(server_answers, "_wanted_server", lambda variant, *_: variant)
    monkeypatch.setattr(server_answers, "own_server", servers.start)
    monkeypatch.setattr(server_answers, "_ask", lambda client, *_, radix: (client, radix))
    seen, subject = Recorder(), SimpleNamespace(questions=None)
    runs, failures = server_answers.ask_own_servers(wanted, subject, (), 1.0, seen)  # type: ignore[arg-type]
    return runs, failures, seen.notes


def test_one_of_several_servers_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = ServerVariant(), ServerVariant(chunk=64, radix=False)
    runs, failures, notes = ask(monkeypatch, [bad, good], Servers((bad,)))
    assert runs == [(good, True)]
    assert [(one.variant, one.error.message) for one in failures] == [(bad, "it died.")]
    assert [note.code for note in notes] == ["server.failed"]
    assert str(bad) in notes[0].text and notes[0].facts["hint"] == "see the log"


def test_the_only_server_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = ServerVariant()
    with pytest.raises(ServerFailed):
        ask(monkeypatch, [bad], Servers((bad,)))


def test_an_evaluation_passes_only_without_failures_and_violations() -> None:
    def found(rows: Any = (), failures: Any = ()) -> ServerEvaluation:
        nothing: Any = None
        return ServerEvaluation("m", nothing, "cpu", nothing, nothing, rows, failures)

    right, wrong = SimpleNamespace(violations=()), SimpleNamespace(violations=("off",))
    assert found((right,)).passed
    assert not found((right, wrong)).passed
    assert not found((right,), (ServerFailure(ServerVariant(), ServerFailed("x")),)).passed
