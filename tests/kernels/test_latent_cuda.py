"""Stage 1 of the CUDA kernel for latents, run by an emulator where g++ is."""

from __future__ import annotations

import ctypes
import math
import shutil
from pathlib import Path

import pytest
import torch
from emulation import EMULATORS, Emulator
from random_caches import random_cache

from oscar_kernels import reference
from oscar_kernels.decode_attention import latent_cuda
from oscar_kernels.spec import PLAIN, QuantSpec

SPECS = QuantSpec(512, 128, 0.96), QuantSpec(64, 64, bits=PLAIN)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("latents")
    made = Emulator(latent_cuda.SOURCE, "decode_emulator", latent_cuda.Params, folder)
    shutil.copy(EMULATORS / "latent_emulator/emulate.cpp", folder)
    return made


@pytest.mark.parametrize(
    ("heads", "splits", "windows"),
    [(16, (2, 1), (4, 8, 2, None)), (20, (1, 2), (4, 40, None, 60)), (5, (3, 1), (0, 0, 0, None))],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
@pytest.mark.parametrize(("stages", "resident"), [(4, 2), (2, 3)])
def test_outputs(
    emulator: Emulator,
    heads: int,
    splits: tuple[int, int],
    windows: tuple[int, int, int | None, int | None],
    scale: float,
    stages: int,
    resident: int,
) -> None:
    """Requests without codes, of one, of a tile, of several tiles; sinks that start late."""
    torch.manual_seed(0)
    sink, recent, sink_from, ring_start = windows
    filling = random_cache(
        [3, 13, 76, 12 + 64 * 5 + 3], *SPECS, num_kv_heads=1, sink=sink, recent=recent,
        sink_from=sink_from, ring_start=ring_start, dtype=torch.bfloat16,
    )  # fmt: skip
    cache, batch = filling.cache, filling.batch
    cache.affine[:] *= scale
    for exact in (cache.sink_k, cache.ring_k):
        exact[:] *= scale
    query = (torch.randn(4, heads, 576) / max(1.0, scale)).bfloat16()
    library = emulator.library(latent_cuda.flags(cache, batch, stages, resident))
    partial = torch.full((4, heads, sum(splits), 512), math.nan)
    lse = torch.full((4, heads, sum(splits)), math.nan)
    given = latent_cuda.arguments(query, cache, batch, (partial, lse), 0.2, splits)
    library.forget()
    lists = (batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors)
    for x in (query, *cache.stores, *lists):
        library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
    message, columns = ctypes.create_string_buffer(201), -(-heads // 16) * sum(splits)
    shared = latent_cuda.shared_bytes(stages, batch.kv_indices.element_size())
    good = library.emulate(ctypes.byref(given), columns, 4, shared, scale == 1, heads, message)
    assert good, message.value.decode()
    assert not lse.isnan().any()
    shares = torch.softmax(lse * math.log(2), -1)[..., None]
    found = (partial.nan_to_num() * shares).sum(2)
    wanted = reference.decode_attention(query.double(), cache, batch, sm_scale=0.2)
    plain = reference.decode_attention(query, cache, batch, sm_scale=0.2)
    for b in range(4):
        error, usual = ((x[b] - wanted[b]).norm() / wanted[b].norm() for x in (found, plain))
        assert error < max(0.004, 2 * usual), (b, error, usual)
