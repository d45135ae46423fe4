"""The newest release of transformers, in front of the one that SGLang pins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEWEST = Path(sys.prefix) / "transformers-newest"


@pytest.mark.slow
@pytest.mark.skipif(not NEWEST.is_dir(), reason="`make install` puts it there")
def test_the_newest_release_gives_the_same_tokens() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # What stays out depends on our own code alone.
    command += ["-k", "not (cuda or widths or feedback or recording or wanted)"]
    files = [str(HERE / name) for name in ("test_cache.py", "test_architectures.py")]
    done = subprocess.run(
        [*command, *files], env=os.environ | {"PYTHONPATH": str(NEWEST)}, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout
