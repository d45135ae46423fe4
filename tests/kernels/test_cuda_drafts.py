"""Verification of drafts by the CUDA decode kernel: compilation and refusals anywhere, numbers on a
GPU against float64."""

from __future__ import annotations

import dataclasses
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from random_caches import Filling, assert_as_good_as_torch, poison, random_cache

from oscar_kernels import nvrtc, reference
from oscar_kernels.cache import Drafts
from oscar_kernels.decode_attention import cuda, dispatch
from oscar_kernels.decode_attention import variant as variants
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec

LENGTHS = (1000, 0, 4, 17, 61, 66, 300, 3001)
"""Committed tokens of the requests."""


def variant(group: int, drafts: int, heads: int = 8) -> variants.AttentionVariant:
    spec = QuantSpec(128, 128)
    return variants.AttentionVariant(
        spec, spec, group, heads, "int", "int", "long long", 0, False, whole=True, drafts=drafts
    )


def stack_bytes(code: bytes, folder: Path) -> list[int]:
    """Bytes that the functions of a module keep in memory because registers did not suffice."""
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not program.exists():
        pytest.skip("no cuobjdump beside Triton")
    (folder / "code.cubin").write_bytes(code)
    done = subprocess.run(
        [program, "-res-usage", folder / "code.cubin"], capture_output=True, text=True, check=True
    )
    return [int(x) for x in re.findall(r"STACK:(\d+)", done.stdout)]


@pytest.mark.parametrize(("group", "drafts"), [(4, 4), (1, 7), (16, 2), (8, 8)])
def test_variants_for_drafts_compile_and_spill_no_registers(
    group: int, drafts: int, own_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    monkeypatch.setenv("OSCAR_KERNELS_CACHE", str(own_state / "kernels"))
    code = nvrtc.Build.of(cuda.SOURCE, variant(group, drafts).flags, "sm_90").code()
    assert stack_bytes(code, own_state) == [0] * (1 + len(cuda.MERGED_ROWS))


@pytest.mark.parametrize(
    ("group", "drafts", "warps"),
    [(4, 0, 1), (4, 2, 1), (4, 4, 1), (4, 8, 2), (1, 32, 2), (3, 11, 4), (8, 8, 4)],
)
def test_a_warp_has_up_to_sixteen_query_rows(group: int, drafts: int, warps: int) -> None:
    flags = variant(group, drafts).flags
    assert flags["VH"] == warps
    assert flags["GROUP"] == group * max(1, drafts) <= 16 * warps
    assert int(flags["HB"]) * warps * int(flags["TW"]) == variants.WARPS


def test_refusals_name_what_was_seen() -> None:
    def reason(
        count: int,
        tokens: int | None = None,
        heads: int = 4,
        head_dim: int = 128,
        ring_rows: int = 71,
        mask: torch.Tensor | None = None,
    ) -> str | None:
        filling = random_cache(
            [50],
            QuantSpec(head_dim, head_dim),
            drafts=32,
            recent=40,
            ring_rows=ring_rows,
            dtype=torch.bfloat16,
        )
        query = torch.zeros(tokens or count, heads, head_dim, dtype=torch.bfloat16)
        return variants.misfit(query, filling.cache, filling.batch, Drafts(count, mask))

    assert reason(16) is None
    assert reason(16, mask=torch.zeros(16, dtype=torch.int32)) is None
    assert "66 query rows of a KV head, 22 drafts" in (reason(22, heads=6) or "")
    assert reason(8, heads=16, head_dim=256) is None
    assert "3 drafts and 4 queries" in (reason(3, tokens=4) or "")
    assert "33 drafts" in (reason(33, heads=2) or "")
    assert "a ring of 50" in (reason(16, ring_rows=50) or "")
    assert "int64" in (reason(2, mask=torch.zeros(2, dtype=torch.int64)) or "")


def trees(requests: int, count: int) -> torch.Tensor:
    """Masks of trees in which every node hangs below any earlier one."""
    draw, masks = random.Random(requests), []
    for _ in range(requests):
        seen = [1]
        for node in range(1, count):
            seen.append(draw.choice(seen) | 1 << node)
        masks += [bits - (1 << 32) if bits >> 31 else bits for bits in seen]
    return torch.tensor(masks, dtype=torch.int32, device="cuda")


def sizes(count: int, committed: tuple[int, ...] = LENGTHS) -> list[int]:
    """Cached tokens with the drafts; the last request is padding without any."""
    return [*(length + count for length in committed), 0]


def case(
    count: int,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    tree: bool = True,
    group: int = 4,
    heads: int = 2,
    head_dim: int = 128,
    groups: int = 1,
    bits: tuple[int, int] = (2, 2),
    dtype: torch.dtype = torch.bfloat16,
    **cache: int,
) -> tuple[Filling, torch.Tensor, Drafts]:
    """A cache whose drafts have codes of poison, a query, and the drafts."""
    k_spec, v_spec = (QuantSpec(head_dim, head_dim // groups, 0.96, bits=x) for x in bits)
    found = sizes(count, lengths)
    filling = random_cache(
        found,
        k_spec,
        v_spec,
        num_kv_heads=heads,
        drafts=count,
        dtype=torch.bfloat16,
        device="cuda",
        **cache,
    )
    ends = filling.batch.kv_indptr.tolist()[1:]
    for length, end in zip(found, ends, strict=True):
        slots = filling.batch.kv_indices[end - min(count, length) : end].long()
        filling.cache.affine[slots] = torch.nan
    query = torch.randn(len(found) * count, heads * group, head_dim, device="cuda").to(dtype)
    return filling, query, Drafts(count, trees(len(found), count) if tree else None)


def assert_right(
    filling: Filling,
    query: torch.Tensor,
    drafts: Drafts,
    *,
    atol: float = 1e-6,
    **options: object,
) -> None:
    """Against plain torch in float64, with poisoned scratch and output; twice, because nothing may
    stay in scratch."""
    cache, batch = filling.cache, filling.batch
    numel = cuda.decode_workspace_numel(cache, query.shape[1], len(batch.rows), drafts.count)
    workspace = Workspace.allocate(numel, "cuda")
    poison(workspace.scratch)
    out = poison(query.new_empty(*query.shape[:2], cache.v_spec.head_dim))
    options = {"sm_scale": 0.1, "drafts": drafts, **options}
    for stable in (False, True):
        cuda.decode_attention(
            query, cache, batch, workspace=workspace, out=out, prefix_stable=stable, **options
        )
        assert_as_good_as_torch(
            out,
            lambda q: reference.decode_attention(q, cache, batch, **options),
            [query],
            atol=atol,
        )
    assert not out[-drafts.count :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_chains_and_trees(count: int, tree: bool) -> None:
    assert_right(*case(count, tree=tree))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("count", "group"), [(4, 4), (2, 3), (8, 4)])
def test_kv_heads(count: int, group: int, heads: int) -> None:
    assert_right(*case(count, heads=heads, group=group))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_query_heads_of_a_kv_head(group: int) -> None:
    """Two drafts, and as many as two and eight warps have rows for."""
    for count in (2, 32 // group, min(32, 64 // group)):
        assert_right(*case(count, group=group))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_rows_of_256_channels(count: int, heads: int) -> None:
    """Two to eight warps share the query rows of a KV head."""
    assert_right(*case(count, group=8, heads=heads, head_dim=256))


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(0, 8), (64, 8), (16, 33), (64, 256), (0, 256)], ids=str)
@pytest.mark.parametrize("missing", [(0, 0), (16, 0), (16, 10_000), (8, 20)], ids=str)
def test_windows(windows: tuple[int, int], missing: tuple[int, int]) -> None:
    """Requests shorter than sink or window, and every place of the edge between the tiers; what no
    draft may read is poison."""
    (sink, recent), (sink_from, ring_start) = windows, missing
    lengths = (0, 1, 15, 16, 17, 31, 32, 33, 39, 40, 47, 48, 63, 64, 65, 72, 80, 96, 300)
    for count in (4, 8):
        shape = {"sink": sink, "recent": recent, "ring_rows": recent + count + 5}
        starts = {"sink_from": min(sink_from, sink), "ring_start": ring_start}
        assert_right(*case(count, lengths=lengths, **shape, **starts))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [(4, 2), (2, 4), (4, 4)], ids=str)
@pytest.mark.parametrize(("head_dim", "groups"), [(64, 2), (128, 1), (128, 4)])
def test_codes_of_four_bits(bits: tuple[int, int], head_dim: int, groups: int) -> None:
    assert_right(*case(4, bits=bits, head_dim=head_dim, groups=groups))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_dtypes(dtype: torch.dtype, head_dim: int) -> None:
    """Weights enter the tensor cores in float16, so a float32 query is not better than one in
    float16."""
    loose = 2e-3 if dtype == torch.float32 else 1e-6
    assert_right(*case(3, dtype=dtype, head_dim=head_dim, recent=40), atol=loose)


@pytest.mark.gpu
def test_logit_cap_and_value_partner() -> None:
    partner = torch.linalg.qr(torch.randn(2, 128, 128, device="cuda")).Q.contiguous()
    assert_right(*case(4), logit_cap=2.5, o_partner=partner)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [9000, 5])
def test_a_request_alone(length: int) -> None:
    filling, query, drafts = case(4, lengths=(length,), heads=8)
    assert drafts.mask is not None
    batch = dataclasses.replace(
        filling.batch, kv_indptr=filling.batch.kv_indptr[:2], rows=filling.batch.rows[:1]
    )
    options = {"sm_scale": 0.1, "drafts": Drafts(4, drafts.mask[:4])}
    assert_as_good_as_torch(
        cuda.decode_attention(query[:4], filling.cache, batch, **options),
        lambda q: reference.decode_attention(q, filling.cache, batch, **options),
        [query[:4]],
    )


@pytest.mark.gpu
def test_a_chain_of_one_draft_is_a_decode_step() -> None:
    filling, query, _ = case(1, tree=False, sink=0, ring_start=0)
    got = cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1, drafts=Drafts(1))
    want = cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1)
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_a_graph_follows_lengths_masks_and_padding() -> None:
    """Captured once, replayed after the batch changed in place."""
    lengths = (1000, 77, 300, 5)
    filling, query, drafts = case(4, lengths=lengths)
    cache, batch, mask = filling.cache, filling.batch, drafts.mask
    assert mask is not None
    numel = cuda.decode_workspace_numel(cache, query.shape[1], len(batch.rows), 4)
    workspace, out = Workspace.allocate(numel, "cuda"), torch.empty_like(query)
    run = {"sm_scale": 0.1, "workspace": workspace, "out": out, "drafts": drafts}
    cuda.decode_attention(query, cache, batch, **run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        cuda.decode_attention(query, cache, batch, **run)
    other = random_cache(
        [9, 1200, 0, 99, 4],
        cache.k_spec,
        num_kv_heads=2,
        drafts=4,
        seed=1,
        dtype=torch.bfloat16,
        device="cuda",
    )
    for name in ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v"):
        target, source = getattr(cache, name), getattr(other.cache, name)
        poison(target)
        target[: len(source)].copy_(source)
    poison(batch.kv_indices)[: len(other.batch.kv_indices)] = other.batch.kv_indices
    batch.kv_indptr.copy_(other.batch.kv_indptr)
    batch.rows.copy_(other.batch.rows)
    for name in ("sink_block", "sink_from", "ring_start"):
        getattr(batch.windows, name).copy_(getattr(other.batch.windows, name))
    mask.copy_(trees(6, 4)[4:])
    query.normal_()
    graph.replay()
    assert_as_good_as_torch(
        out,
        lambda q: reference.decode_attention(q, cache, batch, sm_scale=0.1, drafts=drafts),
        [query],
    )


@pytest.mark.gpu
def test_the_dispatcher_takes_the_kernel_for_drafts(caplog: pytest.LogCaptureFixture) -> None:
    filling, query, drafts = case(4)
    got = dispatch.decode_attention(
        query, filling.cache, filling.batch, sm_scale=0.1, drafts=drafts
    )
    want = cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1, drafts=drafts)
    assert torch.equal(got, want)
    assert not [x for x in caplog.records if x.name == dispatch.__name__]
