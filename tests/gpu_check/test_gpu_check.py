"""The GPU check where there is no GPU: what it says then, and the document that it writes."""

import importlib
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


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("document")


def _section(document: ModuleType, gpu: str, date: str, *, status: str = "passed") -> str:
    results = [
        document.StepResult("compute with defaults", "passed", 12.4, "`wush-tuned` chosen"),
        document.StepResult("serve", status, 31.0, "ready | answered\nright"),
    ]
    facts = FACTS | {"GPU": gpu}
    return str(document.section(facts, results, date=date, commit="abc1234", seconds=43.4))


def run_without_gpu(folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """The command in the checkout, where the driver answers that there is no GPU."""
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (folder / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
    words = list(map(str, command))
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=env)
    assert "error: the GPU check needs an NVIDIA GPU" in done.stderr
    return done


def test_without_a_gpu_one_line_says_what_is_missing(tmp_path: Path) -> None:
    work, written = tmp_path / "work", tmp_path / "written.md"
    run = (sys.executable, FOLDER / "run.py", "--work", work, "--document", written)
    done = run_without_gpu(tmp_path, *run)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not work.exists() and not written.exists()
    done = run_without_gpu(tmp_path, "make", "-s", "gpu-check")  # before it installs anything
    assert done.returncode == 2 and "venv-gpu" not in done.stdout


@pytest.mark.parametrize(
    ("status", "verdict", "row"),
    [
        (
            "passed",
            "**passed** on 2026-01-02",
            "| serve | passed | 31 | ready \\| answered right |",
        ),
        ("FAILED", "**FAILED** on 2026-01-02", "| serve | **FAILED** | 31 |"),
        ("not tried", "**1 passed, 1 not tried** on 2026-01-02", "| serve | not tried | 31 |"),
    ],
)
def test_a_section_says_machine_commit_and_every_figure(
    document: ModuleType, status: str, verdict: str, row: str
) -> None:
    """One failed step fails the run, and what was not tried has not passed."""
    made = _section(document, FACTS["GPU"], "2026-01-02", status=status)
    assert made.startswith("## 1 x NVIDIA H100 80GB HBM3, 80 GiB\n")
    assert f"{verdict}, commit abc1234, 43 seconds in all." in made and row in made
    assert "driver 580.1, torch 2.11.0+cu130." in made


def test_a_step_for_a_gpu_is_not_tried_on_a_cpu(tmp_path: Path) -> None:
    """The rehearsal says so in the line of the step, which is what people read while it runs."""
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(FOLDER)!r})
import cards, steps, window_drafts
from record import Record
check = steps.Check(Path("."), "cpu", ())
tried = (steps.kernel_tests, steps.serve_hybrid, window_drafts.serve_windowed_drafts)
tried += (cards.older_chip_tests, steps.serve_latents, steps.compute_real)
for step in (*tried, steps.serve_real, steps.real_in_vllm):
    found = Record(Path({str(tmp_path / "passed")!r})).timed(step.__name__, step, check)
    assert found.status == "not tried", found
found = Record(Path({str(tmp_path / "passed")!r}), ["one"]).timed("one", lambda _: "", check)
assert found.status == "not tried", found
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kernel_tests: not tried (0 s) these tests need a GPU" in done.stdout


@pytest.mark.parametrize("given", [False, True])
def test_a_trained_model_is_not_tried_only_where_none_is_given_or_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """A folder that is given and does not work is a failure."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.syspath_prepend(FOLDER)
    steps = importlib.import_module("steps")
    model = tmp_path / "absent" if given else None
    check = steps.Check(tmp_path, "cuda", (), real_model=model)
    with pytest.raises(steps.CheckFailed if given else steps.NotTried, match=r"oscar-zoo|pip"):
        steps.compute_real(check)


def test_a_run_that_was_interrupted_keeps_what_had_ended(tmp_path: Path) -> None:
    """The command of the second step gets the signal too, and its end is no failure of the step."""
    program = f"""
import subprocess, sys, time
from pathlib import Path
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {str(FOLDER)!r})
import document, record as records
from record import Record
from steps import CheckFailed
records.INTERRUPT_SECONDS = 300  # on a busy machine this thread may come long before the main one
def second(check):
    if subprocess.run(["sh", "-c", "kill -INT 0; exec sleep 60"]).returncode:
        raise CheckFailed("the command was interrupted")
record = Record(Path({str(tmp_path / "passed")!r}))
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
    program = program.replace("all is well", "run again")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, start_new_session=True
    )
    assert "all is well" in done.stdout and "run again" not in done.stdout, done.stderr


def test_a_run_replaces_the_section_of_its_own_gpu_only(document: ModuleType) -> None:
    first = document.merge("", _section(document, "1 x H100", "2026-01-01"))
    both = document.merge(first, _section(document, "1 x H200", "2026-01-02"))
    again = document.merge(both, _section(document, "1 x H100", "2026-01-03"))
    assert again.count("## 1 x") == 2 and again.startswith("# GPU check\n")
    assert again.index("1 x H100") < again.index("1 x H200")
    assert "2026-01-01" not in again and "2026-01-02" in again and "2026-01-03" in again
    assert document.merge(again, _section(document, "1 x H100", "2026-01-03")) == again


def test_every_gpu_test_file_that_the_check_runs_exists() -> None:
    named = re.findall(r'"(tests/[^"]+)"', (FOLDER / "steps.py").read_text("utf-8"))
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
