"""Call the attention backend as SGLang's runners do, in a fork of `sglang_forks`.

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
    from oscar_zoo.engines.sglang import worker

    backend, calls = _backend()
    batch = _decode_batch(rows=[1, 2])
    assert "alloc" not in worker.FIRED
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    _noting_refusal(calls, backend.init_forward_metadata_out_graph, batch)
    worker.FIRED.add("alloc")
    backend.init_forward_metadata_out_graph(batch)
    Path(out).write_text(json.dumps(calls))


def eager_warm_up(out: str) -> None:
    """A pass of padding rows before any request, as for FlashInfer's autotune, then rows of
    requests."""
    from oscar_zoo.engines.sglang import worker

    backend, calls = _backend()
    assert "alloc" not in worker.FIRED
    _noting_refusal(calls, backend.init_forward_metadata, _decode_batch(rows=[0, 0]))
    _noting_refusal(calls, backend.init_forward_metadata, _decode_batch(rows=[0, 1]))
    Path(out).write_text(json.dumps(calls))


def _backend() -> tuple[Any, list[str]]:
    from oscar_zoo.engines.sglang.backend import OscarAttentionBackend

    calls: list[str] = []
    backend: Any = object.__new__(OscarAttentionBackend)
    backend.pool = SimpleNamespace(device="cuda:0", windows=SimpleNamespace(fresh=set()))
    backend.window_on_hit = "recompute"
    backend.cache = SimpleNamespace(
        begin=lambda step: calls.append(f"begin {step.kind}"),
        refill=lambda step: calls.append(f"refill {step.kind}"),
    )
    return backend, calls


def _decode_batch(rows: list[int]) -> Any:
    numbers = torch.tensor(rows)
    return SimpleNamespace(
        req_pool_indices=numbers,
        seq_lens=numbers,
        out_cache_loc=numbers,
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_target_verify=lambda: False),
    )


def _noting_refusal(calls: list[str], call: Any, batch: Any) -> None:
    from oscar_zoo.errors import ServerFailed

    try:
        call(batch)
    except ServerFailed as error:
        calls.append(type(error).__name__)
