"""The places where stock vLLM asks us. Each does nothing unless the KV dtype is ours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from oscar_zoo.engines.sglang.sizing import UNKNOWN
from oscar_zoo.engines.vllm import compat, worker
from oscar_zoo.engines.vllm.register import BACKEND, DTYPE
from oscar_zoo.runtime.sink_blocks import NOBODY, PromptKey


def install() -> None:
    """One hook; the others come with the first model whose cache is ours, because they import much
    that a process without a model has no use for."""
    compat.replaced(*compat.platform_choice(), _choice)
    arguments = compat.engine_arguments()
    if arguments is not None:  # this process reads a command line
        compat.replaced(arguments, "create_engine_config", _requests)


def _requests(stock: Any) -> Any:
    """As many requests at a time as there is room for windows, where nobody says it."""

    @functools.wraps(stock)
    def create(self: Any, *given: Any, **named: Any) -> Any:
        if self.kv_cache_dtype == DTYPE and self.max_num_seqs is None:
            self.max_num_seqs = UNKNOWN
        return stock(self, *given, **named)

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
        hooks = {"spec": _spec, "hits": _hits, "added": _added, "removed": _removed}
        for what, (owner, name) in compat.hook_points().items():
            compat.replaced(owner, name, hooks[what])
        return BACKEND

    return choose


def _spec(stock: Any) -> Any:
    """Pages of a layer by its own widths."""

    @functools.wraps(stock)
    def get(self: Any, vllm_config: Any) -> Any:
        spec = stock(self, vllm_config)
        if self.kv_cache_dtype != DTYPE or spec is None:
            return spec
        from oscar_zoo.engines.vllm.backend import pages_of

        names = [*compat.attention_layers(vllm_config)]
        return pages_of(spec, names.index(self.layer_name))

    return get


def _hits(stock: Any) -> Any:
    """A hit leaves the recent window to prefill, and needs the first tokens in 16 bits."""

    @functools.wraps(stock)
    def get(self: Any, request: Any, max_cache_hit_length: int | None = None) -> Any:
        if worker.running is None or not compat.has_byte_pages(self.kv_cache_config):
            return stock(self, request, max_cache_hit_length)
        sinks = worker.running.windows.sinks
        ids = request.all_token_ids
        key = prompt_key(ids, request.lora_request, request.mm_features, sinks.width)
        size = self.block_pool.hash_block_size
        most = max(0, request.num_tokens - sinks.reprefill_tail(key, size))
        given = request.num_tokens - 1 if max_cache_hit_length is None else max_cache_hit_length
        return stock(self, request, min(given, most))

    return get


def _added(stock: Any) -> Any:
    """Rows of requests that are new in this step, which take no ring and no sinks over."""

    @functools.wraps(stock)
    def add(self: Any, scheduler_output: Any) -> None:
        stock(self, scheduler_output)
        new, state = scheduler_output.scheduled_new_reqs, worker.of(self.vllm_config)
        if state is None or not new:
            return
        windows = state.windows
        rows = [self.req_states.req_id_to_index[one.req_id] + 1 for one in new]
        windows.hand_out(rows)
        windows.sinks.admit(rows, [_prompt_of(one, windows.sinks.width) for one in new])

    return add


def _removed(stock: Any) -> Any:
    """A request that has ended, or starts again later, gives its sinks back."""

    @functools.wraps(stock)
    def remove(self: Any, req_id: str) -> bool:
        index, state = self.req_states.req_id_to_index.get(req_id), worker.of(self.vllm_config)
        if state is not None and index is not None:
            state.windows.sinks.release(index + 1, NOBODY)
        return bool(stock(self, req_id))

    return remove


def _prompt_of(new: Any, width: int) -> PromptKey:
    return prompt_key(new.prefill_token_ids, new.lora_request, new.mm_features, width)


def prompt_key(ids: Sequence[int], lora: Any, pictures: Any, width: int) -> PromptKey:
    """What the first tokens of a request depend on: those of an image are not known by ids."""
    scope = None if pictures else (None if lora is None else lora.lora_name,)
    return PromptKey(scope, tuple(ids[:width]), len(ids))
