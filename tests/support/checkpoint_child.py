"""Where a release of SGLang saves a state during a prefill, after we named a place.

The scheduler's own method decides. Its batch, request and configuration are plain objects.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

STEP = 64


def saved_places(cases: list[dict[str, Any]], out: str) -> None:
    """For every case, the place that each of its passes saves; JSON in the file `out`.

    A case has `length` (tokens of the prompt), `passes` (their ends), `prefix` (cached tokens),
    `branch` (a place that SGLang found itself) and `recent`.
    """
    with configuration():
        found = [passes(**case) for case in cases]
    Path(out).write_text(json.dumps(found))


def passes(length: int, passes: list[int], prefix: int, branch: int | None, recent: int) -> Any:
    import torch
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from oscar_zoo.engines.sglang.compat import scheduling

    rows = SimpleNamespace(
        enable_mamba_extra_buffer=True, get_mamba_ping_pong_other_idx=lambda index: 1 - index
    )
    tree = SimpleNamespace(page_size=1, req_to_token_pool=rows)
    batch = SimpleNamespace(
        req_to_token_pool=rows,
        tree_cache=tree,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace()),
    )
    request = SimpleNamespace(
        origin_input_ids=range(length),
        output_ids=(),
        mamba_branching_seqlen=branch,
        mamba_ping_pong_track_buffer=torch.tensor([3, 4]),
        mamba_next_track_idx=0,
    )
    request.kv = request  # where these numbers are depends on the release
    found = []
    for number, end in enumerate(passes):
        request.prefix_indices, request.prefix_len = range(prefix), prefix
        request.extend_range = SimpleNamespace(length=end - prefix)
        request.extend_len, request.extend_end = end - prefix, end
        if number == 0:
            scheduling.save_early(request, tree, recent)
        else:
            scheduling.name_place(request)
        request.mamba_last_track_seqlen = None
        ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, request)
        found.append(request.mamba_last_track_seqlen)
        prefix = end
    return found


@contextlib.contextmanager
def configuration() -> Any:
    """A server with an extra buffer of states, one token per page."""
    from sglang.srt import runtime_context
    from sglang.srt.managers import schedule_batch

    args = SimpleNamespace(
        mamba_cache_chunk_size=STEP, enable_mamba_extra_buffer_lazy=lambda: False
    )
    values = {
        "get_server_args": lambda: args,
        "mamba_cache_chunk_size": lambda: STEP,
        "get_exec": lambda: SimpleNamespace(
            mamba=SimpleNamespace(enable_mamba_extra_buffer_lazy=False)
        ),
        "get_parallel": lambda: SimpleNamespace(dcp_enabled=False),
    }
    with contextlib.ExitStack() as stack:
        for module in (runtime_context, schedule_batch):
            for name, value in values.items():
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, value))
        yield
