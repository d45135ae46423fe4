"""Hands all hooks to SGLang, and makes our attention backend."""

from __future__ import annotations

from typing import Any

from oscar_zoo.engines import setting_flags
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

MODULES = (server_args, memory, prefix_cache, requests, observation)
"""Functions in them have the names of the hooks in `hook_targets`."""


def install() -> None:
    releases.sglang_version()
    hooks = {name: value for module in MODULES for name, value in vars(module).items()}
    hooks["wrap"] = wrap
    report = {"oscar_report": observation.oscar_report}
    hook_targets.install(hooks, setting_flags.BACKEND, make_backend, report)


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
