"""The attention backend: from SGLang's batch to a `Step`, and from there to an executor.

It refuses to exist when a hook did not run or the pool is not ours, so a server that was asked for
INT2 runs exactly that or does not start. Per-request state is reset here, in front of the forward
pass, never by the scheduler.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from oscar_zoo.engines.sglang import fired_hooks, refusals, worker
from oscar_zoo.engines.sglang.compat import geometry, radix_attention, server_arguments
from oscar_zoo.engines.sglang.pool import Int2TokenPool
from oscar_zoo.errors import ServerFailed
from oscar_zoo.runtime import memory_plan
from oscar_zoo.runtime.step import Executor, Step, StepRequest
from oscar_zoo.runtime.torch_executor import TorchExecutor
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.window_store import WindowStore

if TYPE_CHECKING:
    from oscar_zoo.engines.sglang.device_path import DevicePath

logger = logging.getLogger(__name__)

_Stock: Any = radix_attention.attention_backend_class()


@dataclass(frozen=True)
class _Batch:
    """What `init_forward_metadata` keeps for the layers of one forward pass."""

    requests: tuple[StepRequest, ...]
    decode: bool


class OscarAttentionBackend(_Stock):  # type: ignore[misc]
    """Attention over an `Int2TokenPool`.

    Args:
        runner: SGLang's model runner.

    Raises:
        ServerFailed: a hook did not run, or the pool is not ours.
        OscarZooError: server, model or artifact are refused.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool, rows = runner.token_to_kv_pool, runner.req_to_token_pool
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
        refusals.check_layers(radix_attention.attention_layers(runner.model))
        chosen, artifact = worker.served()
        table = TransformTable.build(
            artifact.k,
            artifact.v,
            range(pool.start_layer, pool.start_layer + pool.layer_num),
            kv_heads=geometry.local_kv_heads(runner.model_config),
            device=pool.device,
        )
        self.pool = pool
        # Models and SGLang's forward context read these two names from any backend.
        self.token_to_kv_pool, self.req_to_token_pool = pool, rows
        self.req_to_token = rows.req_to_token
        self.window_on_hit = chosen.window_on_hit.value
        self.mutant = chosen.knobs.mutant
        self.device_path: DevicePath | None = None
        self.executor: Executor | None = None
        if worker.runs_kernels(str(pool.device), chosen):
            from oscar_zoo.engines.sglang.device_path import DevicePath

            self.device_path = DevicePath(runner, pool, table, self._begin)
        else:
            self.executor = TorchExecutor(pool.slots, pool.side, table, self.mutant)
        self.transform_bytes = table.nbytes
        self.batch: _Batch | None = None
        rows.oscar_hand_out, rows.oscar_sinks = self.side.hand_out, self.side.sinks
        scratch = worker.scratch_bytes(runner, str(pool.device), pool.slots.shape, pool.side.shape)
        plan = memory_plan.plan(
            pool.slots.shape, pool.side.shape, table.nbytes, pool.slots.mode, scratch=scratch
        )
        logger.info("INT2 KV cache: artifact %s; %s", artifact.digest, chosen.describe())
        logger.info(
            "INT2 KV cache: %s",
            memory_plan.describe(plan, pool.slots.shape, pool.side.shape, tokens=pool.size),
        )
        warning = memory_plan.too_short(pool.size, geometry.context_length(runner))
        if warning is not None:
            logger.warning("INT2 KV cache: %s", warning)

    @property
    def side(self) -> WindowStore:
        """Rings and sinks of the pool."""
        side: WindowStore = self.pool.side
        return side

    def support_triton(self) -> bool:
        """SGLang may use its own Triton helpers beside this backend."""
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Reset rows with a new owner, then work out where every request reads its cached
        tokens."""
        if "alloc" not in fired_hooks.FIRED:
            raise ServerFailed(
                "the hook that watches request rows did not run; request rows cannot be trusted."
            )
        if self.device_path is not None:
            self.device_path.start(forward_batch)
            return
        rows = forward_batch.req_pool_indices.tolist()
        lengths = forward_batch.seq_lens.tolist()
        decode = not forward_batch.forward_mode.is_extend()
        if decode:
            self._check_decode(rows)
            prefixes = [n - 1 for n in lengths]
        else:
            prefixes = list(forward_batch.extend_prefix_lens_cpu)
            self._begin(rows, prefixes, lengths)
        cached = self.side.coverage(rows, lengths if decode else prefixes)
        self.batch = _Batch(
            tuple(
                StepRequest(
                    row, prefix, n - prefix, cover, self.req_to_token[row, : cover.length].long()
                )
                for row, prefix, n, cover in zip(rows, prefixes, lengths, cached, strict=True)
            ),
            decode,
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Tables have fixed addresses from the start."""
        if self.device_path is None:
            raise ServerFailed("the plain PyTorch executor cannot be captured in a CUDA graph.")

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tables that a decode graph reads, in front of its capture and of every
        replay."""
        if self.device_path is None:
            raise ServerFailed("the plain PyTorch executor cannot be captured in a CUDA graph.")
        self.device_path.start(forward_batch, refill_only=not in_capture)

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
        """Attention of a prefill or mixed batch; `q`, `k`, `v` are those of the local heads, after
        RoPE."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

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
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def report(self) -> dict[str, Any]:
        """What was read and allocated, for tests and for the log."""
        return {
            "reads": dict(getattr(self.executor, "reads", {})),
            "slot_store": self.pool.slots.nbytes,
            "side_store": self.side.nbytes,
            "transforms": self.transform_bytes,
            "kv_size": sum(self.pool.get_kv_size_bytes()),
            "tokens": self.pool.size,
            "rows": self.side.shape.num_rows,
            "blocks": self.side.shape.num_blocks,
            "sinks": self.side.sinks.counts(),
        }

    def _begin(self, rows: list[int], prefixes: list[int], ends: list[int]) -> None:
        starts, fresh = dict(zip(rows, prefixes, strict=True)), self.side.take_fresh(rows)
        if fresh and "admit" not in fired_hooks.FIRED:
            raise ServerFailed(
                "the hook that tells the tokens of new requests did not run; sinks would be lost."
            )
        if any(starts[row] for row in fresh) and self.window_on_hit == "recompute":
            missing = sorted({"tail", "match"} - fired_hooks.FIRED)
            if missing:
                raise ServerFailed(
                    f"a prefix-cache hit without the hooks that limit it ({', '.join(missing)})."
                )
        self.side.begin(
            {row: 0 if self.mutant == "keep_stale_rows" else starts[row] for row in fresh}
        )
        self.side.sinks.launched(rows, ends)

    def _check_decode(self, rows: list[int]) -> None:
        unseen = [row for row in rows if row in self.side.fresh]
        if unseen:
            raise ServerFailed(f"request rows {unseen} reached decode without a prefill.")

    def _forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save: bool,
        extra: dict[str, Any],
    ) -> Tensor:
        unknown = sorted(name for name, value in extra.items() if value is not None)
        if k is None or v is None or not save or unknown:
            raise NotImplementedError(
                "oscar-zoo INT2 KV cache: attention without its own keys and values, or with"
                f" {unknown}"
            )
        if self.device_path is not None:
            return self.device_path.forward(q, k, v, layer)
        if self.batch is None or self.executor is None:
            raise ServerFailed("a forward pass without metadata.")
        total = sum(request.new for request in self.batch.requests)
        slots = radix_attention.write_location(forward_batch.out_cache_loc)[:total].long()
        step = Step(self.batch.requests, slots, self.batch.decode)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        run = self.executor.decode if step.decode else self.executor.extend
        out[:total] = run(
            layer.layer_id - self.pool.start_layer,
            q[:total].view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k[:total].view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v[:total].view(-1, layer.tp_v_head_num, layer.v_head_dim),
            step,
            scaling=layer.scaling,
        )
        return out.flatten(1)
