"""The list of all hooks, and the one call that hands them to SGLang."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import setting_flags
from oscar_zoo.engines.sglang.bounds import grammars
from oscar_zoo.engines.sglang.compat import (
    backends,
    forward_batch,
    geometry,
    hook_targets,
    releases,
)
from oscar_zoo.engines.sglang.compat import requests as compat_requests
from oscar_zoo.engines.sglang.hooks import memory, observation, prefix_cache, requests, server_args
from oscar_zoo.engines.sglang.worker import FIRED
from oscar_zoo.runtime.batch import longest_chains


def install() -> None:
    releases.sglang_version()
    hooks: dict[str, hook_targets.Hook] = {
        "add_cli_args": server_args.add_cli_args,
        "set_defaults": server_args.set_defaults,
        "check_server_args": server_args.check_server_args,
        "model_arguments": server_args.model_arguments,
        "rendezvous": server_args.rendezvous,
        "kv_dtype": memory.kv_dtype,
        "slot_bytes": memory.slot_bytes,
        "draft_bytes": memory.draft_bytes,
        "states": memory.states,
        "budget": memory.budget,
        "rows": memory.rows,
        "pool": memory.pool,
        "wrap": wrap,
        "sliding_sizes": memory.sliding_sizes,
        "sliding_divide": memory.sliding_divide,
        "sliding_limit": memory.sliding_limit,
        "sliding_keep": memory.sliding_keep,
        "tail": prefix_cache.tail,
        "alloc": prefix_cache.alloc,
        "match": prefix_cache.match,
        "admit": prefix_cache.admit,
        "release": prefix_cache.release,
        "flush": prefix_cache.flush,
        "model": server_args.model,
        "divided": requests.divided,
        "arrives": requests.arrives,
        "prompt": requests.prompt,
        "http": requests.http,
        "logprobs": requests.logprobs,
        "server_info": observation.server_info,
        "metrics": observation.metrics,
        "update_metrics": observation.update_metrics,
        "prefix_hits": observation.prefix_hits,
    }
    hook_targets.install(
        hooks, setting_flags.BACKEND, make_backend, {"oscar_report": observation.oscar_report}
    )


def wrap(original: Any, runner: Any, backend: Any) -> Any:
    """Let SGLang put our backend beside that of layers with states."""
    if "states" not in FIRED:
        return original(runner, backend)
    return backends.wrap(original, runner, backend)


def make_backend(runner: Any) -> Any:
    from oscar_zoo.engines.sglang.backend import OscarAttentionBackend

    compat_requests.guard_grammars(grammars.guarded, grammars.followed, grammars.forget)
    full = OscarAttentionBackend(runner)
    if full.chains_only and forward_batch.by_ngrams():
        hook_targets.install_chains(chains)
    if geometry.sliding_pool(runner.token_to_kv_pool) is None:
        return full
    from oscar_zoo.engines.sglang.backend import SlidingOnCpu, WindowedBackend

    on_gpu = str(runner.device).startswith("cuda")
    make = backends.sliding_backend if on_gpu else SlidingOnCpu
    return WindowedBackend(full, make(runner))


def chains(result: Any, *_: Any, **__: Any) -> Any:
    """Keep one chain of the drafts of every request. SGLang's table gives several of them, whatever
    breadth it is asked for: one for each beginning that it knows, and zeros below the last
    token."""
    FIRED.add("chains")
    return longest_chains(*result)
