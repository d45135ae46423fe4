"""What a benchmark says before it starts servers."""

from __future__ import annotations

import pytest

from oscar_zoo.app import bench, bench_device
from oscar_zoo.app.bench import BenchRequest
from oscar_zoo.observer import Note, Silent


class Remarks(Silent):
    """Keeps the codes of all remarks."""

    def __init__(self) -> None:
        self.codes: list[str] = []

    def note(self, note: Note) -> None:
        self.codes.append(note.code)


class Started(Exception):
    """The servers would start now."""


@pytest.mark.parametrize(("device", "told"), [(None, ["bench.on_cpu"]), ("cpu", [])])
def test_a_model_without_weights_on_a_cpu_nobody_named_is_remarked_on(
    monkeypatch: pytest.MonkeyPatch, device: str | None, told: list[str]
) -> None:
    def start(*arguments: object) -> None:
        raise Started

    monkeypatch.setattr(bench, "require_serve", lambda: None)
    monkeypatch.setattr(bench_device, "pick_serving_device", lambda wanted: ("cpu", 0))
    monkeypatch.setattr(bench, "_measure_all", start)
    remarks = Remarks()
    with pytest.raises(Started):
        bench.compare(BenchRequest(None, dummy_weights="tiny-qwen3-hard", device=device), remarks)
    assert remarks.codes == told
