"""Attempts side by side: what one of them does never hurts the others."""

from __future__ import annotations

import sys
from pathlib import Path

from architecture_attempts import Attempt
from architecture_jobs import all_attempts
from architecture_page import Row, page, read_records, write_records

WORKS = "import sys, json; json.dump(['works', ''], open(sys.argv[1] + '/attempt.json', 'w'))"
FAILS = "import sys, json; json.dump(['fails', 'It.'], open(sys.argv[1] + '/attempt.json', 'w'))"
PROGRAMS = {
    "qwen2": WORKS,
    "qwen3": "print('before'); raise SystemExit(3)",
    "llama": "import time; time.sleep(600)",
    "phi3": FAILS + "; print('its log')",
    "glm4": WORKS,
}


def test_one_that_crashes_or_hangs_is_one_failure(tmp_path: Path) -> None:
    ended: list[str] = []
    (tmp_path / "logs" / "glm4").mkdir(parents=True)
    found = dict(
        all_attempts(
            list(PROGRAMS),
            lambda name, folder: [sys.executable, "-c", PROGRAMS[name], str(folder)],
            tmp_path / "work",
            jobs=2,
            limit=20,
            logs=tmp_path / "logs",
            ended=lambda folder: ended.append(folder.name),
        )
    )
    assert found == {
        "qwen2": Attempt("works"),
        "qwen3": Attempt("fails", "The attempt ended with status 3."),
        "llama": Attempt("fails", "The attempt took more than 20 seconds."),
        "phi3": Attempt("fails", "It."),
        "glm4": Attempt("works"),
    }
    assert sorted(ended) == ["llama", "qwen3"]
    logs = {path.parent.name: path.read_text() for path in (tmp_path / "logs").rglob("*.log")}
    assert logs == {"qwen3": "before\n", "llama": "", "phi3": "its log\n"}
    assert not (tmp_path / "logs" / "glm4").exists()


def test_a_column_of_the_gpu_is_recorded_beside_those_of_the_cpu(tmp_path: Path) -> None:
    works, tried = Attempt("works"), "SGLang 1 on an X"
    rows = {
        "qwen2": Row(works, works, works, "SGLang 2", Attempt("fails", "It stopped."), tried),
        "qwen3": Row(works, works, Attempt("refused", "No."), "SGLang 2"),
    }
    write_records(rows, tmp_path / "records.json")
    assert read_records(tmp_path / "records.json") == rows
    text = page(rows)
    assert "| Qwen2, Qwen2.5 | `qwen2` | works | works | works | fails |" in text
    assert "| Qwen3 | `qwen3` | works | works | refused | refused |" in text
    assert "## What is refused, and why\n\n- Qwen3: No.\n" in text
    assert "## What fails\n\n- Qwen2, Qwen2.5: It stopped.\n" in text
    assert tried in text
