"""One architecture in a process of its own: compute, serve, compare, and write what came of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/support"))

from architecture_attempts import CPU, GPU, compute, serve
from architecture_page import write_attempt


def main(name: str, folder: str, device: str, flags: str, start_seconds: str) -> None:
    """Arguments as strings; `flags` are more flags of SGLang in one word."""
    place = GPU if device == "cuda" else CPU
    place = place.given(tuple(shlex.split(flags)), int(start_seconds))
    work = Path(folder) / "work"
    attempt = compute(name, work, place)
    if attempt.outcome == "works":
        attempt = serve(name, work, place)
    write_attempt(attempt, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
