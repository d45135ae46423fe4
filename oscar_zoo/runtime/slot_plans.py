"""How a worker divides its memory between token slots and what other layers of a model keep.

An engine gives states, or tokens of layers with a sliding window, a share that suits uncompressed
tokens. Beside INT2 tokens that share is wrong: requests would wait for a state beside empty token
slots, or windows would have most of the memory. So the share is planned again.

States: there are as many tokens per state slot as the engine would have with uncompressed tokens,
so both grow; and no more states than requests and cached prefixes can use. Windows: there are as
many sliding slots as the engine would have with an uncompressed cache, always enough for one
request, and never more than token slots; all that INT2 saves goes to token slots.
"""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_PER_PREFIX = 512
"""One state slot is planned for so many cached tokens, beside those of running requests."""


@dataclass(frozen=True)
class StateDemand:
    state: int  # bytes of one state slot, over all layers that keep a state
    per_request: int  # state slots of a running request
    row: int  # bytes of the windows and tables of one request
    token: int  # bytes of one token slot
    plain_token: int  # bytes of one token in the engine's own, uncompressed cache
    ratio: float  # memory of states to memory of tokens that the engine wants with its own cache
    requests: int  # requests at a time that are asked for
    most_tokens: int | None = None  # token slots that are asked for at most; `None` for no limit

    def divide(self, memory: float) -> tuple[int, int]:
        """State slots, and the requests that they serve at a time, for `memory` bytes that states,
        rows and tokens share. Requests are fewer than asked when there are not enough states for
        them, but at least one."""
        # Memory of tokens per byte of states that keeps the engine's number of tokens per state.
        per_state_byte = self.token / (self.ratio * self.plain_token)
        slot = self.state * (1 + per_state_byte)
        running = int(memory / (slot + self.row / self.per_request)) // self.per_request
        requests = max(1, min(self.requests, running))
        left, busy = memory - requests * self.row, requests * self.per_request
        tokens = (left - busy * self.state) / (self.token + self.state / TOKENS_PER_PREFIX)
        if self.most_tokens is not None:
            tokens = min(tokens, self.most_tokens)
        wanted = busy + int(max(0.0, tokens)) // TOKENS_PER_PREFIX + 1
        return max(busy, min(int(left / slot), wanted)), requests

    def tokens(self, memory: float, slots: int, requests: int) -> int:
        taken = requests * self.row + slots * self.state
        return max(0, int((memory - taken) / self.token))

    def least_tokens(self, memory: float) -> int:
        """Token slots that fit at least, however large a state is, as long as one request fits.
        States never get more than the share that keeps the engine's tokens per state, and `state`
        does not count here."""
        left = memory - self.requests * self.row
        return max(0, int(left / (self.token + self.ratio * self.plain_token)))


@dataclass(frozen=True)
class SlidingPlan:
    """Slots of both pools: of the full-attention layers, and of those with a window."""

    tokens: int
    sliding: int

    @property
    def ratio(self) -> float:
        return min(1.0, self.sliding / max(1, self.tokens))


@dataclass(frozen=True)
class SlidingDemand:
    token: int  # bytes of one token slot, SGLang's own tables included
    plain_token: int  # bytes of one token in the engine's own, uncompressed pool
    sliding: int  # bytes of one sliding slot, over all layers with a window
    ratio: float  # sliding slots to token slots that the engine wants with its own cache
    one_request: int  # sliding slots that a request needs while it is prefilled
    all_requests: int  # sliding slots that all requests need that run at a time

    def divide(self, memory: float) -> SlidingPlan:
        as_before = int(self.ratio * memory / (self.plain_token + self.ratio * self.sliding))
        both = int(memory / (self.token + self.sliding))
        sliding = min(both, max(as_before, self.one_request))
        return SlidingPlan(int((memory - sliding * self.sliding) / self.token), sliding)

    def limit(self, plan: SlidingPlan, tokens: int) -> SlidingPlan:
        """The plan with only `tokens` token slots. Sliding slots become fewer too, but those stay
        that requests at a time need."""
        wanted = max(round(plan.ratio * tokens), min(plan.sliding, self.all_requests))
        return SlidingPlan(tokens, min(tokens, wanted))
