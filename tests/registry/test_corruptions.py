"""Damaged deliveries: every one is refused, and nothing in the store is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hub_clients import HUB_2, VERSIONS

SUPPORT = Path(__file__).parents[1] / "support"


def corrupted(folder: Path, count: int, scheme: str, version: int = 1) -> dict[str, Any]:
    """What `corruption_run.py` found."""
    state = {
        f"OSCAR_ZOO_{name}": str(folder / name.lower())
        for name in ("CACHE", "DATA", "STATE", "CONFIG")
    }
    path = {"PYTHONPATH": str(HUB_2)} if version == 2 else {}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "corruption_run.py"), str(count), "20261120", scheme],
        env={
            **os.environ,
            **state,
            **path,
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(folder),
            "HOME": str(folder),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_damaged_deliveries_from_hugging_face(tmp_path: Path, version: int) -> None:
    count = 300 if version == 1 else 120
    result = corrupted(tmp_path, count, "hf", version)
    assert result["accepted"] == []
    assert result["refused"] == count
    assert result["same_size"] >= 0.25 * count
    assert result["unchanged"]
    assert result["healed"]


def test_damaged_deliveries_from_modelscope(tmp_path: Path) -> None:
    result = corrupted(tmp_path, 120, "ms")
    assert (result["accepted"], result["refused"], result["unchanged"], result["healed"]) == (
        [],
        120,
        True,
        True,
    )
