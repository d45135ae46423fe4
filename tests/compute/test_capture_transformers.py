"""The capture sees exactly the rows that attention sees, of any architecture, and stores none of
them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, Rows, attention_rows, build, first, sequences
from torch import Tensor
from torch.nn import functional

from oscar_zoo.compute.capture import passes
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.attention import EXACT, Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel

ALL: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
DATA = sequences(40, 23, 1, 33)
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo", "sst_num", "sst_den", "wo")


def direct_sums(rows: Rows, weight: Tensor, heads: int) -> dict[str, Tensor]:
    """The sums of `LayerMoments`, from rows in one piece."""

    def grouped(x: Tensor) -> Tensor:
        return x.double().reshape(heads, -1, x.shape[-1])

    q, k, v, o = (grouped(x) for x in (rows.query, rows.key, rows.value, rows.output))
    target = q.mT @ q / q.shape[1]
    w = torch.einsum("htd,hde,hte->ht", k, target, k)
    columns = weight.double().T.reshape(
        heads, -1, v.shape[-1], weight.shape[0]
    )  # [kv head, g, dv, hidden]
    return {
        "qq": q.mT @ q,
        "kk": k.mT @ k,
        "k_sum": k.sum(1),
        "vv": v.mT @ v,
        "v_sum": v.sum(1),
        "oo": o.mT @ o,
        "sst_num": torch.einsum("ht,htd,hte->hde", w, v, v),
        "sst_den": w.sum(1),
        "wo": torch.einsum("hgdx,hgex->hde", columns, columns),
    }


def assert_sums(loaded: LoadedModel, moments: Moments) -> None:
    """Those of the rows, which are seen by other means."""
    for layer, rows in attention_rows(loaded, DATA.sequences).items():
        heads = loaded.block.num_kv_heads
        want = direct_sums(rows, output_weight(loaded, layer), heads)
        for name in SUMS:
            got = getattr(moments.layers[layer], name)
            assert (got - want[name]).abs().max() <= 1e-12 * want[name].abs().max(), name


def assert_equal(one: Moments, other: Moments) -> None:
    for layer in one.layers:
        for name in SUMS:
            mine, theirs = (getattr(some.layers[layer], name) for some in (one, other))
            assert torch.equal(mine, theirs), (layer, name)


def output_weight(loaded: LoadedModel, layer: int) -> Tensor:
    attention = loaded.model.base_model.layers[layer].self_attn
    weight: Tensor = first(attention, "o_proj", "out_proj").weight
    return weight.detach()


def captured(loaded: LoadedModel) -> tuple[Moments, bool]:
    """Everything, and whether it ran layer by layer, as the number of reports tells."""
    news: list[tuple[int, int]] = []
    moments = capture(loaded, DATA, needs=ALL, progress=lambda *one: news.append(one))
    by_layer = len(news) == 1 + loaded.block.num_layers * len(DATA.sequences)
    assert by_layer or len(news) == 2 * (1 + len(DATA.sequences))  # else two passes
    return moments, by_layer


@pytest.mark.parametrize("family", FAMILIES)
def test_sums_are_those_of_the_rows(family: str) -> None:
    loaded = build(family)
    moments, by_layer = captured(loaded)
    moments.check(ALL)
    assert by_layer and tuple(moments.layers) == loaded.block.attention_layers
    assert_sums(loaded, moments)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Next", "Gemma3Text"])
def test_both_engines_give_the_same_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build(family, torch.float32)
    by_layer, _ = captured(loaded)
    monkeypatch.setattr(passes, "MEMORY_SHARE", 0.0)
    whole, layered = captured(loaded)
    assert not layered
    assert_equal(by_layer, whole)


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits_with_both_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build("Qwen3", torch.bfloat16, hidden_size=256, head_dim=128)
    on_cpu, _ = captured(loaded)
    loaded.model.to("cuda")
    by_layer, _ = captured(loaded)
    monkeypatch.setattr(passes, "MEMORY_SHARE", 0.0)
    whole, _ = captured(loaded)
    assert_equal(by_layer, whole)
    for layer, want in on_cpu.layers.items():
        difference = (by_layer.layers[layer].kk.cpu() - want.kk).abs().max()
        assert difference <= 0.05 * want.kk.abs().max()  # bfloat16 on another machine


@pytest.mark.parametrize("family", ["Qwen3", "Gemma3Text"])
@pytest.mark.parametrize("share", [0.6, 0.0], ids=["layers", "passes"])
def test_weights_that_accelerate_keeps_elsewhere_are_found(
    family: str, share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setattr(passes, "MEMORY_SHARE", share)
    loaded = build(family, torch.float32)
    want, _ = captured(loaded)
    away = build(family, torch.float32)
    accelerate.cpu_offload(away.model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in away.model.parameters())
    assert_equal(capture(away, DATA, needs=ALL, work=tmp_path), want)


def talk_by_attribute(first: torch.nn.Module, second: torch.nn.Module) -> None:
    first.register_forward_hook(lambda module, args, output: setattr(second, "left", output))
    second.register_forward_hook(lambda module, args, output: output + second.left[:, :1])


def talk_by_scale(first: torch.nn.Module, second: torch.nn.Module) -> None:
    """Seen only when two sequences take turns."""

    def scaled(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] * first.scale}

    first.register_forward_hook(
        lambda module, args, output: setattr(first, "scale", output.abs().mean())
    )
    second.self_attn.register_forward_pre_hook(scaled, with_kwargs=True)


def talk_by_dictionary(first: torch.nn.Module, second: torch.nn.Module) -> None:
    shared: dict[str, Tensor] = {}

    def handed(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return args, {**kwargs, "shared": shared}

    for layer in (first, second):
        layer.register_forward_pre_hook(handed, with_kwargs=True)


@pytest.mark.parametrize("talk", [talk_by_attribute, talk_by_scale, talk_by_dictionary])
def test_layers_that_exchange_more_than_hidden_states_run_whole(talk: Callable[..., None]) -> None:
    loaded = build("Qwen3")
    talk(*loaded.model.model.layers)
    moments, layered = captured(loaded)
    assert not layered
    assert_sums(loaded, moments)


def test_only_what_is_needed_is_summed() -> None:
    moments = capture(build("Qwen3"), DATA, needs=frozenset(("rows",)))
    moments.check({"rows"})
    for one in moments.layers.values():
        assert one.weighted_tokens == one.output_rows == 0 and one.wo is None
    assert capture(build("Qwen3"), DATA, needs=frozenset()).layers == {}


def test_progress_counts_each_token_once() -> None:
    news: list[tuple[int, int]] = []
    capture(build("Qwen3"), DATA, needs=ALL, progress=lambda *one: news.append(one))
    total = DATA.tokens_used
    assert (news[0], news[-1]) == ((0, total), (total, total))
    assert news == sorted(news)
    assert len(news) == 1 + 2 * len(DATA.sequences)


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    loaded = build("Qwen3", torch.float32)

    def interrupt(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    forwards = [layer.forward for layer in loaded.model.model.layers]
    with pytest.raises(KeyboardInterrupt):
        capture(loaded, DATA, needs=ALL, progress=interrupt)
    assert loaded.model.config._attn_implementation == EXACT
    assert [layer.forward for layer in loaded.model.model.layers] == forwards
    for module in loaded.model.modules():
        assert not (module._forward_hooks or module._forward_pre_hooks)


INDEX = {"index_topk": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("Falcon", {"head_dim": None, "alibi": False}, "code of its own"),
        ("Mistral", {"sliding_window": 16}, "sliding window"),
        ("DeepseekV3", INDEX, "with an index"),
    ],
)
def test_attention_that_cannot_be_calibrated_is_refused_by_name(
    family: str, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said) as refusal:
        capture(build(family, torch.float32, **changes), DATA, needs=ALL)
    assert f"tests/{family}" in refusal.value.message


def test_quantized_output_weights_are_refused_where_they_are_read() -> None:
    loaded = build("Qwen3", torch.float32)
    projection = loaded.model.model.layers[1].self_attn.o_proj
    exact = projection.weight.data
    projection.weight = torch.nn.Parameter(exact.to(torch.float8_e4m3fn), requires_grad=False)
    projection.forward = lambda x: x @ projection.weight.float().T
    capture(loaded, DATA, needs=ALL - {"weights"}).check(ALL - {"weights"})
    with pytest.raises(UnsupportedModel, match=r"output projection of layer 1 .*float8_e4m3fn"):
        captured(loaded)


def test_simulated_attention_leaves_sliding_windows_alone() -> None:
    """`attention_scope` replaces full attention only; other layers still get their masks."""
    loaded = build("Gemma3Text")
    ids = torch.tensor([DATA.sequences[0]])

    def plain(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=softmax.scaling, enable_gqa=True
        )

    with torch.inference_mode():
        want = loaded.model(input_ids=ids).logits
        with attention_scope(loaded, plain):
            got = loaded.model(input_ids=ids).logits
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
