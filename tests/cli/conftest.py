"""What most tests of the command line need."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_output import Cli
from tiny_artifacts import artifact_files, write_folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder with an artifact for the example model."""
    return write_folder(tmp_path / "artifact", artifact_files())
