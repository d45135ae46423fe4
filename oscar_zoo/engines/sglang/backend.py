"""The attention backends: ours, which hands SGLang's batches to the INT2 cache; the pair of it and
one of layers with a sliding window; and one of such layers for CPUs.

Ours refuses to exist when a hook did not run or the pool is not ours, so a server that was asked
for INT2 runs exactly that or does not start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oscar_zoo.engines.setting_flags import BACKEND
from oscar_zoo.engines.sglang import refusals, worker
from oscar_zoo.engines.sglang.compat import backends, geometry, server_arguments
from oscar_zoo.engines.sglang.compat.forward_batch import step_input
from oscar_zoo.engines.sglang.pool import Int2TokenPool
from oscar_zoo.errors import ServerFailed, UnsupportedModel
from oscar_zoo.models.attention import Softmax, attend
from oscar_zoo.runtime import memory_plan
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.stores import WindowStore
from oscar_zoo.runtime.transforms import TransformTable

logger = logging.getLogger(__name__)

_Stock: Any = geometry.attention_backend_class()


def _require(*hooks: str) -> None:
    """Refuse to go on where one of these hooks did not run."""
    missing = sorted({*hooks} - worker.FIRED)
    if missing:
        raise ServerFailed(
            f"the INT2 KV cache is not in place, hooks did not run: {', '.join(missing)}.",
            hint="is another plugin replacing the same functions? SGLANG_PLUGINS=oscar loads ours"
            " alone",
        )


class OscarAttentionBackend(_Stock):  # type: ignore[misc]
    """Attention over an `Int2TokenPool`, for the full-attention layers of a model. SGLang wraps it
    in a backend of its own when the model has other layers too."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool, rows = geometry.full_pool(runner.token_to_kv_pool), runner.req_to_token_pool
        _require(*worker.BEFORE_BACKEND)
        if not isinstance(pool, Int2TokenPool):
            raise ServerFailed(f"SGLang built a {type(pool).__name__} for an INT2 KV cache.")
        refusals.check_server(
            server_arguments.resolved(runner.server_args),
            os.environ,
            eager_only=worker.eager_only(runner.server_args),
        )
        refusals.check_attention(geometry.full_attention_layers(runner))
        if geometry.sliding_pool(runner.token_to_kv_pool) is not None:
            refusals.check_sliding_layers(geometry.sliding_layers(runner))
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
        self.latent = geometry.is_latent(runner.model_config)
        if self.latent:
            backends.hand_over_latents(BACKEND)
        self.pool = pool
        # Models and SGLang's forward context read these two names from any backend.
        self.token_to_kv_pool, self.req_to_token_pool = runner.token_to_kv_pool, rows
        self.max_context_len = geometry.context_length(runner)  # SGLang sizes masks of drafts by it
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
        windows: WindowStore = self.pool.windows
        return windows

    def support_triton(self) -> bool:
        """SGLang may use its own Triton helpers beside this backend."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.cache.begin(self._step(forward_batch))

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """The tables have fixed addresses from the start."""
        self._check_graphs()

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tables that a graph of decode or verify steps reads, before its capture and
        before every replay. SGLang captures before the first request, when no hook has seen a row
        yet, so nothing can be checked then."""
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
        """Attention of any batch in one layer; `q`, `k`, `v` are those of the local heads, after
        RoPE."""
        sinks = kwargs.pop("sinks", None)
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if k is None or v is None or not save_kv_cache or unknown:
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
        if self.pool.layer_transfer_counter is not None:
            self.pool.layer_transfer_counter.wait_until(self.cache.index[layer.layer_id])
        # Gemma hands over four dimensions, in an order of its own.
        q = q.reshape(-1, layer.tp_q_head_num * layer.qk_head_dim)
        k = k.reshape(-1, layer.tp_k_head_num * layer.qk_head_dim)
        v = v.reshape(-1, layer.tp_v_head_num * layer.v_head_dim)
        if self.latent:  # a value is the first part of its key
            k, v = k.tensor_split([layer.v_head_dim], -1)
        return self.cache.forward(layer.layer_id, q, k, v, sinks)

    forward_extend = forward_decode

    def report(self) -> dict[str, Any]:
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
            "disk": self.pool.disk_counts,
            **self.cache.report(),
        }

    def _step(self, forward_batch: Any) -> StepInput:
        """The step that SGLang asks for, once it is known that its rows can be trusted."""
        step = step_input(forward_batch)
        if self.pool.layer_transfer_counter is not None:
            _require("host_pool")
        if "alloc" not in worker.FIRED and not bool(step.rows.any()):
            return step  # a warm-up of SGLang before any request; row 0 is nobody's
        _require("alloc")
        fresh = [row for row in step.request_rows if row in self.windows.fresh]
        if fresh and step.kind != "extend":
            raise ServerFailed(f"request rows {fresh} reached {step.kind} without a prefill.")
        if fresh:
            _require("admit")  # or sinks would be lost
        branching = step.drafts is not None and step.drafts.mask is not None
        if branching and self.chains_only:
            _require("chains")
        found = dict(zip(step.request_rows, step.prefix_lens, strict=False))
        if any(found[row] for row in fresh) and worker.kept_by_hits():
            _require("tail", "match")
        return step

    def _log_memory(self, runner: Any) -> None:
        slots, windows = self.pool.slots.shape, self.windows.shape
        scratch = worker.scratch_bytes(runner, str(self.pool.device), slots, windows)
        plan = memory_plan.plan(slots, windows, self.transform_bytes, scratch=scratch)
        told = [memory_plan.describe(plan, slots, windows, tokens=self.pool.size)]
        if each := worker.FACTS.get("draft_bytes"):
            told.append(
                f"the draft model has a cache of its own, {each} bytes per token slot ="
                f" {each * self.pool.size / memory_plan.MB:.1f} MB"
            )
        if "states" in worker.FACTS:
            told.append(memory_plan.describe_states(**worker.FACTS["states"]))
        if "sliding" in worker.FACTS:
            told.append(memory_plan.describe_sliding(**worker.FACTS["sliding"]))
        for line in told:
            logger.info("INT2 KV cache: %s", line)
        warning = memory_plan.too_short(self.pool.size, geometry.context_length(runner))
        if warning is not None:
            logger.warning("INT2 KV cache: %s", warning)

    def _check_graphs(self) -> None:
        if not str(self.pool.device).startswith("cuda"):
            raise ServerFailed("a worker without a GPU cannot capture CUDA graphs.")


def _of_both(name: str) -> Callable[..., None]:

    def method(self: WindowedBackend, *given: Any, **named: Any) -> None:
        for part in self.attn_backend_list:
            getattr(part, name)(*given, **named)

    return method


def _of_one(name: str) -> Callable[..., Tensor]:

    def method(
        self: WindowedBackend, q: Any, k: Any, v: Any, layer: Any, *given: Any, **named: Any
    ) -> Tensor:
        out: Tensor = getattr(self.part_of(layer), name)(q, k, v, layer, *given, **named)
        return out

    return method


class WindowedBackend(_Stock):  # type: ignore[misc]
    def __init__(self, full: OscarAttentionBackend, sliding: Any) -> None:
        super().__init__()
        # SGLang's own pairs of backends have these names, and it reads them.
        self.full_attn_backend, self.attn_backend_list = full, [full, sliding]
        self.token_to_kv_pool = full.token_to_kv_pool
        self.req_to_token_pool = full.req_to_token_pool
        self.sliding = sliding
        self.kv_index_translator = getattr(sliding, "kv_index_translator", None)
        self.needs_cpu_seq_lens = full.needs_cpu_seq_lens or sliding.needs_cpu_seq_lens
        self.extend_dummy_seqs_capped_by_req_pool = getattr(
            sliding, "extend_dummy_seqs_capped_by_req_pool", False
        )
        self.max_context_len = full.max_context_len  # SGLang sizes masks of drafts by it
        self._full_layers = frozenset(full.cache.config.layer_ids)

    @property
    def verify_mask(self) -> Any:
        """Where SGLang writes which drafts see which; `None` without drafts and without graphs.
        The other backend keeps a copy of its own."""
        return self.sliding.verify_mask

    def support_triton(self) -> bool:
        """SGLang may use its own Triton helpers if both backends allow it."""
        return all(part.support_triton() for part in self.attn_backend_list)

    def shared_read_ends(self, mode: Any) -> Any:
        """When SGLang may change what a forward pass reads: after the later of both backends."""
        ends = [part.shared_read_ends(mode) for part in self.attn_backend_list]
        return type(ends[0]).max_of(ends)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.full_attn_backend.get_cuda_graph_seq_len_fill_value()

    init_forward_metadata = _of_both("init_forward_metadata")
    init_cuda_graph_state = _of_both("init_cuda_graph_state")
    init_forward_metadata_out_graph = _of_both("init_forward_metadata_out_graph")
    init_forward_metadata_in_graph = _of_both("init_forward_metadata_in_graph")
    on_after_cuda_graph_warmup = _of_both("on_after_cuda_graph_warmup")
    forward_extend = _of_one("forward_extend")
    forward_decode = _of_one("forward_decode")

    def part_of(self, layer: Any) -> Any:
        return self.full_attn_backend if layer.layer_id in self._full_layers else self.sliding


class SlidingOnCpu(_Stock):  # type: ignore[misc]
    """Plain attention over SGLang's pool for layers with a sliding window."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self._step: StepInput | None = None
        self._lengths: list[int] = []
        self._new: list[int] = []

    def support_triton(self) -> bool:
        """SGLang may not use its own Triton helpers without a GPU."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self._step = step = step_input(forward_batch)
        drafts = 0 if step.drafts is None else step.drafts.count
        if step.drafts is not None and step.drafts.mask is not None:
            chain = [(2 << place) - 1 for place in range(drafts)] * len(step.request_rows)
            if [bits & 0xFFFFFFFF for bits in step.drafts.mask.tolist()] != chain:
                raise NotImplementedError("a tree of drafts over a sliding window")
        # Drafts are not among the tokens of their request, which a new token of any other step is.
        self._lengths = [length + drafts for length in step.seq_lens.tolist()]
        self._new = list(step.extend_lens) or [drafts or 1] * len(self._lengths)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of a batch in one layer, `[tokens, heads * v_head_dim]`; `sinks` is `[heads]`
        of this worker."""
        step = self._step
        if step is None:
            raise RuntimeError("a forward pass without metadata")
        if k is None or not save_kv_cache:
            raise NotImplementedError("a sliding window over the keys of another layer")
        pool = self.token_to_kv_pool
        geometry.write_both(pool, layer, step.out_loc, k, v)
        keys, values = pool.get_kv_buffer(layer.layer_id)
        softmax = Softmax(layer.scaling, layer.logit_cap or None, sinks)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        parts, begin = [], 0
        for row, length, new in zip(step.request_rows, self._lengths, self._new, strict=True):
            first = max(0, length - new - layer.sliding_window_size)
            slots = self.slots(row, first, length)
            asking = torch.arange(length - new, length)[:, None]
            mask = self.seen(asking, torch.arange(first, length), layer.sliding_window_size)
            parts.append(
                attend(
                    q[None, begin : begin + new].transpose(1, 2),
                    keys[None, slots].transpose(1, 2),
                    values[None, slots].transpose(1, 2),
                    mask,
                    softmax,
                )[0].transpose(0, 1)
            )
            begin += new
        return torch.cat(parts).flatten(1)

    forward_decode = forward_extend

    def seen(self, asking: Tensor, positions: Tensor, window: int) -> Tensor:
        """Which `positions`, `[keys]`, tokens at `asking`, `[tokens, 1]`, see: their own, and
        `window` before it."""
        return (positions <= asking) & (positions >= asking - window)

    def slots(self, row: int, first: int, last: int) -> Tensor:
        """Slots of the positions `[first, last)` of a request in the pool of these layers."""
        own = self.req_to_token_pool.req_to_token[row, first:last].long()
        translated: Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(own)
        return translated
