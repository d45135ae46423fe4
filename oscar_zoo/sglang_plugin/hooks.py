"""Every change to SGLang, one function per hook.

SGLang swallows an exception raised while a hook is installed, so each hook notes in `FIRED` that it ran and the
attention backend refuses to start when one is missing. Every hook returns at once unless the KV dtype is int2: merely
having the package installed must not change a server that does not use it.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from oscar_zoo.compute.capture.ranks import VARIABLE
from oscar_zoo.errors import UsageError
from oscar_zoo.sglang_plugin import accounting, compat, fork_environment, refusals, settings, tap, worker
from oscar_zoo.sglang_plugin import metrics as exported
from oscar_zoo.sglang_plugin import server_info as info
from oscar_zoo.sglang_plugin.sink_blocks import SinkBlocks
from oscar_zoo.sglang_plugin.transforms import transform_bytes

logger = logging.getLogger(__name__)

FIRED: set[str] = set()
"""Hooks that ran in this process, with int2."""
BEFORE_BACKEND = frozenset({"kv_dtype", "slot_bytes", "budget", "rows", "pool"})
"""Hooks that must have run when the attention backend is built."""
FACTS: dict[str, Any] = {}
"""Numbers for the report: what the hooks told SGLang."""


def install() -> None:
    """Register every hook with SGLang.

    Raises:
        UsageError: this sglang is not a supported version.
    """
    compat.sglang_version()
    hooks: dict[str, compat.Hook] = {
        "add_cli_args": add_cli_args,
        "set_defaults": set_defaults,
        "check_server_args": check_server_args,
        "kv_dtype": kv_dtype,
        "slot_bytes": slot_bytes,
        "budget": budget,
        "rows": rows,
        "pool": pool,
        "tail": tail,
        "alloc": alloc,
        "match": match,
        "admit": admit,
        "release": release,
        "flush": flush,
        "model": model,
        "sampling": sampling,
        "server_info": server_info,
        "metrics": metrics,
        "update_metrics": update_metrics,
        "prefix_hits": prefix_hits,
    }
    compat.install(hooks, settings.BACKEND, make_backend, {"oscar_report": oscar_report})
    if VARIABLE in os.environ:
        compat.install_tap(tap.attention, tap.METHODS)


def make_backend(runner: Any) -> Any:
    """Build the attention backend of a model runner."""
    from oscar_zoo.sglang_plugin.backend import OscarAttentionBackend

    return OscarAttentionBackend(runner)


# --- server arguments ----------------------------------------------------------------------------------------------


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """Hook 2: the dtype and the `--oscar-*` flags."""
    compat.add_dtype_choice(parser, settings.DTYPE)
    group = parser.add_argument_group("INT2 KV cache (oscar-zoo)")
    for option in settings.OPTIONS.values():
        group.add_argument(
            option.flag, action=settings.EnvironmentAction, const=option, default=argparse.SUPPRESS, help=option.help
        )


def set_defaults(args: Any, *_: Any, **__: Any) -> None:
    """Hook 3: our backend, and a number of requests whose rings fit. SGLang would take 2048 or more requests."""
    if args.kv_cache_dtype != settings.DTYPE or not compat.may_set_defaults(args):
        return
    worker.served.cache_clear()  # an earlier engine of this process may have had other settings
    if args.attention_backend is None:
        args.attention_backend = settings.BACKEND
    if args.max_running_requests is None:
        args.max_running_requests = settings.MAX_RUNNING_REQUESTS
    if args.cuda_graph_backend_prefill is None and args.cuda_graph_config is None:
        args.cuda_graph_backend_prefill = "disabled"  # see `launch.GPU_FLAGS`


def check_server_args(_result: None, args: Any, *_: Any, **__: Any) -> None:
    """Hook 4: refusals, and an early look at settings and artifact, before any worker starts.

    Raises:
        OscarZooError: the server asks for something an INT2 cache cannot do.
    """
    if args.kv_cache_dtype != settings.DTYPE:
        flags = settings.flags_given(os.environ)
        if flags:
            raise UsageError(f"{flags[0]} needs --kv-cache-dtype int2.", hint="add it, or leave the flag out")
        idle = fork_environment.present(os.environ)
        if idle:
            logger.warning("%s have no effect without --kv-cache-dtype int2.", ", ".join(idle))
        return
    refusals.check_server(compat.resolved(args), os.environ, eager_only=worker.eager_only(args))
    chosen, artifact = worker.served()
    for warning in chosen.warnings:
        logger.warning("INT2 KV cache: %s", warning)
    logger.info("INT2 KV cache: artifact %s; %s", artifact.digest, chosen.describe())


# --- memory pool ---------------------------------------------------------------------------------------------------


def kv_dtype(original: Any, **kwargs: Any) -> Any:
    """Hook 5: the storage type. uint8 also keeps SGLang away from its fused rotary embedding and cache write."""
    if kwargs["server_args_kv_cache_dtype"] != settings.DTYPE:
        return original(**kwargs)
    FIRED.add("kv_dtype")
    return settings.DTYPE, torch.uint8


def slot_bytes(original: Any, self: Any, configurator: Any, num_layers: int) -> Any:
    """Hook 6: bytes of one token slot over all layers of this worker.

    Raises:
        OscarZooError: the artifact was made for another model, or the model is one we do not serve.
    """
    if configurator.kv_cache_dtype_str != settings.DTYPE:
        return original(self, configurator, num_layers)
    FIRED.add("slot_bytes")
    chosen, _ = worker.served()
    worker.check_model(configurator.model_config)
    FACTS["slot_bytes"] = worker.slot_shape(configurator, num_slots=0).token_bytes(chosen.knobs.mode)
    return FACTS["slot_bytes"]


def budget(result: int, self: Any, *_: Any, **__: Any) -> int | None:
    """Hook 7: rings, sinks and transforms come out of the budget before SGLang divides it by the slot size.

    Raises:
        UsageError: nothing is left for token slots.
    """
    if self.kv_cache_dtype_str != settings.DTYPE:
        return None
    FIRED.add("budget")
    chosen, artifact = worker.served()
    slots = worker.slot_shape(self, num_slots=0)
    side = worker.side_shape(self, num_rows=compat.max_requests_per_worker(self) + 1)
    transforms = transform_bytes(artifact.k, artifact.v, slots.num_layers, slots.num_kv_heads)
    scratch = worker.scratch_bytes(self, str(self.device), slots, side)
    plan = accounting.plan(slots, side, transforms, chosen.knobs.mode, scratch=scratch)
    left = plan.budget(int(result))
    FACTS.update(profiled=int(result), subtracted=plan.fixed, plan=asdict(plan))
    return left


def rows(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook 8, first half: how many request rows there are, which the token pool is not told."""
    if self.kv_cache_dtype_str == settings.DTYPE:
        FIRED.add("rows")
        FACTS["rows"] = int(kwargs["req_to_token_pool"].req_to_token.shape[0])
    return original(self, *args, **kwargs)


def pool(original: Any, self: Any, **kwargs: Any) -> Any:
    """Hook 8, second half: our pool class, which owns codes, scales, rings and sinks.

    Raises:
        RuntimeError: the number of request rows is not known.
    """
    if self.kv_cache_dtype_str != settings.DTYPE:
        return original(self, **kwargs)
    if "rows" not in FIRED:
        raise RuntimeError("the hook that counts request rows did not run")
    FIRED.add("pool")
    from oscar_zoo.sglang_plugin.pool import Int2TokenPool

    chosen, _ = worker.served()
    side = worker.side_shape(self, num_rows=FACTS["rows"])
    make = functools.partial(
        Int2TokenPool,
        side_shape=side,
        sinks=worker.sink_blocks(side),
        slot_shape=worker.slot_shape(self, num_slots=0),
        mode=chosen.knobs.mode,
    )
    return original(self, **{**kwargs, "mha_pool_class": make})


# --- prefix cache and request rows ---------------------------------------------------------------------------------


def tail(result: int, tree: Any, request: Any = None) -> int | None:
    """Hook 9: a prefix hit ends `recent` tokens before the end of the prompt, so that prefill fills the ring; there is
    none where the block with the first tokens is gone. 0.5.23 says who asks; before, hook 12 knows."""
    if "kv_dtype" not in FIRED or worker.served()[0].window_on_hit.value != "recompute":
        return None
    FIRED.add("tail")
    sinks = _sinks(compat.request_rows(tree))
    if sinks is None:
        return max(int(result), worker.served()[0].recent.value)
    prompt = sinks.asking if request is None else compat.prompt(request, sinks.width)
    return max(int(result), sinks.tail(prompt, compat.page_size(tree)))


def match(original: Any, self: Any, tree: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Hook 12: whose prefix is being looked up. The rest of a prompt is continued without asking a prefix cache."""
    tree = kwargs.pop("tree_cache", tree)
    sinks = _sinks(compat.request_rows(tree))
    if sinks is None:
        return original(self, tree, *args, **kwargs)
    FIRED.add("match")
    sinks.asking = compat.prompt(self, sinks.width)
    try:
        return original(self, tree, *args, **kwargs)
    finally:
        sinks.asking = None


def alloc(original: Any, self: Any, request: Any) -> Any:
    """Hook 10: rows with a new owner. Only a set on the host is touched here; see `side_store`."""
    hand_out = getattr(self, "oscar_hand_out", None)  # put there by our attention backend
    if hand_out is None:
        return original(self, request)
    FIRED.add("alloc")
    result, new_rows = compat.newly_allocated(original, self, request)
    hand_out(new_rows)
    return result


def admit(result: Any, self: Any, requests: Any) -> None:
    """Hook 10, for sinks: which tokens the rows will hold. Whether a row is new to its request, `alloc` tells."""
    sinks = _sinks(self)
    if sinks is not None and result is not None:
        FIRED.add("admit")
        sinks.expect(result, (compat.prompt(request, sinks.width) for request in requests))


def release(original: Any, self: Any, request: Any) -> Any:
    """Hook 11: a request is done with its row, or retracted; its sinks may be shared from now on."""
    sinks = _sinks(self)
    if sinks is None:
        return original(self, request)
    FIRED.add("release")
    prompt = compat.prompt(request, sinks.width)
    result, rows = compat.freed(original, self, request)
    for row in rows:
        sinks.free(row, prompt)
    return result


def flush(_result: None, self: Any) -> None:
    """Hook 11: the prefix cache and all rows are emptied."""
    sinks = _sinks(self)
    if sinks is not None:
        FIRED.add("flush")
        sinks.clear()


def _sinks(rows: Any) -> SinkBlocks | None:
    """Sink blocks of a pool of request rows, put there by our attention backend; `None` without an INT2 cache."""
    found: SinkBlocks | None = getattr(rows, "oscar_sinks", None)
    return found


def model(
    result: Any, args: Any, model_path: str | None = None, *_: Any, is_draft_model: bool = False, **__: Any
) -> None:
    """Hook 20: a model that cannot be served, or not with this artifact, is refused before its weights are loaded.

    Raises:
        OscarZooError: see `worker.check_model`.
    """
    if args.kv_cache_dtype == settings.DTYPE and model_path in (None, args.model_path) and not is_draft_model:
        worker.check_model(result)


def sampling(_result: None, params: Any, *_: Any, **__: Any) -> None:
    """Hook 15: a request that an INT2 cache cannot answer is refused, the server goes on.

    Raises:
        UsageError: names the parameter, the reason and what to use in its place.
    """
    if compat.published_dtype() == settings.DTYPE:
        refusals.check_request(params)


# --- observation ---------------------------------------------------------------------------------------------------


def server_info(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    """Hook 16: artifact, recipe and memory in the state of every worker, which `/server_info` shows."""
    if "pool" in FIRED:
        compat.add_internal_state(result, info.KEY, _described(compat.scheduler_runner(scheduler)))


def metrics(_result: None, reporter: Any, *_: Any, **__: Any) -> None:
    """Hook 17, where SGLang makes its own metrics: ours beside them."""
    outlet = compat.metrics_outlet(reporter) if "pool" in FIRED else None
    if outlet is None:
        return
    FIRED.add("metrics")
    pool, rows = outlet.runner.token_to_kv_pool, outlet.runner.req_to_token_pool
    described = _described(outlet.runner)
    chosen = worker.served()[0]
    refilled = chosen.window_on_hit.value == "recompute"
    hits = rows.oscar_prefix_hits = exported.PrefixHits(chosen.recent.value if refilled else 0, pool.page_size)
    capacity = pool.side.shape.num_rows - 1
    sources: dict[str, exported.Source] = {
        "capacity_tokens": lambda: pool.size,
        "used_tokens": outlet.used_tokens,
        "evictable_tokens": outlet.evictable_tokens,
        "capacity_ring_rows": lambda: capacity,
        "used_ring_rows": lambda: compat.rows_in_use(rows),
        **exported.sink_sources(pool.side.sinks),
        "tail_tokens_total": lambda: hits.tail_tokens,
        "bits_per_element": lambda: described["bits_per_element"],
    }
    labels = {**described["artifact"], **described["recipe"]}
    outlet.collector.oscar_exporter = exported.Exporter(
        outlet.labels, sources, labels, gauge=outlet.gauge, counter=outlet.counter
    )


def update_metrics(_result: None, collector: Any, *_: Any, **__: Any) -> None:
    """Hook 18: SGLang logs its stats, and ours follow."""
    exporter = getattr(collector, "oscar_exporter", None)  # put there by hook 17
    if exporter is not None:
        exporter.update()


def prefix_hits(rows: Any, requests: Any, *_: Any, **__: Any) -> None:
    """Hook 19: what the new owners of request rows found cached."""
    counted = getattr(rows, "oscar_prefix_hits", None)  # put there by hook 17
    if counted is not None:
        counted.see(compat.new_requests(requests))


def _described(runner: Any) -> dict[str, Any]:
    chosen, artifact = worker.served()
    pool = runner.token_to_kv_pool
    return info.describe(chosen, artifact, pool.slots.shape, FACTS, tokens=pool.size)


def oscar_report(scheduler: Any, path: str) -> None:
    """Hook 13, called through `Engine.collective_rpc`: write what this worker did to `<path>.<process id>.json`.

    Raises:
        RuntimeError: this server has no INT2 cache.
    """
    backend = compat.scheduler_runner(scheduler).attn_backend
    if "pool" not in FIRED:
        raise RuntimeError("this server has no INT2 KV cache")
    report = {"fired": sorted(FIRED), "facts": FACTS, **backend.report()}
    Path(f"{path}.{os.getpid()}.json").write_text(json.dumps(report))
