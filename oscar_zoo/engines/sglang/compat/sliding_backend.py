"""SGLang's attention backend for layers with a sliding window on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from oscar_zoo.engines.sglang.compat import geometry

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
    """A stock backend over the pool of the layers with a window, which has the model's dtype."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    (window,) = {layer.sliding_window_size for layer in geometry.sliding_layers(runner)}
    return whole_windows(ATTENTION_BACKENDS[NAME](StockRunner(runner)), window)


def whole_windows(backend: Any, window: int) -> Any:
    """Let decode steps of SGLang's backend read whole windows.

    A token sees itself and `window` tokens before it. Prefill and drafts have so many tokens in
    front of them. A decode step counts its new token among them and so reads one too few.
    """

    def sized(method: Callable[..., Any], *, graphs: bool = False) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(batch: Any, *args: Any, **named: Any) -> Any:
            decodes = graphs or batch.forward_mode.is_decode_or_idle()
            backend.sliding_window_size = window + 1 if decodes else window
            return method(batch, *args, **named)

        return call

    for name in ("init_forward_metadata", "init_forward_metadata_out_graph"):
        setattr(backend, name, sized(getattr(backend, name)))
    backend.init_cuda_graph_state = sized(backend.init_cuda_graph_state, graphs=True)
    return backend
