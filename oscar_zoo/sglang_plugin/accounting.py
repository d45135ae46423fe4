"""Where the memory of a worker goes, as one plan that is printed at start-up. Every byte we allocate is in it.

`budget = profiled - side - transforms - scratch`, `tokens = budget // slot`: the side store (rings and sinks of all
request rows), the transforms and the kernels' scratch come out of the budget before SGLang divides it by the bytes of
a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.errors import UsageError
from oscar_zoo.sglang_plugin.side_store import SideShape
from oscar_zoo.sglang_plugin.slot_store import SlotShape

MB = 1e6


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one worker.

    Attributes:
        slot: of one token in the pool, all layers.
        side: of rings and sinks of all rows.
        transforms: of the transform table.
        scratch: of tables and of prefixes read back in 16 bits.
    """

    slot: int
    side: int
    transforms: int
    scratch: int = 0

    @property
    def fixed(self) -> int:
        """What has to be there before the first token."""
        return self.side + self.transforms + self.scratch

    def budget(self, profiled: int) -> int:
        """What is left for token slots.

        Args:
            profiled: bytes SGLang found for its KV cache.

        Raises:
            UsageError: nothing is left.
        """
        left = profiled - self.fixed
        if left <= 0:
            raise UsageError(
                f"rings and sinks need {self.side / MB:.0f} MB, transforms and scratch "
                f"{(self.transforms + self.scratch) / MB:.0f} MB, "
                f"but only {profiled / MB:.0f} MB are there for the KV cache.",
                hint="lower --max-running-requests or --oscar-idle-sinks, or --oscar-recent-size and --oscar-sink-size",
            )
        return left


def plan(slots: SlotShape, side: SideShape, transforms: int, mode: str = "int2", *, scratch: int = 0) -> MemoryPlan:
    """The plan of a worker with these stores."""
    return MemoryPlan(slots.token_bytes(mode), side.nbytes, transforms, scratch)


def describe(plan: MemoryPlan, slots: SlotShape, side: SideShape, *, tokens: int) -> str:
    """The plan with `tokens` slots, one line for the log."""
    elements = slots.num_layers * slots.num_kv_heads * (slots.k.head_dim + slots.v.head_dim)
    total = plan.slot * tokens + plan.fixed
    return (
        f"{tokens} token slots of {plan.slot} bytes ({8 * plan.slot / elements:.2f} bits per element) = "
        f"{plan.slot * tokens / MB:.1f} MB, side store {plan.side / MB:.1f} MB for {side.num_rows} request rows "
        f"({side.recent} recent tokens each) and {side.num_blocks} sink blocks ({side.sink} first tokens each, "
        f"{side.idle} for finished requests), transforms {plan.transforms / MB:.1f} MB, "
        f"scratch {plan.scratch / MB:.1f} MB, together {total / MB:.1f} MB"
    )
