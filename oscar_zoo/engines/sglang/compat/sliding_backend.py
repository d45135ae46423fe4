"""The stock attention backend of the layers with a sliding window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

GPU_BACKEND = "triton"
"""It runs on every GPU, and knows windows, learned sinks and CUDA graphs."""


class StockRunner:
    """A model runner as it would be without an INT2 cache: backends plan with the type of its
    cache."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.kv_cache_dtype, self.kv_cache_dtype_str = runner.dtype, "auto"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def sliding_backend(runner: Any) -> Any:
    """A stock backend over the pool of the layers with a window, which has the model's dtype.

    Args:
        runner: SGLang's model runner, with both pools.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    stock = StockRunner(runner)
    if str(runner.device).startswith("cuda"):
        return ATTENTION_BACKENDS[GPU_BACKEND](stock)
    return on_cpu()(stock)


def on_cpu() -> Any:
    """The class of the backend on a CPU."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class TranslatedNative(TorchNativeAttnBackend):
        """The stock backend of a CPU, which writes slots of the window pool, and reads those of the
        full pool in it. The two differ as soon as slots behind a window were used again."""

        def __init__(self, runner: Any) -> None:
            super().__init__(runner)
            self._slots = runner.req_to_token_pool.req_to_token
            self._own = torch.zeros_like(self._slots)
            self.req_to_token_pool = SimpleNamespace(req_to_token=self._own)

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            rows = forward_batch.req_pool_indices
            seen = slice(int(forward_batch.seq_lens.max()))
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            self._own[rows, seen] = translate(self._slots[rows, seen].long()).to(self._own.dtype)

    return TranslatedNative
