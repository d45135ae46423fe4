"""Kernels are interpreted where there is no GPU, and every test draws the same numbers each
time."""

from pathlib import Path

import pytest
import torch
import triton_interpreter  # noqa: F401

from oscar_kernels import nvrtc


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for what NVRTC compiles; a test without NVRTC is skipped."""
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv(nvrtc.VARIABLE, str(tmp_path / "kernels"))
    return tmp_path / "kernels"
