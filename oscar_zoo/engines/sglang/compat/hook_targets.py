"""Where hooks attach in the installed version of SGLang, and how.

Hooks have the kinds of SGLang's registry, and wrap functions as it does. The registry itself looks
for each function in every module, which takes 20 ms for each of 40 hooks in every process. Here one
look finds all of them.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from oscar_zoo.engines.sglang.compat import releases

Hook = Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """A place in SGLang that a hook of ours attaches to.

    Attributes:
        path: of a function or method.
        kind: name of a `HookType`: a hook `BEFORE` may return other arguments, one `AFTER` another
            result, and one `AROUND` calls the original itself.
    """

    path: str
    kind: str

    def place(self) -> tuple[Any, str]:
        """Class or module, and name in it."""
        owner, _, name = self.path.rpartition(".")
        return pkgutil.resolve_name(owner), name


def targets() -> dict[str, tuple[Target, ...]]:
    """Where each hook attaches in the installed version, by the name of the hook.

    Subclasses that override a method are listed with their base, because a patch of the base does
    not reach them.
    """
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    configurator = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."
    resolve = releases.RESOLVE.name(ServerArgs)
    rows = "sglang.srt.mem_cache.memory_pool.ReqToTokenPool"
    alloc = releases.ALLOCATE_ROWS.name(ReqToTokenPool)
    tails = ("base_prefix_cache.BasePrefixCache", "unified_radix_cache.UnifiedRadixCache")
    return {
        **_observed_places(),
        "add_cli_args": (Target("sglang.srt.server_args.ServerArgs.add_cli_args", "AFTER"),),
        "set_defaults": (Target(f"sglang.srt.server_args.ServerArgs.{resolve}", "BEFORE"),),
        "check_server_args": (
            Target("sglang.srt.server_args.ServerArgs.check_server_args", "AFTER"),
        ),
        "model_arguments": (Target(_model_arguments(ServerArgs), "AROUND"),),
        "rendezvous": (
            Target("sglang.srt.distributed.parallel_state.init_distributed_environment", "BEFORE"),
        ),
        "kv_dtype": (
            Target("sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype", "AROUND"),
        ),
        "slot_bytes": (
            Target(
                "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size",
                "AROUND",
            ),
        ),
        "draft_bytes": (
            Target(
                "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator.__init__",
                "AFTER",
            ),
        ),
        "states": (Target(configurator + "_handle_max_mamba_cache", "AROUND"),),
        "budget": (Target(configurator + "_profile_available_bytes", "AFTER"),),
        "rows": (Target(configurator + "_build_token_to_kv_pool", "AROUND"),),
        "wrap": (
            Target("sglang.srt.layers.attention.attention_registry.attn_backend_wrapper", "AROUND"),
        ),
        "pool": tuple(
            Target(f"{configurator}_build_{kind}_kv_pool", "AROUND")
            for kind in ("mha", "hybrid_linear", "hybrid_swa")
        ),
        **_sliding_places(),
        "tail": tuple(
            Target(f"sglang.srt.mem_cache.{t}.swa_reprefill_tail_tokens", "AFTER") for t in tails
        ),
        "alloc": (Target(f"{rows}.{alloc}", "AROUND"),),
        "match": (
            Target("sglang.srt.managers.schedule_batch.Req.init_next_round_input", "AROUND"),
        ),
        "admit": (Target(f"{rows}.alloc", "AFTER"),),
        "release": (Target(f"{rows}.free", "AROUND"),),
        "flush": (Target(f"{rows}.clear", "AFTER"),),
    }


def _model_arguments(server_args: Any) -> str:
    """Where SGLang decides and checks arguments by the model."""
    name = "handle_model_specific_adjustments"
    if releases.RESOLVE.here(server_args):
        return f"sglang.srt.arg_groups.model_hook.{name}"
    return f"sglang.srt.server_args.ServerArgs._{name}"


def _sliding_places() -> dict[str, tuple[Target, ...]]:
    """The targets for models whose layers partly have a sliding window."""
    pools = "sglang.srt.model_executor.pool_configurator.HybridSWAPoolConfigurator."
    free = "sglang.srt.mem_cache.common.free_swa_out_of_window_slots"
    return {
        "sliding_sizes": (Target(pools + "__init__", "AFTER"),),
        "sliding_divide": (Target(pools + "calculate_pool_sizes", "AROUND"),),
        "sliding_limit": (Target(pools + "calculate_pool_sizes_from_max_tokens", "AROUND"),),
        "sliding_keep": (Target(free, "AROUND"),),
    }


def _observed_places() -> dict[str, tuple[Target, ...]]:
    """The targets whose hooks change nothing: they refuse or report."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    module = "sglang.srt.managers.scheduler_components.metrics_reporter"
    reporter = f"{module}.SchedulerMetricsReporter.__post_init__"
    beams = releases.BEAM_WIDTH.here(SamplingParams)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    verify = (Target("sglang.srt.sampling.sampling_params.SamplingParams.verify", "AFTER"),)
    return {
        "model": (Target("sglang.srt.configs.model_config.ModelConfig.from_server_args", "AFTER"),),
        "sampling": verify if beams else (),
        "media": (Target(f"{manager}._validate_one_request", "BEFORE"),),
        "divided": (
            Target("sglang.srt.managers.io_struct.GenerateReqInput.__getitem__", "AROUND"),
            Target(
                "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
                "AROUND",
            ),
        ),
        "arrives": (Target(f"{manager}.generate_request", "BEFORE"),),
        "prompt": (Target(f"{manager}._validate_one_request", "BEFORE"),),
        "logprobs": (
            Target("sglang.srt.layers.logprob_processor.LogprobResult.write_output_to", "AFTER"),
        ),
        "http": (Target(f"{manager}.__init__", "AFTER"),),
        "server_info": (
            Target("sglang.srt.managers.scheduler.Scheduler.get_internal_state", "AFTER"),
        ),
        "metrics": (Target(reporter, "AFTER"),),
        "update_metrics": (
            Target(
                "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats",
                "AFTER",
            ),
        ),
        "prefix_hits": (Target("sglang.srt.mem_cache.memory_pool.ReqToTokenPool.alloc", "BEFORE"),),
    }


def install(
    hooks: Mapping[str, Hook],
    backend: str,
    make_backend: Hook,
    scheduler_methods: Mapping[str, Hook],
) -> None:
    """Register everything with SGLang.

    Args:
        hooks: one function per name of `targets`.
        scheduler_methods: what `collective_rpc` may call.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    server_args.add_attention_backend_choices([backend])
    register_attention_backend(backend)(make_backend)
    _attach((hooks[name], place) for name, places in targets().items() for place in places)
    _add_to_scheduler(scheduler_methods)


def install_chains(hook: Hook) -> None:
    """Attach the hook behind the drafts of n-grams, in a worker that is about to make some. Without
    a GPU the module cannot be imported everywhere."""
    path = "sglang.srt.speculative.ngram_worker.NGRAMWorker._prepare_draft_tokens"
    _attach([(hook, Target(path, "AFTER"))])


def _attach(wanted: Iterable[tuple[Hook, Target]]) -> None:
    """Attach hooks to functions and methods. All places are found before any of them changes."""
    functions: dict[tuple[Any, str], Hook] = {}
    for hook, kind, (owner, name) in [(hook, x.kind, x.place()) for hook, x in wanted]:
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
    """Replace functions, by their `id`, where a module has imported them by name."""
    for module in list(sys.modules.values()):
        names = list(getattr(module, "__dict__", {}).items())
        for name, value in names:
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])


def _add_to_scheduler(methods: Mapping[str, Hook]) -> None:
    from sglang.srt.managers.scheduler import Scheduler

    for name, method in methods.items():
        setattr(Scheduler, name, method)
