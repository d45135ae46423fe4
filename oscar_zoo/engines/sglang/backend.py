"""The attention backend: it hands SGLang's batches to the INT2 cache.

It refuses to exist when a hook did not run or the pool is not ours, so a server that was asked for
INT2 runs exactly that or does not start.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor

from oscar_zoo.engines.sglang import fired_hooks, model_refusals, refusals, worker
from oscar_zoo.engines.sglang.compat import (
    geometry,
    hybrid_parts,
    radix_attention,
    server_arguments,
)
from oscar_zoo.engines.sglang.compat.forward_batch import step_input
from oscar_zoo.engines.sglang.pool import Int2TokenPool
from oscar_zoo.errors import ServerFailed, UnsupportedModel
from oscar_zoo.runtime import memory_plan
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowStore

logger = logging.getLogger(__name__)

_Stock: Any = radix_attention.attention_backend_class()


class OscarAttentionBackend(_Stock):  # type: ignore[misc]
    """Attention over an `Int2TokenPool`, for the full-attention layers of a model.

    SGLang wraps it in a backend of its own when the model has other layers too.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool, rows = hybrid_parts.full_pool(runner.token_to_kv_pool), runner.req_to_token_pool
        missing = sorted(fired_hooks.BEFORE_BACKEND - fired_hooks.FIRED)
        if missing or not isinstance(pool, Int2TokenPool):
            raise ServerFailed(
                f"the INT2 KV cache is not in place: pool {type(pool).__name__}, hooks that did not"
                f" run: {missing}.",
                hint=(
                    "is another plugin replacing the same functions? SGLANG_PLUGINS=oscar loads"
                    " ours alone"
                ),
            )
        refusals.check_server(
            server_arguments.resolved(runner.server_args),
            os.environ,
            eager_only=worker.eager_only(runner.server_args),
        )
        model_refusals.check_layers(geometry.full_attention_layers(runner))
        if hybrid_parts.sliding_pool(runner.token_to_kv_pool) is not None:
            model_refusals.check_sliding_layers(geometry.sliding_layers(runner))
        chosen, artifact = worker.served()
        config = geometry.cache_config(runner)
        table = TransformTable.build(
            artifact.k,
            artifact.v,
            config.layer_ids,
            kv_heads=geometry.local_kv_heads(runner.model_config),
            device=pool.device,
        )
        if config.softmax.cap and table.centred:
            raise UnsupportedModel(
                "this model caps its logits, and an artifact with centred keys shifts them.",
                hint="compute an artifact without centred keys: oscar-zoo compute MODEL",
            )
        self.pool = pool
        # Models and SGLang's forward context read these two names from any backend.
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, rows
        self.max_context_len = geometry.context_length(runner)  # SGLang sizes masks of drafts by it
        self.window_on_hit = chosen.window_on_hit.value
        self.chains_only = geometry.other_layers(runner.model_config) is not None
        self.cache = worker.make_cache(config, pool.slots, pool.windows, table, rows.req_to_token)
        self.transform_bytes = table.nbytes
        rows.oscar_hand_out, rows.oscar_sinks = self.windows.hand_out, self.windows.sinks
        rows.oscar_rings = self.windows.rings
        if self.windows.shape.drafts > 1:
            pool.commit = self.cache.commit
        logger.info("INT2 KV cache: artifact %s; %s", artifact.told, chosen.describe())
        self._log_memory(runner)

    @property
    def windows(self) -> WindowStore:
        """Rings and sinks of the pool."""
        windows: WindowStore = self.pool.windows
        return windows

    def support_triton(self) -> bool:
        """SGLang may use its own Triton helpers beside this backend."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Reset rows with a new owner, and build what the layers of this pass read."""
        self.cache.begin(self._step(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The tables have fixed addresses from the start."""
        self._check_graphs()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tables that a graph of decode or verify steps reads, before its capture and
        before every replay.

        SGLang captures before the first request, when no hook has seen a row yet, so nothing can
        be checked then.
        """
        self._check_graphs()
        step = step_input(forward_batch) if in_capture else self._step(forward_batch)
        if in_capture and step.kind == "extend" and self.windows.shape.drafts > 1:
            raise ServerFailed("a graph that verifies drafts was captured over a prefill batch.")
        if in_capture or step.kind == "extend":
            self.cache.begin(step)
        else:
            self.cache.refill(step)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Padding requests have one token: that of row 0 and slot 0, which are nobody's."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a prefill or mixed batch, or of drafts; `q`, `k`, `v` are those of the local
        heads, after RoPE."""
        return self._forward(q, k, v, layer, save_kv_cache, kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of a decode batch."""
        return self._forward(q, k, v, layer, save_kv_cache, kwargs)

    def report(self) -> dict[str, Any]:
        """What was allocated, for tests."""
        return {
            "slot_store": self.pool.slots.nbytes,
            "window_store": self.windows.nbytes,
            "transforms": self.transform_bytes,
            "kv_size": sum(self.pool.get_kv_size_bytes()),
            "tokens": self.pool.size,
            "rows": self.windows.shape.num_rows,
            "blocks": self.windows.shape.num_blocks,
            "sinks": self.windows.sinks.counts(),
            "rings": {"used": self.windows.rings.used, "lost": self.windows.rings.lost},
            **self.cache.report(),
        }

    def _step(self, forward_batch: Any) -> StepInput:
        """The step that SGLang asks for, once it is known that its rows can be trusted."""
        step = step_input(forward_batch)
        if "alloc" not in fired_hooks.FIRED:
            if not bool(step.rows.any()):
                return step  # a warm-up of SGLang before any request; row 0 is nobody's
            raise ServerFailed(
                "the hook that watches request rows did not run; request rows cannot be trusted."
            )
        fresh = [row for row in step.request_rows if row in self.windows.fresh]
        if fresh and step.kind != "extend":
            raise ServerFailed(f"request rows {fresh} reached {step.kind} without a prefill.")
        if fresh and "admit" not in fired_hooks.FIRED:
            raise ServerFailed(
                "the hook that tells the tokens of new requests did not run; sinks would be lost."
            )
        branching = step.drafts is not None and step.drafts.mask is not None
        if branching and self.chains_only and "chains" not in fired_hooks.FIRED:
            raise ServerFailed("the hook that makes chains of the drafts of n-grams did not run.")
        found = dict(zip(step.request_rows, step.prefix_lens, strict=False))
        if self.window_on_hit == "recompute" and any(found[row] for row in fresh):
            missing = sorted({"tail", "match"} - fired_hooks.FIRED)
            if missing:
                raise ServerFailed(
                    f"a prefix-cache hit without the hooks that limit it ({', '.join(missing)})."
                )
        return step

    def _log_memory(self, runner: Any) -> None:
        slots, windows = self.pool.slots.shape, self.windows.shape
        scratch = worker.scratch_bytes(runner, str(self.pool.device), slots, windows)
        plan = memory_plan.plan(slots, windows, self.transform_bytes, scratch=scratch)
        logger.info(
            "INT2 KV cache: %s",
            memory_plan.describe(plan, slots, windows, tokens=self.pool.size),
        )
        if fired_hooks.FACTS.get("draft_bytes"):
            each = fired_hooks.FACTS["draft_bytes"]
            logger.info(
                "INT2 KV cache: the draft model has a cache of its own, %d bytes per token slot ="
                " %.1f MB",
                each,
                each * self.pool.size / memory_plan.MB,
            )
        if "states" in fired_hooks.FACTS:
            states = memory_plan.States(**fired_hooks.FACTS["states"])
            logger.info("INT2 KV cache: %s", states.describe())
        if "sliding" in fired_hooks.FACTS:
            sliding = memory_plan.Sliding(**fired_hooks.FACTS["sliding"])
            logger.info("INT2 KV cache: %s", sliding.describe())
        warning = memory_plan.too_short(self.pool.size, geometry.context_length(runner))
        if warning is not None:
            logger.warning("INT2 KV cache: %s", warning)

    def _check_graphs(self) -> None:
        if not str(self.pool.device).startswith("cuda"):
            raise ServerFailed("a worker without a GPU cannot capture CUDA graphs.")

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        save: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        sinks = extra.pop("sinks", None)
        unknown = sorted(name for name, value in extra.items() if value is not None)
        if k is None or v is None or not save or unknown:
            raise NotImplementedError(
                "oscar-zoo INT2 KV cache: attention without its own keys and values, or with"
                f" {unknown}"
            )
        scale = self.cache.config.softmax.scale
        if float(layer.scaling) != scale:  # code of transformers may set it as late as here
            raise ServerFailed(
                f"layer {layer.layer_id} scales its logits by {layer.scaling:g}, the INT2 cache was"
                f" built for {scale:g}."
            )
        # Gemma hands over four dimensions, in an order of its own.
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        k = k.reshape(-1, layer.tp_k_head_num * layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num * layer.v_head_dim)
        return self.cache.forward(layer.layer_id, q, k, v, sinks)
