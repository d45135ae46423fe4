"""The recorder in contrib/ keeps what commands answer and finds what changed."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_second_run_is_compared_with_the_first(tmp_path: Path) -> None:
    lines, answers = tmp_path / "lines.txt", tmp_path / "answers.json"
    lines.write_text("# a comment\n--version\nverify ./missing\ncache list --json\n")
    command = [sys.executable, str(ROOT / "contrib/record_cli.py"), str(lines), str(answers)]
    assert subprocess.run(command).returncode == 0
    recorded = json.loads(answers.read_text())
    assert [answer["code"] for answer in recorded.values()] == [0, 3, 0]
    assert recorded["cache list --json"]["stdout"]["artifacts"] == []
    assert subprocess.run(command).returncode == 0
    recorded["verify ./missing"]["code"] = 4
    answers.write_text(json.dumps(recorded))
    assert subprocess.run(command).returncode == 1
