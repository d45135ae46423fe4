"""Pairs: scores and outputs unchanged by them, slices by layer and head, and a pair that is none is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cache_oracle import general_set
from tiny_artifacts import rotation

from oscar_zoo.errors import GeometryMismatch, VerificationFailed
from oscar_zoo.sglang_plugin.transforms import TransformTable

ORTHOGONAL = rotation("qqt_r_h_pbr", spread=0.5), rotation("sst_r_h_pbr", spread=0.5)
GENERAL = general_set("k", 4, 2, 64, seed=1), general_set("v", 4, 2, 64, seed=2)


@pytest.mark.parametrize("sets", [ORTHOGONAL, GENERAL], ids=["orthogonal", "general"])
@pytest.mark.parametrize("layer", [0, 3])
def test_attention_does_not_change(sets: tuple, layer: int) -> None:
    table = TransformTable.build(*sets, range(4), kv_heads=range(2), device="cpu")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 64, generator=g) for heads in (6, 2, 2))
    pair_k, pair_v = table.k[layer], table.v[layer]
    mean = 0 if pair_k.mean is None else pair_k.mean
    want = torch.einsum("qhgd,khd->hgqk", q.double().unflatten(1, (2, 3)), (k - mean).double())
    got = torch.einsum("qhgd,khd->hgqk", pair_k.query(q).unflatten(1, (2, 3)), pair_k.cached(k))
    torch.testing.assert_close(got.double(), want, atol=5e-4, rtol=0)
    back = pair_v.output(pair_v.cached(v).repeat_interleave(3, 1))
    torch.testing.assert_close(back, v.repeat_interleave(3, 1), atol=1e-5, rtol=0)


def test_a_worker_gets_its_own_layers_and_heads() -> None:
    whole = TransformTable.build(*GENERAL, range(4), kv_heads=range(2), device="cpu")
    part = TransformTable.build(*GENERAL, range(1, 3), kv_heads=range(1, 2), device="cpu")
    assert len(part.k) == len(part.v) == 2
    for i, layer in enumerate((1, 2)):
        assert torch.equal(part.k[i].forward, whole.k[layer].forward[1:])
        assert torch.equal(part.v[i].partner, whole.v[layer].partner[1:])
        assert part.k[i].mean is not None and torch.equal(part.k[i].mean, whole.k[layer].mean[1:])


def test_an_orthogonal_side_holds_one_tensor() -> None:
    table = TransformTable.build(*ORTHOGONAL, range(4), kv_heads=range(2), device="cpu")
    assert all(pair.partner is pair.forward and pair.mean is None for pair in (*table.k, *table.v))


def test_a_pair_that_is_none_is_refused() -> None:
    k, v = GENERAL
    broken = replace(k.layers[2], partner=k.layers[2].forward)
    with pytest.raises(VerificationFailed, match="K layer 2: forward and partner are no pair"):
        TransformTable.build(
            replace(k, layers=(*k.layers[:2], broken, k.layers[3])), v, range(4), kv_heads=range(2), device="cpu"
        )


def test_layers_and_heads_that_are_missing() -> None:
    with pytest.raises(GeometryMismatch, match="K side of the artifact has no layer 4"):
        TransformTable.build(*ORTHOGONAL, range(5), kv_heads=range(2), device="cpu")
    with pytest.raises(GeometryMismatch, match="has 2 KV heads, this worker needs head 3"):
        TransformTable.build(*GENERAL, range(4), kv_heads=range(2, 4), device="cpu")
