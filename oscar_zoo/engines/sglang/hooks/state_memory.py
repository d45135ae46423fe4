"""Hook where SGLang divides memory between the states of a hybrid model and its tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from oscar_zoo.engines.sglang import setting_flags, worker
from oscar_zoo.engines.sglang.compat import geometry, speculation, state_memory
from oscar_zoo.engines.sglang.fired_hooks import FACTS, FIRED
from oscar_zoo.runtime.memory_plan import SLOT_TABLES, States
from oscar_zoo.runtime.state_plan import StateDemand


def states(original: Any, self: Any, total_rest_memory: float) -> float:
    """Take states out of the memory that SGLang found, as many as INT2 tokens need.

    Args:
        total_rest_memory: GiB for states, windows and tokens.

    Returns:
        GiB without the states.
    """
    if self.kv_cache_dtype_str != setting_flags.DTYPE:
        return float(original(self, total_rest_memory))
    FIRED.add("states")
    asked = geometry.max_requests_per_worker(self)
    if not state_memory.decided():
        state_memory.choose_slots(self, 1)
        one = _found(self, total_rest_memory - original(self, total_rest_memory), asked)
        demand = _demand(self, one.state, asked)
        padding = demand.state * (1 + speculation.drafts())
        fixed = worker.fixed_memory(self, num_rows=1).fixed + padding
        FACTS["state_demand"] = asdict(demand)
        plan = demand.divide(total_rest_memory * state_memory.GIB - fixed)
        state_memory.choose_slots(self, plan.slots)
    left = float(original(self, total_rest_memory))
    FACTS["states"] = asdict(_found(self, total_rest_memory - left, asked))
    return left


def _found(configurator: Any, taken: float, asked: int) -> States:
    """The states for which SGLang takes `taken` GiB: those of its slots, and one for each draft of
    each request; of both one more, for padding."""
    slots = state_memory.slots()
    requests = min(asked, slots // state_memory.per_request(configurator))
    verified = speculation.drafts() * (requests + 1)
    state = round(taken * state_memory.GIB / (slots + 1 + verified))
    return States(slots, state * (slots + 1), requests, state * verified)


def _demand(configurator: Any, state: int, asked: int) -> StateDemand:
    windows = worker.window_shape(configurator, num_rows=asked + 1)
    none, all_rows = (worker.fixed_memory(configurator, num_rows=n).fixed for n in (1, asked + 1))
    return StateDemand(
        state=state,
        per_request=state_memory.per_request(configurator),
        row=-(-(all_rows - none) // asked) + speculation.drafts() * state,
        token=worker.slot_shape(configurator, num_slots=0).token_bytes() + SLOT_TABLES,
        plain_token=windows.token_bytes,
        ratio=state_memory.ratio(),
        requests=asked,
        most_tokens=state_memory.most_tokens(),
    )
