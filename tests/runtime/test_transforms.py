"""Pairs: scores and outputs unchanged by them, slices by layer and head, and a pair that is none is
refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cache_oracle import general_set
from tiny_artifacts import rotation

from oscar_kernels.reference import apply_o_partner, transform_rows
from oscar_zoo.artifact.formats import LayerTransform, RotationSet
from oscar_zoo.errors import GeometryMismatch, VerificationFailed
from oscar_zoo.runtime.transforms import TransformTable, transform_bytes

ORTHOGONAL = rotation("qqt_r_h_pbr", spread=0.5), rotation("sst_r_h_pbr", spread=0.5)
GENERAL = general_set("k", 4, 2, 64, seed=1), general_set("v", 4, 2, 64, seed=2)


@pytest.mark.parametrize("sets", [ORTHOGONAL, GENERAL], ids=["orthogonal", "general"])
@pytest.mark.parametrize("layer", [0, 3])
def test_attention_does_not_change(sets: tuple, layer: int) -> None:
    table = TransformTable.build(*sets, range(4), kv_heads=range(2), device="cpu")
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, heads, 64, generator=g) for heads in (6, 2, 2))
    pair = table.layers[layer]
    mean = 0 if pair.k_mean is None else pair.k_mean
    want = torch.einsum("qhgd,khd->hgqk", q.double().unflatten(1, (2, 3)), (k - mean).double())
    query = transform_rows(q, pair.q_partner).unflatten(1, (2, 3))
    keys = transform_rows(k, pair.k_forward, pair.k_mean)
    got = torch.einsum("qhgd,khd->hgqk", query, keys)
    torch.testing.assert_close(got.double(), want, atol=5e-4, rtol=0)
    values = transform_rows(v, pair.v_forward).repeat_interleave(3, 1)
    back = apply_o_partner(values, pair.o_partner)
    torch.testing.assert_close(back, v.repeat_interleave(3, 1), atol=1e-5, rtol=0)


def test_a_worker_gets_its_own_layers_and_heads() -> None:
    whole = TransformTable.build(*GENERAL, range(4), kv_heads=range(2), device="cpu")
    part = TransformTable.build(*GENERAL, range(1, 3), kv_heads=range(1, 2), device="cpu")
    assert len(part.layers) == 2
    for own, layer in zip(part.layers, (1, 2), strict=True):
        all_heads = whole.layers[layer]
        for name in ("k_forward", "q_partner", "v_forward", "o_partner", "k_mean"):
            assert torch.equal(getattr(own, name), getattr(all_heads, name)[1:]), name


def test_latents_have_one_copy_of_what_keys_and_values_share() -> None:
    keys, latent = (general_set(side, 2, 1, 64, seed=0) for side in "kv")
    table = TransformTable.build(latent, latent, (0, 1), kv_heads=range(1), device="cpu")
    for layer in table.layers:
        assert layer.k_forward is layer.v_forward and layer.q_partner is layer.o_partner
    assert table.nbytes == transform_bytes(latent, latent, 2, 1) == 2 * 2 * 64 * 64 * 4
    with pytest.raises(ValueError, match="values with a mean"):
        TransformTable.build(keys, keys, (0, 1), kv_heads=range(1), device="cpu")


def per_head(version: int, heads: int) -> list[RotationSet]:
    """Both sides with a matrix per KV head: orthogonal ones (format 2) or general pairs (format
    3)."""
    sets = [general_set(side, 1, heads, 16, seed=3 + i) for i, side in enumerate("kv")]
    objectives = ("qqt_r_h_pbr", "sst_r_h_pbr")
    both = zip(sets, objectives, strict=True)
    return sets if version == 3 else [orthogonal_heads(*one) for one in both]


def orthogonal_heads(side: RotationSet, objective: str) -> RotationSet:
    layers = []
    for layer in side.layers:
        matrix = np.linalg.qr(layer.forward)[0].astype(np.float32)
        layers.append(LayerTransform(layer.layer_id, matrix, matrix))
    return RotationSet(2, objective, "kv_head", "oscar", True, False, tuple(layers), {})


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_hold_the_matrices_of_their_heads(version: int, heads: int, ranks: int) -> None:
    """With more ranks than heads, `ranks / heads` neighbours hold the same one. `compat.geometry`
    has the same rule, and `test_engine.py` compares it with what SGLang loads."""
    sets = per_head(version, heads)
    held = []
    for rank in range(ranks):
        begin = rank * heads // ranks
        own = range(begin, begin + max(1, heads // ranks))
        table = TransformTable.build(*sets, range(1), kv_heads=own, device="cpu")
        (pair,) = table.layers
        (k,), (v,) = (side.layers for side in sets)
        names = ("k_forward", "q_partner", "v_forward", "o_partner", "k_mean")
        loaded = (k.forward, k.partner, v.forward, v.partner, k.mean)
        for name, array in zip(names, loaded, strict=True):
            got = getattr(pair, name)
            if array is None:
                assert got is None
            else:
                assert torch.equal(got, torch.from_numpy(array[own.start : own.stop])), name
        assert table.nbytes == transform_bytes(*sets, 1, len(own))
        held += own
    assert held == sorted(list(range(heads)) * max(1, ranks // heads))


BROKEN = replace(GENERAL[0].layers[2], partner=GENERAL[0].layers[2].forward)
LAYERS = GENERAL[0].layers


@pytest.mark.parametrize(
    ("k", "v", "layers", "heads", "error"),
    [
        (GENERAL[0], general_set("k", 4, 2, 64, seed=5), 4, range(2), ValueError),  # with a mean
        (
            replace(GENERAL[0], layers=(*LAYERS[:2], BROKEN, LAYERS[3])),
            GENERAL[1],
            4,
            range(2),
            VerificationFailed,
        ),
        (*ORTHOGONAL, 5, range(2), GeometryMismatch),
        (*GENERAL, 4, range(2, 4), GeometryMismatch),
    ],
    ids=["values with a mean", "no pair", "no such layer", "no such head"],
)
def test_what_a_worker_cannot_use_is_refused(
    k: RotationSet, v: RotationSet, layers: int, heads: range, error: type[Exception]
) -> None:
    with pytest.raises(error):
        TransformTable.build(k, v, range(layers), kv_heads=heads, device="cpu")
