"""Refusals: each row is hit by the configuration it is about, and its sentence says what and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.sglang_plugin import refusals
from oscar_zoo.sglang_plugin.settings import BACKEND

NORMAL: dict[str, Any] = {
    "attention_backend": BACKEND,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "speculative_algorithm": None,
    "disaggregation_mode": "null",
    "enable_hierarchical_cache": False,
    "dcp_size": 1,
    "device": "cuda",
    "cuda_graph_config": SimpleNamespace(
        decode=SimpleNamespace(backend="disabled"), prefill=SimpleNamespace(backend="disabled")
    ),
}


def graphs(decode: str, prefill: str) -> SimpleNamespace:
    return SimpleNamespace(decode=SimpleNamespace(backend=decode), prefill=SimpleNamespace(backend=prefill))


SERVER_CASES = {
    "--attention-backend": {"attention_backend": "triton"},
    "--speculative-algorithm": {"speculative_algorithm": "EAGLE"},
    "--disaggregation-mode": {"disaggregation_mode": "decode"},
    "--enable-hierarchical-cache": {"enable_hierarchical_cache": True},
    "--enable-lmcache": {"enable_lmcache": True},
    "--enable-flexkv": {"enable_flexkv": True},
    "--enable-hisparse": {"enable_hisparse": True},
    "--enable-kv-cache-sharding": {"enable_kv_cache_sharding": True},
    "--enable-unified-memory": {"enable_unified_memory": True},
    "--enable-page-major-kv-layout": {"enable_page_major_kv_layout": True},
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-streaming-session": {"enable_streaming_session": True},
    "--dcp-size": {"dcp_size": 2},
    "--dllm-algorithm": {"dllm_algorithm": "LowConfidence"},
    "--prefill-only-disable-kv-cache": {"prefill_only_disable_kv_cache": True},
    "--cuda-graph-backend-prefill full": {"cuda_graph_config": graphs("disabled", "full")},
}
MODEL_CASES = {
    "MLA": {"attention_arch": SimpleNamespace(name="MLA")},
    "a sliding-window hybrid model": {"is_hybrid_swa": True},
    "a model with attention sinks as weights": {"has_attention_sinks": True},
    "an encoder-decoder model": {"is_encoder_decoder": True},
    "chunked local attention": {"attention_chunk_size": 8192},
}
LAYER_CASES = {
    "sliding_window_size": {"sliding_window_size": 127},
    "logit_cap": {"logit_cap": 30.0},
    "xai_temperature_len": {"xai_temperature_len": 1024},
    "cross attention": {"is_cross_attention": True},
    "attention that is not causal": {"attn_type": SimpleNamespace(value="encoder_only")},
}


def test_an_ordinary_server_passes() -> None:
    refusals.check_server(SimpleNamespace(**NORMAL), {}, eager_only=True)
    refusals.check_server(SimpleNamespace(), {}, eager_only=True)
    refusals.check_model(SimpleNamespace(attention_arch=SimpleNamespace(name="MHA"), is_hybrid_swa=False))
    decoder = SimpleNamespace(
        sliding_window_size=-1, logit_cap=0.0, xai_temperature_len=-1, attn_type=SimpleNamespace(value="decoder")
    )
    refusals.check_layers([decoder, SimpleNamespace()])


def test_every_row_has_a_case() -> None:
    for rows, cases in ((refusals.SERVER, SERVER_CASES), (refusals.MODEL, MODEL_CASES), (refusals.LAYER, LAYER_CASES)):
        assert [row.name for row in rows] == list(cases)


@pytest.mark.parametrize("name", SERVER_CASES)
def test_server_rows(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        refusals.check_server(SimpleNamespace(**{**NORMAL, **SERVER_CASES[name]}), {}, eager_only=False)
    assert_says(name, caught.value)


@pytest.mark.parametrize("name", MODEL_CASES)
def test_model_rows(name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        refusals.check_model(SimpleNamespace(**MODEL_CASES[name]))
    assert_says(name, caught.value)


@pytest.mark.parametrize("name", LAYER_CASES)
def test_layer_rows(name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        refusals.check_layers([SimpleNamespace(), SimpleNamespace(**LAYER_CASES[name])])
    assert_says(name, caught.value)


def test_the_plain_executor_refuses_cuda_graphs_and_only_on_a_gpu() -> None:
    config = SimpleNamespace(**{**NORMAL, "cuda_graph_config": graphs("full", "disabled")})
    refusals.check_server(config, {}, eager_only=False)
    with pytest.raises(UsageError, match="CUDA graphs") as caught:
        refusals.check_server(config, {}, eager_only=True)
    assert "--disable-cuda-graph" in str(caught.value.hint)
    config.device = "cpu"
    refusals.check_server(config, {}, eager_only=True)


@pytest.mark.parametrize("name", [name for name, _ in refusals.ENVIRONMENT])
def test_environment_rows(name: str) -> None:
    refusals.check_server(SimpleNamespace(**NORMAL), {name: "0"}, eager_only=False)
    with pytest.raises(UsageError, match=f"{name} does not work with an INT2 KV cache: ") as caught:
        refusals.check_server(SimpleNamespace(**NORMAL), {name: "true"}, eager_only=False)
    assert caught.value.hint == f"unset {name}"


def assert_says(name: str, error: UsageError) -> None:
    assert error.message.startswith(f"{name} does not work with an INT2 KV cache: ")
    reason = error.message.removeprefix(f"{name} does not work with an INT2 KV cache: ")
    assert len(reason) > 10 and reason.endswith(".")
    assert str(error.hint).startswith("instead: ")
