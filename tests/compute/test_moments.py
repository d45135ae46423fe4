"""Sums do not depend on how tokens are split, and incomplete ones are never fitted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.moments import CHUNK_ROWS, LayerMoments, Moments
from oscar_zoo.errors import ComputeFailed

GEOMETRY = Geometry(num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=4, attention_layers=(0, 2))
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "sst_num", "sst_den")


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, tokens, 8), (2, tokens, 8), (2, tokens, 4))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def observed(tokens: int = 12) -> Moments:
    moments = Moments.zeros(GEOMETRY)
    for layer_id, layer in moments.layers.items():
        query, key, value = rows(tokens, layer_id)
        layer.add(query, key, value)
        layer.add_weighted(key, value, layer.qq)
    return moments


def assert_equal(got: LayerMoments, want: LayerMoments) -> None:
    for name in SUMS:
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)
    assert (got.tokens, got.query_rows) == (want.tokens, want.query_rows)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_sums_do_not_depend_on_the_split(sizes: list[int]) -> None:
    query, key, value = rows(sum(sizes))
    whole, parts, merged = (LayerMoments.zeros(2, 8, 4) for _ in range(3))
    whole.add(query, key, value)
    target = whole.qq / whole.query_rows
    start = 0
    for size in sizes:
        block = slice(start, start + size)
        parts.add(query[:, block], key[:, block], value[:, block])
        one = LayerMoments.zeros(2, 8, 4)
        one.add(query[:, block], key[:, block], value[:, block])
        merged.merge(one)
        start += size
    assert_equal(merged, whole)
    whole.add_weighted(key, value, target)
    for k, v in zip(key.split(sizes, 1), value.split(sizes, 1), strict=True):
        parts.add_weighted(k, v, target)
    assert_equal(parts, whole)


def test_rows_beyond_one_chunk_are_all_counted() -> None:
    query, key, value = rows(2 * CHUNK_ROWS + 1)
    layer = LayerMoments.zeros(2, 8, 4)
    layer.add(query, key, value)
    q = query.double().reshape(2, -1, 8)
    torch.testing.assert_close(layer.qq, q.mT @ q, rtol=1e-12, atol=1e-9)


def test_bfloat16_rows_are_summed_exactly() -> None:
    query, key, value = (x.bfloat16() for x in rows(100))
    layer = LayerMoments.zeros(2, 8, 4)
    layer.add(query, key, value)
    torch.testing.assert_close(layer.kk, key.double().mT @ key.double(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(layer.k_sum, key.double().sum(1), rtol=1e-13, atol=1e-13)


def test_weighted_sums_do_not_merge() -> None:
    moments = observed()
    with pytest.raises(ComputeFailed, match="cannot be merged"):
        moments.layers[0].merge(moments.layers[2])


def test_rows_of_another_geometry_are_refused() -> None:
    query, key, value = rows(5)
    layer = LayerMoments.zeros(2, 8, 4)
    for wrong in (
        (query[:3], key, value),
        (query[:, :4], key, value),
        (query, key, value[:1]),
        (query, key[:1], value),
    ):
        with pytest.raises(ComputeFailed, match="do not fit"):
            layer.add(*wrong)
    assert layer.tokens == 0


def test_complete_moments_pass() -> None:
    moments = observed(tokens=12)
    moments.check_coverage(frozenset({"rows", "weighted"}))
    assert moments.tokens == 12


def test_a_layer_never_reached_is_found() -> None:
    moments = observed()
    with pytest.raises(ComputeFailed, match=r"layers \[2\]"):
        dataclasses.replace(moments, layers={0: moments.layers[0]}).check_coverage(frozenset({"rows", "weighted"}))
    with pytest.raises(ComputeFailed, match="saw 0 tokens"):
        Moments.zeros(GEOMETRY).check_coverage(frozenset({"rows"}))


def test_layers_must_have_seen_the_same_tokens() -> None:
    moments = observed()
    moments.layers[2].add(*rows(3))
    with pytest.raises(ComputeFailed, match="layer 2 saw 15 tokens, another layer 12"):
        moments.check_coverage(frozenset({"rows"}))


def test_query_heads_of_one_rank_only_are_found() -> None:
    moments = observed()
    query, key, value = rows(12)
    partial = LayerMoments.zeros(2, 8, 4)
    partial.add(query[:2], key, value)
    layers = {**moments.layers, 2: partial}
    with pytest.raises(ComputeFailed, match="layer 2 saw 12 query rows, expected 2 x 12"):
        dataclasses.replace(moments, layers=layers).check_coverage(frozenset({"rows"}))


def test_a_missing_weighted_pass_is_found() -> None:
    moments = observed()
    moments.layers[2].weighted_tokens = 0
    moments.check_coverage(frozenset({"rows"}))
    with pytest.raises(ComputeFailed, match="layer 2 weighed 0 of 12"):
        moments.check_coverage(frozenset({"rows", "weighted"}))


@pytest.mark.parametrize("name", ["qq", "kk", "vv", "sst_num"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_dead_and_broken_heads_are_found(name: str, value: float) -> None:
    moments = observed()
    getattr(moments.layers[2], name)[1] = value
    with pytest.raises(ComputeFailed, match=f"layer 2, KV head 1: trace of {name}"):
        moments.check_coverage(frozenset({"rows", "weighted"}))
