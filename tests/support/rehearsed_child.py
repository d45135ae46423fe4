"""`ahead`: compile what a worker on this GPU will need, without touching the GPU. `serve`: be that
worker until it is ready. Arguments behind it: channels of a row, drafts, and `tree` or `chain`."""

import sys

import torch
from cache_oracle import PlainPrefill
from small_caches import CacheShape

from oscar_kernels import ahead, nvrtc
from oscar_kernels.cache import Drafts
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import rehearsal
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import StepInput

HEADS, REQUESTS, LONGEST = 8, 20, 4000


def main(what: str, dim: int, drafts: int, tree: bool) -> None:
    shape = CacheShape(
        HEADS,
        4,
        (QuantSpec(dim, dim, 0.96, "float16"), QuantSpec(dim, dim, 0.92, "float16")),
        sink=64,
        recent=256,
        rows=REQUESTS + 1,
        slots=5000,
        longest=LONGEST,
        piece=32768,
        drafts=drafts,
        dtype=torch.bfloat16,
        device="cpu" if what == "ahead" else "cuda",
    )
    worker = rehearsal.Worker(
        specs=(shape.specs,),
        num_q_heads=shape.num_q_heads,
        num_kv_heads=HEADS,
        sink=shape.sink,
        recent=shape.recent,
        dtype="bfloat16",
        cap=0.0,
        learned_sinks=False,
        drafts=drafts,
        tree=tree,
        requests=REQUESTS,
        max_tokens=LONGEST,
    )
    if what == "ahead":
        assert ahead.compile_all(rehearsal.jobs(worker, shape.table(), nvrtc.target(0))) == []
    else:
        _serve(shape, tree)


def _serve(shape: CacheShape, tree: bool) -> None:
    slots = torch.zeros(REQUESTS + 1, LONGEST + 4, dtype=torch.int32, device="cuda")
    cache = shape.cache(KERNELS, shape.table(), slots, PlainPrefill())
    cache.compile_kernels(lambda: None)
    for requests in rehearsal.captured_batches(REQUESTS):
        tokens = requests * shape.drafts
        rows, ends, out_loc = (
            torch.zeros(count, dtype=torch.int64, device="cuda")
            for count in (requests, requests, tokens)
        )
        mask = torch.full((tokens,), -1, dtype=torch.int32, device="cuda") if tree else None
        drafts = Drafts(shape.drafts, mask) if shape.drafts > 1 else None
        kind = "verify" if drafts else "decode"
        cache.begin(StepInput(kind, rows, (), ends + 1, out_loc, drafts=drafts))  # type: ignore[arg-type]
        fused = torch.zeros(tokens, sum(shape.widths), dtype=torch.bfloat16, device="cuda")
        cache.forward(0, *fused.split(shape.widths, dim=1))
        if drafts and tree:
            cache.commit(out_loc[:1], out_loc[:1])
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "tree")
