"""Stage 1 of the CUDA kernel for latents, run by an emulator where g++ is."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import shutil

import pytest
import torch
from emulation import EMULATORS, Emulator
from random_caches import Filling, random_cache
from torch import Tensor

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


def errors(
    emulator: Emulator,
    filling: Filling,
    query: Tensor,
    splits: tuple[int, int],
    each: int,
    built: tuple[int, int] = (latent_cuda.STAGES, latent_cuda.RESIDENT),
    *,
    eager: bool = False,
) -> list[tuple[float, float]]:
    """Of every request, relative, and those of plain attention in bfloat16. Tensors of the cache
    are all that may be read, splits without tokens leave their outputs, and scratch is NaN."""
    cache, batch = filling.cache, filling.batch
    requests, heads = query.shape[:2]
    library = emulator.library(latent_cuda.flags(batch, each, *built))
    partial = torch.full((requests, heads, sum(splits), 512), math.nan)
    lse = torch.full((requests, heads, sum(splits)), math.nan)
    given = latent_cuda.arguments(query, cache, batch, (partial, lse), 0.2, splits, each)
    library.forget()
    lists = (batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors)
    for x in (query, *cache.stores, *lists):
        library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(x.nbytes))
    message, columns = ctypes.create_string_buffer(201), -(-heads // each) * sum(splits)
    shared = latent_cuda.shared_bytes(batch.kv_indices.element_size(), each, built[0])
    good = library.emulate(ctypes.byref(given), columns, requests, shared, eager, heads, message)
    assert good, message.value.decode()
    assert not lse.isnan().any()
    shares = torch.softmax(lse * math.log(2), -1)[..., None]
    found = (partial.nan_to_num() * shares).sum(2)
    wanted = reference.decode_attention(query.double(), cache, batch, sm_scale=0.2)
    plain = reference.decode_attention(query, cache, batch, sm_scale=0.2)
    lost = [(x - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2)) for x in (found, plain)]
    return list(zip(*(x.tolist() for x in lost), strict=True))


@pytest.mark.parametrize(
    ("heads", "each", "splits", "windows"),
    [
        (16, 16, (2, 1), (4, 8, 2, None)),
        (20, 16, (1, 2), (4, 40, None, 60)),
        (20, 24, (2, 2), (4, 40, None, 60)),
        (5, 8, (3, 1), (0, 0, 0, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
@pytest.mark.parametrize("built", [(3, 2), (2, 3)], ids=str)
def test_outputs(
    emulator: Emulator,
    heads: int,
    each: int,
    splits: tuple[int, int],
    windows: tuple[int, int, int | None, int | None],
    scale: float,
    built: tuple[int, int],
) -> None:
    """Requests without codes, of one, of a tile, of several tiles; sinks that start late."""
    torch.manual_seed(0)
    sink, recent, sink_from, ring_start = windows
    filling = random_cache(
        [3, 13, 76, 12 + 64 * 5 + 3], *SPECS, num_kv_heads=1, sink=sink, recent=recent,
        sink_from=sink_from, ring_start=ring_start, dtype=torch.bfloat16,
    )  # fmt: skip
    for values in (filling.cache.affine, filling.cache.sink_k, filling.cache.ring_k):
        values[:] *= scale
    query = (torch.randn(4, heads, 576) / max(1.0, scale)).bfloat16()
    for error, usual in errors(emulator, filling, query, splits, each, built, eager=scale == 1):
        assert error < max(0.004, 2 * usual)


@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_logits_that_climb_from_tile_to_tile(emulator: Emulator, slots: torch.dtype) -> None:
    """Sums are scaled anew where a logit is far above the highest so far."""
    torch.manual_seed(0)
    filling = random_cache(
        [64 * 6 + 3], *SPECS, num_kv_heads=1, sink=0, recent=0, dtype=torch.bfloat16
    )
    batch = dataclasses.replace(filling.batch, kv_indices=filling.batch.kv_indices.to(slots))
    climbing = torch.linspace(0, 6, 387)[:, None].bfloat16()
    rotary = filling.cache.codes.view(torch.bfloat16)[batch.kv_indices.long(), 0, 64:]
    filling.cache.codes.view(torch.bfloat16)[batch.kv_indices.long(), 0, 64:] = rotary + climbing
    query = torch.cat([torch.randn(1, 16, 512), torch.ones(1, 16, 64)], -1).bfloat16()
    ((error, usual),) = errors(
        emulator, dataclasses.replace(filling, batch=batch), query, (1, 1), 16
    )
    assert error < max(0.004, 2 * usual)
