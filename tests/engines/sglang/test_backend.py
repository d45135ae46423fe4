"""What the attention backend asks of the cache, as far as that can be seen without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from sglang_forks import shared


@pytest.mark.sglang
@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_a_decode_graph_is_captured_before_any_request(tmp_path: Path) -> None:
    """Hooks on request rows have seen nothing yet; a replay wants to know that they run."""
    out, log = tmp_path / "calls", tmp_path / "log"
    status = shared().call("backend_child:decode_graph", tmp_path, log, out=str(out))
    assert status == 0, log.read_text()[-4000:]
    assert json.loads(out.read_text()) == ["begin decode", "ServerFailed", "refill decode"]
