"""The simulation of 2-bit latents, `contrib/mla`, on random weights and short text."""

import copy
from functools import cache
from typing import Any

import latent_cache
import pytest
import simulate
import tiny_model
import torch

from oscar_kernels.quantizer import fake_quantize
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute.methods.base import hadamard_matrix
from oscar_zoo.evaluate.simulated_cache import SimulatedCache

NEAR = Windows(sink=4, recent=8)


@cache
def subject() -> tuple[Any, torch.Tensor, simulate.Statistics]:
    """A model whose attention is sharp enough to depend on single rows, a text, and statistics."""
    model = tiny_model.new_model(tiny_model.load_teacher()).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 20
        layer.self_attn.kv_b_proj.weight.data *= 3
    ids = torch.randint(0, 2048, (96,), generator=torch.Generator().manual_seed(0))
    found = simulate.Statistics(model, NEAR)
    latent_cache.run(model, found, ids)
    return model, ids, found


def test_a_rotation_of_the_latent_fits_into_the_weights() -> None:
    """An orthogonal one passes through the norm, whose gains move behind it."""
    model, ids, _ = subject()
    turned = copy.deepcopy(model)
    gains = torch.linspace(0.5, 2.0, tiny_model.RANK)
    turn = hadamard_matrix(tiny_model.RANK, torch.device("cpu")).float()
    for layer in turned.model.layers:
        at = layer.self_attn
        at.kv_a_layernorm.weight.data = torch.ones_like(gains)
        at.kv_a_proj_with_mqa.weight.data[: tiny_model.RANK] = (
            turn.mT @ at.kv_a_proj_with_mqa.weight[: tiny_model.RANK]
        )
        at.kv_b_proj.weight.data = at.kv_b_proj.weight * gains @ turn
    plain = copy.deepcopy(model)
    for layer in plain.model.layers:
        layer.self_attn.kv_a_layernorm.weight.data = gains
    with torch.inference_mode():
        got, wanted = (one(ids[None]).logits[0] for one in (turned, plain))
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()


def divergence(name: str, windows: Windows) -> float:
    model, ids, found = subject()
    layers = {}
    for i in found.gram:
        latents, rotaries = (
            simulate.fits(found, i, channels)
            for channels in (slice(0, tiny_model.RANK), slice(tiny_model.RANK, None))
        )
        layers[i] = simulate.latent(latents[name], 128), simulate.rotary(rotaries["none"], 16)
    spec = latent_cache.LatentCache(layers, windows)
    fn = SimulatedCache(spec, latent_cache.geometry(model), torch.device("cpu"))
    exact, mine = (latent_cache.run(model, one, ids) for one in (latent_cache.exact, fn))
    before, after = (one.log_softmax(-1) for one in (exact, mine))
    return float(torch.nn.functional.kl_div(after, before, log_target=True, reduction="sum"))


def test_windows_and_the_transform_each_help() -> None:
    none = divergence("none", Windows(sink=0, recent=1))
    kept = divergence("none", NEAR)
    assert divergence("WUSH, both", NEAR) < 0.7 * kept < 0.7 * none


def test_the_latent_goes_through_the_quantizer_of_the_project() -> None:
    one = torch.eye(128, dtype=torch.float64)
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    part = simulate.latent((one, one, one[None]), 64)
    assert torch.equal(part.read(rows), fake_quantize(rows, QuantSpec(128, 64)))
    assert part.bits == pytest.approx(2.5)
