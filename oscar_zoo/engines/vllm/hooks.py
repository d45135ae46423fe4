"""The places where stock vLLM asks us. Each does nothing unless the KV dtype is ours."""

from __future__ import annotations

import copy
import functools
from typing import Any

from oscar_zoo.engines.sglang.sizing import UNKNOWN
from oscar_zoo.engines.vllm import compat, worker
from oscar_zoo.engines.vllm.account import Account, prompt_key
from oscar_zoo.engines.vllm.register import BACKEND, DTYPE, NAME, PLACEMENT
from oscar_zoo.models.geometry import sliding_window


def install() -> None:
    """A few hooks; the others come with the first scheduler, and with the first model whose cache
    is ours, because they import much that a process without these has no use for."""
    compat.replaced(*compat.platform_choice(), _choice)
    compat.replaced(*compat.placement_choice(), _placement)
    compat.replaced(*compat.scheduler_choice(), _scheduler)
    arguments = compat.engine_arguments()
    if arguments is not None:  # this process reads a command line
        compat.replaced(arguments, "create_engine_config", _config)


def _config(stock: Any) -> Any:
    """As many requests at a time as there is room for windows, where nobody says it. Layers of a
    draft model keep 16 bits, and so do those with a sliding window."""

    @functools.wraps(stock)
    def create(self: Any, *given: Any, **named: Any) -> Any:
        ours = self.kv_cache_dtype == DTYPE
        if ours and self.max_num_seqs is None:
            self.max_num_seqs = UNKNOWN
        config = stock(self, *given, **named)
        drafts = config.speculative_config
        if ours and drafts is not None and drafts.kv_cache_dtype is None:
            drafts.kv_cache_dtype = "auto"
        if ours and sliding_window(config.model_config.hf_text_config) is not None:
            config.cache_config.kv_cache_dtype_skip_layers = ["sliding_window"]
            # vLLM would keep the window at the end of a prompt alone, and our hits end before it
            config.cache_config.prefix_cache_retention_interval = None
        return config

    return create


def _choice(stock: Any) -> Any:
    """Our backend for our dtype, also where `--attention-backend` is not given: the list of
    candidates is closed."""

    @functools.wraps(stock)
    def choose(
        cls: Any, selected_backend: Any, attn_selector_config: Any, *rest: Any, **named: Any
    ) -> str:
        if attn_selector_config.kv_cache_dtype != DTYPE:
            return str(stock(cls, selected_backend, attn_selector_config, *rest, **named))
        worker.model = compat.config().model_config.model
        hooks = {"spec": _spec, "added": _added, "builders": _builders, "named": _named}
        for what, (owner, name) in compat.hook_points().items():
            compat.replaced(owner, name, hooks[what])
        return BACKEND

    return choose


def _placement(stock: Any) -> Any:
    """Room behind the pages. The process of the scheduler asks, and workers do."""

    @functools.wraps(stock)
    def choose(cls: Any, vllm_config: Any) -> str:
        if vllm_config.cache_config.cache_dtype != DTYPE:
            return str(stock(cls, vllm_config))
        worker.model = vllm_config.model_config.model
        return PLACEMENT

    return choose


def _spec(stock: Any) -> Any:
    """Pages of a layer by its own widths, and those of layers with a window by ours."""

    @functools.wraps(stock)
    def get(self: Any, vllm_config: Any) -> Any:
        spec, ours = stock(self, vllm_config), worker.layers_of(vllm_config)
        if not ours or spec is None:
            return spec
        from oscar_zoo.engines.vllm.placement import pages_of, window_pages_of

        if self.layer_name in ours:
            return pages_of(spec, [*ours].index(self.layer_name))
        if self.sliding_window is None:
            return spec
        page = pages_of(stock(next(iter(ours.values())), vllm_config), 0).page_size_bytes
        return window_pages_of(spec, self.attn_backend, page)

    return get


def _builders(stock: Any) -> Any:
    """Stock backends plan for the type of the whole cache, which is not that of their layers."""

    @functools.wraps(stock)
    def create(self: Any, vllm_config: Any, *given: Any, **named: Any) -> Any:
        if vllm_config.cache_config.cache_dtype == DTYPE and self.backend.get_name() != NAME:
            vllm_config, cache = copy.copy(vllm_config), copy.copy(vllm_config.cache_config)
            cache.cache_dtype, vllm_config.cache_config = "auto", cache
        return stock(self, vllm_config, *given, **named)

    return create


def _named(stock: Any) -> Any:
    """Of models with states, stock builders are not told which request is which."""

    @functools.wraps(stock)
    def prepare(self: Any, input_batch: Any, *given: Any, **named: Any) -> Any:
        state = worker.of(self.vllm_config)
        if state is not None:
            state.requests = input_batch.idx_mapping_np
        return stock(self, input_batch, *given, **named)

    return prepare


def _scheduler(stock: Any) -> Any:
    """The process of the scheduler is the one that asks for its class."""

    @functools.wraps(stock)
    def get(self: Any) -> Any:
        found = stock(self)
        compat.replaced(found, "schedule", _scheduled)
        compat.replaced(*compat.prefix_cache(), _hits)
        return found

    return get


def _scheduled(stock: Any) -> Any:
    """The scheduler's own account of sinks."""

    @functools.wraps(stock)
    def schedule(self: Any, *given: Any, **named: Any) -> Any:
        if self.vllm_config.cache_config.cache_dtype != DTYPE:
            return stock(self, *given, **named)
        manager = self.kv_cache_manager
        if not hasattr(manager, "of_oscar"):
            worker.model = self.vllm_config.model_config.model
            sinks = worker.sinks_of(self.vllm_config.scheduler_config.max_num_seqs + 1)
            manager.of_oscar = Account(sinks, lambda starts: sinks.begin([*starts.items()]))
        message = stock(self, *given, **named)
        manager.of_oscar.follow(message)
        return message

    return schedule


def _hits(stock: Any) -> Any:
    """A hit leaves the recent window to prefill, and needs the first tokens in 16 bits."""

    @functools.wraps(stock)
    def get(self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
        account: Account | None = getattr(self, "of_oscar", None)
        if account is None:
            return stock(self, request, max_cache_hit_length)
        sinks, ids = account.sinks, request.all_token_ids
        key = prompt_key(ids, request.lora_request, request.mm_features, sinks.width)
        size = self.coordinator.single_type_managers[0].cache_hit_alignment_tokens
        most = max(0, request.num_tokens - sinks.reprefill_tail(key, size))
        given = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        return stock(self, request, min(given, most))

    return get


def _added(stock: Any) -> Any:
    """A worker's account of windows and sinks; requests have rows by now."""

    @functools.wraps(stock)
    def add(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        state, indices = worker.of(self.vllm_config), self.req_states.req_id_to_index
        if state is not None:
            state.account.follow(scheduler_output, lambda name: int(indices[name]) + 1)
            state.copy(scheduler_output.kv_cache_block_copies or ())

    return add
