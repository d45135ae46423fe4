"""The main job end to end, as `make demo` runs it, on less text: compute, verify, publish, pull,
measure, serve."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import smollm2
import torch
from engines import needs_sglang
from tiny_models import llama_in_gguf

from oscar_zoo.models.loading import load_model
from oscar_zoo.registry.pins import PinFile

ROOT = Path(__file__).resolve().parents[1]
FAKE = """#!/bin/sh
echo "$@" >> commands.txt
mkdir -p rotation && touch rotation/oscar.json rotation.report.html
echo '{"rows": []}'
"""
WAITING = """#!/usr/bin/env python3
import sys, time
try:
    print("begun", file=sys.stderr, flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The demo as a module, with a command line that only writes down what it was asked."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")
    module = importlib.import_module("demo")
    monkeypatch.setattr(module, "CLI", program(tmp_path / "oscar-zoo", FAKE))
    return module


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def computations(demo: ModuleType, work: Path, options: Sequence[str] = ()) -> list[str]:
    """The command lines of `compute` that a run in `work` comes to."""
    demo.prepare(work, options)
    os.chdir(work)
    demo.compute(options)
    told = work / "commands.txt"
    return told.read_text().splitlines() if told.exists() else []


def test_the_demo_computes_once_from_the_same_inputs(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, (quick, _) = tmp_path / "demo", demo.QUICK
    (first,) = computations(demo, work, quick)
    assert first.startswith("compute ") and set(quick) <= set(first.split())
    assert computations(demo, work, quick) == []
    (whole,) = computations(demo, work)
    assert not {"-q", "--quiet", "--resume", *quick} & set(whole.split())
    assert computations(demo, work) == []
    assert (work / "rotation.report.html").exists()
    text = tmp_path / "calibration.txt"
    text.write_text("another text")
    monkeypatch.setattr(demo, "ROOT", Path("/"))
    monkeypatch.setattr(demo, "CALIBRATION", text)
    assert len(computations(demo, work)) == 1


def test_an_interrupted_computation_of_the_demo_continues(demo: ModuleType, tmp_path: Path) -> None:
    work = tmp_path / "demo"
    demo.prepare(work)
    (work / "rotation.work/whole").mkdir(parents=True)
    (command,) = computations(demo, work)
    assert command.endswith("--resume")


def test_the_demo_measures_once_what_has_not_changed(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The key is everything that the result depends on: inputs, text, options, the rotation."""
    work, options = tmp_path / "demo", ("--windows", "2")

    def evaluations(options: Sequence[str] = options) -> list[str]:
        computations(demo, work)
        assert demo.measure(options) == {"rows": []}
        told = work / "commands.txt"  # the demo empties the folder
        lines = told.read_text().splitlines() if told.exists() else []
        return [line for line in lines if line.startswith("eval ")]

    (first,) = evaluations()
    assert first.endswith("--windows 2 --json")
    capsys.readouterr()
    assert evaluations() == []
    assert "measured by an earlier run" in capsys.readouterr().out
    (work / "rotation/more").write_text("another rotation")
    assert len(evaluations()) == 1
    assert len(evaluations(("--windows", "3"))) == 1
    text = tmp_path / "validation.txt"
    text.write_text("another text")
    monkeypatch.setattr(demo, "VALIDATION", text)
    assert len(evaluations(("--windows", "3"))) == 1
    assert evaluations(("--windows", "3")) == []
    (work / "rotation.eval.json").write_text("{")
    assert len(evaluations(("--windows", "3"))) == 1


def test_the_demo_does_not_read_the_lock_of_the_checkout(demo: ModuleType, tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "oscar-zoo.lock").write_text("of steps by hand")
    demo.prepare(tmp_path / ".demo")
    os.chdir(tmp_path / ".demo")
    assert PinFile.of_project().read().artifacts == ()


def test_an_interrupted_demo_ends_without_a_traceback(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[1]); import demo;"
        " demo.CLI = pathlib.Path(sys.argv[2]); sys.argv[1:] = ['--work', sys.argv[3]];"
        " sys.exit(demo.main())"
    )
    fake, work = program(tmp_path / "oscar-zoo", WAITING), tmp_path / "demo"
    child = subprocess.Popen(
        [sys.executable, "-c", script, ROOT / "examples", fake, work],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert child.stderr is not None
    assert child.stderr.readline() == "begun\n"
    os.killpg(child.pid, signal.SIGINT)
    _, told = child.communicate(timeout=300)
    assert child.returncode == 130
    assert told == "\nInterrupted; the next run continues with what was computed.\n"


def test_a_model_comes_out_of_gguf_as_it_was(demo: ModuleType, tmp_path: Path) -> None:
    model = llama_in_gguf(tmp_path / "tiny.gguf")
    smollm2.make(tmp_path / "tiny.gguf", tmp_path / "demo/model")
    demo.prepare(tmp_path / "demo", source=tmp_path / "demo/model")
    loaded = load_model(str(tmp_path / "demo/model"))
    found = loaded.model.state_dict()
    assert loaded.dtype == "bfloat16" and found.keys() == model.keys()
    assert all(torch.equal(found[name], weight) for name, weight in model.items())
    assert loaded.tokenizer.tokenize("ab12") == ["ab", "1", "2"]
    assert loaded.tokenizer.eos_token == "<|im_end|>" and loaded.tokenizer.chat_template == "chat"


def test_a_model_is_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    outside = {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, smollm2.__file__, tmp_path / "demo/model"]
    done = subprocess.run(command, env=outside, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "error: " in done.stderr
    assert not (tmp_path / "demo").exists() and smollm2.PACKAGE in done.stderr
    with pytest.raises(SystemExit, match="SHA-256"):
        smollm2.check(Path(__file__), smollm2.WHEEL_SHA256)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_sglang
def test_the_demo_ends_with_a_table_and_an_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py"), "--quick", "--work", tmp_path / "demo"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for step in ("compute", "verify", "publish", "pull", "eval", "serve"):
        assert f"$ oscar-zoo {step} " in done.stdout
    rows = re.findall(r"^(\S.*?)  +([\d.]+) +([\d.,]+) +([\d.]+)%$", done.stdout, re.MULTILINE)
    perplexity = {name: float(value.replace(",", "")) for name, _, value, _ in rows}
    order = ["BF16", "INT2 as computed", "Hadamard INT2, clipped", "Hadamard INT2", "INT2"]
    assert sorted(perplexity, key=lambda name: perplexity[name]) == order
    assert {name: bits for name, bits, _, _ in rows}["INT2 as computed"] == "2.50"
    assert perplexity["INT2 as computed"] < 1.015 * perplexity["BF16"]
    assert re.search(r"^Kept wush", done.stdout, re.MULTILINE)
    recall = {name: float(value) for name, _, _, value in rows}
    assert recall["BF16"] > 99 and recall["INT2 as computed"] > 90 > recall["INT2"]
    steps = re.findall(r"^  serve it +\S+ serve (\S+) --model (\S+)$", done.stdout, re.MULTILINE)
    (served,) = steps
    assert all(Path(place).is_dir() for place in served)
    answered = re.search(r"expected '(\d{6})', answered '(.*)'", done.stdout)
    assert answered is not None and answered[2].strip() == answered[1]
