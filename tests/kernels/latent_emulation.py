"""The kernels for latents in CUDA C++ as functions of tensors on the CPU, where g++ is."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import torch
from emulation import Emulator
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import BatchView, LayerCache
from oscar_kernels.decode_attention import latent_cuda
from oscar_kernels.kv_write import latent


class EmulatedDecode:
    """Stage 1, and its splits merged in plain torch."""

    def __init__(self, folder: Path) -> None:
        self.emulator = Emulator(
            latent_cuda.SOURCE, "latent_decode.cpp", latent_cuda.Params, folder
        )

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: BatchView,
        *,
        sm_scale: float,
        splits: tuple[int, int],
        each: int,
        eager: bool = False,
    ) -> Tensor:
        """Outputs in float32. Only tensors of the cache and of the batch may be read, and scratch
        is NaN: splits without tokens leave their outputs."""
        assert not (misfits := latent_cuda.misfit(query, cache, batch)), misfits
        requests, heads = query.shape[:2]
        library = self.emulator.library(latent_cuda.flags(batch, each))
        partial = torch.full((requests, heads, sum(splits), 512), math.nan)
        lse = torch.full((requests, heads, sum(splits)), math.nan)
        given = latent_cuda.arguments(query, cache, batch, (partial, lse), sm_scale, splits, each)
        library.forget()
        lists = (batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors)
        for x in (query, *cache.stores, *lists):
            size = x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize
            library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(size))
        message, columns = ctypes.create_string_buffer(201), -(-heads // each) * sum(splits)
        shared = latent_cuda.shared_bytes(batch.kv_indices.element_size(), each)
        good = library.emulate(
            ctypes.byref(given), columns, requests, shared, eager, heads, message
        )
        assert good, message.value.decode()
        assert not lse.isnan().any()
        shares = torch.softmax(lse * math.log(2), -1)[..., None]
        return (partial.nan_to_num() * shares).sum(2)

    def decode_attention(
        self, query: Tensor, cache: LayerCache, batch: BatchView, *, sm_scale: float,
        o_partner: Tensor | None = None, out: Tensor, **_: Any,
    ) -> Tensor:  # fmt: skip
        """As `latent_cuda.decode_attention`."""
        heads = query.shape[1]
        each = latent_cuda.heads_of_a_block(heads)
        found = self.attend(query, cache, batch, sm_scale=sm_scale, splits=(2, 1), each=each)
        return out.copy_(reference.apply_o_partner(found, o_partner))


class EmulatedWrite:
    """A module with the op."""

    def __init__(self, folder: Path) -> None:
        self.emulator = Emulator(latent.SOURCE, "latent_write.cpp", latent.Params, folder)

    def write_kv_int2(
        self, *given: Any, windows: Any, query: Tensor, query_out: Tensor | None = None
    ) -> Tensor:
        """As `latent.write_kv_int2`."""
        key, value, cache, transforms, targets = given
        assert latent.misfit(key, value, cache, targets) is None
        rows = latent.transformed(key, transforms)
        parameters = latent.arguments(rows, value, cache, transforms, targets, windows)
        library = self.emulator.library(latent.flags(cache, transforms, targets))
        message = ctypes.create_string_buffer(201)
        good = library.emulate(ctypes.byref(parameters), len(key), 3, message)
        assert good, message.value.decode()
        return latent.transformed_query(query, query_out, transforms)
