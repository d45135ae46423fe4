"""Hooks where SGLang divides memory: the type and size of a token slot, the budget of all slots,
and the pool itself."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

import torch

from oscar_zoo.engines.sglang import setting_flags, worker
from oscar_zoo.engines.sglang.compat import geometry, hybrid_parts, speculation
from oscar_zoo.engines.sglang.fired_hooks import FACTS, FIRED
from oscar_zoo.runtime import memory_plan

OWN = "auto"
"""The type of a cache that is not compressed: that of its model."""


def _ours(configurator: Any) -> bool:
    return configurator.kv_cache_dtype_str == setting_flags.DTYPE and not speculation.is_draft(
        configurator
    )


def kv_dtype(original: Any, **kwargs: Any) -> Any:
    """Store `uint8`. With it SGLang also skips its fused rotary embedding and cache
    write. A draft model keeps a cache in its own type."""
    if kwargs["server_args_kv_cache_dtype"] != setting_flags.DTYPE:
        return original(**kwargs)
    if kwargs["is_draft_worker"]:
        found, dtype = original(**{**kwargs, "server_args_kv_cache_dtype": OWN})
        return found or OWN, dtype
    FIRED.add("kv_dtype")
    return setting_flags.DTYPE, torch.uint8


def slot_bytes(original: Any, self: Any, configurator: Any, num_layers: int) -> Any:
    """Return the bytes of one token slot over all layers, SGLang's own tables included."""
    if not _ours(configurator):
        return original(self, configurator, num_layers)
    FIRED.add("slot_bytes")
    worker.check_model(configurator.model_config)
    FACTS["slot_bytes"] = worker.slot_shape(configurator, num_slots=0).token_bytes()
    return FACTS["slot_bytes"] + memory_plan.SLOT_TABLES


def draft_bytes(_result: None, self: Any, configurator: Any, *_: Any, **__: Any) -> None:
    """Count what a token slot takes in the cache of a draft model. SGLang takes a layer of it for
    as large as one of ours."""
    if not _ours(configurator) or speculation.most_drafts() == 1:
        return
    more = beside_slot(configurator)
    if more:
        self._cell_size = FACTS["slot_bytes"] + memory_plan.SLOT_TABLES + more


def beside_slot(configurator: Any) -> int:
    """Bytes that a draft model takes for every token slot: in its cache, and in the tables of its
    runner. The first are noted.
    """
    found = FACTS["draft_bytes"] = speculation.draft_slot_bytes(configurator)
    return found + memory_plan.SLOT_TABLES if found else 0


def budget(result: int, self: Any, *_: Any, **__: Any) -> int | None:
    """Take rings, sinks and transforms out of the budget before SGLang divides it by the
    slot size.
    """
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
    """Build our pool, which owns codes, scales, rings and sinks."""
    if not _ours(self):
        return original(self, **kwargs)
    if "rows" not in FIRED:
        raise RuntimeError("the hook that counts request rows did not run")
    FIRED.add("pool")
    from oscar_zoo.engines.sglang.pool import Int2TokenPool

    make = functools.partial(
        Int2TokenPool,
        slot_shape=worker.slot_shape(self, num_slots=0),
        window_shape=worker.window_shape(self, num_rows=FACTS["rows"]),
        make_stores=worker.make_stores,
    )
    either = hybrid_parts.either_pool(make, self.model_dtype)
    return original(self, **{**kwargs, "mha_pool_class": either})
