"""How many tokens and requests fit beside the weights of a model, for each kind of KV cache, from
shapes alone and without torch: token slots, state slots and sliding slots, as the server itself
would divide its memory (`runtime/slot_plans.py`; stock SGLang has fixed ratios).

What an engine needs besides weights and cache differs between engines and versions; `RULES` leave
room for it, and for SGLang's tables of slots. A started server says what it really got. The zoo's
page computes the same in a browser from the same `Cache` numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from oscar_kernels.spec import QuantSpec, group_channels, row_bytes
from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import Geometry, ServingRecipe, Windows
from oscar_zoo.engines.sglang.sizing import SLIDING_RATIO, STATE_RATIO, Layout
from oscar_zoo.models.other_layers import STATES_PER_REQUEST, OtherLayers
from oscar_zoo.runtime.slot_plans import SlidingDemand, StateDemand


class Rules(NamedTuple):
    """What the plan of a GPU takes from its engine."""

    usable: float  # share of the memory for weights and cache
    requests: str  # flag for the requests that run at a time


RULES = {
    "sglang": Rules(0.85, "--max-running-requests"),
    "vllm": Rules(0.89, "--max-num-seqs"),
}
"""SGLang takes about so much by itself. vLLM takes 0.92, and on an H200 it needed 0.027 of that for
its largest pass and its graphs."""
USABLE = RULES["sglang"].usable
BF16_BYTES = 2
FP8_BYTES = 1
PIECE = 8192
"""Tokens that one forward pass adds to a request; SGLang takes 2,048 to 16,384 by the size of the
GPU. They decide how many sliding slots there are at least."""


@dataclass(frozen=True)
class Cache:
    kind: str  # `BF16`, `FP8` or `INT2`
    token: int  # bytes of one token in the layers with full attention
    window_token: int = 0  # bytes of one token in the layers with a sliding window
    window: int = 0  # tokens that these layers keep of a request
    request: int = 0  # bytes that a running request takes beside its tokens: sinks, ring and states
    sinks: int = 0  # of these, the first tokens in BF16, its own and those of a finished prompt
    ring: int = 0  # of these, the last tokens in BF16

    @property
    def state(self) -> int:
        """Of the bytes of `request`, the states of layers without keys and values."""
        return self.request - self.sinks - self.ring

    def request_bytes(self, context: int) -> int:
        sliding = min(context, self.window)
        return self.token * context + self.window_token * sliding + self.request

    def requests(self, left: int, context: int) -> int:
        return max(0, left // self.request_bytes(context))

    def context(self, left: int, requests: int) -> int:
        each = left // requests - self.request
        short = each // (self.token + self.window_token)
        if short < self.window:
            return max(0, short)
        return max(self.window, (each - self.window_token * self.window) // self.token)

    def tokens(self, left: int, requests: int) -> int:
        return self.context(left, requests) * requests


def room(memory: int, weights: int, layout: Layout, usable: float = USABLE) -> int:
    """Bytes for a cache on each GPU of `memory` bytes; 0 where the weights do not fit."""
    return max(0, memory - reserved(memory, usable) - weights_share(weights, layout))


def reserved(memory: int, usable: float = USABLE) -> int:
    return memory - int(usable * memory)


def weights_share(weights: int, layout: Layout) -> int:
    return weights // (layout.tp * layout.pp)


def caches(
    geometry: Geometry, serving: ServingRecipe, layout: Layout, other: OtherLayers | None = None
) -> tuple[Cache, ...]:
    other = other or OtherLayers()
    dims = geometry.row_dims
    layers, heads = len(geometry.attention_layers), geometry.num_kv_heads

    def token(itemsize: int) -> int:
        return layout.token_bytes(
            layers=layers, num_kv_heads=heads, dims=sum(dims), itemsize=itemsize
        )

    def sliding(itemsize: int) -> int:
        return layout.token_bytes(
            layers=other.layers, num_kv_heads=other.num_kv_heads, dims=other.dims, itemsize=itemsize
        )

    state, window = (other.state or 0) // (layout.tp * layout.pp), other.window or 0
    bf16 = token(BF16_BYTES)
    plain = {"BF16": BF16_BYTES, "FP8": FP8_BYTES}
    found = [Cache(kind, token(size), sliding(size), window, state) for kind, size in plain.items()]
    sinks = 2 * serving.windows.sink * bf16  # as `usual_requests` counts
    ring = serving.windows.recent * bf16
    int2 = bf16 * code_bytes(geometry, serving) // (BF16_BYTES * sum(dims) * layers)
    beside = sinks + ring + state
    found.append(Cache("INT2", int2, sliding(BF16_BYTES), window, beside, sinks=sinks, ring=ring))
    return tuple(found)


def stored_bits(geometry: Geometry, serving: ServingRecipe) -> float:
    """Bits of an element of an INT2 cache in a server, its share of scales and offsets included,
    on average."""
    elements = sum(geometry.row_dims) * len(geometry.attention_layers)
    return 8 * code_bytes(geometry, serving) / elements


def code_bytes(geometry: Geometry, serving: ServingRecipe) -> int:
    """Bytes of a token's rows of codes with scales, of K and V in all layers of one head. Scales
    have 16 bits in a server, whatever type the recipe names, and so have rotary keys."""
    roles: tuple[tuple[Role, int], ...] = (("k", geometry.head_dim), ("v", geometry.v_head_dim))
    roles = roles[:1] if geometry.rotary_key else roles
    exact = BF16_BYTES * (geometry.rotary_key or 0) * len(geometry.attention_layers)
    return exact + sum(
        row_bytes(
            QuantSpec(
                dim, group_channels(dim, serving.group_size), bits=serving.code_bits(role, index)
            )
        )
        for index in range(len(geometry.attention_layers))
        for role, dim in roles
    )


@dataclass(frozen=True)
class Pools:
    tokens: int  # token slots
    requests: int  # that run at a time, no more than were asked for
    states: int = 0  # state slots
    sliding: int | None = None  # sliding slots, or `None` where no layer has a window
    held: int = 0  # sliding slots of a request at most

    @property
    def context(self) -> int:
        if self.requests == 0:
            return 0
        each = self.tokens // self.requests
        if self.sliding is None or self.sliding >= self.requests * self.held:
            return each
        return min(each, self.sliding // self.requests)

    def holds(self, requests: int, context: int) -> bool:
        if self.requests < requests or self.tokens < requests * context:
            return False
        return self.sliding is None or self.sliding >= requests * min(context, self.held)


@dataclass(frozen=True)
class Planner:
    cache: Cache  # its bytes
    plain: int  # bytes of a token in 16 bits, in the layers with full attention
    windows: Windows  # of an INT2 cache
    other: OtherLayers | None  # what other layers keep, or `None` where nobody knows that
    # Whether what nobody knows counts as much as it can be; otherwise it is nothing.
    least: bool = False

    @property
    def uncertain(self) -> bool:
        return self.other is None or not self.other.known

    def divide(self, left: int, requests: int) -> Pools:
        if self.other is None or self.other.state is None:
            return self._unknown(left, requests)
        if self.cache.state:
            return self._with_states(left, requests)
        if self.cache.window_token:
            return self._with_windows(left, requests)
        return Pools(self.cache.tokens(left, requests), requests)

    def requests(self, left: int, context: int) -> int:
        most = self.cache.requests(left, context) if context else 0
        return bisect_left(
            range(1, most + 1),
            True,
            key=lambda number: not self.divide(left, number).holds(number, context),
        )

    def state_demand(self, requests: int) -> StateDemand:
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
            slots, running = demand.divide(memory)
            return Pools(demand.tokens(memory, slots, running), running, slots)
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
        return self.cache.sinks + self.cache.ring

    @property
    def _token(self) -> int:
        """Bytes of a token; a model with states and windows keeps all tokens here."""
        return self.cache.token + self.cache.window_token
