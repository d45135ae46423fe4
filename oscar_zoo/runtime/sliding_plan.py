"""How a worker divides its memory between the two pools of a model with sliding windows.

Layers with a sliding window keep tokens in slots of their own, uncompressed, and only as long as a
window or the prefix cache needs them. An engine has a fixed ratio of these slots to the token slots
of the full-attention layers. With INT2 token slots that ratio would leave most of the memory to the
layers with a window.

So there are as many sliding slots as the engine would have with an uncompressed cache. All memory
that INT2 saves goes to token slots. There are always enough sliding slots for one request, and
never more of them than token slots.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SlidingPlan:
    """Slots of both pools: of the full-attention layers, and of those with a window."""

    tokens: int
    sliding: int

    @property
    def ratio(self) -> float:
        """Sliding slots to token slots."""
        return min(1.0, self.sliding / max(1, self.tokens))


@dataclass(frozen=True)
class SlidingDemand:
    """What decides the number of slots.

    Attributes:
        token: bytes of one token slot, SGLang's own tables included.
        plain_token: bytes of one token in the engine's own, uncompressed pool.
        sliding: bytes of one sliding slot, over all layers with a window.
        ratio: sliding slots to token slots that the engine wants with its own cache.
        one_request: sliding slots that a request needs while it is prefilled.
        all_requests: sliding slots that all requests need that run at a time.
    """

    token: int
    plain_token: int
    sliding: int
    ratio: float
    one_request: int
    all_requests: int

    def divide(self, memory: float) -> SlidingPlan:
        """The plan for `memory` bytes that both pools share."""
        as_before = int(self.ratio * memory / (self.plain_token + self.ratio * self.sliding))
        both = int(memory / (self.token + self.sliding))
        sliding = min(both, max(as_before, self.one_request))
        return SlidingPlan(int((memory - sliding * self.sliding) / self.token), sliding)

    def limit(self, plan: SlidingPlan, tokens: int) -> SlidingPlan:
        """The plan with only `tokens` token slots.

        Sliding slots become fewer too, but those stay that requests at a time need.
        """
        wanted = max(round(plan.ratio * tokens), min(plan.sliding, self.all_requests))
        return SlidingPlan(tokens, min(tokens, wanted))
