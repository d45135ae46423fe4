"""Hooks for models whose layers partly have a sliding window: two pools, their sizes, and what the
prefix cache keeps behind a window."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from oscar_zoo.engines.sglang import setting_flags, worker
from oscar_zoo.engines.sglang.compat import geometry, sliding_windows, speculation
from oscar_zoo.engines.sglang.fired_hooks import FACTS, FIRED
from oscar_zoo.engines.sglang.hooks import memory_pool
from oscar_zoo.runtime.memory_plan import SLIDING_TABLES, SLOT_TABLES, Sliding
from oscar_zoo.runtime.sliding_plan import SlidingDemand, SlidingPlan


def pool_sizes(_result: None, self: Any, configurator: Any, *_: Any, **__: Any) -> None:
    """Note what slots of both pools take, and that of a draft model beside them."""
    if configurator.kv_cache_dtype_str != setting_flags.DTYPE:
        return
    FIRED.add("slot_bytes")
    worker.check_model(configurator.model_config)
    FACTS["slot_bytes"] = worker.slot_shape(configurator, num_slots=0).token_bytes()
    self.oscar_demand = _demand(configurator)
    FACTS["sliding_demand"] = asdict(self.oscar_demand)
    _apply(self, self.oscar_demand, sliding_windows.given_ratio())


def divide(original: Any, self: Any, available_bytes: int, page_size: int) -> Any:
    """Choose the number of sliding slots for INT2 token slots, unless the user did."""
    demand: SlidingDemand | None = getattr(self, "oscar_demand", None)  # `pool_sizes` put it there
    if demand is None:
        return original(self, available_bytes, page_size)
    if sliding_windows.given_ratio() is None:
        self.oscar_plan = demand.divide(available_bytes)
        _apply(self, demand, self.oscar_plan.ratio)
    return _noted(original(self, available_bytes, page_size), demand)


def limit(original: Any, self: Any, max_total_num_tokens: int, page_size: int) -> Any:
    """The same where the user named the number of token slots."""
    plan: SlidingPlan | None = getattr(self, "oscar_plan", None)  # `divide` put it there
    demand: SlidingDemand | None = getattr(self, "oscar_demand", None)
    if demand is None:
        return original(self, max_total_num_tokens, page_size)
    if plan is not None:
        _apply(self, demand, demand.limit(plan, max_total_num_tokens).ratio)
    return _noted(original(self, max_total_num_tokens, page_size), demand)


def keep(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep one recent window more behind a sliding window than SGLang does, so that a hit that
    leaves the recent window to prefill finds what the layers with a window need."""
    if "kv_dtype" in FIRED and not kwargs.get("is_chunk_cache"):
        kwargs["sliding_window_size"] += worker.kept_by_hits()
    return original(*args, **kwargs)


def _demand(configurator: Any) -> SlidingDemand:
    page, window = configurator.page_size, configurator.sliding_window_size
    piece = sliding_windows.longest_piece(configurator)
    held = window + worker.kept_by_hits() + 2 * page + speculation.reserved_slots()
    drafted = memory_pool.beside_slot(configurator) if speculation.drafts() else 0
    requests = geometry.max_requests_per_worker(configurator)
    return SlidingDemand(
        token=worker.slot_shape(configurator, num_slots=0).token_bytes() + SLOT_TABLES + drafted,
        plain_token=worker.window_shape(configurator, num_rows=1).token_bytes + drafted,
        sliding=sliding_windows.sliding_bytes(configurator) + SLIDING_TABLES,
        ratio=sliding_windows.STOCK_RATIO,
        one_request=held + 2 * piece,
        all_requests=requests * held + 2 * piece,
    )


def _apply(pools: Any, demand: SlidingDemand, ratio: float | None) -> None:
    chosen = demand.ratio if ratio is None else ratio
    sliding_windows.set_sizes(pools, token=demand.token, sliding=demand.sliding, ratio=chosen)


def _noted(config: Any, demand: SlidingDemand) -> Any:
    slots = int(config.swa_max_total_num_tokens)
    nbytes = slots * (demand.sliding - SLIDING_TABLES)
    FACTS["sliding"] = asdict(Sliding(slots, nbytes, slots / config.full_max_total_num_tokens))
    return config
