"""Time one decode step of one MLA layer with a 2-bit latent on this GPU, beside kernels of stock
servers over a cache in BF16: CSV on standard output. Slots are random, and the L2 is cold.

    decode_speed.py --only ours,flashinfer-fa2,flashinfer-fa3,triton
    decode_speed.py --only ours,fa3               in an environment with vLLM
    decode_speed.py --only write,write-carried    the write of a decode step
    decode_speed.py --only ours-triton --heads 16 --tiles 16,64,32,4,3,2 16,64,32,4,3,3,168

Rows have 512 channels of a latent and 64 of a rotary key, and windows 64 and 256 tokens. `ours` is
the attention alone, as the others are; `+partner` brings its sums back to the basis of the model
too. FlashInfer compiles for a minute or two at its first call.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "contrib/kernel_bench")]

import timing  # noqa: E402

from oscar_kernels import reference  # noqa: E402
from oscar_kernels.cache import (  # noqa: E402
    BatchView,
    LayerCache,
    TokenTargets,
    Transforms,
    WindowState,
    allocate,
)
from oscar_kernels.decode_attention import dispatch, latent  # noqa: E402
from oscar_kernels.decode_attention.launcher import Workspace  # noqa: E402
from oscar_kernels.kv_write.dispatch import write_kv_int2  # noqa: E402
from oscar_kernels.spec import PLAIN, QuantSpec  # noqa: E402

LATENT, ROTARY, SINK, RECENT, PAGE = 512, 64, 64, 256, 64
SCALE = 192**-0.5
CASES = ("16x30000", "1x100000", "64x8192")
Calls = list[Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="ours,flashinfer-fa2,flashinfer-fa3,triton")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--heads", default="16,128")
    parser.add_argument("--tiles", nargs="*", help="fields of `LatentTiles`; other ones to try")
    parser.add_argument("--replays", type=int, default=10)
    chosen = parser.parse_args()
    print("kernel,requests,tokens,heads,us,p20,p80,GB/s,TFLOP/s", flush=True)
    for case in chosen.cases.split(","):
        number, length = map(int, case.split("x"))
        for name in chosen.only.split(","):
            for heads in map(int, chosen.heads.split(",")):
                torch.manual_seed(0)
                if name in OURS:
                    ours(name, number, length, heads, chosen)
                elif name in WRITES:
                    written(name, number, heads, chosen.replays)
                else:
                    theirs(name, number, length, heads, chosen.replays)
                torch.cuda.empty_cache()


def tell(name: str, case: tuple[int, int, int], row: int, calls: Calls, replays: int) -> None:
    number, length, heads = case
    try:
        found = timing.timed(calls, replays=replays)
    except Exception as error:  # what a library says; the other kernels are timed nevertheless
        print(f"{name},{number},{length},{heads},{type(error).__name__}: {error}"[:300], flush=True)
        return
    moved = number * length * row
    work = number * length * heads * 2 * (2 * LATENT + ROTARY)
    times = ",".join(f"{1e6 * x:.1f}" for x in (found.median, found.p20, found.p80))
    rates = f"{moved / found.median / 1e9:.0f},{work / found.median / 1e12:.0f}"
    print(f"{name},{number},{length},{heads},{times},{rates}", flush=True)


OURS = {"ours": dispatch.decode_attention, "ours-triton": latent.decode_attention}


def ours(name: str, number: int, length: int, heads: int, chosen: Any) -> None:
    caches, batch = filled(number, length, layers=max(4, 12 if number == 1 else 4))
    query = torch.randn(number, heads, LATENT + ROTARY, device="cuda", dtype=torch.bfloat16)
    out = query.new_empty(number, heads, LATENT)
    partner = torch.linalg.qr(torch.randn(1, LATENT, LATENT, device="cuda"))[0].contiguous()
    row = LATENT // 4 + 16 + 2 * ROTARY
    given = [latent.LatentTiles(*map(int, one.split(","))) for one in chosen.tiles or ()]
    for tiles in given or [None]:
        numel = dispatch.decode_workspace_numel(caches[0], heads, number)
        if tiles:
            splits = sum(latent._splits(tiles, caches[0], number, heads))
            numel = number * heads * (splits * 513 + 512)
        run = partial(
            OURS[name], query, batch=batch, sm_scale=SCALE,
            workspace=Workspace.allocate(numel, "cuda"), out=out,
            **({"tiles": tiles} if tiles else {}),
        )  # fmt: skip
        told = name + (" " + "/".join(map(str, vars(tiles).values())) if tiles else "")
        try:
            check(run, query, caches[0], batch)
        except Exception as error:  # a configuration that does not fit; others may
            print(f"{told},{number},{length},{heads},{type(error).__name__}: {error}"[:300])
            continue
        case = number, length, heads
        tell(told, case, row, [partial(run, cache=one) for one in caches], chosen.replays)
        if not given:
            both = [partial(run, cache=one, o_partner=partner) for one in caches]
            tell(f"{name}+partner", case, row, both, chosen.replays)


WRITES = {"write": False, "write-carried": True}
"""Writes of a decode step, and whether they carry errors on."""


def written(name: str, number: int, heads: int, replays: int) -> None:
    """The new row of every request, and its queries, transformed, quantized and stored."""
    caches, batch = filled(number, SINK, layers=4)
    row = [torch.randn(number, 1, x, device="cuda").bfloat16() for x in (LATENT, ROTARY)]
    query = torch.randn(number, heads, LATENT + ROTARY, device="cuda").bfloat16()
    matrix = torch.linalg.qr(torch.randn(1, LATENT, LATENT, device="cuda"))[0].contiguous()
    feedback = (0.1 * torch.randn_like(matrix)).triu(1).half() if WRITES[name] else None
    pairs = Transforms(*[matrix] * 4, None, feedback)
    targets = TokenTargets(batch.kv_indices[:number], batch.rows, batch.rows * 0, batch.rows)
    given = {"windows": batch.windows, "query": query, "query_out": torch.empty_like(query)}
    calls = [partial(write_kv_int2, *row, one, pairs, targets, **given) for one in caches]
    tell(name, (number, 1, heads), 2 * (LATENT + ROTARY), calls, replays)


def check(run: Callable[..., Any], query: Any, cache: LayerCache, batch: BatchView) -> None:
    """The first request beside the reference."""
    got = run(cache=cache)[:1].float()
    first = BatchView(batch.kv_indptr[:2], batch.kv_indices, batch.rows[:1], batch.windows)
    want = reference.decode_attention(query[:1].float(), cache, first, sm_scale=SCALE)
    error = float((got - want).norm() / want.norm())
    if not error < 0.02:
        raise ValueError(f"the output misses the reference by {error:.3f}")


def filled(number: int, length: int, layers: int) -> tuple[list[LayerCache], BatchView]:
    """Caches of random rows, and one batch that reads them."""
    specs = QuantSpec(LATENT, 128), QuantSpec(ROTARY, ROTARY, bits=PLAIN)
    tokens = number * length
    caches = []
    for _ in range(layers):
        made = allocate(
            *specs, slots=tokens + 1, rows=number + 1, num_kv_heads=1, sink=SINK, recent=RECENT,
            device="cuda",
        )  # fmt: skip
        made.codes.random_(256)
        made.codes.view(torch.bfloat16)[..., LATENT // 8 :].normal_()
        made.affine[..., ::2].uniform_(0.5, 1.0)
        made.affine[..., 1::2].uniform_(-1.6, -0.6)
        for store in made.stores[2:]:
            store.normal_()
        caches.append(made)
    rows = torch.arange(1, number + 1, device="cuda", dtype=torch.int32)
    state = WindowState(*(torch.zeros(number + 1, dtype=torch.int32, device="cuda"),) * 3)
    state = replace(state, sink_block=torch.arange(number + 1, dtype=torch.int32, device="cuda"))
    ends = torch.arange(number + 1, device="cuda", dtype=torch.int32) * length
    slots = 1 + torch.randperm(tokens, device="cuda").int()
    return caches, BatchView(ends, slots, rows, state)


def theirs(name: str, number: int, length: int, heads: int, replays: int) -> None:
    tokens = number * (-(-length // PAGE) * PAGE)
    size = tokens, 1, LATENT + ROTARY
    rows = [torch.randn(size, device="cuda").bfloat16() for _ in range(4)]
    query = torch.randn(number, heads, LATENT + ROTARY, device="cuda", dtype=torch.bfloat16)
    try:
        calls = OTHERS[name](rows, query, number, length)
    except Exception as error:  # of a library that is not there, or does not take the shape
        print(f"{name},{number},{length},{heads},{type(error).__name__}: {error}"[:300], flush=True)
        return
    tell(name, (number, length, heads), 2 * (LATENT + ROTARY), calls, replays)


def flashinfer(rows: list[Any], query: Any, number: int, length: int, *, backend: str) -> Calls:
    """A page per token, as SGLang plans it."""
    import flashinfer

    heads = query.shape[1]
    ends = torch.arange(number + 1, dtype=torch.int32, device="cuda")
    slots = torch.randperm(len(rows[0]), device="cuda").int()[: number * length]
    lengths = torch.full((number,), length, dtype=torch.int32, device="cuda")
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(384 << 20, dtype=torch.int8, device="cuda"),
        use_cuda_graph=True,
        qo_indptr=torch.empty_like(ends),
        kv_indptr=torch.empty_like(ends),
        kv_indices=torch.empty_like(slots),
        kv_len_arr=torch.empty_like(lengths),
        backend=backend,
    )
    wrapper.plan(
        ends, ends * length, slots, lengths, heads, LATENT, ROTARY, 1, False, SCALE,
        query.dtype, query.dtype,
    )  # fmt: skip
    parts = query[..., :LATENT].contiguous(), query[..., LATENT:].contiguous()
    out = torch.empty_like(parts[0])
    return [
        partial(wrapper.run, *parts, one[..., :LATENT], one[..., LATENT:], out=out) for one in rows
    ]


def triton(rows: list[Any], query: Any, number: int, length: int) -> Calls:
    """SGLang's own, with as many splits as its backend takes."""
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    heads, most, sms = query.shape[1], 256, latent._triton.multiprocessors(query.device)
    ends = torch.arange(number + 1, dtype=torch.int32, device="cuda") * length
    slots = torch.randperm(len(rows[0]), device="cuda")[: number * length]
    splits = torch.empty(number, dtype=torch.int32, device="cuda")
    lengths = torch.full((number,), length, device="cuda")
    get_num_kv_splits_triton[(1,)](splits, lengths, number, 1, heads, 1, most, sms, MAX_NUM_SEQ=256)
    logits = torch.empty(number, heads, most, LATENT, device="cuda")
    lse = torch.empty(number, heads, most, device="cuda")
    out = query.new_empty(number, heads, LATENT)
    return [
        partial(
            decode_attention_fwd, query, one, one[..., :LATENT], out, ends, slots, logits, lse,
            splits, most, SCALE, 1.0, 1.0, has_mla=True,
        )
        for one in rows
    ]  # fmt: skip


def fa3(rows: list[Any], query: Any, number: int, length: int) -> Calls:
    """FlashAttention-3 as vLLM ships and calls it, over pages of 64 tokens."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    pages = -(-length // PAGE)
    table = torch.randperm(number * pages, device="cuda").int().view(number, pages)
    ends = torch.arange(number + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((number,), length, dtype=torch.int32, device="cuda")
    paged = [one.view(-1, PAGE, 1, LATENT + ROTARY) for one in rows]
    return [
        partial(
            flash_attn_varlen_func, q=query[..., LATENT:], k=one[..., LATENT:],
            v=one[..., :LATENT], q_v=query[..., :LATENT], max_seqlen_q=1, cu_seqlens_q=ends,
            max_seqlen_k=length, seqused_k=lengths, block_table=table, softmax_scale=SCALE,
            causal=True, fa_version=3,
        )
        for one in paged
    ]  # fmt: skip


OTHERS: dict[str, Callable[..., Calls]] = {
    "flashinfer-fa2": partial(flashinfer, backend="fa2"),
    "flashinfer-fa3": partial(flashinfer, backend="fa3"),
    "triton": triton,
    "fa3": fa3,
}

if __name__ == "__main__":
    main()
