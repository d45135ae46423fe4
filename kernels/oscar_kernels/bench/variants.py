"""What the tables leave open: variants of the CUDA kernels, and where a fused extend stops to
pay.

Each variant is checked against the reference before it is timed, like everything else here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from oscar_kernels.bench import baselines, cases, checks, ops, roofline
from oscar_kernels.bench.plain_rows import Baseline
from oscar_kernels.bench.results import ResultRow, row
from oscar_kernels.bench.timing import timed
from oscar_kernels.cache import Drafts, LayerCache
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.cuda import launcher as cuda_attention
from oscar_kernels.kv_read.launcher import materialize_prefix
from oscar_kernels.kv_write.cuda import launcher as cuda_write

WARPGROUPS = (1, 2, 3, 4)
PREFIXES = (8192, 32_768, 100_000)
NEW_TOKENS = (4, 16, 32, 64, 128, 256)


def decode(bench: ops.OpBench) -> Iterator[ResultRow]:
    """Decode attention by every variant of `decode_attention.tuning`, on every shape; and the
    verification of drafts, if the plan has some."""
    for drafts in dict.fromkeys((0, bench.plan.drafts)):
        checked = set[tuning.CudaTiles]()
        for number, length in bench.plan.decode:
            yield from _decode(bench, number, length, drafts, checked)


def _decode(
    bench: ops.OpBench, number: int, length: int, drafts: int, checked: set[tuning.CudaTiles]
) -> Iterator[ResultRow]:
    heads, plan, lengths = bench.plan.heads, bench.plan, [length] * number
    moved = roofline.extend(heads, lengths, drafts) if drafts else roofline.decode(heads, lengths)
    count, case = cases.layers(moved, plan.layers), f"{number} x {length}"
    job = cases.attention_layers(heads, lengths, count, drafts=drafts)
    given = Drafts(drafts) if drafts else None
    case += f", {drafts} drafts" if drafts else ""
    reason = ops.cuda_cannot_decode(job, given)
    if reason:
        bench.note(f"decode {case}: no CUDA path: {reason}")
        return
    seen = list[object]()
    for tiles in tuning.VARIANTS:
        made = cuda_attention.chosen(job.query, job.caches[0], job.batch, tiles=tiles, drafts=given)
        if made.flags in seen:
            continue
        seen.append(made.flags)
        op = partial(cuda_attention.decode_attention, tiles=tiles)
        if tiles not in checked:
            _check(heads, op, drafts)
            checked.add(tiles)
        calls = ops.decode_calls(cuda_attention, job, tiles=tiles, drafts=given)
        timing = timed(calls, replays=plan.replays)
        yield row("decode", case, f"cuda {words(tiles)}", timing, moved, bench.bandwidth)


def _check(heads: roofline.Heads, op: Callable[..., Tensor], drafts: int) -> None:
    if drafts:
        checks.verify(heads, op, drafts)
    else:
        checks.decode(heads, op)
        checks.decode(heads, op, [9000])  # a single request has a way of its own


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
