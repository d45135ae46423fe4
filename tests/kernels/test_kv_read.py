"""Prefix materialisation against its reference: equal values, and no row beyond them."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_caches import Filling, random_cache
from torch import Tensor

from oscar_kernels import kv_read, quantizer, reference
from oscar_kernels.spec import PLAIN, QuantSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def read(module: Any, filling: Filling, capacity: int, **options: Any) -> tuple[Tensor, Tensor]:
    cache, like = filling.cache, filling.cache.ring_k
    shapes = ((capacity, cache.num_kv_heads, x.head_dim) for x in (cache.k_spec, cache.v_spec))
    out_k, out_v = (like.new_full(shape, math.nan) for shape in shapes)
    module.materialize_prefix(cache, filling.batch, out_k=out_k, out_v=out_v, **options)
    return out_k, out_v


def assert_same(filling: Filling, capacity: int, **options: Any) -> tuple[Tensor, Tensor]:
    got, want = (read(module, filling, capacity, **options) for module in (kv_read, reference))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.mark.parametrize(("k_spec", "v_spec"), [
    (QuantSpec(16, 16, 0.9), None),
    (QuantSpec(64, 16, 0.9), QuantSpec(64, 32)),
    (QuantSpec(96, 48), QuantSpec(128, 128)),
    (QuantSpec(256, 128), QuantSpec(16, 4)),
    (QuantSpec(192, 96, 0.9), QuantSpec(128, 128, 0.9)),
    (QuantSpec(512, 128, 0.9), QuantSpec(512, 256)),
    (QuantSpec(512, 512, 0.9), None),
    (QuantSpec(16, 4, bits=4), QuantSpec(24, 12, 0.9)),
    (QuantSpec(128, 128, 0.98), QuantSpec(64, 32, bits=4)),
    (QuantSpec(96, 48, bits=4), QuantSpec(96, 24, bits=4)),
    (QuantSpec(512, 128, 0.9), QuantSpec(64, 64, bits=PLAIN)),
], ids=str)  # fmt: skip
def test_every_tier_is_read(k_spec: QuantSpec, v_spec: QuantSpec | None) -> None:
    filling = random_cache(
        [1, 30, 0, 7, 12], k_spec, v_spec, num_kv_heads=3, sink=4, recent=6, device=DEVICE
    )
    got, _ = assert_same(filling, 57)
    assert not got[:50].isnan().any() and got[50:].isnan().all()


@pytest.mark.parametrize(
    ("sink", "recent", "ring_rows"),
    [(0, 0, 0), (0, 5, 5), (5, 0, 0), (40, 40, 40), (3, 5, 8), (0, 0, 3)],
)
def test_any_windows(sink: int, recent: int, ring_rows: int) -> None:
    filling = random_cache(
        [33, 2], QuantSpec(16, 16), sink=sink, recent=recent, ring_rows=ring_rows, device=DEVICE
    )
    assert_same(filling, 35)


def test_a_request_in_int2_alone_gives_what_the_quantizer_gives() -> None:
    spec = QuantSpec(32, 16, 0.9)
    filling = random_cache([9], spec, sink=2, recent=3, sink_from=2, ring_start=9, device=DEVICE)
    keys, values = read(kv_read, filling, 9)
    assert torch.equal(keys, quantizer.fake_quantize(filling.keys, spec))
    assert torch.equal(values, quantizer.fake_quantize(filling.values, spec))


def pieces(lengths: Sequence[int], size: int, device: str) -> list[tuple[Tensor, Tensor]]:
    """`first` and `out_indptr` of every piece of at most `size` positions of each request."""
    out = []
    for start in range(0, max(lengths), size):
        counts = [min(max(n - start, 0), size) for n in lengths]
        ends = [0, *itertools.accumulate(counts)]
        out_indptr = torch.tensor(ends, dtype=torch.int32, device=device)
        out.append((torch.full((len(lengths),), start, device=device), out_indptr))
    return out


def test_pieces_give_the_whole() -> None:
    lengths = [20, 0, 3, 11]
    filling = random_cache(lengths, QuantSpec(16, 8), sink=3, recent=4, device=DEVICE)
    whole, _ = read(kv_read, filling, sum(lengths))
    for first, out_indptr in pieces(lengths, 8, DEVICE):
        keys, _ = assert_same(filling, 4 * 8, first=first, out_indptr=out_indptr)
        for b, start in enumerate(itertools.accumulate([0, *lengths[:-1]])):
            first_row, last_row = out_indptr[b : b + 2].tolist()
            position = start + int(first[b])
            piece = whole[position : position + last_row - first_row]
            assert torch.equal(keys[first_row:last_row], piece)


def test_outputs_may_be_smaller_than_the_batch() -> None:
    assert_same(random_cache([9, 9], QuantSpec(16, 16), sink=2, recent=3, device=DEVICE), 13)


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=5),
    head_dim=st.sampled_from([16, 32, 48]),
    groups=st.sampled_from([1, 2, 4]),
    heads=st.integers(1, 3),
    sink=st.integers(0, 9),
    recent=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
@settings(max_examples=20, deadline=None)
def test_random_batches(
    lengths: list[int], head_dim: int, groups: int, heads: int, sink: int, recent: int, seed: int
) -> None:
    spec = QuantSpec(head_dim, head_dim // groups, 0.9)
    filling = random_cache(
        lengths, spec, num_kv_heads=heads, sink=sink, recent=recent, seed=seed, device=DEVICE
    )
    assert_same(filling, sum(lengths) + 3)


def test_an_output_that_does_not_fit_is_refused() -> None:
    filling = random_cache([4], QuantSpec(16, 16), device=DEVICE)
    out = torch.zeros(4, 2, 32, device=DEVICE)
    with pytest.raises(ValueError, match="out_k"):
        kv_read.materialize_prefix(filling.cache, filling.batch, out_k=out, out_v=out)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_bfloat16_on_a_gpu(head_dim: int, scale_dtype: str) -> None:
    spec = QuantSpec(head_dim, head_dim // 2, 0.92, scale_dtype)
    filling = random_cache(
        [700, 0, 1, 300, 65], spec, num_kv_heads=8, dtype=torch.bfloat16, device="cuda"
    )
    assert_same(filling, 1100)
