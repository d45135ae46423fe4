"""Where hooks attach in the installed version of SGLang, and how.

Hooks have the kinds of SGLang's registry, and wrap functions as it does. The registry itself looks
for each function in every module, which takes 20 ms for each of 40 hooks in every process. Here one
look finds all of them.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oscar_zoo.engines.sglang.compat import releases

Hook = Callable[..., Any]


def targets() -> list[tuple[str, str, str]]:
    """The name of each hook, its kind, and the path of the function or method that it attaches to
    in the installed version. A hook `BEFORE` may return other arguments, one `AFTER` another
    result, and one `AROUND` calls the original itself. Subclasses that override a method are listed
    with their base, because a patch of the base does not reach them."""
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    args, resolve = "server_args.ServerArgs", releases.RESOLVE.name(ServerArgs)
    adjust = "handle_model_specific_adjustments"  # where SGLang decides arguments by the model
    by_model = f"{args}._{adjust}"
    if releases.RESOLVE.here(ServerArgs):
        by_model = f"arg_groups.model_hook.{adjust}"
    cache = "mem_cache.kv_cache_configurator.KVCacheConfigurator"
    pools = "model_executor.pool_configurator"
    sliding = f"{pools}.HybridSWAPoolConfigurator"
    rows, alloc = (
        "mem_cache.memory_pool.ReqToTokenPool",
        releases.ALLOCATE_ROWS.name(ReqToTokenPool),
    )
    trees = ("base_prefix_cache.BasePrefixCache", "unified_radix_cache.UnifiedRadixCache")
    manager = "managers.tokenizer_manager.TokenizerManager"
    request = "managers.io_struct.GenerateReqInput"
    stats = "observability.metrics_collector.SchedulerMetricsCollector"
    reporter = "managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"
    places = (
        ("add_cli_args", "AFTER", f"{args}.add_cli_args"),
        ("set_defaults", "BEFORE", f"{args}.{resolve}"),
        ("check_server_args", "AFTER", f"{args}.check_server_args"),
        ("model_arguments", "AROUND", by_model),
        ("rendezvous", "BEFORE", "distributed.parallel_state.init_distributed_environment"),
        ("kv_dtype", "AROUND", "mem_cache.kv_cache_dtype.configure_kv_cache_dtype"),
        ("slot_bytes", "AROUND", f"{pools}.DefaultPoolConfigurator._compute_cell_size"),
        ("draft_bytes", "AFTER", f"{pools}.DefaultPoolConfigurator.__init__"),
        ("states", "AROUND", f"{cache}._handle_max_mamba_cache"),
        ("budget", "AFTER", f"{cache}._profile_available_bytes"),
        ("rows", "AROUND", f"{cache}._build_token_to_kv_pool"),
        ("wrap", "AROUND", "layers.attention.attention_registry.attn_backend_wrapper"),
        *(
            ("pool", "AROUND", f"{cache}._build_{kind}_kv_pool")
            for kind in ("mha", "hybrid_linear", "hybrid_swa")
        ),
        ("latent_pool", "AROUND", f"{cache}._build_mla_kv_pool"),
        ("sliding_sizes", "AFTER", f"{sliding}.__init__"),
        ("sliding_divide", "AROUND", f"{sliding}.calculate_pool_sizes"),
        ("sliding_limit", "AROUND", f"{sliding}.calculate_pool_sizes_from_max_tokens"),
        ("sliding_keep", "AROUND", "mem_cache.common.free_swa_out_of_window_slots"),
        *(("tail", "AFTER", f"mem_cache.{tree}.swa_reprefill_tail_tokens") for tree in trees),
        ("alloc", "AROUND", f"{rows}.{alloc}"),
        ("match", "AROUND", "managers.schedule_batch.Req.init_next_round_input"),
        ("admit", "AFTER", f"{rows}.alloc"),
        ("release", "AROUND", f"{rows}.free"),
        ("flush", "AFTER", f"{rows}.clear"),
        # These change nothing: they refuse or report.
        ("model", "AFTER", "configs.model_config.ModelConfig.from_server_args"),
        ("divided", "AROUND", f"{request}.__getitem__"),
        ("divided", "AROUND", f"{request}.normalize_batch_and_arguments"),
        ("arrives", "BEFORE", f"{manager}.generate_request"),
        ("prompt", "BEFORE", f"{manager}._validate_one_request"),
        ("logprobs", "AFTER", "layers.logprob_processor.LogprobResult.write_output_to"),
        ("http", "AFTER", f"{manager}.__init__"),
        ("server_info", "AFTER", "managers.scheduler.Scheduler.get_internal_state"),
        ("metrics", "AFTER", f"{reporter}.__post_init__"),
        ("update_metrics", "AFTER", f"{stats}.log_stats"),
        ("prefix_hits", "BEFORE", f"{rows}.alloc"),
    )
    return [(hook, kind, f"sglang.srt.{path}") for hook, kind, path in places]


def install(
    hooks: Mapping[str, Hook],
    backend: str,
    make_backend: Hook,
    scheduler_methods: Mapping[str, Hook],
) -> None:
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.managers.scheduler import Scheduler

    server_args.add_attention_backend_choices([backend])
    register_attention_backend(backend)(make_backend)
    _attach([(hooks[name], kind, path) for name, kind, path in targets()])
    for name, method in scheduler_methods.items():
        setattr(Scheduler, name, method)


def install_chains(hook: Hook) -> None:
    """Attach the hook behind the drafts of n-grams, in a worker that is about to make some. Without
    a GPU the module cannot be imported everywhere."""
    path = "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens"
    _attach([(hook, "AFTER", path)])


def install_host_pool(make: Hook, store: Hook) -> None:
    """Attach the hooks where SGLang makes a pool in the host's memory, and a storage backend for
    it, in a worker that is about to have one. Other workers never import the modules."""
    factory = "mem_cache.storage.backend_factory.StorageBackendFactory"
    places = (
        (make, "AROUND", "mem_cache.hybrid_cache.hybrid_pool_assembler.build_kv_host_pool"),
        (store, "AROUND", f"{factory}.create_backend"),
    )
    _attach([(hook, kind, f"sglang.srt.{path}") for hook, kind, path in places])


def _attach(wanted: Sequence[tuple[Hook, str, str]]) -> None:
    """Attach hooks to functions and methods. All places are found before any of them changes."""
    functions: dict[tuple[Any, str], Hook] = {}
    places = [path.rpartition(".") for _, _, path in wanted]
    owners = [pkgutil.resolve_name(owner) for owner, _, _ in places]
    for (hook, kind, _), owner, (_, _, name) in zip(wanted, owners, places, strict=True):
        given: Any = vars(owner).get(name)
        unbound = isinstance(given, (classmethod, staticmethod))
        original = given.__func__ if unbound else getattr(owner, name)
        wrapped = _wrapped(original, hook, kind)
        setattr(owner, name, type(given)(wrapped) if unbound else wrapped)
        if not isinstance(owner, type):
            functions.setdefault((owner, name), original)
    _replace_imported({id(was): getattr(*place) for place, was in functions.items()})


def _wrapped(original: Hook, hook: Hook, kind: str) -> Hook:
    @functools.wraps(original)
    def wrapped(*args: Any, **named: Any) -> Any:
        if kind == "AROUND":
            return hook(original, *args, **named)
        if kind == "BEFORE":
            args, named = hook(*args, **named) or (args, named)
            return original(*args, **named)
        result = original(*args, **named)
        changed = hook(result, *args, **named)
        return result if changed is None else changed

    return wrapped


def _replace_imported(replaced: Mapping[int, Hook]) -> None:
    for module in list(sys.modules.values()):
        names = list(getattr(module, "__dict__", {}).items())
        for name, value in names:
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
