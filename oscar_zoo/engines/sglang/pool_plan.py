"""What a server has on one GPU with each kind of cache, from shapes alone: token slots, state slots
and sliding slots, as the server itself would divide its memory.

An INT2 server divides by `runtime/state_plan.py` and `runtime/sliding_plan.py`, and so does this.
Stock SGLang with a BF16 or FP8 cache divides by fixed ratios. Imports neither torch nor sglang.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.sglang.capacity import Cache
from oscar_zoo.engines.sglang.compat.sliding_windows import STOCK_RATIO as SLIDING_RATIO
from oscar_zoo.engines.sglang.compat.state_memory import STOCK_RATIO as STATE_RATIO
from oscar_zoo.models.other_layers import STATES_PER_REQUEST, OtherLayers
from oscar_zoo.runtime.sliding_plan import SlidingDemand
from oscar_zoo.runtime.state_plan import StateDemand

PIECE = 8192
"""Tokens that one forward pass adds to a request; SGLang takes 2,048 to 16,384 by the size of the
GPU. They decide how many sliding slots there are at least."""


@dataclass(frozen=True)
class Pools:
    """What a server has.

    Attributes:
        tokens: token slots.
        requests: that run at a time, no more than were asked for.
        states: state slots.
        sliding: sliding slots, or `None` where no layer has a window.
        held: sliding slots of a request at most.
    """

    tokens: int
    requests: int
    states: int = 0
    sliding: int | None = None
    held: int = 0

    @property
    def context(self) -> int:
        """Tokens that each of the requests can have at a time."""
        if self.requests == 0:
            return 0
        each = self.tokens // self.requests
        if self.sliding is None or self.sliding >= self.requests * self.held:
            return each
        return min(each, self.sliding // self.requests)

    def holds(self, requests: int, context: int) -> bool:
        """Whether `requests` requests of `context` tokens run at a time."""
        if self.requests < requests or self.tokens < requests * context:
            return False
        return self.sliding is None or self.sliding >= requests * min(context, self.held)


@dataclass(frozen=True)
class Planner:
    """The division of memory with one kind of cache.

    Attributes:
        cache: its bytes.
        plain: bytes of a token in 16 bits, in the layers with full attention.
        windows: of an INT2 cache.
        other: what other layers keep, or `None` where nobody knows that.
        least: whether what nobody knows counts as much as it can be; otherwise it is nothing.
    """

    cache: Cache
    plain: int
    windows: Windows
    other: OtherLayers | None
    least: bool = False

    @property
    def uncertain(self) -> bool:
        """Whether somebody has to say more about the model."""
        return self.other is None or not self.other.known

    def divide(self, left: int, requests: int) -> Pools:
        """What `left` bytes are divided into, when so many `requests` shall run at a time."""
        if self.other is None or self.other.state is None:
            return self._unknown(left, requests)
        if self.cache.state:
            return self._with_states(left, requests)
        if self.cache.window_token:
            return self._with_windows(left, requests)
        return Pools(self.cache.tokens(left, requests), requests)

    def requests(self, left: int, context: int) -> int:
        """How many requests of `context` tokens run at a time, when as many are asked for."""
        most = self.cache.requests(left, context) if context else 0
        return bisect_left(
            range(1, most + 1),
            True,
            key=lambda number: not self.divide(left, number).holds(number, context),
        )

    def state_demand(self, requests: int) -> StateDemand:
        """What decides the number of states of an INT2 server."""
        return StateDemand(
            state=self.cache.state // STATES_PER_REQUEST,
            per_request=STATES_PER_REQUEST,
            row=self._row,
            token=self._token,
            plain_token=self.plain + self.cache.window_token,
            ratio=STATE_RATIO,
            requests=requests,
        )

    def sliding_demand(self, requests: int) -> SlidingDemand:
        """What decides the number of sliding slots."""
        return SlidingDemand(
            token=self.cache.token,
            plain_token=self.plain if self._ours else self.cache.token,
            sliding=self.cache.window_token,
            ratio=SLIDING_RATIO,
            one_request=self._held + 2 * PIECE if self._ours else 0,
            all_requests=requests * self._held + 2 * PIECE,
        )

    def _unknown(self, left: int, requests: int) -> Pools:
        if not self.least:
            return Pools(self.cache.tokens(left, requests), requests)
        if self.other is None:
            return Pools(0, 0)
        if not self._ours:
            return Pools(int(left / (1 + STATE_RATIO)) // self.cache.token, 0)
        return Pools(self.state_demand(requests).least_tokens(left), 0)

    def _with_states(self, left: int, requests: int) -> Pools:
        state = self.cache.state // STATES_PER_REQUEST
        if self._ours:
            demand = self.state_demand(requests)
            memory = max(0, left - self._row - state)  # those of the padding row
            plan = demand.divide(memory)
            return Pools(demand.tokens(memory, plan), plan.requests, plan.slots)
        slots = max(0, int(left * STATE_RATIO / (1 + STATE_RATIO)) // state - 1)
        running = min(requests, slots // STATES_PER_REQUEST)
        return Pools(max(0, left - (slots + 1) * state) // self._token, running, slots)

    def _with_windows(self, left: int, requests: int) -> Pools:
        plan = self.sliding_demand(requests).divide(max(0, left - (requests + 1) * self._row))
        held = self._held
        if self.uncertain:
            held = plan.tokens if self.least else 0
        return Pools(plan.tokens, requests, sliding=plan.sliding, held=held)

    @property
    def _ours(self) -> bool:
        return self.cache.kind == "INT2"

    @property
    def _held(self) -> int:
        """Sliding slots that a request keeps at most: its window, what a prefix hit needs behind
        it, and a page at either end."""
        return self.cache.window + (self.windows.recent if self._ours else 0) + 2

    @property
    def _row(self) -> int:
        """Bytes of the windows of one request."""
        return self.cache.sinks + self.cache.ring

    @property
    def _token(self) -> int:
        """Bytes of a token; a model with states and windows keeps all tokens here."""
        return self.cache.token + self.cache.window_token
