"""Estimators against their formulas, evaluated token by token in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute.estimators import ESTIMATORS, estimate
from oscar_zoo.compute.moments import LayerMoments, Moments

Rows = NDArray[np.float64]
TOKENS, GROUP, KV_HEADS, DIM, VALUE_DIM = 41, 3, 2, 8, 4


def brute_force(query: Rows, key: Rows, value: Rows) -> dict[str, Rows]:
    """Every estimator per KV head, one token at a time."""
    heads, tokens, _ = key.shape
    group = query.shape[0] // heads
    result: dict[str, list[Rows]] = {"qqt/1": [], "sst/1": [], "kk/1": [], "vv/1": []}
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
    return {name: np.array(matrices) for name, matrices in result.items()}


@pytest.fixture(scope="module")
def case() -> tuple[Moments, dict[str, Rows]]:
    draw = np.random.default_rng(3)
    query = draw.normal(size=(KV_HEADS * GROUP, TOKENS, DIM)) * np.exp(draw.normal(size=DIM))
    key = draw.normal(size=(KV_HEADS, TOKENS, DIM)) + 1
    value = draw.normal(size=(KV_HEADS, TOKENS, VALUE_DIM))
    layer = LayerMoments.zeros(KV_HEADS, DIM, VALUE_DIM)
    q, k, v = (torch.from_numpy(x) for x in (query, key, value))
    for start in (0, 10, 30):  # three sequences of 10, 20 and 11 tokens
        part = slice(start, {0: 10, 10: 30, 30: TOKENS}[start])
        layer.add(q[:, part], k[:, part], v[:, part])
    layer.add_weighted(k, v, ESTIMATORS["qqt/1"](layer))
    geometry = Geometry(
        num_layers=9,
        num_q_heads=KV_HEADS * GROUP,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=VALUE_DIM,
        attention_layers=(5,),
    )
    return Moments(geometry, {5: layer}), brute_force(query, key, value)


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
