"""The GPU check where there is no GPU: what it says then, and the document that it writes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FACTS = {"GPU": "1 x NVIDIA H100 80GB HBM3, 80 GiB", "driver": "580.1", "torch": "2.11.0+cu130"}


@pytest.fixture(scope="module")
def document() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check_document", FOLDER / "document.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _section(document: ModuleType, gpu: str, date: str, *, status: str = "passed") -> str:
    results = [
        document.StepResult("compute with defaults", "passed", 12.4, "`wush-tuned` chosen"),
        document.StepResult("serve", status, 31.0, "ready | answered\nright"),
    ]
    return str(
        document.section(FACTS | {"GPU": gpu}, results, date=date, commit="abc1234", seconds=43.4)
    )


def test_without_a_gpu_one_line_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        [
            sys.executable,
            FOLDER / "run.py",
            "--work",
            tmp_path / "work",
            "--document",
            tmp_path / "written.md",
        ],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: the GPU check needs an NVIDIA GPU")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "work").exists() and not (tmp_path / "written.md").exists()


def test_make_says_the_same_before_it_installs_anything(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["make", "-s", "gpu-check"], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "error: the GPU check needs an NVIDIA GPU" in done.stderr
    assert "venv-gpu" not in done.stdout


def test_a_section_says_machine_commit_and_every_figure(document: ModuleType) -> None:
    made = _section(document, FACTS["GPU"], "2026-01-02")
    assert made.startswith("## 1 x NVIDIA H100 80GB HBM3, 80 GiB\n")
    assert (
        "**passed** on 2026-01-02, commit abc1234, 43 seconds in all.\ndriver 580.1, torch"
        " 2.11.0+cu130." in made
    )
    assert "| serve | passed | 31 | ready \\| answered right |" in made


def test_one_failed_step_fails_the_run(document: ModuleType) -> None:
    made = _section(document, FACTS["GPU"], "2026-01-02", status="FAILED")
    assert "**FAILED** on 2026-01-02" in made and "| serve | **FAILED** | 31 |" in made


def test_what_was_not_tried_has_not_passed(document: ModuleType) -> None:
    made = _section(document, FACTS["GPU"], "2026-01-02", status="not tried")
    assert "**1 passed, 1 not tried** on 2026-01-02" in made
    assert "| serve | not tried | 31 |" in made


def test_a_step_for_a_gpu_is_not_tried_on_a_cpu() -> None:
    """The rehearsal says so in the line of the step, which is what people read while it runs."""
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
import steps, window_drafts
from record import Record
check = steps.Check(Path("."), "cpu", ())
for step in (steps.kernel_tests, steps.serve_hybrid, window_drafts.serve_windowed_drafts):
    found = Record().timed(step.__name__, step, check)
    assert found.status == "not tried", found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel_tests: not tried (0 s) these tests need a GPU" in done.stdout


def test_a_run_that_was_interrupted_keeps_what_had_ended(tmp_path: Path) -> None:
    """The command of the second step gets the signal too, and its end is no failure of the step."""
    program = f"""
import subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {str(FOLDER)!r})
import document, record as records
from record import Record
from steps import CheckFailed
records.INTERRUPT_SECONDS = 300  # on a busy machine this thread may come long before the main one
def second(check):
    if subprocess.run(["sh", "-c", "kill -INT 0; exec sleep 60"]).returncode:
        raise CheckFailed("the command was interrupted")
record = Record()
try:
    with ThreadPoolExecutor(2) as pool, record.until_interrupted(pool):
        record.timed("first", lambda check: "all is well", None)
        step = pool.submit(record.timed, "second", second, None)
        pool.submit(lambda: (step.result(), record.timed("after it", lambda check: "", None)))
        while not step.done():
            time.sleep(0.01)  # a signal just before a wait for a lock would come with the lock
        record.timed("third", second, None)
except KeyboardInterrupt:
    facts = {{"GPU": "none"}}
    print(document.section(facts, record.stopped(), date="d", commit="c", seconds=1))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True
    )
    assert "**not completed** on d" in done.stdout, done.stderr
    assert re.search(r"\| first \| passed \| \d+ \| all is well \|", done.stdout)
    assert "| second | not ended |" in done.stdout and "| third |" not in done.stdout
    assert "after it" not in done.stdout


def test_a_run_replaces_the_section_of_its_own_gpu_only(document: ModuleType) -> None:
    first = document.merge("", _section(document, "1 x H100", "2026-01-01"))
    both = document.merge(first, _section(document, "1 x H200", "2026-01-02"))
    again = document.merge(both, _section(document, "1 x H100", "2026-01-03"))
    assert again.count("## 1 x") == 2 and again.startswith("# GPU check\n")
    assert again.index("1 x H100") < again.index("1 x H200")
    assert "2026-01-01" not in again and "2026-01-02" in again and "2026-01-03" in again
    assert document.merge(again, _section(document, "1 x H100", "2026-01-03")) == again


def test_every_gpu_test_file_that_the_check_runs_exists() -> None:
    source = (FOLDER / "steps.py").read_text("utf-8")
    named = [
        word
        for word in source.replace('"', " ").replace(",", " ").split()
        if word.startswith("tests/")
    ]
    assert named and all((ROOT / name).exists() for name in named)


def test_answers_with_drafts_may_differ_where_two_tokens_are_nearly_as_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    compared = importlib.import_module("window_drafts").compared
    first = {7: -1.0, 8: -1.25}
    other = {8: -1.0, 7: -1.125}
    assert compared([[first, first]], [[dict(first), {7: -2.0}]]) == (1, [])
    assert compared([[first, first]], [[first, other]]) == (0, [0.25])
    assert compared([[first], [first]], [[{9: -1.0}], [first]]) == (1, [float("inf")])
