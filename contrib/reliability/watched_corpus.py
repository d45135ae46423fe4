"""Verifies the bad files while an audit hook watches, with torch made unimportable.

Prints the number of files and what was imported, opened, compiled, started or connected meanwhile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests/support")]

import hostile  # noqa: E402
import tiny_artifacts as tiny  # noqa: E402

from oscar_zoo.artifact.verify import verify_files  # noqa: E402
from oscar_zoo.artifact.writer import rotation_bytes  # noqa: E402

WATCHED = ("import", "pickle", "exec", "compile", "open", "os", "subprocess", "socket")


def main() -> None:
    """Watch."""
    good = rotation_bytes(tiny.rotation_set())
    files = [data for _, _, data in hostile.corpus()]
    for data in (good, *files):
        verify_files({"k_rotation.pt": data})  # what numpy or pydantic import late is loaded now
    seen: list[str] = []
    active = True

    def hook(event: str, arguments: Any) -> None:
        if active and event.split(".")[0] in WATCHED:
            seen.append(f"{event} {str(arguments)[:80]}")

    sys.addaudithook(hook)
    for data in files:
        verify_files({"k_rotation.pt": data})
    outcome = verify_files({"k_rotation.pt": good})
    active = False
    if type(outcome).__name__ != "Verified" or sys.modules.get("torch") is not None:
        seen.append(f"the good file is {outcome!r}, torch is {sys.modules.get('torch')!r}")
    print(json.dumps([len(files), seen]))


if __name__ == "__main__":
    main()
