"""Split-KV attention with Triton against the reference: on a GPU where there is one, else
interpreted in float32."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_caches import (
    Filling,
    assert_as_good_as_torch,
    poison,
    poisoned_allocations,
    random_cache,
    random_trees,
)

from oscar_kernels import reference
from oscar_kernels.cache import BatchView, Drafts
from oscar_kernels.decode_attention import cuda, launcher
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
GROUPS = (1, 2, 4, 5, 6, 7, 8, 12, 16)


def check(
    lengths: list[int],
    k_spec: QuantSpec,
    v_spec: QuantSpec,
    *,
    group: int = 4,
    cap: float = 0.0,
    sinks: bool = False,
    dtype: torch.dtype = DTYPE,
    shared_partner: bool = True,
    **cache: int | None,
) -> None:
    """Decode of a random batch, with poisoned scratch, is as good as the reference in the same
    dtype."""
    filling = random_cache(lengths, k_spec, v_spec, dtype=DTYPE, device=DEVICE, **cache)  # type: ignore[arg-type]
    heads, head_dim = filling.cache.num_kv_heads, v_spec.head_dim
    query = torch.randn(len(lengths), heads * group, k_spec.head_dim, device=DEVICE, dtype=dtype)
    partner = torch.randn(
        1 if shared_partner else heads, head_dim, head_dim, device=DEVICE
    ) / math.sqrt(head_dim)
    options = {"sm_scale": k_spec.head_dim**-0.5, "logit_cap": cap, "o_partner": partner}
    if sinks:  # of the heads, or of every query when keys are centred
        own = torch.randn(heads * group, device=DEVICE)
        each = torch.randn(len(lengths), heads * group, device=DEVICE)
        options["sink_logits"] = each if shared_partner else own.expand(len(lengths), -1)
    assert_right(filling, query, options)


def assert_right(
    filling: Filling, query: torch.Tensor, options: dict[str, Any], *, scale: float = 1
) -> torch.Tensor:
    """With poisoned scratch, as good as the reference in the same dtype."""
    with poisoned_allocations():
        got = launcher.decode_attention(query, filling.cache, filling.batch, **options)

    def op(query: torch.Tensor) -> torch.Tensor:
        return reference.decode_attention(query, filling.cache, filling.batch, **options) / scale

    assert_as_good_as_torch(got / scale, op, [query], atol=4e-6)
    return got


@pytest.mark.parametrize(("dk", "dv", "gk", "gv"), [
    (64, 64, 64, 64), (128, 128, 128, 64), (128, 128, 32, 32), (96, 96, 96, 96),
    (192, 128, 192, 128), (256, 256, 256, 64), (512, 512, 512, 256), (512, 512, 128, 128),
    (80, 40, 80, 20),
])  # fmt: skip
def test_head_dims_and_group_sizes(dk: int, dv: int, gk: int, gv: int) -> None:
    k, v = QuantSpec(dk, gk, 0.96), QuantSpec(dv, gv, 0.92)
    check([70, 1], k, v, sink=5, recent=9, shared_partner=False)


@pytest.mark.parametrize(("dk", "dv", "gk", "gv", "bk", "bv"), [
    (64, 64, 64, 64, 4, 2), (128, 128, 128, 64, 2, 4), (128, 128, 32, 32, 4, 4),
    (96, 80, 48, 20, 4, 4), (256, 256, 64, 256, 4, 2),
])  # fmt: skip
def test_codes_of_4_bits(dk: int, dv: int, gk: int, gv: int, bk: int, bv: int) -> None:
    k, v = QuantSpec(dk, gk, 0.98, bits=bk), QuantSpec(dv, gv, 0.0, bits=bv)
    check([70, 1, 0, 33], k, v, sink=5, recent=9, shared_partner=False)


DRAFTS = 5


def check_drafts(
    lengths: list[int], *, group: int, count: int = DRAFTS, tree: bool = True, **cache: int
) -> None:
    k_spec, v_spec = QuantSpec(32, 32, 0.96), QuantSpec(16, 16)
    made = random_cache(lengths, k_spec, v_spec, drafts=count, dtype=DTYPE, device=DEVICE, **cache)
    heads, tokens = made.cache.num_kv_heads * group, len(lengths) * count
    query = torch.randn(tokens, heads, 32, device=DEVICE, dtype=DTYPE)
    options = {
        "sm_scale": 0.2,
        "o_partner": torch.randn(1, 16, 16, device=DEVICE) / 4,
        "sink_logits": torch.randn(tokens, heads, device=DEVICE),
        "drafts": Drafts(count, random_trees(len(lengths), count, DEVICE) if tree else None),
    }
    got = assert_right(made, query, options)
    empty = [i for i, length in enumerate(lengths) if not length]
    assert not got.unflatten(0, (-1, count))[empty].any()


@pytest.mark.parametrize(("group", "tree"), [(4, False), (4, True), (16, True)])
def test_drafts(group: int, tree: bool) -> None:
    check_drafts([70, 5, 0, 9], group=group, tree=tree, sink=5, recent=9)


@pytest.mark.parametrize(
    ("windows", "missing"),
    [((0, 5), (0, 60)), ((4, 5), (2, 30)), ((20, 8), (4, 0)), ((4, 64), (4, 60))],
    ids=str,
)
def test_windows_of_drafts(windows: tuple[int, int], missing: tuple[int, int]) -> None:
    (sink, recent), (sink_from, ring_start) = windows, missing
    stores = {"sink": sink, "recent": recent, "sink_from": sink_from, "ring_start": ring_start}
    check_drafts([62, 6], group=2, num_kv_heads=1, **stores)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("count", [1, 32])
def test_fewest_and_most_drafts(count: int, tree: bool) -> None:
    check_drafts([37], group=1, num_kv_heads=1, count=count, tree=tree, sink=3, recent=32)


@pytest.mark.parametrize(("tokens", "drafts", "words"), [
    (2, Drafts(3), "2 query tokens for 1 requests with 3 each"),
    (3, None, "3 query tokens for 1 requests with 1 each"),
    (4, Drafts(4), "4 drafts: 1 to 32 are supported, in a window of 8 and a ring of 10 rows"),
    (3, Drafts(3, torch.ones(3).long()), r"the mask of drafts is \(3,\) torch.int64"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_drafts_that_do_not_fit_are_refused(tokens: int, drafts: Drafts | None, words: str) -> None:
    spec = QuantSpec(32, 32)
    filling = random_cache([20], spec, drafts=3, sink=4, recent=8, dtype=DTYPE, device=DEVICE)
    query = torch.zeros(tokens, 2, 32, device=DEVICE, dtype=DTYPE)
    with pytest.raises(ValueError, match=words):
        launcher.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0, drafts=drafts)


def test_a_ring_that_is_larger_than_its_window() -> None:
    check([70, 12, 0, 5], QuantSpec(32, 32), QuantSpec(16, 16), sink=4, recent=8, ring_rows=13)


@pytest.mark.parametrize("group", GROUPS)
def test_gqa_groups(group: int) -> None:
    check([67], QuantSpec(32, 32), QuantSpec(16, 16), group=group, sink=4, recent=8)


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_gqa_groups_batches_and_head_dims(group: int, batch: int, head_dim: int) -> None:
    spec = QuantSpec(head_dim, head_dim, 0.96)
    check([400 + 37 * i for i in range(batch)], spec, spec, group=group, num_kv_heads=4)


@settings(
    max_examples=200 if ON_GPU else 15, deadline=None, derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    dk, dv = (draw(st.sampled_from([16, 24, 64])) for _ in range(2))
    k_groups, v_groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    k_ratio, v_ratio = draw(st.sampled_from([0.0, 0.96])), draw(st.sampled_from([0.0, 0.92]))
    check(
        draw(st.lists(st.integers(0, 200), min_size=1, max_size=3)),
        QuantSpec(dk, dk // k_groups, k_ratio, "bfloat16"),
        QuantSpec(dv, dv // v_groups, v_ratio, "bfloat16"),
        group=draw(st.integers(1, 16)),
        num_kv_heads=draw(st.integers(1, 3)),
        cap=draw(st.sampled_from([0.0, 2.0])),
        sinks=draw(st.booleans()),
        shared_partner=draw(st.booleans()),
        sink=draw(st.sampled_from([0, 1, 16, 64])),
        recent=draw(st.sampled_from([0, 1, 20, 64])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_small_and_large_values_keep_their_precision(scale: float) -> None:
    """The probabilities meet the codes in float16: neither tiny nor huge V scales may cost bits."""
    spec = QuantSpec(64, 64)
    filling = random_cache([300], spec, sink=0, recent=0, dtype=DTYPE, device=DEVICE)
    filling.cache.affine[..., 2:] *= scale
    query = torch.randn(1, 8, 64, device=DEVICE, dtype=DTYPE)
    assert_right(filling, query, {"sm_scale": 0.5}, scale=scale)


def test_padding_of_a_cuda_graph_changes_nothing() -> None:
    spec = QuantSpec(32, 32)
    filling = random_cache([50, 3], spec, sink=4, recent=8, dtype=DTYPE, device=DEVICE)
    cache, batch = filling.cache, filling.batch
    query = torch.randn(5, 4, 32, device=DEVICE, dtype=DTYPE)
    ends = batch.kv_indptr[-1] + torch.arange(1, 4, device=DEVICE, dtype=batch.kv_indptr.dtype)
    padded = BatchView(
        torch.cat([batch.kv_indptr, ends]),
        torch.cat([batch.kv_indices, batch.kv_indices.new_zeros(3)]),
        torch.cat([batch.rows, batch.rows.new_zeros(3)]),
        batch.windows,
    )
    before = [x.clone() for x in cache.stores]
    got = launcher.decode_attention(query, cache, padded, sm_scale=0.2)
    want = reference.decode_attention(query[:2].double(), cache, batch, sm_scale=0.2)
    assert (got[:2] - want).abs().max() < (0.05 if ON_GPU else 1e-5)
    for old, new in zip(before, cache.stores, strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())


def test_a_poisoned_workspace_serves_every_batch_it_was_made_for() -> None:
    spec = QuantSpec(16, 16)
    filling = random_cache([40, 1, 0], spec, sink=4, recent=8, dtype=DTYPE, device=DEVICE)
    workspace = Workspace.allocate(launcher.decode_workspace_numel(filling.cache, 4, 3), DEVICE)
    for batch in (1, 2, 3):
        poison(workspace.scratch)
        rows = dataclasses.replace(filling.batch, rows=filling.batch.rows[:batch])
        query = torch.randn(batch, 4, 16, device=DEVICE, dtype=DTYPE)
        out = poison(torch.empty(batch, 4, 16, device=DEVICE, dtype=DTYPE))
        got = launcher.decode_attention(
            query, filling.cache, rows, sm_scale=0.2, workspace=workspace, out=out
        )
        want = reference.decode_attention(query.double(), filling.cache, rows, sm_scale=0.2)
        assert got is out
        assert (got - want).abs().max() < (0.05 if ON_GPU else 1e-5)
    with pytest.raises(ValueError, match="the workspace holds 5 elements"):
        small = Workspace.allocate(5, DEVICE)
        launcher.decode_attention(query, filling.cache, rows, sm_scale=0.2, workspace=small)


def test_query_and_out_may_be_slices() -> None:
    spec = QuantSpec(16, 16)
    made = random_cache([30, 9], spec, sink=4, recent=8, dtype=DTYPE, device=DEVICE)
    wide, target = (torch.randn(2, 8, 16, device=DEVICE, dtype=DTYPE) for _ in range(2))
    kept = target.clone()
    got = launcher.decode_attention(
        wide[:, 2:6], made.cache, made.batch, sm_scale=0.2, out=target[:, 1:5]
    )
    want = reference.decode_attention(wide[:, 2:6].double(), made.cache, made.batch, sm_scale=0.2)
    assert (got - want).abs().max() < (0.05 if ON_GPU else 1e-5)
    assert torch.equal(target[:, 5:], kept[:, 5:]) and torch.equal(target[:, :1], kept[:, :1])


@pytest.mark.parametrize(
    ("heads", "spec", "words"),
    [(34, QuantSpec(16, 16), "17 query heads"), (3, QuantSpec(16, 16), "a multiple of 2"),
     (2, QuantSpec(12, 12), "head_dim 12"), (2, QuantSpec(1024, 1024), "head_dim 1024")],
)  # fmt: skip
def test_what_is_not_supported_is_refused(heads: int, spec: QuantSpec, words: str) -> None:
    filling = random_cache([3], spec, sink=2, recent=2, dtype=DTYPE, device=DEVICE)
    query = torch.randn(1, heads, spec.head_dim, device=DEVICE, dtype=DTYPE)
    with pytest.raises(ValueError, match=words):
        launcher.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_query_dtypes(dtype: torch.dtype) -> None:
    check([500, 3000], QuantSpec(128, 128, 0.96), QuantSpec(128, 128, 0.92), dtype=dtype)


@pytest.mark.gpu
def test_a_million_tokens() -> None:
    check([1_000_000], QuantSpec(64, 64), QuantSpec(64, 64), num_kv_heads=1)


@pytest.mark.gpu
@pytest.mark.parametrize("module", [launcher, cuda], ids=["triton", "cuda"])
def test_offsets_beyond_32_bits(module: Any) -> None:
    spec = QuantSpec(128, 128)
    small = random_cache([1000], spec, num_kv_heads=8, dtype=DTYPE, device=DEVICE)
    slots = 10_000_000  # 2.56 billion 16-bit lanes
    codes = torch.zeros(slots, *small.cache.codes.shape[1:], dtype=torch.uint8, device=DEVICE)
    affine = torch.zeros(slots, *small.cache.affine.shape[1:], dtype=torch.float16, device=DEVICE)
    far = slots - small.cache.codes.shape[0]
    codes[far:], affine[far:] = small.cache.codes, small.cache.affine
    cache = dataclasses.replace(small.cache, codes=codes, affine=affine)
    batch = dataclasses.replace(small.batch, kv_indices=small.batch.kv_indices + far)
    query = torch.randn(1, 32, 128, device=DEVICE, dtype=DTYPE)
    want = module.decode_attention(query, small.cache, small.batch, sm_scale=0.1)
    assert torch.equal(module.decode_attention(query, cache, batch, sm_scale=0.1), want)


@pytest.mark.gpu
def test_a_cuda_graph_follows_new_lengths() -> None:
    spec = QuantSpec(128, 128, 0.96)
    made = random_cache([5000, 700], spec, num_kv_heads=8, sink_from=0, dtype=DTYPE, device=DEVICE)
    cache, batch = made.cache, made.batch
    query = torch.randn(2, 32, 128, device=DEVICE, dtype=DTYPE)
    workspace = Workspace(torch.empty(launcher.decode_workspace_numel(cache, 32, 2), device=DEVICE))
    out = torch.empty_like(query)

    def step() -> None:
        launcher.decode_attention(query, cache, batch, sm_scale=0.1, workspace=workspace, out=out)

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
        want = reference.decode_attention(query.double(), cache, batch, sm_scale=0.1)
        assert (out - want).abs().max() < 0.02
