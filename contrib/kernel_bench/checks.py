"""Checks of every op against its reference before it is timed, on shapes that the reference can
handle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cases
import torch
from random_caches import Filling, assert_as_good_as_torch, random_cache
from roofline import Heads
from torch import Tensor

from oscar_kernels import kv_read as read
from oscar_kernels import reference as attention_reference
from oscar_kernels import reference as read_reference
from oscar_kernels import reference as write_reference
from oscar_kernels.cache import Drafts
from oscar_kernels.decode_attention import launcher as attention
from oscar_kernels.kv_write import launcher as write
from oscar_kernels.quantizer import unpack
from oscar_kernels.spec import LEVELS, code_bytes

ATOL = 4e-6
TIES = 2e-5
"""Share of the 2-bit codes of 16-bit rows that may differ at rounding ties; `kv_write.tuning` tells
why. Codes of 4 bits have four times as many ties."""


def lengths() -> list[int]:
    """Lengths of the requests, one of them a single token; they are short if kernels are
    interpreted."""
    return [1000, 1, 17, 3001] if cases.DEVICE == "cuda" else [21, 1, 40]


def decode(heads: Heads, op: Callable[..., Tensor], cached: list[int] | None = None) -> None:
    """Check that decode attention by `op` is as good as PyTorch in the same dtype, on requests of
    `cached` tokens.
    """
    cached = cached or lengths()
    filling = _filling(heads, cached)
    query = cases.normal(len(cached), heads.num_kv_heads * heads.group, heads.k_spec.head_dim)
    options = {"sm_scale": heads.k_spec.head_dim**-0.5, "o_partner": _partner(heads)}
    got = op(query, filling.cache, filling.batch, **options)
    assert_as_good_as_torch(
        got,
        lambda q: attention_reference.decode_attention(q, filling.cache, filling.batch, **options),
        [query],
        atol=ATOL,
    )


def verify(heads: Heads, op: Callable[..., Tensor], drafts: int) -> None:
    """Check that attention of so many drafts by `op` is as good as PyTorch in the same dtype, for
    chains and for trees.

    Raises:
        AssertionError: it is not.
    """
    cached = [length + drafts for length in lengths()]
    filling = _filling(heads, cached, drafts)
    tokens = drafts * len(cached)
    query = cases.normal(tokens, heads.num_kv_heads * heads.group, heads.k_spec.head_dim)
    star = [1 | 1 << node for node in range(drafts)]  # all of them below the first one
    masks = [bits - (1 << 32) if bits >> 31 else bits for bits in star] * len(cached)
    for mask in (None, torch.tensor(masks, dtype=torch.int32, device=cases.DEVICE)):
        options = {
            "sm_scale": heads.k_spec.head_dim**-0.5,
            "o_partner": _partner(heads),
            "drafts": Drafts(drafts, mask),
        }
        assert_as_good_as_torch(
            op(query, filling.cache, filling.batch, **options),
            partial(_reference, attention_reference.decode_attention, filling, options),
            [query],
            atol=ATOL,
        )


def _reference(
    op: Callable[..., Tensor], filling: Filling, options: dict[str, Any], query: Tensor
) -> Tensor:
    return op(query, filling.cache, filling.batch, **options)


def extend(heads: Heads) -> None:
    """Check that outputs and log-sum-exps of the short extend are as good as PyTorch's in the same
    dtype.
    """
    filling, new = _filling(heads, lengths()), [3, 1, 7, 2][: len(lengths())]
    qo_indptr = torch.tensor([0, *new], device=cases.DEVICE).cumsum(0).int()
    query = cases.normal(sum(new), heads.num_kv_heads * heads.group, heads.k_spec.head_dim)
    key = cases.normal(sum(new), heads.num_kv_heads, heads.k_spec.head_dim)
    value = cases.normal(sum(new), heads.num_kv_heads, heads.v_spec.head_dim)
    options: dict[str, Any] = {
        "qo_indptr": qo_indptr,
        "sm_scale": heads.k_spec.head_dim**-0.5,
        "o_partner": _partner(heads),
    }
    got = attention.extend_attention(query, key, value, filling.cache, filling.batch, **options)

    def op(index: int) -> Callable[..., Tensor]:
        reference = attention_reference.extend_attention
        return lambda q, k, v: reference(q, k, v, filling.cache, filling.batch, **options)[index]

    for index in (0, 1):
        assert_as_good_as_torch(got[index], op(index), [query, key, value], atol=ATOL)


def writing(heads: Heads, op: Callable[..., Any] = write.write_kv_int2) -> None:
    """Check the write by `op`: few codes differ from the reference's, at rounding ties and by one,
    and exact rows are close to the reference's.
    """
    cached = [length + heads.recent for length in lengths()]
    layer = cases.write_layer(heads, cached, 300 if cases.DEVICE == "cuda" else 5)
    seen = []
    for path in (op, write_reference.write_kv_int2):
        cache = replace(
            layer.cache, codes=layer.cache.codes.clone(), ring_v=layer.cache.ring_v.clone()
        )
        query = path(
            layer.key,
            layer.value,
            cache,
            layer.transforms,
            layer.targets,
            windows=layer.windows,
            query=layer.query,
        )
        assert query is not None
        seen.append((_codes(heads, cache.codes), cache.ring_v, query))
    (codes, *rows), (want_codes, *want_rows) = seen
    few = TIES * max(heads.k_spec.levels, heads.v_spec.levels) / LEVELS * layer.key.numel() + 10
    if heads.feedback:  # a tie changes the rest of its row
        got, want = codes[0], want_codes[0]
        same = (got == want).all(-1).float().mean()
        assert same > 0.98, f"{1 - same:.1%} of the rows of K differ"
        codes, want_codes = codes[1:], want_codes[1:]
    for side, got, want in zip("KV"[-len(codes) :], codes, want_codes, strict=True):
        differ = (got - want).abs()
        assert differ.max() <= 1 and differ.count_nonzero() <= few, (
            f"{differ.count_nonzero()} codes of {side} differ"
        )
    for got, want in zip(rows, want_rows, strict=True):
        torch.testing.assert_close(got, want, rtol=0.01, atol=0.01)


def _codes(heads: Heads, records: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of K and of V."""
    k, v = records.split([code_bytes(heads.k_spec), code_bytes(heads.v_spec)], -1)
    return unpack(k, heads.k_spec.bits).int(), unpack(v, heads.v_spec.bits).int()


def reading(heads: Heads) -> None:
    """Check that materialised rows equal the reference's to the bit."""
    few = [min(length, 500) for length in lengths()]  # the reference takes one position at a time
    cache, batch = cases.cached_batch(heads, few)
    rows = []
    for module in (read, read_reference):
        out_k, out_v = (
            cases.normal(sum(few), heads.num_kv_heads, heads.k_spec.head_dim) for _ in "kv"
        )
        module.materialize_prefix(cache, batch, out_k=out_k, out_v=out_v)
        rows.append((out_k, out_v))
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True)), (
        "rows differ from the reference"
    )


def _filling(heads: Heads, cached: list[int], drafts: int = 0) -> Filling:
    return random_cache(
        cached,
        heads.k_spec,
        heads.v_spec,
        num_kv_heads=heads.num_kv_heads,
        sink=heads.sink,
        recent=heads.recent,
        drafts=drafts,
        dtype=cases.DTYPE,
        device=cases.DEVICE,
    )


def _partner(heads: Heads) -> Tensor:
    dim = heads.v_spec.head_dim
    return torch.linalg.qr(torch.randn(1, dim, dim, device=cases.DEVICE))[0].contiguous()
