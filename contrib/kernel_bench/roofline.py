"""Bytes each op must move through device memory: every input read once, every output written once.
No torch.

A share of the roofline is these bytes over the time, over the bandwidth measured in the same run.
Caches can only make an op faster than that if they keep what a real step would have evicted, so
benchmarks clear them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oscar_kernels.spec import QuantSpec, row_bytes

WINDOW_BYTES = 2
TARGET_BYTES = 8
"""Bytes of the slot of a new token: int64, as SGLang gives it."""
SLOT_BYTES = 4
"""Bytes of the slot of a cached token: int32, in the packed list of a batch."""


@dataclass(frozen=True)
class Heads:
    """The attention geometry of one layer on one rank.

    Attributes:
        k_spec, v_spec: what a row is.
        num_kv_heads, group: KV heads, and query heads of each.
        sink, recent: positions of the windows.
        feedback: whether keys are rounded with it.
    """

    k_spec: QuantSpec
    v_spec: QuantSpec
    num_kv_heads: int
    group: int
    sink: int = 64
    recent: int = 256
    feedback: bool = False

    def with_bits(self, k_bits: int, v_bits: int) -> Heads:
        """The same heads with codes of these bits, 2 or 4."""
        return replace(
            self, k_spec=replace(self.k_spec, bits=k_bits), v_spec=replace(self.v_spec, bits=v_bits)
        )

    def of_shape(self, num_kv_heads: int, group: int, head_dim: int) -> Heads:
        """Heads of this shape with one quantization group, and otherwise like these."""
        k_spec, v_spec = (
            replace(spec, head_dim=head_dim, group_size=head_dim)
            for spec in (self.k_spec, self.v_spec)
        )
        return replace(self, num_kv_heads=num_kv_heads, group=group, k_spec=k_spec, v_spec=v_spec)

    @property
    def record(self) -> int:
        """Bytes of a token in the cache's slots, codes and affine parameters of all heads."""
        return self.num_kv_heads * (row_bytes(self.k_spec) + row_bytes(self.v_spec))

    @property
    def rows(self) -> int:
        """Bytes of a token's K and V in 16 bits."""
        return self.num_kv_heads * (self.k_spec.head_dim + self.v_spec.head_dim) * WINDOW_BYTES

    @property
    def query(self) -> int:
        """Bytes of a token's query."""
        return self.num_kv_heads * self.group * self.k_spec.head_dim * WINDOW_BYTES

    @property
    def output(self) -> int:
        """Bytes of a token's attention output."""
        return self.num_kv_heads * self.group * self.v_spec.head_dim * WINDOW_BYTES


def matrices(heads: Heads, *, per_head: bool, query: bool) -> int:
    """Bytes of a layer's float32 transforms that a write reads."""
    k, v = heads.k_spec.head_dim**2, heads.v_spec.head_dim**2
    return 4 * (heads.num_kv_heads if per_head else 1) * (k * (2 if query else 1) + v)


def write(
    heads: Heads,
    tokens: int,
    *,
    window_rows: int = 0,
    slots: bool = True,
    query: bool = False,
    per_head: bool = False,
) -> int:
    """Writing `tokens` new tokens, `window_rows` of them (a token in ring and sink counts twice) to
    the windows."""
    per_token = (
        heads.rows
        + TARGET_BYTES
        + (heads.record if slots else 0)
        + (2 * heads.query if query else 0)
    )
    return (
        tokens * per_token
        + window_rows * heads.rows
        + matrices(heads, per_head=per_head, query=query)
    )


def read(heads: Heads, lengths: Sequence[int]) -> int:
    """Materialising `lengths` cached tokens of some requests."""
    return cached(heads, lengths) + sum(lengths) * heads.rows


def decode(heads: Heads, lengths: Sequence[int]) -> int:
    """Decode attention of one token per request over `lengths` cached tokens."""
    return cached(heads, lengths) + len(lengths) * (heads.query + heads.output)


def extend(heads: Heads, lengths: Sequence[int], new: int) -> int:
    """Attention of `new` tokens per request over `lengths` cached tokens and themselves."""
    return cached(heads, lengths) + new * len(lengths) * (heads.rows + heads.query + heads.output)


def attend_rows(
    heads: Heads, lengths: Sequence[int], new: int = 1, *, element_bytes: int = 2
) -> int:
    """The same attention over unquantized rows; `lengths` are those of the cache, new tokens
    included or not."""
    token = heads.rows // 2 * element_bytes + SLOT_BYTES
    return sum(lengths) * token + new * len(lengths) * (heads.query + heads.output)


def cached(heads: Heads, lengths: Sequence[int]) -> int:
    """Reading every cached token once, from the window or the slot that holds it."""
    total = 0
    for length in lengths:
        window = min(length, heads.sink + heads.recent)
        total += window * heads.rows + (length - window) * (heads.record + SLOT_BYTES)
    return total


def share(moved: int, seconds: float, bandwidth: float) -> float:
    """Part of `bandwidth` (bytes per second) that an op reached."""
    return moved / seconds / bandwidth
