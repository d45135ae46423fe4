"""What the attention backend asks of the cache, as far as that can be seen without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from sglang_forks import shared

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="sglang is not installed"
    ),
]


def test_a_decode_graph_is_captured_before_any_request(tmp_path: Path) -> None:
    """Hooks on request rows have seen nothing yet; a replay wants to know that they run."""
    calls = _calls(tmp_path, "decode_graph")
    assert calls == ["begin decode", "ServerFailed", "refill decode"]


def test_a_pass_of_padding_rows_runs_before_any_request(tmp_path: Path) -> None:
    """SGLang tunes FlashInfer's experts with such a pass; rows of requests stay refused."""
    assert _calls(tmp_path, "eager_warm_up") == ["begin decode", "ServerFailed"]


def _calls(folder: Path, child: str) -> list[str]:
    out, log = folder / "calls", folder / "log"
    status = shared().call(f"engine_calls:{child}", folder, log, out=str(out))
    assert status == 0, log.read_text()[-4000:]
    calls: list[str] = json.loads(out.read_text())
    return calls
