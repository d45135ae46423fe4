"""Kernels are interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import triton_interpreter  # noqa: F401
from cli_output import Cli


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)
