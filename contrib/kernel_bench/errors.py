"""Errors of decode attention against float64 beside those of PyTorch's attention in bfloat16 over
the same rows: of the CUDA kernel on a GPU, else of its source in the emulator of the tests.

    errors.py 8x128 16x64     query heads of one KV head, and head_dim; by default nine of them

In percent, over the heads of all requests: the median and the maximum of the norm of the error,
then those of its largest element, relative to the output's. Keys and values are plain where
channels have means, else centred; logits have a standard deviation.
"""

from __future__ import annotations

import math
import sys
import tempfile
from itertools import product
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [f"{heads}x{dim}" for heads, dim in product((4, 8, 16), (64, 128, 256))]
LENGTHS = (900, 500)


def main(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "kernels"))
    sys.path.append(str(ROOT / "tests/kernels"))
    import random_caches
    import test_cuda_decode_emulated as emulated
    import torch
    from emulation import Emulator

    from oscar_kernels.decode_attention import cuda
    from oscar_kernels.spec import QuantSpec

    device = "cuda" if torch.cuda.is_available() else "cpu"
    emulator = Emulator(cuda.SOURCE, "decode.cpp", cuda.Params, folder)
    print("| query heads x head_dim | rows | logits | bfloat16 | kernel | query in float16 |")
    print("|---|---|---:|---:|---:|---:|")
    for shape, plain, sharp in product(sys.argv[1:] or SHAPES, (True, False), (0.3, 1, 3)):
        heads, dim = (int(x) for x in shape.split("x"))
        torch.manual_seed(0)

        def rows(tokens: int, _: int, spec: QuantSpec, draw: object, plain: bool = plain) -> object:
            means = torch.randn(1, 1, spec.head_dim, device=device)
            return torch.randn(tokens, 1, spec.head_dim, device=device) + plain * means

        with mock.patch.object(random_caches, "_rows", rows):
            stores = {"num_kv_heads": 1, "sink": 0, "recent": 0, "dtype": torch.bfloat16}
            spec = QuantSpec(dim, dim, 0.96)
            filling = random_caches.random_cache(LENGTHS, spec, device=device, **stores)
        query = torch.randn(len(LENGTHS), heads, dim, device=device).bfloat16()
        options, found = {"sm_scale": sharp / math.sqrt(dim), "logit_cap": 0.0}, []
        for given in (query, query.half()):
            if device == "cuda":
                out = cuda.decode_attention(given, filling.cache, filling.batch, **options)
            else:
                job = emulated.Job(filling, given, None, options)
                out = emulated.emulate(emulator, job, blocks=6, merged=4, stable=True)
            of = out, filling, query, options["sm_scale"]
            ours, theirs = random_caches.errors_beside_bfloat16(*of)
            found += [ours] if found else [theirs, ours]
        cells = (" ".join(f"{100 * x:.2f}" for x in errors.tolist()) for errors in found)
        name = "plain" if plain else "centred"
        print("|", " | ".join([shape, name, str(sharp), *cells]), "|", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
