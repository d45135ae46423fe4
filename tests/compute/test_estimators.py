"""Estimators against their formulas, evaluated token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.estimators import ESTIMATORS, estimate
from oscar_zoo.compute.layer_moments import LayerMoments
from oscar_zoo.compute.moments import Moments

Rows = NDArray[np.float64]
TOKENS, GROUP, KV_HEADS, DIM, VALUE_DIM, HIDDEN = 41, 3, 2, 8, 4, 10
SEQUENCES = ((0, 10), (10, 30), (30, TOKENS))


def attention(query: Rows, key: Rows, value: Rows) -> Rows:
    """Causal softmax attention of every query head within its sequence, one query at a time."""
    out = np.zeros((query.shape[0], TOKENS, value.shape[-1]))
    for j in range(query.shape[0]):
        h = j // GROUP
        for start, end in SEQUENCES:
            for t in range(start, end):
                p = np.exp(query[j, t] @ key[h, start : t + 1].T / np.sqrt(DIM))
                out[j, t] = p @ value[h, start : t + 1] / p.sum()
    return out


def value_covariance_of_the_paper(query: Rows, key: Rows, value: Rows, head: int) -> Rows:
    """V^T S^T S V with the causal score matrix of every query head of the group, as the paper
    writes it."""
    total = np.zeros((value.shape[-1],) * 2)
    for j in range(head * GROUP, (head + 1) * GROUP):
        for start, end in SEQUENCES:
            scores = np.tril(np.exp(query[j, start:end] @ key[head, start:end].T / np.sqrt(DIM)))
            s = scores / scores.sum(1, keepdims=True)
            total += value[head, start:end].T @ s.T @ s @ value[head, start:end]
    return total / (TOKENS * GROUP)


def brute_force(query: Rows, key: Rows, value: Rows, weights: Rows) -> dict[str, Rows]:
    """Every estimator per KV head, one token at a time."""
    heads, tokens, _ = key.shape
    group = query.shape[0] // heads
    result: dict[str, list[Rows]] = {name: [] for name in ESTIMATORS}
    for h in range(heads):
        a = np.zeros((key.shape[-1],) * 2)
        for j in range(h * group, (h + 1) * group):
            for t in range(tokens):
                a += np.outer(query[j, t], query[j, t]) / (tokens * group)
        numerator, denominator = np.zeros((value.shape[-1],) * 2), 0.0
        for t in range(tokens):
            weight = key[h, t] @ a @ key[h, t]
            numerator += weight * np.outer(value[h, t], value[h, t])
            denominator += weight
        result["qqt/1"].append(a)
        result["sst/1"].append(numerator / max(denominator, 1e-12))
        result["kk/1"].append(np.mean([np.outer(k, k) for k in key[h]], axis=0))
        result["vv/1"].append(np.mean([np.outer(v, v) for v in value[h]], axis=0))
        result["oo/1"].append(value_covariance_of_the_paper(query, key, value, h))
        columns = [
            weights[:, j * VALUE_DIM : (j + 1) * VALUE_DIM]
            for j in range(h * group, (h + 1) * group)
        ]
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
    for start, end in SEQUENCES:
        part = slice(start, end)
        layer.add(q[:, part], k[:, part], v[:, part], o[:, part])
    layer.set_weights(torch.from_numpy(weights))
    layer.add_weighted(k, v, ESTIMATORS["qqt/1"](layer))
    geometry = Geometry(
        num_layers=9,
        num_q_heads=KV_HEADS * GROUP,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=VALUE_DIM,
        attention_layers=(5,),
    )
    return Moments(geometry, {5: layer}), brute_force(query, key, value, weights)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_estimators_equal_their_formulas(case: tuple[Moments, dict[str, Rows]], name: str) -> None:
    moments, want = case
    per_head = estimate(moments, name, "kv_head")[0]
    assert np.abs(per_head - want[name]).max() <= 1e-9 * np.abs(want[name]).max()
    per_layer = estimate(moments, name)[0]
    mean = want[name].mean(axis=0)
    assert np.abs(per_layer - mean).max() <= 1e-9 * np.abs(mean).max()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_results_are_symmetric_to_the_bit(case: tuple[Moments, dict[str, Rows]], name: str) -> None:
    matrix = estimate(case[0], name, "kv_head")
    assert matrix.dtype == np.float64
    assert np.array_equal(matrix, matrix.swapaxes(-1, -2))
