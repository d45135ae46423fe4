"""Benchmarks on a machine without a GPU: what is refused, and remarked on, before anything
starts."""

from __future__ import annotations

import pytest
from cli_output import refused

from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch import server
from oscar_zoo.evaluate.bench import measuring
from oscar_zoo.models import hardware

COMMANDS = (("bench", "serve", "--cases", "1x64"), ("bench", "load", "--clients", "2"))
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one[1])


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(hardware, "default_device", lambda: "cpu")
    monkeypatch.setattr(server, "_start", started)
    monkeypatch.setattr(measuring, "require_serve", lambda: None)


@each_command
def test_a_large_model_needs_a_device_that_was_named(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, 1, *command, "--dummy-weights", "Qwen3-8B")
    assert "Qwen3-8B" in line and "--device cpu" in line


@each_command
def test_one_that_does_not_fit_is_refused_as_serve_refuses_it(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "available_ram", lambda: 32 * 10**9)
    words = (*command, "--dummy-weights", "Qwen3-8B", "--device", "cpu")
    line = refused(capsys, 1, *words)
    assert "Qwen3-8B needs" in line and "cpu" in line


@pytest.mark.parametrize(("device", "told"), [([], True), (["--device", "cpu"], False)])
def test_a_model_without_weights_on_a_cpu_nobody_named_is_remarked_on(
    device: list[str],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def measured(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "_measure_all", measured)
    assert run(["bench", "serve", "--dummy-weights", "tiny-qwen3-hard", *device]) == 130
    assert ("no GPU was found" in capsys.readouterr().err) == told
