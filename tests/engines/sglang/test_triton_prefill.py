"""Heads that FlashInfer does not have are prefilled by SGLang's own Triton kernel, which is fed as
Gemma 4 needs it: parts over new tokens and over cached ones, and their log-sum-exps."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import RELEASES, Engines, needs_sglang

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]

WIDTHS = [(512, 512), (96, 96), (192, 96)]


@pytest.mark.parametrize("release", RELEASES)
def test_parts_and_their_sum_are_those_of_plain_attention(release: str, tmp_path: Path) -> None:
    runs = Engines(tmp_path, release)
    try:
        found = runs.call("engine_calls:differences", widths=WIDTHS)
    finally:
        runs.close()
    for widths, differences in zip(WIDTHS, found, strict=True):
        assert max(differences) < 1e-4, widths
