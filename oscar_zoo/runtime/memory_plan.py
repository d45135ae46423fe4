"""Where the memory of a worker goes, as one plan that is printed at start-up. Every byte we
allocate is in it.

`budget = profiled - windows - transforms - scratch`, `tokens = budget // (slot + SLOT_TABLES)`: the
BF16 windows (rings and sinks of all request rows), the transforms and the scratch of the ops come
out of the budget before SGLang divides it by the bytes of a slot and of SGLang's own tables of
slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.errors import UsageError
from oscar_zoo.runtime.stores import SlotShape, WindowShape

MB = 1e6
SLOT_TABLES = 64
"""Bytes per token slot that SGLang allocates outside of the pool, and does not count. Its eager
runner holds token id, slot, position and three rotary positions for as many tokens as there are
slots (48 bytes, in `build_eager_registry` of every supported release), its allocator the list of
free slots, twice while a request gives slots back (16 bytes). A slot of a small model is a few
hundred bytes with INT2, so that on a large GPU they would not fit into what SGLang leaves free."""
SLIDING_TABLES = 16
"""Bytes per sliding slot that SGLang's allocator has beside the pool."""


@dataclass(frozen=True)
class MemoryPlan:
    slot: int  # bytes of one token in the pool, over all layers
    windows: int  # bytes of rings and sinks of all rows
    transforms: int  # bytes of the transform table
    rows: int  # number of request rows that share the windows, the padding row included
    scratch: int = 0  # bytes of tables, of workspaces, and of prefixes read back into 16 bits

    @property
    def fixed(self) -> int:
        return self.windows + self.transforms + self.scratch

    def budget(self, profiled: int) -> int:
        left = profiled - self.fixed
        if left >= self.slot:
            return left
        parts = (("rings and sinks", self.windows), ("transforms", self.transforms))
        told = ", ".join(f"{what} {n / MB:.0f}" for what, n in (*parts, ("scratch", self.scratch)))
        raise UsageError(
            f"an INT2 KV cache for {self.rows - 1} requests at a time needs more than"
            f" {self.fixed / MB:.0f} MB ({told}) and {self.slot} bytes per token, but only"
            f" {max(0, profiled) / MB:.0f} MB are there.",
            hint=self._remedy(profiled),
        )

    def _remedy(self, profiled: int) -> str:
        """Advice that leaves half of the free memory for tokens and gives half to the windows."""
        row = self.windows / self.rows
        fit = int((profiled - self.transforms - self.scratch) / 2 / row) - 1
        if fit < 1:
            return (
                "raise --mem-fraction-static, lower --oscar-recent-size and --oscar-sink-size, or"
                " use more GPUs"
            )
        return (
            f"--max-running-requests {fit} ({row / MB:.1f} MB each), or lower --oscar-idle-sinks,"
            " --oscar-recent-size and --oscar-sink-size, or raise --mem-fraction-static"
        )


def describe_states(*, slots: int, nbytes: int, requests: int, draft_bytes: int) -> str:
    """The engine's states of layers without full attention, for so many requests at a time. A
    padding slot is in `nbytes`; `draft_bytes` are of the states behind the drafts of each request,
    while they are verified."""
    drafts = f", and {draft_bytes / MB:.1f} MB for those of drafts" if draft_bytes else ""
    return (
        f"{slots} state slots of {nbytes // (slots + 1) / MB:.3f} MB for the layers without full"
        f" attention = {nbytes / MB:.1f} MB, for {requests} requests at a time and for cached"
        f" prefixes{drafts}"
    )


def describe_sliding(*, slots: int, nbytes: int, ratio: float) -> str:
    """The engine's tokens of layers with a sliding window, in the model's dtype. `ratio`: of
    sliding slots to token slots."""
    return (
        f"{slots} sliding slots of {nbytes // max(1, slots)} bytes for the layers with a sliding"
        f" window = {nbytes / MB:.1f} MB, {ratio:.3f} per token slot (--swa-full-tokens-ratio)"
    )


def plan(
    slots: SlotShape, windows: WindowShape, transforms: int, *, scratch: int = 0
) -> MemoryPlan:
    return MemoryPlan(slots.token_bytes(), windows.nbytes, transforms, windows.num_rows, scratch)


def bits_per_element(token_bytes: float, slots: SlotShape) -> float:
    elements = slots.num_layers * slots.num_kv_heads * (slots.k.head_dim + slots.v.head_dim)
    return 8 * token_bytes / elements


def describe(plan: MemoryPlan, slots: SlotShape, windows: WindowShape, *, tokens: int) -> str:
    total = (plan.slot + SLOT_TABLES) * tokens + plan.fixed
    return (
        f"{tokens} token slots of {plan.slot} bytes ({bits_per_element(plan.slot, slots):.2f} bits"
        f" per element) = {plan.slot * tokens / MB:.1f} MB, windows {plan.windows / MB:.1f} MB for"
        f" {windows.num_rows} request rows ({windows.recent} recent tokens each) and"
        f" {windows.num_blocks} sink blocks ({windows.sink} first tokens each, {windows.idle} for"
        f" finished requests), transforms {plan.transforms / MB:.1f} MB, scratch"
        f" {plan.scratch / MB:.1f} MB, SGLang's tables {SLOT_TABLES * tokens / MB:.1f} MB, together"
        f" {total / MB:.1f} MB ({bits_per_element(total / tokens, slots):.2f} bits per element of a"
        " full pool)"
    )


def too_short(tokens: int, context: int) -> str | None:
    """The warning when a pool of `tokens` slots cannot hold one request as long as the model's
    `context`."""
    if tokens >= context:
        return None
    return (
        f"the pool has {tokens} token slots, the context of the model {context} tokens: longer"
        " requests are refused. Raise --mem-fraction-static, lower --max-running-requests, or say"
        f" --context-length {tokens}."
    )
