"""The list of all hooks, and the one call that hands them to SGLang."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines.sglang import loopback_store, setting_flags
from oscar_zoo.engines.sglang.bounds import grammars
from oscar_zoo.engines.sglang.compat import (
    hook_targets,
    hybrid_backends,
    hybrid_parts,
    server_arguments,
    sliding_backend,
    speculation,
    versions,
)
from oscar_zoo.engines.sglang.compat import (
    requests as compat_requests,
)
from oscar_zoo.engines.sglang.fired_hooks import FIRED
from oscar_zoo.engines.sglang.hooks import (
    drafts,
    memory_pool,
    observation,
    prefix_cache,
    requests,
    server_args,
    sliding_windows,
    state_memory,
)


def install() -> None:
    """Register every hook with SGLang."""
    versions.sglang_version()
    hooks: dict[str, hook_targets.Hook] = {
        "add_cli_args": server_args.add_cli_args,
        "set_defaults": server_args.set_defaults,
        "check_server_args": server_args.check_server_args,
        "model_arguments": server_args.model_arguments,
        "rendezvous": rendezvous,
        "kv_dtype": memory_pool.kv_dtype,
        "slot_bytes": memory_pool.slot_bytes,
        "draft_bytes": memory_pool.draft_bytes,
        "states": state_memory.states,
        "budget": memory_pool.budget,
        "rows": memory_pool.rows,
        "pool": memory_pool.pool,
        "wrap": wrap,
        "sliding_sizes": sliding_windows.pool_sizes,
        "sliding_divide": sliding_windows.divide,
        "sliding_limit": sliding_windows.limit,
        "sliding_keep": sliding_windows.keep,
        "tail": prefix_cache.tail,
        "alloc": prefix_cache.alloc,
        "match": prefix_cache.match,
        "admit": prefix_cache.admit,
        "release": prefix_cache.release,
        "flush": prefix_cache.flush,
        "model": server_args.model,
        "sampling": server_args.sampling,
        "media": server_args.media,
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
    return hybrid_backends.wrap(original, runner, backend)


def rendezvous(*given: Any, **named: Any) -> None:
    """Keep the store of the workers of one machine on loopback."""
    if server_arguments.published_dtype() != setting_flags.DTYPE:
        return
    FIRED.add("rendezvous")
    if any(loopback_store.means_loopback(str(one)) for one in (*given, *named.values())):
        loopback_store.bind_stores()


def make_backend(runner: Any) -> Any:
    """Build the attention backend of a model runner."""
    from oscar_zoo.engines.sglang.backend import OscarAttentionBackend

    compat_requests.guard_grammars(grammars.guarded, grammars.followed, grammars.forget)
    full = OscarAttentionBackend(runner)
    if full.chains_only and speculation.by_ngrams():
        hook_targets.install_chains(drafts.chains)
    if hybrid_parts.sliding_pool(runner.token_to_kv_pool) is None:
        return full
    from oscar_zoo.engines.sglang.sliding_on_cpu import SlidingOnCpu
    from oscar_zoo.engines.sglang.windowed_backend import WindowedBackend

    on_gpu = str(runner.device).startswith("cuda")
    make = sliding_backend.sliding_backend if on_gpu else SlidingOnCpu
    return WindowedBackend(full, make(runner))
