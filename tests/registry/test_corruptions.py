"""A thousand damaged deliveries, with each version of the client: every one refused, nothing in the
store touched."""

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
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_thousand_damaged_deliveries_from_hugging_face(tmp_path: Path, version: int) -> None:
    result = corrupted(tmp_path, 1000, "hf", version)
    assert result["accepted"] == []
    assert result["refused"] == 1000
    assert result["same_size"] >= 300
    assert result["unchanged"]
    assert result["healed"]


def test_damaged_deliveries_from_modelscope(tmp_path: Path) -> None:
    result = corrupted(tmp_path, 200, "ms")
    assert (result["accepted"], result["refused"], result["unchanged"], result["healed"]) == (
        [],
        200,
        True,
        True,
    )
