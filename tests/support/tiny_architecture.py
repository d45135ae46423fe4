"""What a row of `architecture_rows` says of a small random model, and values that rows share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Values = Mapping[str, Any]

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QUARTER_ROPE = {**ROPE, "partial_rotary_factor": 0.25}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
EXAONE_ROPE = {
    "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 1024,
}  # fmt: skip
"""All of the family have this theta, and SGLang does not read another one."""
TEXT: Values = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096, "initializer_range": 0.08, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: Values = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS: Values = {"num_local_experts": 4, "num_experts_per_tok": 2}
WINDOWS: Values = {
    "sliding_window": 256,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
GEMMA3: Values = {**WINDOWS, "query_pre_attn_scalar": 64, "initializer_range": 0.02}
"""See `_louder_layers`. Those of `GEMMA4` are here for the same reason."""
GEMMA4: Values = {
    **WINDOWS,
    "num_key_value_heads": 4,
    "global_head_dim": 128,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
    "initializer_range": 0.02,
    "moe_intermediate_size": 64,  # SGLang 0.5.17 wants a number on a CPU, also without experts
}
IMAGE_TOKENS_OF_GEMMA4: Values = {
    "image_token_id": 5,
    "video_token_id": 6,
    "boi_token_id": 7,
    "eoi_token_id": 8,
    "audio_token_id": 9,
}
GEMMA4_IMAGES: Values = {
    **IMAGE_TOKENS_OF_GEMMA4,
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
LINEAR: Values = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2, "full_attention_interval": 2,
}  # fmt: skip
"""Checkpoints on hubs give the interval, which SGLang reads, and some the list too."""
LATENT: Values = {
    "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1,
}  # fmt: skip
MROPE = {**ROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
IMAGE_TOKENS: Values = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
VISION: Values = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 256, "in_channels": 3,
}  # fmt: skip
QWEN3_VL: Values = {
    "vision_config": {**VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    **IMAGE_TOKENS,
}
CLIP_VISION: Values = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """One architecture: the models that people know, the prefix of its configuration class (empty
    where transformers has none), values beside `TEXT`, and values beside those of the text for a
    model with images. `processors` are classes that prepare images, which SGLang loads before it
    answers to text. Checkpoints on hubs may have another `hub_class`, weights of another name or
    layout (`stored`), and values that transformers does not write (`unsaved`, by part)."""

    models: str
    config: str
    values: Values
    image: Values | None = None
    dtype: str = "bfloat16"
    processors: tuple[str, ...] = ()
    hub_class: str = ""
    stored: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None = None
    unsaved: Mapping[str, Values] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return str(self.configuration().model_type)

    def configuration(self) -> Any:
        import transformers

        text = {**TEXT, **self.values}
        if not self.config:
            unknown = {"model_type": text["model_type"]}
            return type("Unknown", (transformers.PreTrainedConfig,), unknown)(**text)
        kind = getattr(transformers, f"{self.config}Config")
        text = {name: text[name] for name in text if text[name] is not None or name not in TEXT}
        if self.image is None:
            return kind(**text)
        return kind(text_config=text, **self.image)


def dense(config: str, models: str, **values: Any) -> Tiny:
    return Tiny(models, config, {"rope_parameters": ROPE, **values})


def latent(config: str, models: str, **values: Any) -> Tiny:
    return Tiny(models, config, {**LATENT, "rope_parameters": ROPE, "head_dim": None, **values})


def named_vision_model(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """`Tiny.stored` of a vision tower under its older name."""
    return name.replace("vision_tower.", "vision_tower.vision_model."), weight


def transposed_experts(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """`Tiny.stored` of experts that hubs have transposed."""
    return name, weight.transpose(1, 2).contiguous() if ".mlp.experts." in name else weight


NO_WIDTH: Values = {"head_dim": None}
"""For classes that divide the hidden size by the query heads."""

QWEN3_IMAGES = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
