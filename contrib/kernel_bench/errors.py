"""Errors of decode attention against float64 beside those of PyTorch's attention in bfloat16 over
the same rows: of the CUDA kernel on a GPU, else of its source in the emulator of the tests.

    errors.py --heads 8,16 --head-dim 128

In percent, over the heads of all requests: the median and the maximum of the norm of the error,
and of its largest element, relative to the norm and the largest element of the output.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (900, 500)
MEANS = {"plain": 1.0, "centred": 0.0}
"""Spread of the means of channels, beside a spread of 1 of tokens."""
SHARPNESS = (0.3, 1, 3)
"""Standard deviations of the logits."""


def main() -> None:
    sys.path.insert(0, str(ROOT / "kernels"))
    sys.path.append(str(ROOT / "tests/kernels"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, usual in (("--heads", "4,8,16"), ("--head-dim", "64,128,256")):
        parser.add_argument(name, default=usual, help=f"by default {usual}")
    options = parser.parse_args()
    groups, dims = ([int(x) for x in text.split(",")] for text in (options.heads, options.head_dim))
    print("| query heads, head_dim | keys | logits | bfloat16 | kernel | query in float16 |")
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for line in lines(groups, dims, Path(folder)):
            print(f"| {line} |", flush=True)


def lines(groups: list[int], dims: list[int], folder: Path) -> Iterator[str]:
    import random_caches
    import test_cuda_decode_emulated as emulated
    import torch
    from emulation import Emulator

    from oscar_kernels.decode_attention import cuda, tuning
    from oscar_kernels.spec import QuantSpec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    emulator = Emulator(cuda.SOURCE, "decode_emulator", cuda.Params, folder)
    for group, dim, (keys, spread), sharp in product(groups, dims, MEANS.items(), SHARPNESS):
        torch.manual_seed(0)
        spec, scale = QuantSpec(dim, dim, 0.96), sharp / math.sqrt(dim)

        def rows(
            tokens: int, heads: int, spec: QuantSpec, draw: torch.Generator, spread: float = spread
        ) -> torch.Tensor:
            x, mean = (
                torch.randn(n, heads, spec.head_dim, generator=draw, device=device)
                for n in (tokens, 1)
            )
            return x + spread * mean

        with mock.patch.object(random_caches, "_rows", rows):
            filling = random_caches.random_cache(
                LENGTHS, spec, num_kv_heads=1, sink=0, recent=0, dtype=torch.bfloat16, device=device
            )
        query = torch.randn(len(LENGTHS), group, dim, device=device).bfloat16()
        job = emulated.Job(filling, query, None, {"sm_scale": scale, "logit_cap": 0.0})
        found = []
        for tiles in (tuning.CUDA, replace(tuning.CUDA, query_bytes=False)):
            if device == "cuda":
                out = cuda.decode_attention(
                    query, filling.cache, filling.batch, sm_scale=scale, tiles=tiles
                )
            else:
                out = emulated.emulate(emulator, job, blocks=6, merged=4, stable=True, tiles=tiles)
            ours, theirs = random_caches.errors_beside_bfloat16(out, filling, query, scale)
            found += [ours] if found else [theirs, ours]
        cells = (" ".join(f"{100 * x:.2f}" for x in errors.tolist()) for errors in found)
        yield " | ".join([f"{group}, {dim}", keys, str(sharp), *cells])


if __name__ == "__main__":
    main()
