"""Real hub clients in child processes: what they are told, and what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HUB_2 = Path(sys.prefix) / "hub-2"
"""Where a second version of huggingface_hub lies, with what it needs."""

VERSIONS = [
    pytest.param(1, id="huggingface_hub-1"),
    pytest.param(
        2,
        id="huggingface_hub-2",
        marks=pytest.mark.skipif(not HUB_2.is_dir(), reason="no hub-2 folder in sys.prefix"),
    ),
]


def run_client(
    code: str, environment: Mapping[str, str], *, version: int = 1, **variables: str
) -> Any:
    """What a child process prints last, as JSON.

    Args:
        code: Python that prints one line of JSON at the end.
        environment: all of the child's variables, as `HubServer.environment` gives them.
        version: 1 for the huggingface_hub of this environment, 2 for the other one.
        variables: more variables.
    """
    home = Path(environment["HOME"])
    path = {"PYTHONPATH": str(HUB_2)} if version == 2 else {}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **path, **variables},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
