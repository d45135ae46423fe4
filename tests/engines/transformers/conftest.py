"""Kernels are interpreted where there is no GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import triton_interpreter  # noqa: F401
from cli_output import Cli
from tiny_artifacts import artifact_files, write_folder
from tiny_models import EXAMPLE


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example `model`, which chats, and an `artifact` for it."""
    root = tmp_path_factory.mktemp("world")
    shutil.copytree(EXAMPLE, root / "model")
    write_folder(root / "artifact", artifact_files())
    return root
