"""What a worker on a GPU will compile, found on a CPU before there is a worker.

A small cache of the same shapes takes every step that compiles something: those of `warm_up`, and
decode or verify steps of the batches that an engine captures. Its ops record and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from oscar_kernels.ahead import Job, Recorder, recording
from oscar_kernels.cache import BatchView, Drafts, LayerCache, TokenTargets, Transforms
from oscar_kernels.chips import Target
from oscar_kernels.decode_attention import dispatch as decode_dispatch
from oscar_kernels.kv_write import dispatch as write_dispatch
from oscar_kernels.kv_write import launcher as write_launcher
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.dispatch import KERNELS, Ops
from oscar_zoo.runtime.engine import CacheConfig, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import SHORT, Int2Cache, warm_up
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

CPU = "cpu"
SLOTS, ROWS, PIECE = 64, 2, 64
MOST_TOKENS = SHORT + 64
"""Sizes that no kernel depends on; there is room for every step of `warm_up`."""


@dataclass(frozen=True)
class Worker:
    """What of a worker decides which kernels it compiles."""

    specs: tuple[tuple[QuantSpec, QuantSpec], ...]  # rows of K and V, every kind of layer once
    num_q_heads: int  # both: local heads
    num_kv_heads: int
    sink: int  # both: tokens of the windows
    recent: int
    dtype: str  # of the model, such as `bfloat16`
    cap: float  # of the logits; 0 is none
    learned_sinks: bool  # whether attention has learned sinks
    drafts: int  # most draft tokens of a request; 1 without speculative decoding
    tree: bool  # whether drafts are a tree
    requests: int  # most requests of a decode or verify step
    max_tokens: int  # cached tokens of one request


def jobs(worker: Worker, transforms: TransformTable, target: Target) -> list[Job]:
    """Everything that a worker compiles before it is ready, in this package and its kernels.

    Afterwards this process must not launch anything in Triton."""
    with recording(target) as recorder:
        cache = _cache(worker, transforms, _ops(recorder))
        warm_up(cache)
        for requests in captured_batches(worker.requests):
            _step(cache, worker, requests)
    return recorder.jobs


def _cache(worker: Worker, transforms: TransformTable, ops: Ops) -> Int2Cache:
    dims = worker.specs[0][0].head_dim, worker.specs[0][1].head_dim
    layers, dtype = len(worker.specs), getattr(torch, worker.dtype)
    shape = WindowShape(
        layers,
        ROWS,
        worker.num_kv_heads,
        *dims,
        worker.sink,
        worker.recent,
        dtype,
        drafts=worker.drafts,
    )
    softmax, tokens = Softmax(dims[0] ** -0.5, worker.cap), min(worker.max_tokens, MOST_TOKENS)
    config = CacheConfig(
        tuple(range(layers)), worker.num_q_heads, softmax, worker.requests, tokens, PIECE, CPU
    )
    table = torch.zeros(ROWS, tokens, dtype=torch.int32)
    return Int2Cache(
        config,
        SlotStore(SlotShape(worker.specs, SLOTS, worker.num_kv_heads), CPU),
        WindowStore(shape, CPU),
        transforms,
        partial(ops.pack, table),
        ops=ops,
        prefill=_NoPrefill(),
    )


def _step(cache: Int2Cache, worker: Worker, requests: int) -> None:
    tokens, drafts = requests * worker.drafts, None
    rows, lengths = torch.zeros(requests, dtype=torch.int64), torch.ones(requests).long()
    out_loc = torch.zeros(tokens, dtype=torch.int64)
    if worker.drafts > 1:
        mask = torch.ones(tokens, dtype=torch.int32) if worker.tree else None
        drafts = Drafts(worker.drafts, mask)
    kind: Literal["decode", "verify"] = "verify" if drafts else "decode"
    cache.begin(StepInput(kind, rows, (), lengths, out_loc, drafts=drafts))
    dtype, heads = getattr(torch, worker.dtype), worker.num_kv_heads
    sinks = torch.zeros(worker.num_q_heads) if worker.learned_sinks else None
    for layer, (k_spec, v_spec) in enumerate(worker.specs):
        query_dim = cache.caches[layer].query_dim
        q = torch.zeros(tokens, worker.num_q_heads * query_dim, dtype=dtype)
        k = torch.zeros(tokens, heads * k_spec.head_dim, dtype=dtype)
        v = torch.zeros(tokens, heads * v_spec.head_dim, dtype=dtype)
        cache.forward(layer, q, k, v, sinks)
    if drafts and worker.tree:
        cache.commit(out_loc, out_loc)


def _ops(recorder: Recorder) -> Ops:
    """The kernels, of which those in CUDA C++ are noted and not run."""
    gpu = recorder.target

    def write(
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        transforms: Transforms,
        targets: TokenTargets,
        **of: Any,
    ) -> Tensor | None:
        build = write_dispatch.planned(key, value, cache, transforms, targets, gpu, **of)
        if build is None:
            return write_launcher.write_kv_int2(key, value, cache, transforms, targets, **of)
        recorder.note(build)
        query_out: Tensor | None = of.get("query_out")
        return query_out

    def decode(query: Tensor, cache: LayerCache, view: BatchView, **of: Any) -> Tensor:
        logits = {name: of[name] for name in ("logit_cap", "sink_logits", "drafts")}
        build = decode_dispatch.planned(query, cache, view, gpu, **logits)
        if build is None:
            return decode_dispatch.in_triton(cache)(query, cache, view, **of)
        recorder.note(build)
        decode_dispatch.beside_cuda(query, cache, view, **of)
        out: Tensor = of["out"]
        return out

    return replace(KERNELS, write=write, decode=decode, prepare=lambda _: None)


class _NoPrefill:
    """A `Prefill` whose results nobody reads."""

    lse_unit = 1.0

    def begin(self, batch: Batch) -> None:
        """Plan nothing."""

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        return self.whole(q, k, v, softmax)

    def whole(self, q: Tensor, k: Tensor, v: Tensor, softmax: Softmax) -> tuple[Tensor, Tensor]:
        size = q.shape[:2]
        return q.new_zeros(*size, v.shape[-1]), q.new_zeros(size, dtype=torch.float32)

    def merge(
        self, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        return one


def captured_batches(most: int) -> tuple[int, ...]:
    usual: Iterable[int] = (1, 2, 4, 8, 12, *range(16, most, 8))
    return (*(number for number in usual if number < most), most)
