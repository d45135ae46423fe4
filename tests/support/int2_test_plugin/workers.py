"""What replaces the functions of `engines.sglang.worker` in the processes of the test suite."""

from collections import Counter
from dataclasses import fields, replace
from functools import partial
from typing import Any

from cache_oracle import PlainPrefill
from torch import Tensor

from int2_test_plugin import exact, mutants, reads
from oscar_zoo.engines.sglang import worker
from oscar_zoo.runtime.dispatch import KERNELS, REFERENCES
from oscar_zoo.runtime.engine import CacheConfig
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

PIECE_TOKENS = 64

slot_shape = worker.slot_shape


class TestedCache(Int2Cache):
    """An INT2 cache that reports how it was made and what was read."""

    said: dict[str, Any]

    def report(self) -> dict[str, object]:
        return {**super().report(), **self.said}


def install(mode: str, mutant: str, ops: str) -> None:
    """Make every INT2 server of this process one of `mode`, with a bug, or with other ops."""
    if mutant == "clip_one_rank_lower":
        mutants.clip_one_rank_lower()
    if mutant == "wrong_slots":
        mutants.wrong_slots()
    if mutant == "several_chains":
        mutants.several_chains()
    if mutant == "stock_window":
        mutants.stock_window()
    if mutant in mutants.SLIDING_DRAFTS:
        mutants.sliding_drafts(mutant)

    def exact_shape(*args: Any, **given: Any) -> SlotShape:
        shape = slot_shape(*args, **given)
        return exact.ExactShape(*(getattr(shape, field.name) for field in fields(shape)))

    def make_stores(
        slots: SlotShape, windows: WindowShape, device: str
    ) -> tuple[SlotStore, WindowStore]:
        store = (exact.ExactStore if mode == "lossless" else SlotStore)(slots, device)
        sinks = worker.sink_blocks(windows)
        if mutant == "publish_early":
            sinks = mutants.EarlySinks(sinks.width, sinks.num_blocks, sinks.recent)
        rings = KeptRings(worker.kept_by_hits(), windows.drafts)
        made = WindowStore(windows, device, sinks, rings)
        if mutant == "small_ring":
            mutants.small_ring(made)
        return store, made

    def make_cache(
        config: CacheConfig,
        slots: SlotStore,
        windows: WindowStore,
        transforms: TransformTable,
        slot_table: Tensor,
    ) -> Int2Cache:
        counted = Counter(reads.NOTHING)
        used = {"": REFERENCES, "lossless": exact.EXACT, "poison": exact.POISONED}[mode]
        used = mutants.broken(reads.counting(used, counted), mutant)
        prefill = None
        if ops == "kernels":
            used, prefill = KERNELS, PlainPrefill()
            counted.clear()
            config = replace(config, piece_tokens=PIECE_TOKENS)
        if mutant == "rot":
            mutants.rot(slots)
        if mutant == "partner_is_forward":
            transforms = mutants.partner_is_forward(transforms)
        cache = TestedCache(
            config,
            slots,
            windows,
            transforms,
            partial(used.pack, slot_table),
            ops=used,
            prefill=prefill,
        )
        last = len(cache.index) - 1
        if mutant == "one_layer":
            cache.index = dict.fromkeys(cache.index, 0)
        if mutant == "swapped_layers":
            cache.index = {layer: last - index for layer, index in cache.index.items()}
        cache.said = {"reads": counted, "mode": mode, "mutant": mutant, "ops": ops}
        return cache

    worker.slot_shape = exact_shape if mode == "lossless" else slot_shape
    worker.make_stores, worker.make_cache = make_stores, make_cache


def slide_as_on_a_gpu(graphs: bool) -> None:
    """Layers with a sliding window run in SGLang's own backend, which a decode or verify step
    prepares as in front of a CUDA graph, if `graphs`."""
    from oscar_zoo.engines.sglang import backend
    from oscar_zoo.engines.sglang.compat import backends, forward_batch

    def make(runner: Any) -> Any:
        backend = backends.sliding_backend(runner)
        if not graphs:
            return backend
        requests, eager = runner.req_to_token_pool.size, backend.init_forward_metadata
        backend.init_cuda_graph_state(requests, requests * forward_batch.most_drafts())

        def prepare(batch: Any) -> None:
            if batch.forward_mode.is_extend() and not batch.forward_mode.is_target_verify():
                eager(batch)
                return
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_out_graph(batch)

        backend.init_forward_metadata = prepare
        return backend

    backend.SlidingOnCpu = make
