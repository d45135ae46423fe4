"""Hooks where SGLang divides memory: the type and size of a token slot, the budget of all slots,
the pool itself, states of a hybrid model beside tokens, and the pool of layers with a sliding
window."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from oscar_zoo.engines import setting_flags
from oscar_zoo.engines.sglang import worker
from oscar_zoo.engines.sglang.compat import (
    forward_batch,
    geometry,
    hook_targets,
    memory,
    server_arguments,
)
from oscar_zoo.engines.sglang.sizing import SLIDING_RATIO
from oscar_zoo.engines.sglang.worker import FACTS, FIRED
from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES
from oscar_zoo.runtime.slot_plans import SlidingDemand, SlidingPlan, StateDemand


def _ours(configurator: Any) -> bool:
    """Not that of a draft model, whose cache is SGLang's own."""
    draft = getattr(configurator, "is_draft_worker", False)
    return configurator.kv_cache_dtype_str == setting_flags.DTYPE and not draft


def kv_dtype(original: Any, **kwargs: Any) -> Any:
    """Store `uint8`. With it SGLang also skips its fused rotary embedding and cache
    write. A draft model keeps a cache in its own type."""
    if kwargs["server_args_kv_cache_dtype"] != setting_flags.DTYPE:
        return original(**kwargs)
    if kwargs["is_draft_worker"]:
        found, dtype = original(**{**kwargs, "server_args_kv_cache_dtype": "auto"})
        return found or "auto", dtype
    FIRED.add("kv_dtype")
    return setting_flags.DTYPE, torch.uint8


def slot_bytes(original: Any, self: Any, configurator: Any, num_layers: int) -> Any:
    if not _ours(configurator):
        return original(self, configurator, num_layers)
    return _note_slot_bytes(configurator) + SLOT_TABLES


def _note_slot_bytes(configurator: Any) -> int:
    FIRED.add("slot_bytes")
    worker.check_model(configurator.model_config)
    found = FACTS["slot_bytes"] = worker.slot_shape(configurator, num_slots=0).token_bytes()
    return found


def draft_bytes(_result: None, self: Any, configurator: Any, *_: Any, **__: Any) -> None:
    """Count what a token slot takes in the cache of a draft model. SGLang takes a layer of it for
    as large as one of ours."""
    if not _ours(configurator) or forward_batch.most_drafts() == 1:
        return
    more = beside_slot(configurator)
    if more:
        self._cell_size = FACTS["slot_bytes"] + SLOT_TABLES + more


def beside_slot(configurator: Any) -> int:
    """Bytes that a draft model takes for every token slot: in its cache, and in the tables of its
    runner. The first are noted."""
    found = FACTS["draft_bytes"] = forward_batch.draft_slot_bytes(configurator)
    return found + SLOT_TABLES if found else 0


def budget(result: int, self: Any, *_: Any, **__: Any) -> int | None:
    """Take rings, sinks and transforms out of the budget before SGLang divides it by the
    slot size."""
    if not _ours(self):
        return None
    FIRED.add("budget")
    states = FACTS.get("states")
    requests = geometry.max_requests_per_worker(self) if states is None else states["requests"]
    plan = worker.fixed_memory(self, num_rows=requests + 1)
    left = plan.budget(int(result))
    FACTS.update(profiled=int(result), subtracted=plan.fixed, plan=asdict(plan))
    return left


def rows(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Note the number of request rows, which SGLang does not tell the token
    pool."""
    if _ours(self):
        FIRED.add("rows")
        FACTS["rows"] = int(kwargs["req_to_token_pool"].req_to_token.shape[0])
    return original(self, *args, **kwargs)


def pool(original: Any, self: Any, **kwargs: Any) -> Any:
    if not _ours(self):
        return original(self, **kwargs)
    either = geometry.either_pool(_pool_maker(self), self.model_dtype)
    return original(self, **{**kwargs, "mha_pool_class": either})


def latent_pool(original: Any, self: Any, **kwargs: Any) -> Any:
    if not _ours(self):
        return original(self, **kwargs)
    return geometry.build_latents(original, self, _pool_maker(self), **kwargs)


def _pool_maker(configurator: Any) -> Callable[..., Any]:
    if "rows" not in FIRED:
        raise RuntimeError("the hook that counts request rows did not run")
    FIRED.add("pool")
    from oscar_zoo.engines.sglang.pool import Int2TokenPool

    make = functools.partial(
        Int2TokenPool,
        slot_shape=worker.slot_shape(configurator, num_slots=0),
        window_shape=worker.window_shape(configurator, num_rows=FACTS["rows"]),
        make_stores=worker.make_stores,
    )
    if server_arguments.published().enable_hierarchical_cache:
        hook_targets.install_host_pool(host_pool, storage)
    return make


def host_pool(original: Any, *, kv_pool: Any, page_size: int, **kwargs: Any) -> Any:
    from oscar_zoo.engines.sglang.compat.host_pool import Int2HostPool
    from oscar_zoo.engines.sglang.pool import Int2TokenPool

    if not isinstance(kv_pool, Int2TokenPool):
        return original(kv_pool=kv_pool, page_size=page_size, **kwargs)
    FIRED.add("host_pool")
    made = Int2HostPool(kv_pool, page_size)
    FACTS["host_tokens"] = made.size
    return made


def storage(_original: Any, _factory: Any, _name: str, _config: Any, host: Any, **__: Any) -> Any:
    """Ours, or none: also one that is asked for while the server runs, which `refusals` sees only
    at its start."""
    if worker.served()[0].disk_cache is None:
        raise UsageError(
            "a storage backend does not work with an INT2 KV cache: pages that outlive a server do"
            " not name their artifact.",
            hint="files that do: --oscar-disk-cache DIR",
        )
    from oscar_zoo.engines.sglang.compat.host_pool import Int2DiskPages

    FIRED.add("storage")
    return Int2DiskPages(worker.disk_files(host.device_pool, host.page_size))


def states(original: Any, self: Any, total_rest_memory: float) -> float:
    """Take states out of the memory that SGLang found, as many as INT2 tokens need. Both numbers
    are GiB: for states, windows and tokens, and without the states."""
    if self.kv_cache_dtype_str != setting_flags.DTYPE:
        return float(original(self, total_rest_memory))
    FIRED.add("states")
    asked = geometry.max_requests_per_worker(self)
    if not memory.decided():
        memory.choose_slots(self, 1)
        taken = total_rest_memory - original(self, total_rest_memory)
        demand = _state_demand(self, _noted_states(self, taken, asked), asked)
        padding = demand.state * (1 + forward_batch.drafts())
        fixed = worker.fixed_memory(self, num_rows=1).fixed + padding
        FACTS["state_demand"] = asdict(demand)
        slots, _ = demand.divide(total_rest_memory * memory.GIB - fixed)
        memory.choose_slots(self, slots)
    left = float(original(self, total_rest_memory))
    _noted_states(self, total_rest_memory - left, asked)
    return left


def _noted_states(configurator: Any, taken: float, asked: int) -> int:
    """Bytes of a state, where SGLang takes `taken` GiB: for those of its slots, and one for each
    draft of each request; of both one more, for padding."""
    slots = int(memory.schedule().max_mamba_cache_size)
    requests = min(asked, slots // memory.per_request(configurator))
    verified = forward_batch.drafts() * (requests + 1)
    state = round(taken * memory.GIB / (slots + 1 + verified))
    FACTS["states"] = {
        "slots": slots,
        "nbytes": state * (slots + 1),
        "requests": requests,
        "draft_bytes": state * verified,
    }
    return state


def _state_demand(configurator: Any, state: int, asked: int) -> StateDemand:
    windows = worker.window_shape(configurator, num_rows=asked + 1)
    none, all_rows = (worker.fixed_memory(configurator, num_rows=n).fixed for n in (1, asked + 1))
    return StateDemand(
        state=state,
        per_request=memory.per_request(configurator),
        row=-(-(all_rows - none) // asked) + forward_batch.drafts() * state,
        token=worker.slot_shape(configurator, num_slots=0).token_bytes() + SLOT_TABLES,
        plain_token=windows.token_bytes,
        ratio=float(memory.schedule().mamba_full_memory_ratio),
        requests=asked,
        most_tokens=memory.schedule().max_total_tokens,
    )


def sliding_sizes(_result: None, self: Any, configurator: Any, *_: Any, **__: Any) -> None:
    if configurator.kv_cache_dtype_str != setting_flags.DTYPE:
        return
    _note_slot_bytes(configurator)
    self.oscar_demand = _sliding_demand(configurator)
    FACTS["sliding_demand"] = asdict(self.oscar_demand)
    _apply(self, self.oscar_demand, memory.given_ratio())


def sliding_divide(original: Any, self: Any, available_bytes: int, page_size: int) -> Any:
    """Choose the number of sliding slots for INT2 token slots, unless the user did."""
    # `sliding_sizes` put it there.
    demand: SlidingDemand | None = getattr(self, "oscar_demand", None)
    if demand is None:
        return original(self, available_bytes, page_size)
    if memory.given_ratio() is None:
        self.oscar_plan = demand.divide(available_bytes)
        _apply(self, demand, self.oscar_plan.ratio)
    return _noted(original(self, available_bytes, page_size), demand)


def sliding_limit(original: Any, self: Any, max_total_num_tokens: int, page_size: int) -> Any:
    """The same where the user named the number of token slots."""
    plan: SlidingPlan | None = getattr(self, "oscar_plan", None)  # `sliding_divide` put it there
    demand: SlidingDemand | None = getattr(self, "oscar_demand", None)
    if demand is None:
        return original(self, max_total_num_tokens, page_size)
    if plan is not None:
        _apply(self, demand, demand.limit(plan, max_total_num_tokens).ratio)
    return _noted(original(self, max_total_num_tokens, page_size), demand)


def sliding_keep(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep one recent window more behind a sliding window than SGLang does, so that a hit that
    leaves the recent window to prefill finds what the layers with a window need."""
    if "kv_dtype" in FIRED and not kwargs.get("is_chunk_cache"):
        kwargs["sliding_window_size"] += worker.kept_by_hits()
    return original(*args, **kwargs)


def _sliding_demand(configurator: Any) -> SlidingDemand:
    page, window = configurator.page_size, configurator.sliding_window_size
    piece = memory.longest_piece(configurator)
    held = window + worker.kept_by_hits() + 2 * page + forward_batch.reserved_slots()
    drafted = beside_slot(configurator) if forward_batch.drafts() else 0
    requests = geometry.max_requests_per_worker(configurator)
    return SlidingDemand(
        token=worker.slot_shape(configurator, num_slots=0).token_bytes() + SLOT_TABLES + drafted,
        plain_token=worker.window_shape(configurator, num_rows=1).token_bytes + drafted,
        sliding=memory.sliding_bytes(configurator) + SLIDING_TABLES,
        ratio=SLIDING_RATIO,
        one_request=held + 2 * piece,
        all_requests=requests * held + 2 * piece,
    )


def _apply(pools: Any, demand: SlidingDemand, ratio: float | None) -> None:
    chosen = demand.ratio if ratio is None else ratio
    memory.set_sizes(pools, token=demand.token, sliding=demand.sliding, ratio=chosen)


def _noted(config: Any, demand: SlidingDemand) -> Any:
    slots = int(config.swa_max_total_num_tokens)
    nbytes = slots * (demand.sliding - SLIDING_TABLES)
    ratio = slots / config.full_max_total_num_tokens
    FACTS["sliding"] = {"slots": slots, "nbytes": nbytes, "ratio": ratio}
    return config
