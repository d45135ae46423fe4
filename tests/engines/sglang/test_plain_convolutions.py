"""What the engines of the tests run in place of SGLang's convolution kernels computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import RELEASES, Engines, needs_sglang

pytestmark = [pytest.mark.sglang, needs_sglang]


@pytest.mark.parametrize("release", RELEASES)
def test_they_give_what_the_kernels_give(tmp_path: Path, release: str) -> None:
    """Prefill behind a state and without one, of sequences shorter than the states, and decoding;
    padding writes nothing."""
    engines = Engines(tmp_path, release)
    found = engines.call("plain_convolutions:compare")
    engines.close()
    assert len(found) == 8 and max(found.values()) < 1e-5, found
