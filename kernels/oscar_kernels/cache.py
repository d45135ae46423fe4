"""The data that the kernels read and write: the INT2 cache of one layer on one rank, its BF16
windows, and the view of a batch.

Every token has codes and affine parameters in the slot the serving engine gave it. On top of them
the first `sink` and the last `recent` tokens of a running request also have exact rows in the sink
and ring stores. A request with `n` cached tokens reads position `p` from

* its sink block where `sink_from <= p < min(sink, n)`,
* its ring, at `p % ring_rows`, where `max(n - recent, ring_start) <= p < n` (and not from the
  sink),
* INT2 otherwise.

A ring has more than `recent` rows only for speculative decoding: the drafts of a step that may be
rejected must not overwrite what the window of an earlier length reads.

Row 0 and slot 0 are dummies, which the padding of a CUDA graph reads and writes.

Record of one slot and KV head, `[K codes | V codes]`, each packed as `spec` says; its affine
parameters are `[K scale, K offset] * K groups, [V scale, V offset] * V groups` in 16 bits.

With multi-head latent attention (MLA) there is one KV head, whose rows are keys and values at once.
K is the latent, and in the place of V is the rotary part of the key, without codes (`spec.PLAIN`)
and not transformed. A query reads both parts as a key, and the latent alone as a value. Extends and
drafts of such rows have no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from oscar_kernels.spec import PLAIN, QuantSpec, code_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer; `H` local KV heads.

    Attributes:
        k_spec, v_spec: what a row is; scales are stored in 16 bits.
        codes: `[slots, H, code_bytes(k) + code_bytes(v)]` uint8.
        affine: `[slots, H, 2 * (K groups + V groups)]` float16 or bfloat16.
        ring_k, ring_v: `[rows, ring_rows, H, head_dim]` BF16 (float32 on a CPU).
        sink_k, sink_v: `[blocks, sink, H, head_dim]`, the same.
        recent: positions of the window that is read from a ring, at most `ring_rows`.
    """

    k_spec: QuantSpec
    v_spec: QuantSpec
    codes: Tensor
    affine: Tensor
    ring_k: Tensor
    ring_v: Tensor
    sink_k: Tensor
    sink_v: Tensor
    recent: int

    @property
    def stores(self) -> tuple[Tensor, ...]:
        """Codes, affine parameters, rings and sinks."""
        return self.codes, self.affine, self.ring_k, self.ring_v, self.sink_k, self.sink_v

    @property
    def num_kv_heads(self) -> int:
        """Local KV heads."""
        return int(self.codes.shape[1])

    @property
    def latent(self) -> bool:
        """Whether rows are latents (MLA)."""
        return self.v_spec.bits == PLAIN

    @property
    def query_dim(self) -> int:
        """Channels of a query head."""
        return self.k_spec.head_dim + (self.v_spec.head_dim if self.latent else 0)

    @property
    def out_dim(self) -> int:
        """Channels of the output of a query head."""
        return (self.k_spec if self.latent else self.v_spec).head_dim

    @property
    def ring_rows(self) -> int:
        """Positions of a ring."""
        return int(self.ring_k.shape[1])

    @property
    def sink(self) -> int:
        """Positions of a sink block."""
        return int(self.sink_k.shape[1])


@dataclass(frozen=True)
class WindowState:
    """Which positions of each row are present in BF16; int32 on the device, `R` rows.

    Attributes:
        sink_block: `[R]`, the block of a row.
        sink_from: `[R]`, first position present in it.
        ring_start: `[R]`, first position present in the row's ring.
    """

    sink_block: Tensor
    sink_from: Tensor
    ring_start: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """In this order."""
        return self.sink_block, self.sink_from, self.ring_start


@dataclass(frozen=True)
class BatchView:
    """The cached tokens of `B` requests.

    Attributes:
        kv_indptr: `[B + 1]` int32 or int64; request `b` has `kv_indptr[b + 1] - kv_indptr[b]`
            cached tokens.
        kv_indices: `[>= kv_indptr[B]]` int32 or int64, slots of the cached tokens in order of
            position.
        rows: `[B]` int32 or int64, the row of each request in the stores; 0 for padding.
        windows: which positions of every row are present in BF16.
    """

    kv_indptr: Tensor
    kv_indices: Tensor
    rows: Tensor
    windows: WindowState


MOST_DRAFTS = 32
"""Most draft tokens of a request, because a mask has a bit for each of them."""


@dataclass(frozen=True)
class Drafts:
    """Speculative decoding: the last tokens of every request of a batch are drafts, which form a
    tree below the last token that is sure. Their first node is that token itself.

    With `L` committed tokens and `n` drafts a request has `L + n` tokens in its `BatchView`. Draft
    `i` lies in slot `L + i` of the list and at `(L + i) % ring_rows` of the ring, whatever its
    depth in the tree.

    Attributes:
        count: `n` drafts of each request, 1 to `MOST_DRAFTS`.
        mask: `[B * n]` int32; bit `i` of entry `b * n + j` says that node `j` of request `b` sees
            node `i`: its ancestors, which have smaller numbers, and itself. `None` is a chain, in
            which node `j` sees the nodes `0 .. j`.
    """

    count: int
    mask: Tensor | None = None


@dataclass(frozen=True)
class TokenTargets:
    """Where `T` new tokens go; all int32 or int64.

    Attributes:
        out_loc: `[T]`, the slot of each token.
        rows: `[T]`, the row of each token's request.
        positions: `[T]`, the position of each token in its request.
        ends: `[T]`, the number of tokens of its request once these are written. Only the last
            `recent` tokens of a request enter the ring.
    """

    out_loc: Tensor
    rows: Tensor
    positions: Tensor
    ends: Tensor


class NewTokens(NamedTuple):
    """Of a decode step, `[B]` integers each: where an engine puts the one new token of a request,
    and what kernels read in its place, which a CUDA graph knows by address."""

    slots: Tensor  # negative for a request that is padding
    out_loc: Tensor  # written: these; 0 for padding
    lengths: Tensor  # written: tokens of the request with the new one; 1 for padding
    positions: Tensor  # written: of the new token


@dataclass(frozen=True, eq=False)
class Transforms:
    """The transform pairs of one layer, float32 but for the feedback; a leading dimension of 1 is
    shared by all heads, else `H`.

    The tensors must not change once they are in use: kernels keep what they compute from them.

    `k' = (k - k_mean) @ k_forward`, `q' = q @ q_partner`, `v' = v @ v_forward`,
    `o = o' @ o_partner^T`.

    Attributes:
        k_forward, q_partner: `[1 | H, Dk, Dk]`.
        v_forward, o_partner: `[1 | H, Dv, Dv]`.
        k_mean: `[1 | H, Dk]`, or `None`.
        k_feedback: `[H, Dk, Dk]` float16, how keys are rounded (`quantizer.quantize_codes`), with a
            `k_forward` of each head; `None` to the nearest code.
    """

    k_forward: Tensor
    q_partner: Tensor
    v_forward: Tensor
    o_partner: Tensor
    k_mean: Tensor | None = None
    k_feedback: Tensor | None = None


def allocate(
    k_spec: QuantSpec,
    v_spec: QuantSpec,
    *,
    slots: int,
    rows: int,
    num_kv_heads: int,
    sink: int,
    recent: int,
    ring_rows: int | None = None,
    blocks: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """An empty cache of one layer.

    Args:
        k_spec, v_spec: what a row is; both have the same 16-bit `scale_dtype`.
        rows: number of request rows, row 0 included; each has a ring.
        ring_rows: positions of a ring; `recent` by default.
        blocks: number of sink blocks; `rows` by default.
        dtype: type of the windows; bfloat16 by default.
    """
    import torch

    if k_spec.scale_dtype != v_spec.scale_dtype or k_spec.scale_dtype == "float32":
        raise ValueError(
            f"scales are stored as {k_spec.scale_dtype} and {v_spec.scale_dtype}; one 16-bit type"
            " is needed"
        )
    ring = recent if ring_rows is None else ring_rows
    if ring < recent:
        raise ValueError(f"a ring of {ring} positions cannot hold a window of {recent}")
    window = {"dtype": dtype or torch.bfloat16, "device": device}
    record = code_bytes(k_spec) + code_bytes(v_spec)
    parameters = 2 * (k_spec.num_groups + v_spec.num_groups)
    sinks = rows if blocks is None else blocks
    return LayerCache(
        k_spec,
        v_spec,
        torch.zeros(slots, num_kv_heads, record, dtype=torch.uint8, device=device),
        torch.zeros(
            slots, num_kv_heads, parameters, dtype=getattr(torch, k_spec.scale_dtype), device=device
        ),
        torch.zeros(rows, ring, num_kv_heads, k_spec.head_dim, **window),
        torch.zeros(rows, ring, num_kv_heads, v_spec.head_dim, **window),
        torch.zeros(sinks, sink, num_kv_heads, k_spec.head_dim, **window),
        torch.zeros(sinks, sink, num_kv_heads, v_spec.head_dim, **window),
        recent,
    )
