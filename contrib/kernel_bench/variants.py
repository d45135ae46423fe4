"""What the tables leave open: variants of the CUDA kernels, and where a fused extend stops to
pay.

Each variant is checked against the reference before it is timed, like everything else here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import baselines
import cases
import checks
import ops
import roofline
import torch
from plain_rows import Baseline
from results import ResultRow, row
from timing import timed
from torch import Tensor

from oscar_kernels.cache import LayerCache
from oscar_kernels.decode_attention import cuda as cuda_attention
from oscar_kernels.decode_attention import tuning
from oscar_kernels.kv_read import materialize_prefix
from oscar_kernels.kv_write import cuda as cuda_write

WARPGROUPS = (1, 2, 3, 4)
PREFIXES = (8192, 32_768, 100_000)
NEW_TOKENS = (4, 16, 32, 64, 128, 256)


def decode(bench: ops.OpBench) -> Iterator[ResultRow]:
    """Decode attention by every variant of `decode_attention.tuning`, on every shape."""
    heads, plan, checked = bench.plan.heads, bench.plan, set[tuning.CudaTiles]()
    for number, length in plan.decode:
        lengths = [length] * number
        moved = roofline.decode(heads, lengths)
        job = cases.attention_layers(heads, lengths, cases.layers(moved, plan.layers))
        reason = ops.cuda_cannot_decode(job)
        if reason:
            bench.note(f"decode {number} x {length}: no CUDA path: {reason}")
            return
        for tiles in tuning.VARIANTS:
            op = partial(cuda_attention.decode_attention, tiles=tiles)
            if tiles not in checked:
                checks.decode(heads, op)
                checks.decode(heads, op, [9000])  # a single request has a way of its own
                checked.add(tiles)
            calls = ops.decode_calls(cuda_attention, job, plan.layers, tiles=tiles)
            yield row(
                "decode",
                f"{number} x {length}",
                f"cuda {words(tiles)}",
                timed(calls, replays=plan.replays),
                moved,
                bench.bandwidth,
            )


def words(tiles: tuning.CudaTiles) -> str:
    """The fields that differ from the tiles in use; `in use` if none does."""
    usual = asdict(tuning.CUDA)
    return (
        " ".join(f"{name}={int(x)}" for name, x in asdict(tiles).items() if x != usual[name])
        or "in use"
    )


def write(bench: ops.OpBench) -> Iterator[ResultRow]:
    """The CUDA write with other numbers of warpgroups."""
    plan = bench.plan
    reason = ops.cuda_cannot_write(cases.write_layer(plan.heads, [0], 64))
    if reason:
        bench.note(f"write: no CUDA path: {reason}")
        return
    for number in WARPGROUPS:
        op = partial(cuda_write.write_kv_int2, warpgroups=number)
        checks.writing(plan.heads, op)
        for case, lengths, new, count, step in bench.writes():
            yield bench.timed_write(
                f"cuda warpgroups={number}", op, case, lengths, new, count, step=step
            )


def crossover(bench: ops.OpBench) -> Iterator[ResultRow]:
    """A few new tokens over a prefix: reading INT2 rows directly, or making 16-bit rows and the
    stock kernel over them.

    Left out of the second: the log-sum-exp merge and the way back to the model's basis, two small
    launches.
    """
    heads, plan, baseline = bench.plan.heads, bench.plan, baselines.available()
    dry = not torch.cuda.is_available()
    for length in (40,) if dry else PREFIXES:
        out_k, out_v = (
            cases.normal(length, heads.num_kv_heads, heads.k_spec.head_dim) for _ in "kv"
        )
        for new in (5,) if dry else NEW_TOKENS:
            job = cases.attention_layers(heads, [length], 2, new=new)
            moved = roofline.extend(heads, [length], new)
            routes = {
                "fused": ops.extend_calls(job),
                "materialised": _materialised(baseline, job, out_k, out_v),
            }
            for name, calls in routes.items():
                timing = timed(calls, replays=max(3, plan.replays // 3), graph=False)
                yield row("crossover", f"{new} over {length}", name, timing, moved, bench.bandwidth)


def _materialised(
    baseline: Baseline, job: cases.AttentionLayers, out_k: Tensor, out_v: Tensor
) -> list[Callable[[], object]]:
    def call(cache: LayerCache) -> None:
        materialize_prefix(cache, job.batch, out_k=out_k, out_v=out_v)
        baseline.whole(job.query, out_k, out_v)
        baseline.chunk(job.query, job.key, job.value)

    return [partial(call, cache) for cache in job.caches]
