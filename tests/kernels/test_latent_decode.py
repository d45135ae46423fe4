"""Decode attention over latents (MLA) with Triton against the reference: on a GPU where there is
one, else interpreted in float32."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from random_caches import (
    Filling,
    assert_as_good_as_torch,
    poison,
    poisoned_allocations,
    random_cache,
)
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import BatchView, Drafts
from oscar_kernels.decode_attention import dispatch, latent, latent_cuda
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import PLAIN, QuantSpec

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SMALL = QuantSpec(128, 128), QuantSpec(32, 32, bits=PLAIN)
LARGE = QuantSpec(512, 128), QuantSpec(64, 64, bits=PLAIN)


def rows(lengths: list[int], specs: tuple[QuantSpec, QuantSpec], **cache: int | None) -> Filling:
    return random_cache(lengths, *specs, num_kv_heads=1, dtype=DTYPE, device=DEVICE, **cache)  # type: ignore[arg-type]


def check(
    filling: Filling, heads: int, *, cap: float = 0.0, partner: bool = True, scale: float = 1
) -> None:
    """With poisoned scratch, as good as the reference in the same dtype."""
    cache, batch = filling.cache, filling.batch
    query = torch.randn(len(batch.rows), heads, cache.query_dim, device=DEVICE, dtype=DTYPE)
    matrix = torch.randn(1, cache.out_dim, cache.out_dim, device=DEVICE) / cache.out_dim**0.5
    options = {
        "sm_scale": cache.query_dim**-0.5,
        "logit_cap": cap,
        "o_partner": matrix if partner else None,
    }
    with poisoned_allocations():
        got = dispatch.decode_attention(query, cache, batch, **options)
    assert_as_good_as_torch(
        got / scale,
        lambda x: reference.decode_attention(x, cache, batch, **options) / scale,
        [query],
        atol=4e-6,
    )


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("heads", [1, 16, 20])
def test_groups_and_query_heads(group: int, heads: int) -> None:
    specs = QuantSpec(128, group, 0.96), SMALL[1]
    check(rows([70, 0, 1, 33], specs, sink=5, recent=9), heads)


@pytest.mark.parametrize("heads", [16, 33])
def test_the_rows_of_deepseek(heads: int) -> None:
    check(rows([150], LARGE, sink=16, recent=32), heads)


@pytest.mark.parametrize(
    ("windows", "missing"),
    [((0, 0), (0, 0)), ((0, 5), (0, 60)), ((4, 5), (2, 30)), ((20, 8), (4, 0)), ((80, 80), (0, 0))],
    ids=str,
)
def test_windows(windows: tuple[int, int], missing: tuple[int, int]) -> None:
    (sink, recent), (sink_from, ring_start) = windows, missing
    stores = {"sink": sink, "recent": recent, "sink_from": sink_from, "ring_start": ring_start}
    check(rows([62, 6], SMALL, **stores), 4, partner=False)


def test_a_capped_logit_and_a_ring_larger_than_its_window() -> None:
    check(rows([70, 12], SMALL, sink=4, recent=8, ring_rows=13), 5, cap=2.0)


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_small_and_large_values_keep_their_precision(scale: float) -> None:
    """Weights meet codes in float16: neither tiny nor huge scales may cost bits."""
    filling = rows([300], SMALL, sink=0, recent=0)
    filling.cache.affine[:] *= scale
    filling.cache.codes.view(torch.bfloat16)[..., 16:] *= scale
    check(filling, 8, scale=scale)


def test_logits_that_climb_from_tile_to_tile() -> None:
    """Sums are scaled anew where a logit is far above the highest so far."""
    filling = rows([400], (QuantSpec(128, 128), QuantSpec(16, 16, bits=PLAIN)), sink=0, recent=0)
    slots = filling.batch.kv_indices.long()
    climbing = torch.linspace(0, 90, 400, device=DEVICE)[:, None, None].to(torch.bfloat16)
    filling.cache.codes.view(torch.bfloat16)[slots, :, 16:] = climbing.expand(-1, 1, 16)
    cache, batch = filling.cache, filling.batch
    query = torch.ones(1, 4, cache.query_dim, device=DEVICE, dtype=DTYPE)
    got = latent.decode_attention(query, cache, batch, sm_scale=0.1)
    want = reference.decode_attention(query.double(), cache, batch, sm_scale=0.1)
    assert (got - want).abs().max() < (0.02 if ON_GPU else 1e-5)


def test_a_poisoned_workspace_serves_every_batch_it_was_made_for() -> None:
    filling = rows([40, 1, 0], SMALL, sink=4, recent=8)
    cache = filling.cache
    workspace = Workspace.allocate(dispatch.decode_workspace_numel(cache, 4, 3), DEVICE)
    for batch in (1, 2, 3):
        poison(workspace.scratch)
        view = dataclasses.replace(filling.batch, rows=filling.batch.rows[:batch])
        query = torch.randn(batch, 4, cache.query_dim, device=DEVICE, dtype=DTYPE)
        out = poison(torch.empty(batch, 4, cache.out_dim, device=DEVICE, dtype=DTYPE))
        got = latent.decode_attention(
            query, cache, view, sm_scale=0.2, workspace=workspace, out=out
        )
        want = reference.decode_attention(query.double(), cache, view, sm_scale=0.2)
        assert got is out and (got - want).abs().max() < (0.05 if ON_GPU else 1e-5)


def test_padding_of_a_cuda_graph_changes_nothing() -> None:
    filling = rows([50, 3], SMALL, sink=4, recent=8)
    cache, batch = filling.cache, filling.batch
    query = torch.randn(4, 4, cache.query_dim, device=DEVICE, dtype=DTYPE)
    ends = batch.kv_indptr[-1] + torch.arange(1, 3, device=DEVICE, dtype=batch.kv_indptr.dtype)
    padded = BatchView(
        torch.cat([batch.kv_indptr, ends]),
        torch.cat([batch.kv_indices, batch.kv_indices.new_zeros(2)]),
        torch.cat([batch.rows, batch.rows.new_zeros(2)]),
        batch.windows,
    )
    got = latent.decode_attention(query, cache, padded, sm_scale=0.2)
    want = reference.decode_attention(query[:2].double(), cache, batch, sm_scale=0.2)
    assert (got[:2] - want).abs().max() < (0.05 if ON_GPU else 1e-5)


@pytest.mark.parametrize(
    ("heads", "specs", "words"),
    [(129, SMALL, "129 query heads"), (4, (QuantSpec(64, 64), SMALL[1]), "64 and 32 channels"),
     (4, (QuantSpec(128, 128, bits=4), SMALL[1]), "codes of 4 bits"),
     (4, (QuantSpec(384, 96), SMALL[1]), "384 and 32 channels")],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    heads: int, specs: tuple[QuantSpec, QuantSpec], words: str
) -> None:
    filling = rows([3], specs, sink=2, recent=2)
    query = torch.randn(1, heads, filling.cache.query_dim, device=DEVICE, dtype=DTYPE)
    with pytest.raises(ValueError, match=words):
        latent.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0)


def test_drafts_are_refused() -> None:
    filling = rows([20], SMALL, drafts=3, sink=2, recent=4)
    query = torch.randn(3, 4, filling.cache.query_dim, device=DEVICE, dtype=DTYPE)
    with pytest.raises(ValueError, match="not built for latents"):
        latent.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0, drafts=Drafts(3))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize("batch", [1, 5, 16])
def test_long_contexts(heads: int, batch: int) -> None:
    filling = rows([3000 + 371 * i for i in range(batch)], LARGE)
    query = torch.empty(batch, heads, filling.cache.query_dim, device=DEVICE, dtype=DTYPE)
    assert latent_cuda.unsupported(query, filling.cache, filling.batch) is None
    check(filling, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", [dispatch.decode_attention, latent.decode_attention])
def test_a_cuda_graph_follows_new_lengths(attention: Callable[..., Tensor]) -> None:
    filling = rows([5000, 700], LARGE, sink_from=0)
    cache, batch = filling.cache, filling.batch
    query = torch.randn(2, 16, cache.query_dim, device=DEVICE, dtype=DTYPE)
    workspace = Workspace.allocate(dispatch.decode_workspace_numel(cache, 16, 2), DEVICE)
    out = torch.empty(2, 16, cache.out_dim, device=DEVICE, dtype=DTYPE)

    def step() -> None:
        attention(query, cache, batch, sm_scale=0.05, workspace=workspace, out=out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.windows.ring_start.fill_(10_000)
    for lengths in ([5000, 700], [64, 1], [4000, 1700]):
        batch.kv_indptr.copy_(torch.tensor([0, *lengths]).cumsum(0))
        poison(workspace.scratch)
        poison(out)
        graph.replay()
        want = reference.decode_attention(query.double(), cache, batch, sm_scale=0.05)
        assert (out - want).abs().max() < 0.02
