"""The loss of latents, and what a transform fitted to it is worth in a simulated cache."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import build, sequences
from torch import Tensor

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute import moments as moments_of
from oscar_zoo.compute.capture.rows import collect
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.methods.base import fit
from oscar_zoo.compute.methods.table import LATENTS
from oscar_zoo.compute.moments import Moments, row_loss
from oscar_zoo.errors import ComputeFailed, UnsupportedModel
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.attention import attend, attention_scope
from oscar_zoo.models.loading import LoadedModel

NEAR = Windows(sink=4, recent=8)
TEXT = sequences(96, 96, seed=5)
MLA = {
    "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
    "q_lora_rank": 32, "hidden_size": 128, "num_key_value_heads": 4, "head_dim": None,
    "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 9,
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments_of, "LOSS_WINDOWS", NEAR)


@cache
def subject() -> tuple[LoadedModel, Moments]:
    """A model whose attention is sharp enough to depend on single rows, and its moments."""
    loaded = build("DeepseekV3", torch.float32, **MLA)
    loaded.model.lm_head.weight.data *= 0.2
    for layer in loaded.model.model.layers:
        layer.self_attn.q_b_proj.weight.data *= 0.3
        layer.self_attn.o_proj.weight.data *= 0.1  # errors stay small from layer to layer
        layer.self_attn.kv_a_layernorm.weight.data *= torch.linspace(0.2, 5, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments_of, "LOSS_WINDOWS", NEAR)
        return loaded, capture(loaded, TEXT, needs=frozenset({"rows"}))


def kl(spec: CacheSpec) -> float:
    loaded, _ = subject()
    ids = torch.tensor(sequences(96, seed=6).sequences)
    fn = SimulatedCache(spec, loaded.block, loaded.device)
    with torch.inference_mode():
        exact = loaded.model(ids, use_cache=False).logits.log_softmax(-1)
        with attention_scope(loaded, fn):
            mine = loaded.model(ids, use_cache=False).logits.log_softmax(-1)
    return float(torch.nn.functional.kl_div(mine, exact, log_target=True, reduction="sum"))


def cache_of(name: str, **changes: Any) -> CacheSpec:
    _, moments = subject()
    found = fit(moments, LATENTS[name])
    recipe = ServingRecipe(group_size=32, clip=Clip(k=0, v=0, algorithm="none"), windows=NEAR)
    return CacheSpec(found.k, found.v, recipe.model_copy(update=changes))


def test_a_transform_is_worth_what_it_is_fitted_to() -> None:
    best = cache_of("wush")
    assert best.k is best.v
    found = kl(best)
    assert found < 0.7 * min(kl(cache_of(name)) for name in ("identity", "hadamard", "oscar"))
    assert 1.3 * found < kl(cache_of("wush", windows=Windows(sink=0, recent=1)))
    ids, layers = best.k.layer_ids, best.k.layers[::-1]
    turned = tuple(replace(one, layer_id=at) for at, one in zip(ids, layers, strict=True))
    other = replace(best.k, layers=turned)
    assert 1.5 * found < kl(CacheSpec(other, other, best.recipe))


def test_the_loss_is_what_small_errors_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of random errors of the rows behind the windows, seen by keys and values alike."""
    draw = torch.Generator().manual_seed(1)
    query = torch.randn(3, 40, 20, generator=draw, dtype=torch.float64)
    rows = torch.randn(40, 20, generator=draw, dtype=torch.float64)
    up, out = (torch.randn(3, *size, generator=draw).double() for size in ((8, 16), (24, 8)))
    at, scaling = torch.arange(40), 0.3
    behind = (at[:, None] - at >= NEAR.recent) & (at >= NEAR.sink)

    def output(error: Tensor) -> Tensor:
        read = rows + error
        logits = scaling * torch.where(behind, query @ read.mT, query @ rows.mT)
        p = logits.masked_fill(at[:, None] < at, -torch.inf).softmax(-1)
        sums = (p * behind) @ read[:, :16] + (p * ~behind) @ rows[:, :16]
        return sums @ up.mT @ out.mT

    exact, cost = output(torch.zeros_like(rows)), 0.0
    for _ in range(400):
        error = 1e-5 * torch.randn(40, 20, generator=draw, dtype=torch.float64)
        error[:, 16:] = 0  # the rotary key has no codes
        cost += float((output(error) - exact).square().sum()) / 400
    loss = row_loss(query.float(), rows, scaling, up.float(), out.float())
    assert cost == pytest.approx(1e-10 * float(loss[0].diagonal().sum()), rel=0.05)
    monkeypatch.setattr(moments_of, "LOGITS_AT_ONCE", 1)
    by_head = row_loss(query.float(), rows, scaling, up.float(), out.float())
    torch.testing.assert_close(by_head.tril(), loss.tril(), rtol=1e-5, atol=1e-3)


def test_held_out_rows_are_those_of_a_head_that_reads_them() -> None:
    """With the weights that read sums of latents, they give what the layer gives."""
    loaded, _ = subject()
    layer = loaded.model.model.layers[1].self_attn
    found: list[Tensor] = []
    hook = layer.o_proj.register_forward_hook(lambda _, args, out: found.append(out[0]))
    try:
        rows = collect(loaded, TEXT.sequences[:1], NEAR)(1)
    finally:
        hook.remove()
    one = rows.sequences[0]
    query = one.even.rows[None]
    mask = one.even.positions[:, None] >= torch.arange(one.key.shape[1])
    sums = attend(query, one.key[None], one.value[None], mask, rows.softmax)[0]
    got = sums.transpose(0, 1).flatten(1) @ rows.o_proj.mT
    torch.testing.assert_close(got, found[-1][one.even.positions], rtol=1e-3, atol=1e-4)


def test_latents_that_are_no_latents_are_refused() -> None:
    loaded = build("DeepseekV3", torch.float32, **MLA)
    attention = loaded.model.model.layers[1].self_attn
    attention.kv_b_proj.register_forward_hook(lambda _, args, out: 2 * out)
    with pytest.raises(UnsupportedModel, match=r"layer 1 .* does not make its keys from a latent"):
        capture(loaded, TEXT, needs=frozenset({"rows"}))


def test_text_within_the_windows_shows_no_loss() -> None:
    loaded, _ = subject()
    found = capture(loaded, sequences(8, 8), needs=frozenset({"rows"}))
    with pytest.raises(ComputeFailed, match="no query that reads a row behind the windows"):
        found.check({"rows"})
