"""A small random model of every architecture that people serve, as checkpoint folders.

They have four layers, 64 channels per head and two KV heads for four query heads, and the values in
which their configuration class differs from others. Weights are random, so perplexities say
nothing; tokens can be compared with those of transformers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from random_qwen3 import EXAMPLE, TOKENIZER
from safetensors.torch import load_file, save_file
from saved_models import change_config

Values = Mapping[str, Any]

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QUARTER_ROPE = {**ROPE, "partial_rotary_factor": 0.25}
HALF_ROPE = {**ROPE, "partial_rotary_factor": 0.5}
EXAONE_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
"""All of the family have this theta, and SGLang does not read another one."""
TEXT: Values = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
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
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
}
"""Checkpoints on hubs give the interval, which SGLang reads, and some the list too."""
LATENT: Values = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
MROPE = {**ROPE, "mrope_section": [12, 10, 10], "mrope_interleaved": True}
IMAGE_TOKENS: Values = {
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_start_token_id": 7,
    "vision_end_token_id": 8,
}
VISION: Values = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 256,
    "in_channels": 3,
}
CLIP_VISION: Values = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Tiny:
    """One architecture.

    Attributes:
        models: those people know that have it, for documents.
        config: prefix of its configuration class in transformers.
        values: what is passed to that class beside `TEXT`.
        image: values beside those of the part about text, for a model with images.
        dtype: of the stored weights.
        processors: classes that prepare images, which SGLang loads before it answers to text.
        hub_class: the class in `config.json` on hubs, where transformers writes another one.
        stored: a weight as checkpoints on hubs have it, where transformers writes another name or
            layout.
        unsaved: values by part of `config.json` that checkpoints on hubs have, SGLang reads, and
            transformers does not write.
    """

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
        """What `config.json` calls it."""
        return str(self.configuration().model_type)

    def configuration(self) -> Any:
        """The configuration of transformers."""
        import transformers

        kind = getattr(transformers, f"{self.config}Config")
        text = {**TEXT, **self.values}
        text = {name: text[name] for name in text if text[name] is not None or name not in TEXT}
        if self.image is None:
            return kind(**text)
        return kind(text_config=text, **self.image)


def _dense(config: str, models: str, **values: Any) -> Tiny:
    return Tiny(models, config, {"rope_parameters": ROPE, **values})


def _latent(config: str, models: str, **values: Any) -> Tiny:
    return Tiny(models, config, {**LATENT, "rope_parameters": ROPE, "head_dim": None, **values})


def _named_vision_model(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name.replace("vision_tower.", "vision_tower.vision_model."), weight


def _transposed_experts(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    return name, weight.transpose(1, 2).contiguous() if ".mlp.experts." in name else weight


NO_WIDTH: Values = {"head_dim": None}
"""For classes that divide the hidden size by the query heads."""

QWEN3_IMAGES = ("Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")

ARCHITECTURES: Mapping[str, Tiny] = {
    "qwen2": _dense("Qwen2", "Qwen2, Qwen2.5", **NO_WIDTH),
    "qwen3": _dense("Qwen3", "Qwen3"),
    "qwen3-yarn": Tiny(
        "Qwen3 with YaRN",
        "Qwen3",
        {
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        },
    ),
    "qwen3_moe": _dense("Qwen3Moe", "Qwen3-MoE", **EXPERTS, norm_topk_prob=True),
    "llama": Tiny(
        "Llama 3",
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 1024,
            }
        },
        dtype="float32",
    ),
    "mistral": _dense("Mistral", "Mistral 7B v0.3, Mistral Nemo", sliding_window=None),
    "mistral-window": _dense("Mistral", "Mistral 7B v0.1", sliding_window=512),
    "ministral3": Tiny(
        "Ministral 3",
        "Ministral3",
        {
            "rope_parameters": {
                "type": "yarn",
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 1024,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "mixtral": _dense("Mixtral", "Mixtral", **NO_WIDTH, **LOCAL_EXPERTS, sliding_window=None),
    "phi3": _dense("Phi3", "Phi-4", **NO_WIDTH, sliding_window=None),
    "phi3-longrope": Tiny(
        "Phi-4-mini, Phi-3 128k",
        "Phi3",
        {
            **NO_WIDTH,
            "sliding_window": 262144,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0] * 24,
                "long_factor": [1.0 + 0.5 * i for i in range(24)],
                "original_max_position_embeddings": 1024,
                "factor": 4.0,
            },
            "partial_rotary_factor": 0.75,
            "tie_word_embeddings": True,
        },
    ),
    "glm4": Tiny("GLM-4", "Glm4", {"attention_bias": True, "rope_parameters": HALF_ROPE}),
    "glm4_moe": Tiny(
        "GLM-4.5, GLM-4.6, GLM-4.7",
        "Glm4Moe",
        {
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": HALF_ROPE,
        },
    ),
    "granite": _dense("Granite", "Granite 3", **NO_WIDTH, attention_multiplier=0.02),
    "granite-4": _dense(
        "GraniteMoeHybrid",
        "Granite 4 (dense)",
        **NO_WIDTH,
        layer_types=["attention"] * 4,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        position_embedding_type="rope",
        attention_multiplier=0.02,
    ),
    "olmo2": _dense("Olmo2", "OLMo 2", **NO_WIDTH),
    "smollm3": _dense("SmolLM3", "SmolLM3", **NO_WIDTH, no_rope_layers=[1, 1, 1, 0]),
    "seed_oss": _dense("SeedOss", "Seed-OSS"),
    "apertus": _dense("Apertus", "Apertus", **NO_WIDTH),
    "ernie4_5": _dense("Ernie4_5", "ERNIE 4.5"),
    "ernie4_5_moe": _dense(
        "Ernie4_5_Moe",
        "ERNIE 4.5 (experts)",
        **NO_WIDTH,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=64,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
    ),
    "minimax_m2": Tiny(
        "MiniMax-M2",
        "MiniMaxM2",
        {
            **LOCAL_EXPERTS,
            "rotary_dim": 32,
            "rope_parameters": HALF_ROPE,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "qwen3_next": Tiny(
        "Qwen3-Next",
        "Qwen3Next",
        {
            **LINEAR,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": QUARTER_ROPE,
        },
    ),
    "qwen3_5": Tiny(
        "Qwen3.5, Qwen3.6",
        "Qwen3_5",
        {**LINEAR, "rope_parameters": {**QUARTER_ROPE, **MROPE, "mrope_section": [2, 3, 3]}},
        {"vision_config": {**VISION, "num_position_embeddings": 64}, **IMAGE_TOKENS},
    ),
    "qwen3_5_moe": Tiny(
        "Qwen3.5 (experts)",
        "Qwen3_5MoeText",
        {
            **LINEAR,
            **EXPERTS,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {**QUARTER_ROPE, **MROPE, "mrope_section": [2, 3, 3]},
        },
    ),
    "lfm2": _dense(
        "Lfm2",
        "LFM2",
        **NO_WIDTH,
        layer_types=["conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    ),
    "lfm2_moe": _dense(
        "Lfm2Moe",
        "LFM2 (experts)",
        **NO_WIDTH,
        **EXPERTS,
        layer_types=["conv", "full_attention"] * 2,
        num_dense_layers=1,
    ),
    "granite-4-h": Tiny(
        "Granite 4-H",
        "GraniteMoeHybrid",
        {
            **NO_WIDTH,
            **LOCAL_EXPERTS,
            "layer_types": ["mamba", "attention"] * 2,
            "shared_intermediate_size": 64,
            "mamba_n_heads": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_d_head": 64,
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.02,
        },
    ),
    "falcon_h1": _dense(
        "FalconH1",
        "Falcon-H1",
        **NO_WIDTH,
        mamba_d_ssm=256,
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
    ),
    "nemotron_h": Tiny(
        "Nemotron-H, Nemotron 3 Nano",
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
        },
    ),
    "gemma2": Tiny(
        "Gemma 2",
        "Gemma2",
        {
            **WINDOWS,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 50.0,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "gemma3_text": Tiny("Gemma 3 (1B, 270M)", "Gemma3Text", GEMMA3),
    "gemma3": Tiny(
        "Gemma 3",
        "Gemma3",
        GEMMA3,
        {
            "vision_config": {**CLIP_VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": 5,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
        stored=_named_vision_model,
    ),
    "gemma3n": Tiny(
        "Gemma 3n",
        "Gemma3nText",
        {**WINDOWS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 2048},
    ),
    "gemma4": Tiny(
        "Gemma 4 (31B)", "Gemma4", {**GEMMA4, "hidden_size_per_layer_input": 0}, GEMMA4_IMAGES
    ),
    "gemma4-experts": Tiny(
        "Gemma 4 (26B-A4B)",
        "Gemma4",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
        },
        GEMMA4_IMAGES,
    ),
    "gemma4_unified": Tiny(
        "Gemma 4 (12B)",
        "Gemma4Unified",
        GEMMA4,
        {
            **IMAGE_TOKENS_OF_GEMMA4,
            "boa_token_id": 10,
            "eoa_token_index": 11,
            "vision_config": {"mm_embed_dim": 64},
        },
        unsaved={
            "text_config": {"hidden_size_per_layer_input": 0},
            "vision_config": {"model_patch_size": 48},
        },
    ),
    "gemma4-text": Tiny(
        "Gemma 4 without its image part",
        "Gemma4Text",
        {**GEMMA4, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-shared": Tiny(
        "Gemma 4 E2B, E4B",
        "Gemma4Text",
        {**WINDOWS, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 2048},
    ),
    "olmo3": _dense("Olmo3", "OLMo 3", **NO_WIDTH, **WINDOWS),
    "exaone4": Tiny(
        "EXAONE 4 (32B)",
        "Exaone4",
        {**NO_WIDTH, **WINDOWS, "sliding_window_pattern": "LG", "rope_parameters": EXAONE_ROPE},
    ),
    "exaone4-full": Tiny(
        "EXAONE 4 (1.2B)",
        "Exaone4",
        {
            **NO_WIDTH,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": EXAONE_ROPE,
        },
    ),
    "exaone_moe": Tiny(
        "K-EXAONE",
        "ExaoneMoe",
        {
            **NO_WIDTH,
            **WINDOWS,
            **EXPERTS,
            "sliding_window_pattern": "LG",
            "is_moe_layer": [False, True, True, True],
            "rope_parameters": {**ROPE, "rope_theta": 1000000.0},
        },
        hub_class="ExaoneMoEForCausalLM",
    ),
    "mellum": Tiny(
        "Mellum 2",
        "Mellum",
        {
            **WINDOWS,
            **EXPERTS,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                },
                "sliding_attention": ROPE,
            },
        },
    ),
    "cohere2": _dense("Cohere2", "Command A, Command R7B", **NO_WIDTH, **WINDOWS),
    "gpt_oss": _dense("GptOss", "gpt-oss", **WINDOWS, **LOCAL_EXPERTS, swiglu_limit=7.0),
    "llama4_text": _dense(
        "Llama4Text",
        "Llama 4",
        num_local_experts=2,
        num_experts_per_tok=1,
        intermediate_size_mlp=256,
        attention_chunk_size=256,
        interleave_moe_layer_step=1,
        no_rope_layers=[1, 1, 1, 0],
        layer_types=["chunked_attention"] * 3 + ["full_attention"],
    ),
    "qwen3_vl": Tiny(
        "Qwen3-VL",
        "Qwen3VL",
        {"rope_parameters": MROPE},
        {
            "vision_config": {
                **VISION,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **IMAGE_TOKENS,
        },
        processors=QWEN3_IMAGES,
    ),
    "qwen3_vl_moe": Tiny(
        "Qwen3-VL (experts)",
        "Qwen3VLMoe",
        {**EXPERTS, "rope_parameters": MROPE},
        {
            "vision_config": {
                **VISION,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
            **IMAGE_TOKENS,
        },
        processors=QWEN3_IMAGES,
        stored=_transposed_experts,
    ),
    "qwen2_5_vl": Tiny(
        "Qwen2.5-VL",
        "Qwen2_5_VL",
        {**NO_WIDTH, "rope_parameters": {"rope_type": "default", **MROPE}},
        {
            "vision_config": {**VISION, "fullatt_block_indexes": [0]},
            **IMAGE_TOKENS,
        },
        processors=("Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    ),
    "mistral3": Tiny(
        "Mistral Small 3.1, 3.2",
        "Mistral3",
        {"model_type": "mistral", "sliding_window": None, "rope_parameters": ROPE},
        {
            "vision_config": {"model_type": "pixtral", **CLIP_VISION, "head_dim": 32},
            "image_token_index": 5,
            "tie_word_embeddings": False,
        },
        processors=("PixtralImageProcessor",),
    ),
    "deepseek_v2": _latent("DeepseekV2", "DeepSeek-V2, DeepSeek-V2-Lite", topk_method="greedy"),
    "deepseek_v3": _latent("DeepseekV3", "DeepSeek-V3, DeepSeek-R1, Kimi K2"),
    "glm4_moe_lite": _latent("Glm4MoeLite", "GLM-4.7-Flash"),
    "mllama": Tiny(
        "Llama 3.2 Vision",
        "Mllama",
        {"rope_parameters": ROPE, "cross_attention_layers": [1], "head_dim": None},
        {"vision_config": {}},
    ),
    "t5": Tiny("T5, FLAN-T5", "T5", {}),
}
"""By a name of ours, mostly the model type."""


def write_config(name: str, folder: Path) -> Path:
    """`config.json` alone, for what is decided before weights are read."""
    ARCHITECTURES[name].configuration().save_pretrained(folder)
    return folder


def write_architecture(name: str, folder: Path, *, dtype: str | None = None) -> Path:
    """A checkpoint with the example's tokenizer.

    Biases, norms and sinks are moved away from their trivial values.

    Args:
        dtype: of the stored weights, in place of the architecture's.
    """
    import transformers

    from oscar_zoo.models.model_class import outline

    tiny = ARCHITECTURES[name]
    torch.manual_seed(1)
    model = outline(tiny.configuration(), name).float()
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if weight.ndim == 1:
                _spread(path, weight, draw)
        if tiny.config.startswith(("Gemma3", "Gemma4")):
            _louder_layers(model)
        if tiny.config.startswith("Gemma4"):
            _own_factors(model)
    model.to(getattr(torch, dtype or tiny.dtype)).save_pretrained(folder)
    if tiny.stored:
        file = folder / "model.safetensors"
        weights = dict(tiny.stored(name, weight) for name, weight in load_file(file).items())
        save_file(weights, file, metadata={"format": "pt"})
    if tiny.hub_class:
        change_config(folder, architectures=[tiny.hub_class])
    for part, values in tiny.unsaved.items():
        change_config(folder, part=part, **values)
    for file in TOKENIZER:
        shutil.copyfile(EXAMPLE / file, folder / file)
    for processor in tiny.processors:
        getattr(transformers, processor)().save_pretrained(folder)
    return folder


def _louder_layers(model: Any) -> None:
    """Gemma multiplies embeddings by 16. Its layers must count more than they do, or a random model
    repeats the last token; and its logits must be further apart."""
    for path, weight in model.named_parameters():
        if "post_" in path and path.endswith("layernorm.weight"):
            weight.add_(3.0)
        elif path.endswith(".norm.weight"):
            weight.add_(9.0)


def _own_factors(model: Any) -> None:
    """Gemma 4 does not divide logits by the width of a head, so the norm of its queries must, or a
    random model looks at single tokens. Each of its layers has a factor of its own."""
    for path, weight in model.named_parameters():
        if path.endswith("q_norm.weight"):
            weight.mul_(0.125)
    for path, buffer in model.named_buffers():
        if path.endswith("layer_scalar"):
            buffer.fill_(0.9)


def _spread(path: str, weight: torch.Tensor, draw: torch.Generator) -> None:
    noise = torch.randn(weight.shape, generator=draw)
    if path.endswith("sinks"):
        weight.copy_(noise)
    elif path.endswith("bias"):
        weight.add_(noise * (0.02 if "correction" in path else 0.3))
    elif "norm" in path.lower():
        weight.add_(noise * 0.2)
