"""Print which kernels Triton would compile for an NVIDIA GPU: what a rehearsal finds ahead, what a
worker of other sizes compiles while it warms up, then for batches that it meets.

Nothing is compiled or run: every launch only gets its key, by Triton's own rules.
"""

import random

import torch
from cache_oracle import PlainPrefill
from small_caches import CacheShape

from oscar_kernels import chips
from oscar_kernels.ahead import recording
from oscar_kernels.chips import Target
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import Softmax, StepInput
from oscar_zoo.runtime.int2_cache import Int2Cache, warm_up

ROWS, MOST = 40, 2003
SHAPE = CacheShape(
    group=4,
    rows=ROWS,
    slots=100,
    longest=MOST,
    piece=64,
    softmax=Softmax(0.1),
    dtype=torch.bfloat16,
)
TARGET = Target((9, 0), chips.CHIPS[9, 0].shared_bytes, 132)


def main() -> None:
    transforms = SHAPE.table()
    rows = rehearsal.Worker(
        specs=(SHAPE.specs,),
        num_q_heads=SHAPE.num_q_heads,
        num_kv_heads=SHAPE.heads,
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
        # SGLang's table is a few tokens wider than a request may be long.
        table = torch.zeros(ROWS, MOST + 13, dtype=torch.int32)
        cache = SHAPE.cache(KERNELS, transforms, table, PlainPrefill())
        warm_up(cache)
        for requests in rehearsal.captured_batches(ROWS - 1):
            _decode(cache, requests)
    _print(set(recorder.launches))
    with recording(TARGET) as recorder:
        _extends(cache)
    _print(set(recorder.launches))


def _print(keys: set[tuple[str, str]]) -> None:
    print("\t".join(sorted(map(" ".join, keys))))


def _decode(cache: Int2Cache, requests: int) -> None:
    """A step of the last rows, whose buffers are parts of longer ones."""
    rows, lengths, written = torch.arange(3 * ROWS).split(ROWS)
    step = StepInput("decode", rows[:requests], (), lengths[:requests], written[:requests])
    cache.begin(step)
    fused = torch.zeros(requests, sum(SHAPE.widths), dtype=torch.bfloat16)
    cache.forward(0, *fused.split(SHAPE.widths, dim=1))


def _extends(cache: Int2Cache) -> None:
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
        fused = torch.zeros(total, sum(SHAPE.widths), dtype=torch.bfloat16)
        cache.forward(0, *fused.split(SHAPE.widths, dim=1))


if __name__ == "__main__":
    main()
