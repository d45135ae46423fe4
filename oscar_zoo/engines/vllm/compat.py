"""What is used of vLLM beside its base classes. Needs neither torch nor vllm to be imported."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any


def register_dtype(name: str) -> None:
    """Let `--kv-cache-dtype` take `name`, whose pages are bytes."""
    import torch
    from vllm.config.cache import KV_CACHE_DTYPES, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            return KVQuantMode.CUSTOM

    Handler.name = name  # type: ignore[attr-defined]
    if name not in KV_CACHE_DTYPES:
        register_kv_cache_dtype(name)(Handler)


def register_backend(name: str, path: str) -> None:
    """Let `--attention-backend` take `name`."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(name, path)


def engine_arguments() -> Any:
    """What reads a command line, where it has been imported."""
    module = sys.modules.get("vllm.engine.arg_utils")
    return None if module is None else module.EngineArgs


def platform_choice() -> tuple[Any, str]:
    """The function that chooses a backend for the attention of a model."""
    from vllm.platforms import current_platform

    return type(current_platform), "get_attn_backend_cls"


def placement_choice() -> tuple[Any, str]:
    """The function that names the class which places layers in memory."""
    return platform_choice()[0], "get_kv_cache_config_builder_cls"


def scheduler_choice() -> tuple[Any, str]:
    """The function that gives the class of the scheduler."""
    from vllm.config import SchedulerConfig

    return SchedulerConfig, "get_scheduler_cls"


def prefix_cache() -> tuple[Any, str]:
    """The function that looks up what the cache has of a prompt."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    return KVCacheManager, "get_computed_blocks"


def tensor_rank() -> int:
    """Of this worker, among those that share the heads."""
    from vllm.distributed import get_tensor_model_parallel_rank

    return int(get_tensor_model_parallel_rank())


def hook_points() -> dict[str, tuple[Any, str]]:
    """Where hooks of a worker go, by what they are for: the owner of a function, and its name."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
    from vllm.v1.worker.utils import AttentionGroup

    return {
        "spec": (Attention, "get_kv_cache_spec"),
        "added": (GPUModelRunner, "add_requests"),
        "builders": (AttentionGroup, "create_metadata_builders"),
        "named": (MambaHybridModelState, "prepare_attn"),
    }


def open_engine(arguments: Sequence[str]) -> tuple[Any, Any]:
    """An engine in a program of ours, with the defaults that its server has for this command line,
    and the class of a request's rules."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    read = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([*arguments])
    given, served = AsyncEngineArgs.from_cli_args(read), UsageContext.OPENAI_API_SERVER
    return AsyncLLM.from_engine_args(given, usage_context=served), SamplingParams


def flash_attention() -> Any:
    """`flash_attn_varlen_func`, in the version that vLLM takes on this GPU."""
    from vllm.v1.attention.backends import fa_utils

    version = fa_utils.get_flash_attn_version()
    return functools.partial(fa_utils.flash_attn_varlen_func, fa_version=version)


def config() -> Any:
    """The `VllmConfig` of this process, while a model is built."""
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config()


def layer_number(name: str) -> int:
    """Of a layer called, for example, `model.layers.7.self_attn.attn`."""
    from vllm.model_executor.models.utils import extract_layer_index

    return int(extract_layer_index(name))


def context(vllm_config: Any) -> Any:
    """What a model's own layers are listed in; no two models share one."""
    return vllm_config.compilation_config.static_forward_context


def attention_layers(vllm_config: Any) -> dict[str, Any]:
    """All layers with attention of a model that was built, by name."""
    from vllm.model_executor.layers.attention import Attention

    found = context(vllm_config).items()
    return {name: layer for name, layer in found if isinstance(layer, Attention)}


def state_layers(vllm_config: Any) -> list[Any]:
    """All layers with a state of a model that was built."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return [one for one in context(vllm_config).values() if isinstance(one, MambaBase)]


def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put `make(function)` in place of a function of a class, once."""
    stock = inspect.getattr_static(owner, name)  # a base of it may have it
    plain = stock.__func__ if isinstance(stock, classmethod) else stock
    if getattr(plain, "of_oscar", False):
        return
    made = make(plain)
    made.of_oscar = True
    setattr(owner, name, classmethod(made) if isinstance(stock, classmethod) else made)
