"""Print which kernels Triton would compile for an NVIDIA GPU: what a rehearsal finds ahead, what a
worker of other sizes compiles while it warms up, then for batches that it meets.

Nothing is compiled or run: every launch only gets its key, by Triton's own rules.
"""

from __future__ import annotations

import random

import torch
from cache_oracle import PlainPrefill, general_set

from oscar_kernels import chips
from oscar_kernels.ahead import recording
from oscar_kernels.chips import Target
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache, warm_up
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

HEADS, GROUP, DIM, ROWS, PIECE, MOST = 2, 4, 32, 40, 64, 2003
SPEC = QuantSpec(DIM, DIM, 0.9, "float16")
TARGET = Target((9, 0), chips.CHIPS[9, 0].shared_bytes, 132)


def main() -> None:
    """One line for each part."""
    sets = [general_set(role, 1, HEADS, DIM, seed=1) for role in ("k", "v")]
    transforms = TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu")
    rows = rehearsal.Worker(
        specs=((SPEC, SPEC),),
        num_q_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        sink=4,
        recent=8,
        dtype="bfloat16",
        cap=0.0,
        learned_sinks=False,
        drafts=1,
        tree=False,
        requests=ROWS - 1,
        max_tokens=MOST,
    )
    _print({(x.kernel.__name__, x.key) for x in rehearsal.jobs(rows, transforms, TARGET)})
    with recording(TARGET) as recorder:
        cache = _cache(transforms)
        warm_up(cache)
        for requests in rehearsal.captured_batches(ROWS - 1):
            _decode(cache, requests)
    _print(set(recorder.launches))
    with recording(TARGET) as recorder:
        _extends(cache)
    _print(set(recorder.launches))


def _print(keys: set[tuple[str, str]]) -> None:
    print("\t".join(sorted(map(" ".join, keys))))


def _cache(transforms: TransformTable) -> Int2Cache:
    windows = WindowStore(WindowShape(1, ROWS, HEADS, DIM, DIM, 4, 8, torch.bfloat16), "cpu")
    slots = SlotStore(SlotShape.alike(1, 100, HEADS, SPEC, SPEC), "cpu")
    config = CacheConfig((0,), HEADS * GROUP, Softmax(0.1), ROWS, MOST, PIECE, "cpu")
    # SGLang's table is a few tokens wider than a request may be long.
    source = SlotTable(torch.zeros(ROWS, MOST + 13, dtype=torch.int32), KERNELS.pack)
    return Int2Cache(
        config, slots, windows, transforms, source, ops=KERNELS, prefill=PlainPrefill()
    )


def _decode(cache: Int2Cache, requests: int) -> None:
    """A step of the last rows, whose buffers are parts of longer ones."""
    rows, lengths, written = torch.arange(3 * ROWS).split(ROWS)
    step = StepInput("decode", rows[:requests], (), lengths[:requests], written[:requests])
    cache.begin(step)
    widths = DIM * HEADS * GROUP, DIM * HEADS, DIM * HEADS
    fused = torch.zeros(requests, sum(widths), dtype=torch.bfloat16)
    q, k, v = fused.split(widths, dim=1)
    cache.forward(0, q, k, v)


def _extends(cache: Int2Cache) -> None:
    """Extends of random shapes."""
    choose = random.Random(4)
    for _ in range(60):
        requests = choose.choice([1, 2, 3, 7, 16, 30])
        prefixes = [choose.choice([0, 1, 64, choose.randrange(300)]) for _ in range(requests)]
        lengths = [
            choose.choice([1, 2, 17, choose.randrange(1, 1200 // requests)])
            for _ in range(requests)
        ]
        rows, total = torch.arange(requests) + choose.randrange(ROWS - requests), sum(lengths)
        # A chunk is a part of longer buffers, whose addresses are not round.
        written = torch.zeros(total + 3, dtype=torch.int64)[choose.randrange(3) :][:total]
        ends = tuple(prefixes), tuple(lengths)
        cache.begin(StepInput("extend", rows, tuple(rows.tolist()), rows, written, *ends))
        widths = DIM * HEADS * GROUP, DIM * HEADS, DIM * HEADS
        fused = torch.zeros(total, sum(widths), dtype=torch.bfloat16)
        cache.forward(0, *fused.split(widths, dim=1))


if __name__ == "__main__":
    main()
