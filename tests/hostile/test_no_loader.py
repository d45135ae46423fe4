"""Untrusted bytes reach no importer, no pickle and no torch: watched with an audit hook, torch made
unimportable."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).resolve().parents[1] / "support"

WATCH = """
import sys
sys.modules["torch"] = None
import hostile
from oscar_zoo.artifact.verify import verify_files
import tiny_rotations as tiny
from oscar_zoo.artifact.writer import rotation_bytes

good = rotation_bytes(tiny.rotation_set())
files = [(name, data) for name, _, data in hostile.corpus()]
assert type(verify_files({"k_rotation.pt": good})).__name__ == "Verified"
for name, data in files:
    verify_files({"k_rotation.pt": data})  # whatever numpy or pydantic import late is loaded now
seen, active = [], True
def hook(event, arguments):
    if active and event.split(".")[0] in ("import", "pickle", "exec", "compile", "open", "os", "subprocess", "socket"):
        seen.append((event, str(arguments)[:80]))
sys.addaudithook(hook)
for name, data in files:
    verify_files({"k_rotation.pt": data})
outcome = verify_files({"k_rotation.pt": good})
active = False
assert type(outcome).__name__ == "Verified"
loaded = sys.modules.get("torch")
assert loaded is None, loaded
print(len(files), seen)
"""  # noqa: E501


def run(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(SUPPORT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_corpus_causes_no_import_call_or_open() -> None:
    count, seen = run(WATCH).split(" ", 1)
    assert int(count) >= 300
    assert seen.strip() == "[]"
