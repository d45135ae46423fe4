"""`ahead`: compile what a worker on this GPU will need, without touching the GPU. `serve`: be that
worker until it is ready. Arguments behind it: channels of a row, drafts, and `tree` or `chain`."""

from __future__ import annotations

import sys

import torch
from cache_oracle import PlainPrefill, general_set

from oscar_kernels import ahead, nvrtc
from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

HEADS, GROUP, REQUESTS, LONGEST = 8, 4, 20, 4000


def main(what: str, dim: int, drafts: int, tree: bool) -> None:
    """Either half of the test."""
    worker = rehearsal.Worker(
        specs=((QuantSpec(dim, dim, 0.96, "float16"), QuantSpec(dim, dim, 0.92, "float16")),),
        num_q_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        sink=64,
        recent=256,
        dtype="bfloat16",
        cap=0.0,
        learned_sinks=False,
        drafts=drafts,
        tree=tree,
        requests=REQUESTS,
        max_tokens=LONGEST,
    )
    sets = [general_set(role, 1, HEADS, dim, seed=1) for role in ("k", "v")]
    device = "cpu" if what == "ahead" else "cuda"
    table = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device=device)
    if what == "ahead":
        assert ahead.compile_all(rehearsal.jobs(worker, table, nvrtc.target(0))) == []
    else:
        _serve(worker, table)


def _serve(worker: rehearsal.Worker, transforms: TransformTable) -> None:
    dim, device = worker.specs[0][0].head_dim, "cuda"
    shape = WindowShape(
        1, REQUESTS + 1, HEADS, dim, dim, 64, 256, torch.bfloat16, drafts=worker.drafts
    )
    config = CacheConfig(
        (0,), worker.num_q_heads, Softmax(dim**-0.5), REQUESTS + 1, LONGEST, 32768, device
    )
    slots = torch.zeros(REQUESTS + 1, LONGEST + 4, dtype=torch.int32, device=device)
    cache = Int2Cache(
        config,
        SlotStore(SlotShape(worker.specs, 5000, HEADS), device),
        WindowStore(shape, device),
        transforms,
        SlotTable(slots, KERNELS.pack),
        ops=KERNELS,
        prefill=PlainPrefill(),
    )
    cache.compile_kernels(lambda: None)
    widths = dim * worker.num_q_heads, dim * HEADS, dim * HEADS
    for requests in rehearsal.captured_batches(REQUESTS):
        tokens = requests * worker.drafts
        rows, ends, out_loc = (
            torch.zeros(count, dtype=torch.int64, device=device)
            for count in (requests, requests, tokens)
        )
        mask = torch.full((tokens,), -1, dtype=torch.int32, device=device) if worker.tree else None
        drafts = Drafts(worker.drafts, mask) if worker.drafts > 1 else None
        kind = "verify" if drafts else "decode"
        cache.begin(StepInput(kind, rows, (), ends + 1, out_loc, drafts=drafts))  # type: ignore[arg-type]
        fused = torch.zeros(tokens, sum(widths), dtype=torch.bfloat16, device=device)
        cache.forward(0, *fused.split(widths, dim=1))
        if drafts and worker.tree:
            cache.commit(out_loc[:1], out_loc[:1])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "tree")
