"""The candidate CUDA kernel for latents in contrib/mla, run by an emulator where g++ is."""

from __future__ import annotations

import ctypes
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from emulation import EMULATORS, Emulator
from random_caches import Filling, random_cache

from oscar_kernels import reference
from oscar_kernels.cache import BatchView, WindowState
from oscar_kernels.spec import PLAIN, QuantSpec

sys.path.append(str(Path(__file__).parents[2] / "contrib/mla"))

import decode_cuda

SPECS = QuantSpec(512, 128, 0.96), QuantSpec(64, 64, bits=PLAIN)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("latents")
    made = Emulator(decode_cuda.SOURCE, "decode_emulator", decode_cuda.Params, folder)
    shutil.copy(EMULATORS / "latent_emulator/emulate.cpp", folder)
    return made


def of_codes(filling: Filling) -> Filling:
    """The same without what windows hold: a batch of the other tokens of each request."""
    cache, batch, ends, slots = filling.cache, filling.batch, [0], []
    for row, first, last in zip(
        batch.rows.tolist(), batch.kv_indptr.tolist(), batch.kv_indptr.tolist()[1:], strict=False
    ):
        n, state = last - first, batch.windows
        sink = min(n, cache.sink)
        ring = min(max(n - cache.recent, int(state.ring_start[row])), n)
        kept = [*range(min(int(state.sink_from[row]), sink, ring)), *range(sink, max(ring, sink))]
        slots += [int(batch.kv_indices[first + i]) for i in kept]
        ends.append(len(slots))
    none = {"sink_k": cache.sink_k[:, :0], "sink_v": cache.sink_v[:, :0], "recent": 0}
    listed = batch.kv_indptr.new_tensor(ends), batch.kv_indices.new_tensor(slots)
    state = WindowState(*(torch.full_like(x, 1 << 20) for x in batch.windows.tensors))
    view = BatchView(*listed, batch.rows, state)
    return replace(filling, cache=replace(cache, **none), batch=view)


@pytest.mark.parametrize(("heads", "splits", "sinks"), [(16, 2, 2), (20, 1, None), (5, 3, 0)])
@pytest.mark.parametrize(("stages", "resident"), [(3, 2), (2, 3)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_sums_of_codes(
    emulator: Emulator,
    heads: int,
    splits: int,
    sinks: int | None,
    scale: float,
    stages: int,
    resident: int,
) -> None:
    """Requests without codes, of one, of a tile, of several tiles; sinks that start late."""
    torch.manual_seed(0)
    filling = random_cache(
        [3, 13, 76, 12 + 64 * 5 + 3], *SPECS,
        num_kv_heads=1, sink=4, recent=8, sink_from=sinks, dtype=torch.bfloat16,
    )  # fmt: skip
    cache, batch = filling.cache, filling.batch
    cache.affine[:] *= scale
    query = (torch.randn(4, heads, 576) / max(1.0, scale)).bfloat16()
    library = emulator.library(decode_cuda.flags(cache, batch, stages, resident))
    partial = torch.full((4, heads, 1 + splits, 512), math.nan)
    lse = torch.full((4, heads, 1 + splits), math.nan)
    given = decode_cuda.arguments(query, cache, batch, (partial, lse), 0.2, (splits, 1))
    library.forget()
    lists = (batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors)
    for x in (query, *cache.stores, *lists):
        library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
    message, columns = ctypes.create_string_buffer(201), -(-heads // 16) * splits
    shared = decode_cuda.shared_bytes(stages, resident)
    good = library.emulate(ctypes.byref(given), columns, 4, shared, scale == 1, heads, message)
    assert good, message.value.decode()
    plain = of_codes(filling)
    counts = plain.batch.kv_indptr.diff().tolist()
    assert not lse[:, :, 1:].isnan().any() and (lse[counts.index(0), :, 1:] == -math.inf).all()
    shares = torch.softmax(lse[:, :, 1:] * math.log(2), -1)[..., None]
    found = (partial[:, :, 1:].nan_to_num() * shares.nan_to_num()).sum(2)
    wanted = reference.decode_attention(query.double(), plain.cache, plain.batch, sm_scale=0.2)
    exact = reference.decode_attention(query, plain.cache, plain.batch, sm_scale=0.2)
    for b in range(4):
        if counts[b]:
            error = (found[b] - wanted[b]).norm() / wanted[b].norm()
            assert error < max(0.004, 2 * float((exact[b] - wanted[b]).norm() / wanted[b].norm()))
