"""Sums do not depend on how tokens are split, and incomplete ones are never fitted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute import coverage
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments, Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.products import CHUNK_ROWS, symmetric
from oscar_zoo.errors import ComputeFailed

GEOMETRY = Geometry(
    num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=4, attention_layers=(0, 2)
)
ALL: frozenset[Need] = frozenset({"rows", "weighted", "outputs", "weights"})
ROWS: frozenset[Need] = frozenset({"rows"})
COUNTS = ("heads", "tokens", "query_rows", "output_rows", "weighted_tokens")


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and o of 4 query heads and 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, tokens, 8), (2, tokens, 8), (2, tokens, 4), (4, tokens, 4))
    query, key, value, output = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, output


def projection(seed: int = 0) -> Tensor:
    return torch.randn(10, 4 * 4, generator=torch.Generator().manual_seed(seed))


def observed(tokens: int = 12) -> Moments:
    moments = Moments.zeros(GEOMETRY)
    for layer_id, layer in moments.layers.items():
        query, key, value, output = rows(tokens, layer_id)
        layer.add(query, key, value, output)
        layer.add_weighted(key, value, layer.qq)
        layer.set_weights(projection(layer_id))
    return moments


def assert_equal(got: LayerMoments, want: LayerMoments) -> None:
    for name in (*ROW_SUMS, *WEIGHTED_SUMS):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)
    assert [getattr(got, name) for name in COUNTS] == [getattr(want, name) for name in COUNTS]
    assert (got.wo is None) == (want.wo is None)
    if got.wo is not None and want.wo is not None:
        torch.testing.assert_close(got.wo, want.wo, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_sums_do_not_depend_on_the_split(sizes: list[int]) -> None:
    query, key, value, output = rows(sum(sizes))
    whole, parts, merged = (LayerMoments.zeros(2, 8, 4) for _ in range(3))
    whole.add(query, key, value, output)
    target = whole.qq / whole.query_rows
    start = 0
    for size in sizes:
        block = slice(start, start + size)
        parts.add(query[:, block], key[:, block], value[:, block], output[:, block])
        one = LayerMoments.zeros(2, 8, 4)
        one.add(query[:, block], key[:, block], value[:, block], output[:, block])
        merged.merge(one)
        start += size
    assert_equal(merged, whole)
    whole.add_weighted(key, value, target)
    for k, v in zip(key.split(sizes, 1), value.split(sizes, 1), strict=True):
        parts.add_weighted(k, v, target)
    assert_equal(parts, whole)


def test_rows_beyond_one_chunk_are_all_counted() -> None:
    query, key, value, _ = rows(2 * CHUNK_ROWS + 1)
    layer = LayerMoments.zeros(2, 8, 4)
    layer.add(query, key, value)
    q = query.double().reshape(2, -1, 8)
    torch.testing.assert_close(layer.qq, q.mT @ q, rtol=1e-12, atol=1e-9)


def test_bfloat16_rows_are_summed_exactly() -> None:
    query, key, value, _ = (x.bfloat16() for x in rows(100))
    layer = LayerMoments.zeros(2, 8, 4)
    layer.add(query, key, value)
    torch.testing.assert_close(layer.kk, key.double().mT @ key.double(), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(layer.k_sum, key.double().sum(1), rtol=1e-13, atol=1e-13)


def test_weighted_sums_do_not_merge() -> None:
    moments = observed()
    with pytest.raises(ComputeFailed, match="cannot be merged"):
        moments.layers[0].merge(moments.layers[2])


def test_rows_of_another_geometry_are_refused() -> None:
    query, key, value, output = rows(5)
    layer = LayerMoments.zeros(2, 8, 4)
    for wrong in (
        (query[:3], key, value),
        (query[:, :4], key, value),
        (query, key, value[:1]),
        (query, key[:1], value),
        (query, key, value, output[:2]),
        (query, key, value, output[..., :3]),
    ):
        with pytest.raises(ComputeFailed, match="do not fit"):
            layer.add(*wrong)
    assert layer.tokens == 0
    for weights in (projection()[:, :12], projection()[0], projection()[:, :6]):
        with pytest.raises(ComputeFailed, match="do not fit: o_proj"):
            layer.set_weights(weights)


def test_complete_moments_pass() -> None:
    moments = observed(tokens=12)
    coverage.check(moments, ALL)
    assert moments.tokens == 12


def test_a_layer_never_reached_is_found() -> None:
    moments = observed()
    with pytest.raises(ComputeFailed, match=r"layers \[2\]"):
        coverage.check(dataclasses.replace(moments, layers={0: moments.layers[0]}), ALL)
    with pytest.raises(ComputeFailed, match="saw 0 tokens"):
        coverage.check(Moments.zeros(GEOMETRY), ROWS)


def test_layers_must_have_seen_the_same_tokens() -> None:
    moments = observed()
    moments.layers[2].add(*rows(3))
    with pytest.raises(ComputeFailed, match="layer 2 saw 15 tokens, another layer 12"):
        coverage.check(moments, ROWS)


def test_query_heads_of_one_rank_only_are_found() -> None:
    moments = observed()
    query, key, value, _ = rows(12)
    partial = LayerMoments.zeros(2, 8, 4)
    partial.add(query[:2], key, value)
    layers = {**moments.layers, 2: partial}
    with pytest.raises(ComputeFailed, match="layer 2 saw 12 query rows, expected 2 x 12"):
        coverage.check(dataclasses.replace(moments, layers=layers), ROWS)


def test_a_missing_weighted_pass_is_found() -> None:
    moments = observed()
    moments.layers[2].weighted_tokens = 0
    coverage.check(moments, ROWS)
    with pytest.raises(ComputeFailed, match="layer 2 weighed 0 of 12"):
        coverage.check(moments, ALL)


def test_missing_outputs_and_weights_are_found_by_fits_that_read_them() -> None:
    moments = observed()
    moments.layers[2].add(*rows(3)[:3])
    moments.layers[0].add(*rows(3)[:3])
    moments.layers[0].wo = None
    coverage.check(moments, ROWS)
    with pytest.raises(ComputeFailed, match="layer 0 saw 24 output rows, expected 2 x 15"):
        coverage.check(moments, frozenset({"rows", "outputs"}))
    with pytest.raises(ComputeFailed, match="layer 0 has no output projection"):
        coverage.check(moments, frozenset({"rows", "weights"}))
    coverage.check(Moments.zeros(GEOMETRY), frozenset())


def test_a_rank_alone_is_no_complete_capture() -> None:
    moments = Moments.zeros(GEOMETRY, heads=[1])
    for layer in moments.layers.values():
        query, key, value, output = rows(12)
        layer.add(query[2:], key[1:], value[1:], output[2:])
    with pytest.raises(ComputeFailed, match=r"layer 0 has the KV heads \[1\], the model 2"):
        coverage.check(moments, ROWS)


def test_moments_of_other_heads_or_weights_do_not_add() -> None:
    one, other = LayerMoments.zeros(2, 8, 4), LayerMoments.zeros(2, 8, 4)
    with pytest.raises(ComputeFailed, match="different heads"):
        one.merge(LayerMoments.zeros(2, 8, 4, heads=[2, 3]))
    one.set_weights(projection())
    one.merge(other)
    other.merge(one)
    assert other.wo is not None
    other.set_weights(projection(seed=1))
    with pytest.raises(ComputeFailed, match="different weights"):
        one.merge(other)
    moments = observed()
    with pytest.raises(ComputeFailed, match="different layers"):
        moments.merge(dataclasses.replace(moments, layers={0: moments.layers[0]}))


def test_all_layers_merge() -> None:
    whole, left, right = (Moments.zeros(GEOMETRY) for _ in range(3))
    for layer in GEOMETRY.attention_layers:
        block = rows(20, layer)
        whole.layers[layer].add(*block)
        left.layers[layer].add(*(x[:, :5] for x in block))
        right.layers[layer].add(*(x[:, 5:] for x in block))
    left.merge(right)
    for layer in GEOMETRY.attention_layers:
        assert_equal(left.layers[layer], whole.layers[layer])


def test_only_the_lower_triangle_of_a_sum_counts() -> None:
    layer = observed(300).layers[0]
    for name in ("qq", "kk", "vv", "oo", "sst_num", "wo"):
        matrix = getattr(layer, name)
        whole = symmetric(matrix)
        assert torch.equal(whole, whole.mT), name
        assert torch.equal(symmetric(matrix.tril()), whole)
        torch.testing.assert_close(whole, matrix, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["qq", "kk", "vv", "sst_num", "oo", "wo"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_dead_and_broken_heads_are_found(name: str, value: float) -> None:
    moments = observed()
    getattr(moments.layers[2], name)[1] = value
    with pytest.raises(ComputeFailed, match=f"layer 2, KV head 1: trace of {name}"):
        coverage.check(moments, ALL)
