"""Benchmarks of large models on a machine without a GPU: refused before anything starts."""

from __future__ import annotations

import pytest
from refusals import refused

from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.models import hardware

COMMANDS = (("bench", "serve", "--cases", "1x64"), ("bench", "load", "--clients", "2"))


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(hardware, "default_device", lambda: "cpu")
    monkeypatch.setattr(server, "_start", started)
    for module in ("bench", "bench_load"):
        monkeypatch.setattr(f"oscar_zoo.app.{module}.require_serve", lambda: None)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[1])
def test_a_large_model_needs_a_device_that_was_named(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, 1, *command, "--dummy-weights", "Qwen3-8B")
    assert "no GPU was found, and Qwen3-8B on a CPU takes hours" in line
    assert "To do it all the same: --device cpu" in line


@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[1])
def test_one_that_does_not_fit_is_refused_as_serve_refuses_it(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_ram", lambda: 32 * 10**9)
    words = (*command, "--dummy-weights", "Qwen3-8B", "--device", "cpu")
    line = refused(capsys, 1, *words)
    assert "Qwen3-8B needs" in line and "cpu" in line
