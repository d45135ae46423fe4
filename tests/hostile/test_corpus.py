"""Every bad file is refused with its own code, in a process with little memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="module")
def outcome() -> dict[str, Any]:
    environment = os.environ | {
        "PYTHONPATH": str(SUPPORT),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "hostile.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout))


def test_every_file_gets_its_code(outcome: dict[str, Any]) -> None:
    assert [row[:3] for row in outcome["rows"] if row[1] != row[2]] == []


def test_the_corpus_is_large_and_its_names_are_unique(outcome: dict[str, Any]) -> None:
    names = [row[0] for row in outcome["rows"]]
    assert len(names) >= 300
    assert len(set(names)) == len(names)
    assert len({row[1] for row in outcome["rows"]}) >= 75


def test_no_file_needs_much_memory(outcome: dict[str, Any]) -> None:
    assert outcome["peak_kib"] < 300 * 1024
