"""Print which kernels Triton would compile for an NVIDIA GPU: while a worker warms up, then for
batches that it meets.

Nothing is compiled or run: every launch only gets its key, by Triton's own rules.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from cache_oracle import general_set
from plain_prefill import PlainPrefill
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from oscar_kernels import _triton
from oscar_kernels.decode_attention import launcher
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime.batch import extend_batch
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import CacheConfig, SlotTable
from oscar_zoo.runtime.executor import Executor
from oscar_zoo.runtime.slot_store import SlotShape, SlotStore
from oscar_zoo.runtime.softmax import Softmax
from oscar_zoo.runtime.transforms import TransformTable
from oscar_zoo.runtime.warm_up import warm_up
from oscar_zoo.runtime.window_store import WindowShape, WindowStore

HEADS, GROUP, DIM, ROWS, PIECE = 2, 4, 32, 40, 64
keys: set[str] = set()


def launched(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In the place of `JITFunction.run`."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    binder = jit.create_function_from_signature(self.signature, self.params, backend)
    _, specialization, found = binder(*args, **options, debug=False)
    keys.add(f"{self.__name__} {specialization} {found}")


def main() -> None:
    """Warm up, then extends of random shapes."""
    jit.JITFunction.run = launched
    _triton.missing = lambda device: None
    _triton.dependent_launch = lambda device: True
    launcher._multiprocessors = lambda device: 132
    spec = QuantSpec(DIM, DIM, 0.9, "float16")
    sets = [general_set(role, 1, HEADS, DIM, seed=1) for role in ("k", "v")]
    windows = WindowStore(WindowShape(1, ROWS, HEADS, DIM, DIM, 4, 8, torch.bfloat16), "cpu")
    slots = SlotStore(SlotShape.alike(1, 100, HEADS, spec, spec), "cpu")
    config = CacheConfig((0,), HEADS * GROUP, Softmax(0.1), ROWS, 2000, PIECE, "cpu")
    executor = Executor(
        [slots.layer(0, windows)],
        windows.state,
        TransformTable.build(*sets, range(1), kv_heads=range(HEADS), device="cpu").layers,
        KERNELS,
        PlainPrefill(),
        num_q_heads=config.num_q_heads,
        max_batch=config.max_batch,
        scratch_tokens=config.piece_tokens,
    )
    source = SlotTable(torch.zeros(ROWS, 2000, dtype=torch.int32), KERNELS.pack)
    warm_up(executor, source, config)
    print("\t".join(sorted(keys)))
    keys.clear()
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
        batch = extend_batch(
            source, rows, written, prefixes, lengths, executor.windows, piece_tokens=PIECE
        )
        executor.begin(batch)
        fused = torch.zeros(total, HEADS * (GROUP + 2), DIM, dtype=torch.bfloat16)
        q, k, v = fused.split([HEADS * GROUP, HEADS, HEADS], dim=1)
        executor.forward(0, q, k, v, batch, softmax=Softmax(0.1))
    print("\t".join(sorted(keys)))


if __name__ == "__main__":
    main()
