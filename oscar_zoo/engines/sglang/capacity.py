"""How many tokens and requests fit beside the weights of a model, for each kind of KV cache.

An estimate from shapes alone, without torch. What an engine needs besides weights and cache differs
between engines and versions; `USABLE` leaves room for it, and for SGLang's tables of slots. A
started server says what it really got. The zoo's page computes the same in a browser from the same
`Cache` numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from oscar_kernels.spec import QuantSpec, group_channels, row_bytes
from oscar_zoo.artifact.formats import Role
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.models.other_layers import OtherLayers

USABLE = 0.85
"""Share of a GPU's memory for weights and cache, about what SGLang takes by itself."""
BF16_BYTES = 2
FP8_BYTES = 1


@dataclass(frozen=True)
class Cache:
    """What one kind of KV cache takes on one GPU.

    Attributes:
        kind: `BF16`, `FP8` or `INT2`.
        token: bytes of one token in the layers with full attention.
        window_token: bytes of one token in the layers with a sliding window.
        window: tokens that these layers keep of a request.
        request: bytes that a running request takes beside its tokens: sinks, ring and states.
        sinks: of these, the first tokens in BF16, its own and those of a finished prompt.
        ring: of these, the last tokens in BF16.
    """

    kind: str
    token: int
    window_token: int = 0
    window: int = 0
    request: int = 0
    sinks: int = 0
    ring: int = 0

    @property
    def state(self) -> int:
        """Of the bytes of `request`, the states of layers without keys and values."""
        return self.request - self.sinks - self.ring

    def request_bytes(self, context: int) -> int:
        """Bytes of one request of `context` tokens."""
        sliding = min(context, self.window)
        return self.token * context + self.window_token * sliding + self.request

    def requests(self, left: int, context: int) -> int:
        """How many requests of `context` tokens fit at a time into `left` bytes."""
        return max(0, left // self.request_bytes(context))

    def context(self, left: int, requests: int) -> int:
        """The longest context with which `requests` requests fit at a time into `left` bytes."""
        each = left // requests - self.request
        short = each // (self.token + self.window_token)
        if short < self.window:
            return max(0, short)
        return max(self.window, (each - self.window_token * self.window) // self.token)

    def tokens(self, left: int, requests: int) -> int:
        """Tokens that fit in all, with `requests` requests that run at a time."""
        return self.context(left, requests) * requests


def room(memory: int, weights: int, layout: Layout) -> int:
    """Bytes for a cache on each GPU of `memory` bytes; 0 where the weights do not fit.

    Args:
        weights: of the whole model.
    """
    return max(0, memory - reserved(memory) - weights_share(weights, layout))


def reserved(memory: int) -> int:
    """Bytes of a GPU of `memory` bytes that neither weights nor a cache take."""
    return memory - int(USABLE * memory)


def weights_share(weights: int, layout: Layout) -> int:
    """Bytes of each GPU for `weights` bytes of a whole model."""
    return weights // (layout.tp * layout.pp)


def caches(
    geometry: Geometry, serving: ServingRecipe, layout: Layout, other: OtherLayers | None = None
) -> tuple[Cache, ...]:
    """The three kinds of cache of a model, on each GPU of `layout`."""
    other = other or OtherLayers()
    dims = geometry.head_dims
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
    on average.
    """
    elements = sum(geometry.head_dims) * len(geometry.attention_layers)
    return 8 * code_bytes(geometry, serving) / elements


def code_bytes(geometry: Geometry, serving: ServingRecipe) -> int:
    """Bytes of a token's rows of codes with scales, of K and V in all layers of one head.

    Scales have 16 bits in a server, whatever type the recipe names.
    """
    roles: tuple[tuple[Role, int], ...] = (("k", geometry.head_dim), ("v", geometry.v_head_dim))
    return sum(
        row_bytes(
            QuantSpec(
                dim,
                group_channels(dim, serving.group_size),
                bits=serving.code_bits(role, index),
            )
        )
        for index in range(len(geometry.attention_layers))
        for role, dim in roles
    )
