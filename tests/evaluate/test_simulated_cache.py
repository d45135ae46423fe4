"""The simulated cache against a second statement of who reads what, one query at a time in
float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_artifacts import cache_shape
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard_set
from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.artifact.specs import Clip, ServingRecipe, SideWidths, Widths, Windows
from oscar_zoo.errors import GeometryMismatch, UsageError
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache, SimulatedLayer
from oscar_zoo.models.attention import Softmax

D, HEADS, KV_HEADS, TOKENS = 16, 6, 2, 300
CPU = torch.device("cpu")
MODEL = ModelBlock(
    num_layers=3,
    num_q_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=D,
    v_head_dim=D,
    attention_layers=(1,),
    id="small",
    revision=None,
    config_sha256=None,
    rope=None,
    qk_norm=None,
    output_gate=None,
    weights=None,
    compatible_with=(),
)
QUARTER = Softmax(0.25)


def recipe(sink: int = 4, recent: int = 10, **changes: object) -> ServingRecipe:
    windows = Windows(sink=sink, recent=recent)
    return ServingRecipe.model_validate(
        {"group_size": D, "clip": Clip(k=0.9, v=0.8), "windows": windows, "scale_dtype": "float32"}
        | changes
    )


def general_pair(seed: int, *, per_head: bool, centered: bool) -> RotationSet:
    """An invertible pair that is not orthogonal but well conditioned, so that float32 stays near
    the oracle."""
    rng = np.random.default_rng(seed)
    shape = (KV_HEADS,) if per_head else ()
    forward = np.eye(D) + 0.1 * rng.standard_normal((*shape, D, D))
    partner = np.linalg.inv(forward).swapaxes(-1, -2)
    mean = rng.standard_normal((*shape, D)).astype(np.float32) if centered else None
    layer = LayerTransform(1, forward.astype(np.float32), partner.astype(np.float32), mean)
    return RotationSet(
        3, "test", "kv_head" if per_head else "layer", "test", False, centered, (layer,)
    )


def test_every_layer_of_a_hybrid_model_uses_its_own_transform() -> None:
    ids = (3, 7, 11)
    layers = [
        replace(general_pair(i, per_head=False, centered=True).layers[0], layer_id=layer)
        for i, layer in enumerate(ids)
    ]
    rotations = replace(general_pair(0, per_head=False, centered=True), layers=tuple(layers))
    geometry = cache_shape(12, heads=HEADS, kv_heads=KV_HEADS, dim=D, at=ids)
    _, key, value = qkv(tokens=5)
    for layer in layers:
        k, _ = SimulatedLayer(
            CacheSpec(rotations, None, recipe()), geometry, layer.layer_id, CPU
        ).encode(key, value)
        assert layer.mean is not None
        expected = (key - torch.tensor(layer.mean)) @ torch.tensor(layer.forward)
        torch.testing.assert_close(k[0], expected)


def qkv(seed: int = 0, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, HEADS, tokens, D, generator=generator),
        torch.randn(1, KV_HEADS, tokens, D, generator=generator),
        torch.randn(1, KV_HEADS, tokens, D, generator=generator),
    )


def oracle(q: Tensor, k: Tensor, v: Tensor, spec: CacheSpec, softmax: Softmax) -> Tensor:
    """Two full score matrices, chosen by mask; both value products."""
    windows = spec.recipe.windows
    out = torch.empty(1, HEADS, q.shape[2], D, dtype=torch.float64)
    s, p = torch.arange(k.shape[2])[None, :], torch.arange(q.shape[2])[:, None]
    exact = (s < windows.sink) | (p - s < windows.recent)
    for j in range(HEADS):
        h = j // (HEADS // KV_HEADS)
        rk, qk, mean = matrices(spec.k, h)
        rv, ov, _ = matrices(spec.v, h)
        keys, values = (k[0, h].double() - mean) @ rk, v[0, h].double() @ rv
        keys_hat = fake_quantize(
            keys.float(), QuantSpec(D, D, spec.recipe.clip.k, "float32")
        ).double()
        values_hat = fake_quantize(
            values.float(), QuantSpec(D, D, spec.recipe.clip.v, "float32")
        ).double()
        query = q[0, j].double() @ qk
        scores = torch.where(exact, query @ keys.T, query @ keys_hat.T)
        scores = (scores + (q[0, j].double() @ mean)[:, None]) * softmax.scaling
        if softmax.cap is not None:
            scores = torch.tanh(scores / softmax.cap) * softmax.cap
        scores = scores.masked_fill(s > p, -torch.inf)
        if softmax.sinks is not None:
            sink = softmax.sinks[j].double().expand(len(scores), 1)
            weights = torch.cat([scores, sink], 1).softmax(-1)[:, :-1]
        else:
            weights = scores.softmax(-1)
        out[0, j] = ((weights * exact) @ values + (weights * ~exact) @ values_hat) @ ov.T
    return out


def matrices(rotation: RotationSet | None, head: int) -> tuple[Tensor, Tensor, Tensor]:
    if rotation is None:
        return torch.eye(D).double(), torch.eye(D).double(), torch.zeros(D).double()
    layer = rotation.layers[0]
    pick = (lambda a: a[head]) if rotation.grouping == "kv_head" else (lambda a: a)
    mean = np.zeros(D) if layer.mean is None else pick(layer.mean)
    return tuple(torch.tensor(x).double() for x in (pick(layer.forward), pick(layer.partner), mean))


PAIRS = {
    "identity": (None, None),
    "hadamard": (hadamard_set(MODEL, "k"), hadamard_set(MODEL, "v")),
    "general": (
        general_pair(1, per_head=False, centered=True),
        general_pair(2, per_head=False, centered=False),
    ),
    "per head": (
        general_pair(3, per_head=True, centered=True),
        general_pair(4, per_head=True, centered=False),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("sink", "recent"), [(4, 10), (0, 1), (64, 256), (1000, 1), (290, 5)])
def test_every_position_reads_its_own_windows(pair: str, sink: int, recent: int) -> None:
    spec = CacheSpec(*PAIRS[pair], recipe(sink, recent))
    q, k, v = qkv()
    got = SimulatedCache(spec, MODEL, CPU)(1, q, k, v, Softmax(0.3))
    want = oracle(q, k, v, spec, Softmax(0.3))
    assert (got.double() - want).abs().max() < 2e-5


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("cap", "sinks"), [(1.5, False), (None, True), (0.7, True)])
def test_caps_and_learned_sinks_see_whole_logits(pair: str, cap: float | None, sinks: bool) -> None:
    """Also where keys are centred: what the mean adds to a logit is no longer without effect."""
    softmax = Softmax(0.3, cap, torch.linspace(-2, 2, HEADS) if sinks else None)
    spec = CacheSpec(*PAIRS[pair], recipe(4, 10))
    q, k, v = qkv()
    got = SimulatedCache(spec, MODEL, CPU)(1, q, k, v, softmax)
    assert (got.double() - oracle(q, k, v, spec, softmax)).abs().max() < 2e-5


def test_windows_that_hold_everything_leave_attention_as_it_was() -> None:
    q, k, v = qkv()
    plain = oracle(q, k, v, CacheSpec(None, None, recipe(TOKENS, 1)), QUARTER)
    for pair in PAIRS.values():
        got = SimulatedCache(CacheSpec(*pair, recipe(TOKENS, 1)), MODEL, CPU)(1, q, k, v, QUARTER)
        assert (got.double() - plain).abs().max() < 2e-5
    coarse = SimulatedCache(CacheSpec(None, None, recipe()), MODEL, CPU)(1, q, k, v, QUARTER)
    # Up to position 13 sink and recent tokens together are all there are.
    assert (plain - coarse)[:, :, :14].abs().max() < 2e-5
    assert (plain - coarse)[:, :, 20:].abs().amax(-1).min() > 1e-3


def test_bfloat16_windows_hold_rounded_rows_and_int2_is_made_from_unrounded_ones() -> None:
    q, k, v = (x.bfloat16() for x in qkv())
    spec = CacheSpec(*PAIRS["hadamard"], recipe())
    rotated = k.float() @ matrices(spec.k, 0)[0].float()
    window, int2 = SimulatedLayer(spec, MODEL, 1, CPU).encode(k, v)[0]
    assert torch.equal(window, rotated.bfloat16().float())
    assert torch.equal(int2, fake_quantize(rotated, spec.recipe.quant_spec("k", D)))
    got = SimulatedCache(spec, MODEL, CPU)(1, q, k, v, QUARTER)
    assert got.dtype == torch.bfloat16
    assert (got.double() - oracle(q, k, v, spec, QUARTER)).abs().max() < 0.05


def test_widths_say_bits_and_clip_of_each_layer_and_side() -> None:
    _, key, value = qkv(tokens=5)
    model = MODEL.model_copy(update={"attention_layers": (0, 1, 2)})
    widths = Widths(
        k=SideWidths(bits=(2, 4, 2), clip=(0.9, 0.0, 0.5)),
        v=SideWidths(bits=(2, 2, 4), clip=(0.8, 0.8, 0.95)),
    )
    spec = CacheSpec(None, None, recipe().with_widths(widths))
    spec.check(model)
    for layer in range(3):
        k, v = SimulatedLayer(spec, model, layer, CPU).encode(key, value)
        for side, x, got in ((widths.k, key, k), (widths.v, value, v)):
            one = QuantSpec(D, D, side.clip[layer], "float32", side.bits[layer])
            assert torch.equal(got[1], fake_quantize(x, one))
    with pytest.raises(UsageError, match="bits for 3 layers, and small has 1 with full attention"):
        spec.check(MODEL)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 64, "v_head_dim": 64}, "head_dim 16; small has 64"),
        ({"num_kv_heads": 3}, "KV heads 2; small has 3"),
        ({"attention_layers": (0, 1)}, r"layers \[1\]; small has \[0, 1\]"),
    ],
)
def test_another_geometry_is_refused(changes: dict[str, object], text: str) -> None:
    other = MODEL.model_copy(update=changes)
    with pytest.raises(GeometryMismatch, match=text):
        SimulatedCache(CacheSpec(*PAIRS["per head"], recipe()), other, CPU)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantizer": "lloydmax-uniform-u2/1"},
        {"clip": Clip(k=0.9, v=0.9, algorithm="absrank-bisect7/1")},
    ],
)
def test_recipes_that_cannot_be_simulated_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        SimulatedCache(CacheSpec(None, None, recipe(**changes)), MODEL, CPU)
