"""Record what command lines answer, and compare a later run with the record.

    python contrib/record_cli.py contrib/recorded.txt before.json

records, and compares once `before.json` is there. Each line of the first file is one command line,
run in this order in one new folder with state of its own and no network, so that a line may use
what those before it made; the example model and the texts are in `examples/`. Kept are exit code,
standard output and standard error, and JSON as values. What differs between two runs of the same
program (the folder, times, seconds, process numbers) is replaced. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS_PER_LINE = 600
VOLATILE = [
    (re.compile(r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?)?"), "<date>"),
    (re.compile(r"\b\d+(\.\d+)? (s|ms|seconds|minutes|min|h)\b"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? [kMG]B/s"), "<speed>"),
    (re.compile(r'("revision": "|(?:README\.md|\w+\.json) .*sha256 )[0-9a-f]{64}'), r"\1<dated>"),
    (re.compile(r'("\w*(?:seconds|duration|pid)": )[\d.e+-]+'), r'\1"<number>"'),
]


def environment(folder: Path) -> dict[str, str]:
    """Nothing of this user: state in `folder`, no hub beyond it, a terminal of 100 columns."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    states = ("CACHE", "DATA", "STATE", "CONFIG")
    return {
        **kept,
        **{f"OSCAR_ZOO_{name}": str(folder / name.lower()) for name in states},
        "OSCAR_ZOO_HUB": f"file:{folder}/zoo",
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "100",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }


def plain(text: str, folder: Path) -> Any:
    for pattern, word in ((re.compile(re.escape(str(folder))), "<here>"), *VOLATILE):
        text = pattern.sub(word, text)
    try:
        return json.loads(text)
    except ValueError:
        return text.splitlines()


def record(lines: list[str], program: str) -> dict[str, dict[str, Any]]:
    answers: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        for name in ("home", "zoo"):
            (folder / name).mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
        for line in lines:
            done = subprocess.run(
                [program, *shlex.split(line)],
                cwd=folder,
                env=environment(folder),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS_PER_LINE,
            )
            out, err = (text.decode(errors="replace") for text in (done.stdout, done.stderr))
            answers[line] = {
                "code": done.returncode,
                "stdout": plain(out, folder),
                "stderr": plain(err, folder),
            }
            print(f"{done.returncode:3d}  {line}", file=sys.stderr)
    return answers


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    found = [f"no longer asked: {line}" for line in before if line not in after]
    for line, answer in after.items():
        if line not in before:
            found.append(f"not recorded: {line}")
            continue
        found += [
            f"{line}\n  {part} was  {json.dumps(old)}\n  {part} is   {json.dumps(answer[part])}"
            for part, old in before[line].items()
            if answer[part] != old
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", type=Path)
    parser.add_argument("answers", type=Path, help="is written, or compared with if it is there")
    parser.add_argument(
        "--program", default=str(Path(sys.executable).with_name("oscar-zoo")), help="what is run"
    )
    asked = parser.parse_args()
    text = asked.lines.read_text("utf-8").splitlines()
    lines = [line for line in map(str.strip, text) if line and not line.startswith("#")]
    if len(set(lines)) < len(lines):
        parser.error("a command line stands there twice")
    answers = record(lines, asked.program)
    if not asked.answers.exists():
        asked.answers.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", "utf-8")
        print(f"recorded {len(answers)} command lines in {asked.answers}")
        return 0
    found = differences(json.loads(asked.answers.read_text("utf-8")), answers)
    print(*found, f"{len(found)} differences in {len(answers)} command lines", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
