"""Sums do not depend on how tokens are split, and incomplete ones are never fitted."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_moments import COUNTS, empty_moments
from tiny_artifacts import cache_shape
from torch import Tensor

from oscar_zoo.compute.moments import (
    ESTIMATORS,
    ROW_SUMS,
    WEIGHTED_SUMS,
    LayerMoments,
    Moments,
    Need,
    estimate,
)
from oscar_zoo.compute.products import symmetric
from oscar_zoo.errors import ComputeFailed

GEOMETRY = cache_shape(3, heads=4, kv_heads=2, dim=8, v_dim=4, at=(0, 2))
ALL: frozenset[Need] = frozenset({"rows", "weighted", "outputs", "weights"})


def rows(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and o of 4 query heads and 2 KV heads."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, tokens, 8), (2, tokens, 8), (2, tokens, 4), (4, tokens, 4))
    query, key, value, output = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value, output


def projection(seed: int = 0) -> Tensor:
    return torch.randn(10, 4 * 4, generator=torch.Generator().manual_seed(seed))


def observed(tokens: int = 12) -> Moments:
    moments = empty_moments(GEOMETRY)
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


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_sums_do_not_depend_on_the_split(sizes: list[int]) -> None:
    whole, parts, merged = (LayerMoments.zeros(2, 8, 4) for _ in range(3))
    given = rows(sum(sizes))
    whole.add(*given)
    for some in zip(*(one.split(sizes, 1) for one in given), strict=True):
        parts.add(*some)
        one = LayerMoments.zeros(2, 8, 4)
        one.add(*some)
        merged.merge(one)
    assert_equal(merged, whole)
    target, (_, key, value, _) = whole.qq / whole.query_rows, given
    whole.add_weighted(key, value, target)
    for k, v in zip(key.split(sizes, 1), value.split(sizes, 1), strict=True):
        parts.add_weighted(k, v, target)
    assert_equal(parts, whole)


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


def more_tokens(layer: LayerMoments) -> None:
    layer.add(*rows(3))


def unweighted(layer: LayerMoments) -> None:
    layer.weighted_tokens = 0


def no_outputs(layer: LayerMoments) -> None:
    layer.output_rows = 0


def no_weights(layer: LayerMoments) -> None:
    layer.wo = None


@pytest.mark.parametrize(
    ("change", "lacks", "said"),
    [
        (more_tokens, "rows", "layer 2 saw 15 tokens, another layer 12"),
        (unweighted, "weighted", "layer 2 weighed 0 of 12"),
        (no_outputs, "outputs", "layer 2 saw 0 output rows, expected 2 x 12"),
        (no_weights, "weights", "layer 2 has no output projection"),
    ],
)
def test_what_a_layer_lacks_is_found_by_fits_that_read_it(
    change: Callable[[LayerMoments], None], lacks: Need, said: str
) -> None:
    moments = observed()
    change(moments.layers[2])
    if lacks != "rows":
        moments.check(ALL - {lacks})
    with pytest.raises(ComputeFailed, match=said):
        moments.check({"rows", lacks})
    empty_moments(GEOMETRY).check(frozenset())


def test_moments_of_other_layers_or_weights_do_not_add() -> None:
    one, other = LayerMoments.zeros(2, 8, 4), LayerMoments.zeros(2, 8, 4)
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
        moments.check(ALL)


Rows = NDArray[np.float64]
TOKENS, GROUP, KV_HEADS, DIM, VALUE_DIM, HIDDEN = 41, 3, 2, 8, 4, 10
SEQUENCES = (slice(0, 10), slice(10, 30), slice(30, TOKENS))


def attention(query: Rows, key: Rows, value: Rows) -> Rows:
    """Causal softmax attention of every query head within its sequence, one query at a time."""
    out = np.zeros((query.shape[0], TOKENS, value.shape[-1]))
    for j in range(query.shape[0]):
        h = j // GROUP
        for part in SEQUENCES:
            for t in range(part.start, part.stop):
                seen = slice(part.start, t + 1)
                p = np.exp(query[j, t] @ key[h, seen].T / np.sqrt(DIM))
                out[j, t] = p @ value[h, seen] / p.sum()
    return out


def value_covariance_of_the_paper(query: Rows, key: Rows, value: Rows, head: int) -> Rows:
    """V^T S^T S V with the causal score matrix of every query head of the group, as the paper
    writes it."""
    total = np.zeros((value.shape[-1],) * 2)
    for j in range(head * GROUP, (head + 1) * GROUP):
        for part in SEQUENCES:
            scores = np.tril(np.exp(query[j, part] @ key[head, part].T / np.sqrt(DIM)))
            s = scores / scores.sum(1, keepdims=True)
            total += value[head, part].T @ s.T @ s @ value[head, part]
    return total / (TOKENS * GROUP)


def brute_force(query: Rows, key: Rows, value: Rows, weights: Rows) -> dict[str, Rows]:
    """Every estimator per KV head, one token at a time."""
    heads, tokens, _ = key.shape
    group = query.shape[0] // heads
    result: dict[str, list[Rows]] = {name: [] for name in ESTIMATORS}
    for h in range(heads):
        mine = range(h * group, (h + 1) * group)
        a = np.zeros((key.shape[-1],) * 2)
        for j in mine:
            for t in range(tokens):
                a += np.outer(query[j, t], query[j, t]) / (tokens * group)
        numerator, denominator = np.zeros((value.shape[-1],) * 2), 0.0
        for t in range(tokens):
            weight = key[h, t] @ a @ key[h, t]
            numerator += weight * np.outer(value[h, t], value[h, t])
            denominator += weight
        columns = [weights[:, j * VALUE_DIM : (j + 1) * VALUE_DIM] for j in mine]
        result["qqt/1"].append(a)
        result["sst/1"].append(numerator / max(denominator, 1e-12))
        result["kk/1"].append(np.mean([np.outer(k, k) for k in key[h]], axis=0))
        result["vv/1"].append(np.mean([np.outer(v, v) for v in value[h]], axis=0))
        result["oo/1"].append(value_covariance_of_the_paper(query, key, value, h))
        result["wo/1"].append(np.sum([w.T @ w for w in columns], axis=0))
    return {name: np.array(matrices) for name, matrices in result.items()}


@pytest.fixture(scope="module")
def case() -> tuple[Moments, dict[str, Rows]]:
    draw = np.random.default_rng(3)
    query = draw.normal(size=(KV_HEADS * GROUP, TOKENS, DIM)) * np.exp(draw.normal(size=DIM))
    key = draw.normal(size=(KV_HEADS, TOKENS, DIM)) + 1
    value = draw.normal(size=(KV_HEADS, TOKENS, VALUE_DIM))
    weights = draw.normal(size=(HIDDEN, KV_HEADS * GROUP * VALUE_DIM))
    layer = LayerMoments.zeros(KV_HEADS, DIM, VALUE_DIM)
    q, k, v, o = (torch.from_numpy(x) for x in (query, key, value, attention(query, key, value)))
    for part in SEQUENCES:
        layer.add(q[:, part], k[:, part], v[:, part], o[:, part])
    layer.set_weights(torch.from_numpy(weights))
    layer.add_weighted(k, v, ESTIMATORS["qqt/1"](layer))
    geometry = cache_shape(
        9, heads=KV_HEADS * GROUP, kv_heads=KV_HEADS, dim=DIM, v_dim=VALUE_DIM, at=(5,)
    )
    return Moments(geometry, {5: layer}), brute_force(query, key, value, weights)


@pytest.mark.parametrize("name", sorted(ESTIMATORS.keys() - {"latent-loss/1"}))
def test_estimators_equal_their_formulas(case: tuple[Moments, dict[str, Rows]], name: str) -> None:
    moments, formulas = case
    per_head, mean = estimate(moments, name, "kv_head")[0], estimate(moments, name)[0]
    for got, want in ((per_head, formulas[name]), (mean, formulas[name].mean(axis=0))):
        assert np.abs(got - want).max() <= 1e-9 * np.abs(want).max()
