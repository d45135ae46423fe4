"""The plugin's only import of sglang, and every difference between the versions it supports.

Nothing is imported before a function runs, so the rest of the plugin can be imported without sglang. Names of things
that moved between 0.5.17 and 0.5.23 appear here and nowhere else.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from oscar_zoo.errors import MissingDependency, UnsupportedMachine, UnsupportedModel
from oscar_zoo.sglang_plugin.sink_blocks import Prompt

FIRST, BEYOND = (0, 5, 17), (0, 5, 24)
"""Supported versions: `FIRST <= version < BEYOND`."""

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """A place in SGLang that a hook of ours attaches to."""

    path: str
    kind: str


def sglang_version() -> str:
    """Version of the installed sglang.

    Raises:
        MissingDependency: it is not installed.
        UnsupportedMachine: it is not a version this plugin was tested with.
    """
    try:
        text = version("sglang")
    except PackageNotFoundError:
        raise MissingDependency.for_extra("sglang", "serve") from None
    number = tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])[:3]))
    if not FIRST <= number < BEYOND:
        first, beyond = (".".join(map(str, v)) for v in (FIRST, BEYOND))
        raise UnsupportedMachine(
            f"sglang {text} is outside the supported range >={first},<{beyond}.",
            hint=f"pip install 'sglang>={first},<{beyond}'",
        )
    return text


def targets() -> dict[str, tuple[Target, ...]]:
    """Where each hook attaches in the installed version, by the name of the hook. Subclasses that override a method
    are listed with their base, because a patch of the base does not reach them."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
    # From 0.5.21 arguments resolve in resolve_once, and an assignment afterwards raises.
    resolve = "resolve_once" if hasattr(ServerArgs, "resolve_once") else "__post_init__"
    rows = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    alloc = "alloc_rows" if hasattr(ReqToTokenPool, "alloc_rows") else "alloc"
    tails = ("base_prefix_cache.BasePrefixCache", "unified_radix_cache.UnifiedRadixCache")
    return {
        **_observed_places(),
        "add_cli_args": (Target("sglang.srt.server_args.ServerArgs.add_cli_args", "AFTER"),),
        "set_defaults": (Target(f"sglang.srt.server_args.ServerArgs.{resolve}", "BEFORE"),),
        "check_server_args": (Target("sglang.srt.server_args.ServerArgs.check_server_args", "AFTER"),),
        "kv_dtype": (Target("sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype", "AROUND"),),
        "slot_bytes": (
            Target("sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size", "AROUND"),
        ),
        "budget": (Target(configurator + "_profile_available_bytes", "AFTER"),),
        "rows": (Target(configurator + "_build_token_to_kv_pool", "AROUND"),),
        "pool": (Target(configurator + "_build_mha_kv_pool", "AROUND"),),
        "tail": tuple(Target(f"sglang.srt.mem_cache.{t}.swa_reprefill_tail_tokens", "AFTER") for t in tails),
        "alloc": (Target(f"{rows}.{alloc}", "AROUND"),),
        "match": (Target("sglang.srt.managers.schedule_batch.Req.init_next_round_input", "AROUND"),),
        "admit": (Target(f"{rows}.alloc", "AFTER"),),
        "release": (Target(f"{rows}.free", "AROUND"),),
        "flush": (Target(f"{rows}.clear", "AFTER"),),
    }


def _observed_places() -> dict[str, tuple[Target, ...]]:
    """The part of `targets` that changes nothing: it refuses or reports."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    reporter = "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.__post_init__"
    beams = hasattr(SamplingParams, "beam_width")  # from 0.5.21
    verify = (Target("sglang.srt.sampling.sampling_params.SamplingParams.verify", "AFTER"),)
    return {
        "model": (Target("sglang.srt.configs.model_config.ModelConfig.from_server_args", "AFTER"),),
        "sampling": verify if beams else (),
        "server_info": (Target("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "AFTER"),),
        "metrics": (Target(reporter, "AFTER"),),
        "update_metrics": (
            Target("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats", "AFTER"),
        ),
        "prefix_hits": (Target("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc", "BEFORE"),),
    }


def install(hooks: Mapping[str, Hook], backend: str, make_backend: Hook, scheduler_methods: Mapping[str, Hook]) -> None:
    """Register everything with SGLang.

    Args:
        hooks: one function per name of `targets`.
        backend: name of the attention backend.
        make_backend: runner -> backend.
        scheduler_methods: what `collective_rpc` may call.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    server_args.add_attention_backend_choices([backend])
    register_attention_backend(backend)(make_backend)
    for name, places in targets().items():
        for place in places:
            HookRegistry.register(place.path, hooks[name], HookType[place.kind])
    for name, method in scheduler_methods.items():
        setattr(Scheduler, name, method)


def add_dtype_choice(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Let `--kv-cache-dtype` accept `dtype`."""
    for action in parser._actions:
        if action.dest == "kv_cache_dtype" and action.choices is not None and dtype not in action.choices:
            action.choices = [*action.choices, dtype]


def resolved(server_args: Any) -> Any:
    """The configuration SGLang decided on: the raw record up to 0.5.17, later a view of declarations over it."""
    try:
        from sglang.srt.arg_groups.overrides import resolved_view
    except ImportError:
        return server_args
    return resolved_view(server_args)


def may_set_defaults(server_args: Any) -> bool:
    """Whether assignments are still accepted; `resolve_once` runs again in every child, on a finished record."""
    return not getattr(server_args, "_resolution_finished", False)


def newly_allocated(original: Hook, pool: Any, request: Any) -> tuple[Any, list[int]]:
    """Call SGLang's row allocator: its result, and the rows that got a new owner.

    From 0.5.21 `alloc_rows` hands out exactly these. Before, `alloc` also returns rows that requests keep, and only
    the generation counter tells; it is compared over this one call, because `clear` sets it to zero.
    """
    if hasattr(pool, "alloc_rows"):
        rows = original(pool, request)
        return rows, list(rows or ())
    before = pool.req_generation.clone()
    rows = original(pool, request)
    return rows, (pool.req_generation != before).nonzero().flatten().tolist() if rows is not None else []


def prompt(request: Any, width: int) -> Prompt:
    """What the tokens of a request, prompt and answer, say about its first `width`.

    SGLang puts the id of a LoRA adapter into the extra key, and up to 0.5.17 the salt of the cache; named here too, so
    that nothing depends on that. Placeholders of images are hashes of their content. Tokens that stand for embeddings
    of the caller say nothing.
    """
    asked, answered = request.origin_input_ids, request.output_ids
    ids = tuple(asked[:width])
    ids += tuple(answered[: width - len(ids)])
    names = ("extra_key", "lora_id", "cache_salt")
    opaque = any(getattr(request, name, None) is not None for name in ("input_embeds", "positional_embed_overrides"))
    scope = None if opaque else tuple(getattr(request, name, None) for name in names)
    return Prompt(scope, ids, len(asked) + len(answered))


def request_rows(tree: Any) -> Any:
    """The request rows beside a prefix cache; `None` where it has none."""
    return getattr(tree, "req_to_token_pool", None)


def page_size(tree: Any) -> int:
    """Tokens at whose multiples hits of a prefix cache end."""
    return int(getattr(tree, "page_size", 1))


def freed(original: Hook, pool: Any, request: Any) -> tuple[Any, list[int]]:
    """Let SGLang free the row of a request: its result, and the rows that are free now and were not before."""
    before = len(pool.free_slots)
    return original(pool, request), list(pool.free_slots[before:])


def max_requests_per_worker(configurator: Any) -> int:
    """`max_running_requests // dp`: request rows of one worker without the padding row."""
    from sglang.srt.runtime_context import get_schedule

    dp = configurator.attn_dp_size if hasattr(configurator, "attn_dp_size") else configurator.ps.attn_dp_size
    return int(get_schedule().max_running_requests) // int(dp)


def longest_request(owner: Any) -> int:
    """Tokens that a row of SGLang's slot table can hold, at most; it has a few more than the context.

    Args:
        owner: model runner or pool configurator.
    """
    return int(owner.model_config.context_len) + 64


def context_length(runner: Any) -> int:
    """Longest request the model is served for, in tokens, prompt and answer together."""
    return int(runner.model_config.context_len)


def local_kv_heads(model_config: Any) -> range:
    """Global ids of the KV heads of this worker; with fewer heads than workers, heads are replicated."""
    from sglang.srt.runtime_context import get_parallel

    size, rank = get_parallel().attn_tp_size, get_parallel().attn_tp_rank
    total, own = model_config.get_total_num_kv_heads(), model_config.get_num_kv_heads(size)
    start = rank * total // size
    return range(start, start + own)


def local_q_heads(model_config: Any) -> int:
    """Number of query heads of this worker."""
    from sglang.srt.runtime_context import get_parallel

    return int(model_config.num_attention_heads) // int(get_parallel().attn_tp_size)


def has_linear_layers(model_config: Any) -> bool:
    """Whether some layers keep a state in place of keys and values."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def attention_layers(model: Any) -> Iterator[Any]:
    """Every attention layer of a loaded model."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return (module for module in model.modules() if isinstance(module, RadixAttention))


def token_pool_class() -> Any:
    """The stock pool of keys and values."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool


def write_location(loc_info: Any) -> Any:
    """Slot ids of a write, whichever of SGLang's types carries them."""
    from sglang.srt.mem_cache.memory_pool import unwrap_write_loc

    return unwrap_write_loc(loc_info)[0]


def attention_backend_class() -> Any:
    """The base class of attention backends."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    return AttentionBackend


def scheduler_runner(scheduler: Any) -> Any:
    """The model runner of a scheduler process."""
    return scheduler.tp_worker.model_runner


# --- observation ---------------------------------------------------------------------------------------------------


def published_dtype() -> str | None:
    """`--kv-cache-dtype` of the server this process belongs to; `None` before SGLang published its arguments."""
    from sglang.srt.runtime_context import get_server_args

    try:
        return str(get_server_args().kv_cache_dtype)
    except ValueError:
        return None


def add_internal_state(output: Any, name: str, value: Any) -> None:
    """Put plain values into what a worker answers for `/server_info`."""
    output.internal_state[name] = value


def rows_in_use(req_to_token_pool: Any) -> int:
    """Request rows with an owner."""
    return int(req_to_token_pool.size) - int(req_to_token_pool.available_size())


def new_requests(requests: Any) -> Iterator[tuple[int, int]]:
    """Of requests that are about to get rows: tokens to prefill in all, and those found cached. Skips those that keep
    the row they have."""
    for request in requests:
        kv: Any = getattr(request, "kv", None)  # 0.5.17 has one too, without the question
        keeps = kv.holds_kv if hasattr(kv, "holds_kv") else request.req_pool_idx is not None
        if not keeps:
            # From 0.5.23 a number in place of the slots.
            cached = len(request.prefix_indices) if hasattr(request, "prefix_indices") else request.prefix_len
            yield len(request.origin_input_ids) + len(request.output_ids), int(cached)


@dataclass(frozen=True)
class MetricsOutlet:
    """Where a worker's metrics go.

    Attributes:
        collector: SGLang's own metrics of this worker, whose stats logging ours follow.
        runner: the model runner.
        labels: of every metric.
        gauge, counter: classes that write where SGLang's `/metrics` reads.
        used_tokens, evictable_tokens: SGLang's last counts of token slots.
    """

    collector: Any
    runner: Any
    labels: dict[str, Any]
    gauge: Callable[..., Any]
    counter: Callable[..., Any]
    used_tokens: Callable[[], float]
    evictable_tokens: Callable[[], float]


def metrics_outlet(reporter: Any) -> MetricsOutlet | None:
    """The outlet of a scheduler process, or `None` where SGLang exports nothing: no `--enable-metrics`, other ranks."""
    if not reporter.current_scheduler_metrics_enabled:
        return None
    # Imported here like SGLang does, after it has chosen the folder that all processes write to.
    from prometheus_client import Counter, Gauge

    collector = reporter.metrics_collector
    return MetricsOutlet(
        collector=collector,
        runner=scheduler_runner(reporter.scheduler),
        labels=dict(collector.labels),
        gauge=collector._gauge_cls or Gauge,
        counter=collector._counter_cls or Counter,
        used_tokens=lambda: reporter.stats.kv_used_tokens,
        evictable_tokens=lambda: reporter.stats.kv_evictable_tokens,
    )


# --- the calibration tap -------------------------------------------------------------------------------------------

ATTENTION_ARGUMENTS = frozenset({"save_kv_cache", "key_value_num_tokens"})
"""Optional arguments of `RadixAttention.forward` that leave plain softmax attention as it is."""


def install_tap(hook: Hook, scheduler_methods: Mapping[str, Hook]) -> None:
    """Register the hook around every attention layer, and what `collective_rpc` may call for it."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.layers.radix_attention.RadixAttention.forward", hook, HookType.AROUND)
    for name, method in scheduler_methods.items():
        setattr(Scheduler, name, method)


def capturing() -> bool:
    """Whether the current forward pass is being recorded into a CUDA graph."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    return bool(get_is_capture_mode())


def rank_name() -> str:
    """Name of this worker among those that hold one copy of the model."""
    from sglang.srt.runtime_context import get_parallel

    return f"pp{get_parallel().pp_rank}-tp{get_parallel().tp_rank}"


def output_projection(model: Any, attention: Any, dtype: Any) -> Any:
    """Weight of the linear layer that reads the output of `attention`, `[hidden, heads * v_head_dim]` of this worker.

    Read by pushing the identity through the layer's own kernel, so that quantized weights need no code of ours.

    Args:
        model: that holds `attention`.
        dtype: of the activations.

    Raises:
        UnsupportedModel: there is no such layer beside `attention`, or more than one.
    """
    import torch
    from sglang.srt.layers.linear import RowParallelLinear

    width = attention.tp_q_head_num * attention.v_head_dim
    owner = next(module for module in model.modules() if any(child is attention for child in module.children()))
    found = [
        child
        for child in owner.children()
        if isinstance(child, RowParallelLinear) and child.input_size_per_partition == width
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"layer {attention.layer_id}: {len(found)} linear layers of {type(owner).__name__} could be o_proj.",
            hint="calibrate with a method that does not use o_proj, such as oscar",
        )
    identity = torch.eye(width, dtype=dtype, device=next(found[0].parameters()).device)
    return found[0].quant_method.apply(found[0], identity, None).T
