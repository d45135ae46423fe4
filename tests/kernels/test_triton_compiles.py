"""The Triton kernels compiled for an NVIDIA GPU that is not here: codes of 4 bits fit its registers
as codes of 2 bits do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = Path(__file__).parents[1] / "support/ptx_child.py"


@pytest.fixture(scope="module")
def registers() -> dict[str, dict[str, int]]:
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, CHILD], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("kernel", ["decode", "read", "write"])
def test_registers_do_not_spill_more_than_with_2_bits(
    kernel: str, registers: dict[str, dict[str, int]]
) -> None:
    narrow, wide = registers[f"{kernel} 2 2"], registers[f"{kernel} 4 4"]
    assert 0 < wide["registers"] <= 255
    assert wide["spilled"] <= narrow["spilled"]
    assert wide["instructions"] < 1.1 * narrow["instructions"]
