"""Call the attention backend as SGLang's CUDA-graph runner does, in a fork of `sglang_forks`.

The backend has no runner and no GPU: a stand-in for the cache notes which of its calls are made.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def decode_graph(out: str) -> None:
    """Capture before any request, then replay without and with the hook that watches rows."""
    from oscar_zoo.engines.sglang import fired_hooks
    from oscar_zoo.engines.sglang.backend import OscarAttentionBackend
    from oscar_zoo.errors import ServerFailed

    calls: list[str] = []
    backend: Any = object.__new__(OscarAttentionBackend)
    backend.pool = SimpleNamespace(device="cuda:0", windows=SimpleNamespace(fresh=set()))
    backend.window_on_hit = "recompute"
    backend.cache = SimpleNamespace(
        begin=lambda step: calls.append(f"begin {step.kind}"),
        refill=lambda step: calls.append(f"refill {step.kind}"),
    )
    rows = torch.tensor([1, 2])
    batch = SimpleNamespace(
        req_pool_indices=rows,
        seq_lens=rows,
        out_cache_loc=rows,
        forward_mode=SimpleNamespace(is_extend=lambda: False),
    )
    assert "alloc" not in fired_hooks.FIRED
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    try:
        backend.init_forward_metadata_out_graph(batch)
    except ServerFailed as error:
        calls.append(type(error).__name__)
    fired_hooks.FIRED.add("alloc")
    backend.init_forward_metadata_out_graph(batch)
    Path(out).write_text(json.dumps(calls))
