"""The GPU check where there is no GPU: what it says then, and what it does not try."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


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


def test_every_gpu_test_file_that_the_check_runs_exists() -> None:
    named = re.findall(r'"(tests/[^"]+)"', (FOLDER / "steps.py").read_text("utf-8"))
    assert named and all((ROOT / name).exists() for name in named)
