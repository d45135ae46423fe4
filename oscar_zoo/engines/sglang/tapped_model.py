"""The model of a tapped worker: which of its layers an INT2 cache would hold, their heads, and what
cannot be calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.sglang import model_refusals
from oscar_zoo.engines.sglang.compat import geometry
from oscar_zoo.errors import ComputeFailed, UnsupportedModel

INSTEAD = "choose a model with full attention in some layers"


def layers_to_tap(runner: Any) -> list[Any]:
    """The full-attention layers of a worker, as SGLang's modules; others keep what they have.

    Args:
        runner: SGLang's model runner.

    Raises:
        UnsupportedModel: an INT2 cache could not serve this model, or several attention layers
            belong to one decoder layer.
        ComputeFailed: the cache of the worker has not the precision of the model.
    """
    try:
        model_refusals.check_model(runner.model_config)
    except UnsupportedModel as error:
        raise UnsupportedModel(error.message, hint=INSTEAD) from None
    layers = geometry.full_attention_layers(runner)
    for layer in layers:
        try:
            model_refusals.check_layers([layer])
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"layer {layer.layer_id}: {error.message}", hint=INSTEAD
            ) from None
    ids = [layer.layer_id for layer in layers]
    if len(set(ids)) != len(ids):
        raise UnsupportedModel(
            "one decoder layer has several attention layers.", hint="choose another model"
        )
    if runner.kv_cache_dtype != runner.model_config.dtype:
        raise ComputeFailed(
            f"the KV cache holds {runner.kv_cache_dtype}, the model computes in"
            f" {runner.model_config.dtype}.",
            hint=(
                "calibrate with a cache of the model's own type: the checkpoint's quantization must"
                " not set another"
            ),
        )
    return layers


def kv_heads(config: Any, layer: Any) -> range:
    """The model's indices of the KV heads of this worker.

    Raises:
        UnsupportedModel: ranks cannot share the KV heads evenly.
    """
    heads, total = geometry.local_kv_heads(config), config.get_total_num_kv_heads()
    whole = (
        getattr(config.hf_text_config, "original_total_num_kv_heads", total) == total
    )  # else SGLang padded them
    if not whole or len(heads) != layer.tp_k_head_num or layer.tp_q_head_num % len(heads):
        raise UnsupportedModel(
            f"layer {layer.layer_id}: the KV heads of the model cannot be split evenly over the"
            " ranks.",
            hint="use as many ranks as divide the number of KV heads",
        )
    return heads


def whole_geometry(config: Any, layers: Sequence[int]) -> Geometry:
    """The geometry of the model, with `layers` as its full-attention layers."""
    return Geometry(
        num_layers=config.num_hidden_layers,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=config.get_total_num_kv_heads(),
        head_dim=config.head_dim,
        v_head_dim=config.v_head_dim,
        attention_layers=tuple(sorted(layers)),
    )
