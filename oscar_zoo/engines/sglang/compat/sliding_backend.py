"""SGLang's attention backend for layers with a sliding window on a GPU."""

from __future__ import annotations

from typing import Any

NAME = "triton"
"""It runs on every GPU, and knows windows, learned sinks, capped logits and CUDA graphs."""


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

    return ATTENTION_BACKENDS[NAME](StockRunner(runner))
