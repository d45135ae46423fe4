"""The CUDA kernels for latents, run by an emulator where g++ is: stage 1 of decode attention, and
steps of a cache that they and the write of few latents make together."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cache_oracle import PlainPrefill
from latent_emulation import EmulatedDecode, EmulatedWrite
from random_caches import Filling, random_cache
from small_caches import Both, CacheShape
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.decode_attention import latent_cuda
from oscar_kernels.kv_write import latent
from oscar_kernels.spec import PLAIN, QuantSpec
from oscar_zoo.runtime.dispatch import REFERENCES

SPECS = QuantSpec(512, 128, 0.96), QuantSpec(64, 64, bits=PLAIN)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDecode:
    return EmulatedDecode(tmp_path_factory.mktemp("latents"))


def errors(
    emulated: EmulatedDecode, filling: Filling, query: Tensor, **how: Any
) -> list[tuple[float, float]]:
    """Of every request, relative, and those of plain attention in bfloat16."""
    given = query, filling.cache, filling.batch
    found = emulated.attend(*given, sm_scale=0.2, **how)
    wanted = reference.decode_attention(query.double(), *given[1:], sm_scale=0.2)
    plain = reference.decode_attention(*given, sm_scale=0.2)
    lost = [(x - wanted).norm(dim=(1, 2)) / wanted.norm(dim=(1, 2)) for x in (found, plain)]
    return list(zip(*(x.tolist() for x in lost), strict=True))


@pytest.mark.parametrize(
    ("heads", "each", "splits", "windows"),
    [(16, 16, (2, 1), (4, 8, 2, None)), (20, 16, (1, 2), (4, 40, None, 60)),
     (20, 24, (2, 2), (4, 40, None, 60)), (5, 8, (3, 1), (0, 0, 0, None))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 1e-3, 300.0])
def test_outputs(
    emulated: EmulatedDecode,
    heads: int,
    each: int,
    splits: tuple[int, int],
    windows: tuple[int, int, int | None, int | None],
    scale: float,
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
    how = {"splits": splits, "each": each, "eager": scale == 1}
    for error, usual in errors(emulated, filling, query, **how):
        assert error < max(0.004, 2 * usual)


@pytest.mark.parametrize("slots", [torch.int32, torch.int64], ids=str)
def test_logits_that_climb_from_tile_to_tile(emulated: EmulatedDecode, slots: torch.dtype) -> None:
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
    filling = dataclasses.replace(filling, batch=batch)
    ((error, usual),) = errors(emulated, filling, query, splits=(1, 1), each=16)
    assert error < max(0.004, 2 * usual)


def test_what_the_kernel_has_no_variant_for() -> None:
    """Other widths, types, scales and a cap: all of it runs in Triton, silently."""
    filling = random_cache([5], *SPECS, num_kv_heads=1, sink=2, recent=2, dtype=torch.bfloat16)
    cache, batch, change = filling.cache, filling.batch, dataclasses.replace
    query = torch.zeros(1, 4, 576, dtype=torch.bfloat16)
    assert latent_cuda.misfit(query, cache, batch) is None
    assert latent_cuda.misfit(query, cache, batch, 30.0)
    assert latent_cuda.misfit(query.half(), cache, batch)
    assert latent_cuda.misfit(torch.zeros(1, 4, 578, dtype=query.dtype)[..., 2:], cache, batch)
    assert latent_cuda.misfit(query, change(cache, affine=cache.affine.bfloat16()), batch)
    assert latent_cuda.misfit(query, change(cache, sink_k=cache.sink_k.half()), batch)
    assert latent_cuda.misfit(query, cache, change(batch, rows=batch.rows.short()))
    assert latent_cuda.misfit(query, change(cache, k_spec=QuantSpec(512, 256)), batch)


def test_steps_of_a_cache(
    emulated: EmulatedDecode, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tokens that the write leaves are those that the attention of the same step reads."""
    few = EmulatedWrite(tmp_path_factory.mktemp("writes"))
    wrote = 0

    def write(key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor | None:
        nonlocal wrote
        how = {name: options[name] for name in ("parts", "rows_out") if name in options}
        if latent.misfit(key, value, others[0], others[2], **how):
            return reference.write_kv_int2(key, value, *others, **options)
        wrote += 1
        return few.write_kv_int2(key, value, *others, **options)

    given = {"write": write, "decode": emulated.decode_attention, "rows_dtype": None}
    shape = CacheShape(
        1, 5, (QuantSpec(512, 128), SPECS[1]), sink=4, recent=8, rows=5, slots=400, longest=160,
        piece=64, dtype=torch.bfloat16,
    )  # fmt: skip
    both = Both(shape, PlainPrefill(), seed=5, kernels=dataclasses.replace(REFERENCES, **given))
    for row in (1, 3):
        both.begin(row)
    both.step({1: 130, 3: 2})
    both.adopt_codes()
    for step in range(12):  # more than a window
        want, got = both.outputs({1: 1, 3: 1}, decode=True)
        assert (got - want).norm() < 0.02 * want.norm(), step
        assert both.adopt_codes() < 0.005
    assert wrote == 12
