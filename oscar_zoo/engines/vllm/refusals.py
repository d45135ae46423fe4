"""What an INT2 cache in vLLM does not do yet, refused by name before a token is made."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from oscar_zoo.engines.settings import PluginSettings
from oscar_zoo.engines.vllm.register import DTYPE
from oscar_zoo.errors import UnsupportedModel, UsageError
from oscar_zoo.runtime.stores import WindowShape

STATES = "GDN_ATTN"
"""What vLLM calls the only kind of state that was tried."""
LARGEST_SHARE = 0.25
"""Of a GPU's memory, for windows. vLLM prepares for 1,024 requests at a time by default."""


def check(
    config: Any, layers: Mapping[str, Any], states: Collection[Any], chosen: PluginSettings
) -> None:
    """Refuse settings of vLLM (`VllmConfig`), of the model's layers with attention and with states,
    and of ours."""
    parallel, drafts = config.parallel_config, config.speculative_config
    wishes = {
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "a method of drafts beside ngram and eagle3": drafts is not None
        and not (drafts.use_ngram() or drafts.method == "eagle3"),
        "a draft model with an INT2 cache of its own": drafts is not None
        and drafts.kv_cache_dtype == DTYPE,
        # Graphs of such steps pad requests that have fewer tokens than others.
        "a number of drafts that changes from step to step": drafts is not None
        and bool(
            drafts.num_speculative_tokens_per_batch_size or drafts.enable_adaptive_verification
        ),
        "drafts of a model whose layers have states": drafts is not None and bool(states),
        "a state of another kind than a gated delta net's": any(
            one.mamba_type.name != STATES for one in states
        ),
        "a model whose images see later tokens, without --language-model-only,": bool(
            config.model_config.is_mm_prefix_lm
        ),
        "--disable-hybrid-kv-cache-manager": bool(
            config.scheduler_config.disable_hybrid_kv_cache_manager
        ),
        "a KV connector": config.kv_transfer_config is not None,
        "LoRA": config.lora_config is not None,
        "the V1 runner (VLLM_USE_V2_MODEL_RUNNER=0)": not config.use_v2_model_runner,
    }
    for name, asked in wishes.items():
        if asked:
            raise UsageError(f"{name} does not work with an INT2 KV cache in vLLM.")
    chosen.check_layers(len(layers))
    impls = [one.impl for one in layers.values()]
    if len({(one.num_kv_heads, one.head_size, one.scale) for one in impls}) > 1:
        raise UnsupportedModel(
            "a model whose layers have different heads does not work with an INT2 KV cache."
        )


def check_windows(shape: WindowShape, device: torch.device) -> None:
    """Refuse windows that leave too little of a GPU to the rest."""
    if device.type != "cuda":
        return
    most = LARGEST_SHARE * torch.cuda.get_device_properties(device).total_memory
    if shape.nbytes > most:
        fit = int(most * (shape.num_rows - 1) / shape.nbytes)
        raise UsageError(
            f"the windows of {shape.num_rows - 1} requests take {shape.nbytes / 1e9:.0f} GB.",
            hint=f"--max-num-seqs={max(1, fit)}, or less",
        )
