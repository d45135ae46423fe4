"""SGLang's own attention beside ours: backends of the layers that keep a state or have a sliding
window, and its Triton kernel as a `Prefill` for heads that FlashInfer does not have."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.engines.sglang.compat import geometry, releases
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax

STAND_IN = "triton"
"""A name that SGLang accepts beside linear attention on every GPU."""
NAME = "triton"
"""It runs on every GPU, and knows windows, learned sinks, capped logits and CUDA graphs."""


def wrap(original: Callable[..., Any], runner: Any, backend: Any) -> Any:
    """Call SGLang's function that wraps a full-attention backend. On Blackwell GPUs it asks for one
    of a few names, and ours is not among them."""
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup

    if releases.BACKEND_NAMES.here(attention_backend_setup):
        names = ("prefill_attention_backend_str", "decode_attention_backend_str")
        with geometry.replaced(runner, **dict.fromkeys(names, STAND_IN)):
            return original(runner, backend)
    args = copy.copy(runner.server_args)
    object.__setattr__(args, "attention_backend", STAND_IN)  # resolved arguments are sealed
    with geometry.replaced(runner, server_args=args):
        return original(runner, backend)


def hand_over_latents(backend: str) -> None:
    """Have models with latents (MLA) absorb their weights in every step, so that the backend of
    this name gets queries and rows of latents in prefill, too."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as module

    module.AttentionBackendRegistry.register(backend, lambda *_: module.AttnForwardMethod.MLA)


class StockRunner:
    """A model runner as it would be without an INT2 cache: backends plan with the type of its
    cache."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.kv_cache_dtype, self.kv_cache_dtype_str = runner.dtype, "auto"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def sliding_backend(runner: Any) -> Any:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    (window,) = {layer.sliding_window_size for layer in geometry.sliding_layers(runner)}
    return whole_windows(ATTENTION_BACKENDS[NAME](StockRunner(runner)), window)


def whole_windows(backend: Any, window: int) -> Any:
    """Let decode steps of SGLang's backend read whole windows. A token sees itself and `window`
    tokens before it. Prefill and drafts have so many tokens in front of them. A decode step counts
    its new token among them and so reads one too few."""

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


class TritonPrefill:
    """`oscar_zoo.runtime.prefill.Prefill` over `extend_attention_fwd`, which plans nothing."""

    lse_unit = 1.0

    def __init__(self) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        self._run: Any = extend_attention_fwd

    def begin(self, batch: Batch) -> None:
        """See `Prefill`."""

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        no_prefix = torch.zeros_like(batch.qo_indptr)
        return self._attend(
            q,
            (k, v),
            (k, v),
            (batch.qo_indptr, no_prefix, no_prefix),
            max(batch.extend_lens),
            softmax,
            skip_prefix=True,
        )

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        ends = torch.arange(2, dtype=torch.int32, device=q.device)
        cuts = ends * len(q), ends * len(k), torch.arange(len(k), device=q.device)
        return self._attend(q, (k, v), (k, v), cuts, len(q), softmax, skip_extend=True)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        lse = torch.logaddexp(one[1], other[1])
        first, second = ((part[1] - lse).exp()[..., None] for part in (one, other))
        return (first * one[0] + second * other[0]).to(one[0].dtype), lse

    def _attend(
        self,
        q: Tensor,
        new: tuple[Tensor, Tensor],
        cached: tuple[Tensor, Tensor],
        cuts: tuple[Tensor, Tensor, Tensor],
        longest: int,
        softmax: Softmax,
        **part: bool,
    ) -> tuple[Tensor, Tensor]:
        """One call, of the part over `new` tokens or of that over `cached` ones. `cuts`:
        `qo_indptr`, `kv_indptr` and `kv_indices`."""
        out = q.new_empty(*q.shape[:2], cached[1].shape[-1])
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run(
            q,
            *new,
            out,
            *cached,
            *cuts,
            None,
            True,
            None,
            longest,
            1.0,
            1.0,
            sm_scale=softmax.scale,
            logit_cap=softmax.cap,
            lse_extend=lse,
            **part,
        )
        return out, lse
