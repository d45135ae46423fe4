"""The CUDA decode kernel: compilation anywhere NVRTC is, refusals anywhere, numbers on a GPU
against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from random_caches import Filling, assert_as_good_as_torch, poison, random_cache

from oscar_kernels import nvrtc, reference
from oscar_kernels.cache import BatchView, Drafts
from oscar_kernels.decode_attention import cuda, tuning
from oscar_kernels.decode_attention import variant as variants
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec


def variant(
    head_dim: int = 128,
    group: int = 4,
    heads: int = 8,
    groups: int = 1,
    bits: tuple[int, int] = (2, 2),
) -> variants.AttentionVariant:
    k_spec, v_spec = (QuantSpec(head_dim, head_dim // groups, bits=width) for width in bits)
    return variants.AttentionVariant(
        k_spec, v_spec, group, heads, "int", "int", "long long", 0, False
    )


def nvrtc_missing() -> str | None:
    try:
        nvrtc.nvrtc_version()
    except nvrtc.CompilerMissing as error:
        return str(error)
    return None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "made",
    [
        variant(),
        variant(64, 8, 1, 2),
        variant(bits=(4, 2)),
        dataclasses.replace(variant(group=12, heads=4), whole=True),
        dataclasses.replace(variant(256, 16, 4, bits=(2, 4)), tiles=tuning.VARIANTS[-1]),
    ],
    ids=lambda x: f"{x.k_spec.head_dim} x {x.group} K{x.k_spec.bits} V{x.v_spec.bits}",
)
def test_source_compiles_without_a_gpu_and_is_kept(
    made: variants.AttentionVariant, arch: str, own_state, monkeypatch
) -> None:
    reason = nvrtc_missing()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("OSCAR_KERNELS_CACHE", str(own_state / "kernels"))
    code = nvrtc.Build.of(cuda.SOURCE, made.flags, arch).code()
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in ("oscar_decode_stage1", "oscar_decode_stage2"))
    assert nvrtc.Build.of(cuda.SOURCE, made.flags, arch).code() == code
    assert len(list((own_state / "kernels").iterdir())) == 1


def test_a_broken_source_raises_the_compilers_words() -> None:
    reason = nvrtc_missing()
    if reason:
        pytest.skip(reason)
    with pytest.raises(nvrtc.CompilationFailed, match=r"decode\.cu\(1\): error"):
        nvrtc.compile_source({"decode.cu": "int x = nothing;"}, "decode.cu", ["-arch=sm_90"])


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize(
    "made",
    [
        variant(),
        variant(64, 8, 1, 2),
        variant(256, 16, 4, 4),
        variant(128, 4, 4),
        variant(256, 4, 8, 1, (4, 4)),
        variant(128, 4, 8, 4, (4, 2)),
    ],
    ids=str,
)
def test_stages_fit_into_the_shared_memory_of_a_block(
    made: variants.AttentionVariant, shared: int
) -> None:
    def room(stages: int) -> int:
        tiles = dataclasses.replace(made.tiles, stages=stages)
        used = variants.ring_bytes(dataclasses.replace(made, tiles=tiles).flags)
        return shared - used - variants.PLAN_BYTES - variants.STATIC_BYTES

    got = variants.fitting(made, shared).tiles.stages
    assert tuning.LEAST_STAGES <= got <= tuning.CUDA.stages
    assert room(got) >= 0 or got == tuning.LEAST_STAGES
    assert got == tuning.CUDA.stages or room(got + 1) < 0


def test_tiles_share_a_block_of_eight_warps() -> None:
    for heads in range(1, 17):
        for group in (1, 4, 8, 9, 16):
            flags = variant(group=group, heads=heads).flags
            assert int(flags["HB"]) * int(flags["VH"]) * int(flags["TW"]) == variants.WARPS
            assert heads % int(flags["HB"]) == 0


def test_blocks_of_many_requests_with_narrow_rows_share_a_multiprocessor() -> None:
    def resident(requests: int, head_dim: int, drafts: int = 0) -> int:
        filling = random_cache(
            [8] * requests, QuantSpec(head_dim, head_dim), num_kv_heads=8, drafts=drafts
        )
        query = torch.zeros(requests * max(1, drafts), 16, head_dim)
        given = Drafts(drafts) if drafts else None
        return variants.variant(query, filling.cache, filling.batch, 0.0, drafts=given).resident

    assert [resident(n, 64) for n in (1, 15, 16, 40)] == [1, 1, 2, 2]
    assert resident(40, 128) == resident(40, 64, drafts=2) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("heads", [1, 4, 6, 32])
def test_scratch_has_room_for_every_variant(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """For what all warps of a block leave of every segment, whatever shares a KV head."""
    spec, blocks = QuantSpec(head_dim, head_dim), 132
    for group, count in ((1, 0), (9, 0), (15, 0), (16, 0), (2, 17), (5, 3), (3, 11), (8, 8)):
        filling = random_cache(
            [count], spec, num_kv_heads=heads, drafts=count, dtype=torch.bfloat16
        )
        query = torch.zeros(max(1, count), heads * group, head_dim, dtype=dtype)
        drafts = Drafts(count) if count else None
        made = variants.variant(query, filling.cache, filling.batch, 0.0, drafts=drafts)
        for whole in (made.whole, False):
            flags = dataclasses.replace(made, whole=whole).flags
            each = -(-made.rows // int(flags["VH"]))
            for requests in (1, 60, 1000):
                sizes = cuda.scratch_sizes(filling.cache, made.rows * heads, requests, blocks)
                segments = blocks + 2 * (heads // int(flags["HB"])) * requests
                assert sizes[1] >= 2 * segments * variants.WARPS * each, (group, count, flags)


def test_refusals_name_what_was_seen() -> None:
    def reason(
        heads: int = 4,
        dtype: torch.dtype = torch.bfloat16,
        spec: QuantSpec | None = None,
        **batch: object,
    ) -> str:
        filling = random_cache(
            [5], spec or QuantSpec(128, 128), sink=4, recent=4, dtype=torch.bfloat16
        )
        query = torch.zeros(1, heads, filling.cache.k_spec.head_dim, dtype=dtype)
        return (
            cuda.unsupported(query, filling.cache, dataclasses.replace(filling.batch, **batch))
            or "nothing"
        )

    assert "NVIDIA GPU" in reason()
    assert "96 of K" in reason(spec=QuantSpec(96, 96))
    assert "5 query heads over 2 KV heads" in reason(heads=5)
    assert "34 query heads" in reason(heads=34)
    assert "float64" in reason(dtype=torch.float64)
    assert "int16 indices" in reason(kv_indices=torch.zeros(5, dtype=torch.int16))


@pytest.mark.parametrize(
    ("checked", "reason"), [(False, "needs an NVIDIA GPU"), (True, "out is not contiguous")]
)
def test_what_the_caller_has_checked_is_not_asked_again(checked: bool, reason: str) -> None:
    filling = random_cache([5], QuantSpec(128, 128), sink=4, recent=4, dtype=torch.bfloat16)
    with pytest.raises(cuda.NoAttentionVariant, match=reason):
        cuda.decode_attention(
            torch.zeros(1, 4, 128, dtype=torch.bfloat16),
            filling.cache,
            filling.batch,
            sm_scale=1.0,
            workspace=Workspace.allocate(1, "cpu"),
            out=torch.zeros(1, 4, 256, dtype=torch.bfloat16)[..., ::2],
            checked=checked,
        )


LENGTHS = (1, 17, 320, 63, 1000, 3001)


def assert_right(
    filling: Filling, query: torch.Tensor, *, atol: float = 1e-6, **options: object
) -> None:
    """Against plain torch in float64, with poisoned scratch and output; twice, because nothing may
    stay in scratch."""
    workspace = Workspace.allocate(
        cuda.decode_workspace_numel(filling.cache, query.shape[1], query.shape[0]), "cuda"
    )
    poison(workspace.scratch)
    out = poison(query.new_empty(*query.shape[:2], filling.cache.v_spec.head_dim))
    options.setdefault("sm_scale", query.shape[-1] ** -0.5)
    tiles = options.pop("tiles", tuning.CUDA)
    for _ in range(2):
        cuda.decode_attention(
            query,
            filling.cache,
            filling.batch,
            workspace=workspace,
            out=out,
            tiles=tiles,
            **options,
        )
    assert_as_good_as_torch(
        out,
        lambda q: reference.decode_attention(q, filling.cache, filling.batch, **options),
        [query],
        atol=atol,
    )


def random_case(
    lengths=LENGTHS,
    head_dim=128,
    heads=2,
    group=4,
    groups=1,
    v_dim=None,
    dtype=torch.bfloat16,
    **options,
) -> tuple[Filling, torch.Tensor]:
    k_bits, v_bits = options.pop("bits", (2, 2))
    scale_dtype = options.pop("scale_dtype", "float16")
    k_spec = QuantSpec(head_dim, head_dim // groups, 0.96, scale_dtype, k_bits)
    v_spec = dataclasses.replace(
        k_spec,
        head_dim=v_dim or head_dim,
        group_size=(v_dim or head_dim) // groups,
        bits=v_bits,
    )
    filling = random_cache(
        lengths, k_spec, v_spec, num_kv_heads=heads, dtype=torch.bfloat16, device="cuda", **options
    )
    query = torch.randn(len(lengths), heads * group, head_dim, device="cuda", dtype=torch.float32)
    return filling, query.to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_query_heads_of_a_kv_head(group: int) -> None:
    assert_right(*random_case(group=group))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("group", [4, 6])
@pytest.mark.parametrize("lengths", [LENGTHS, (2000,), (0, 5, 0, 900)], ids=str)
def test_kv_heads(heads: int, group: int, lengths: tuple[int, ...]) -> None:
    assert_right(*random_case(lengths, heads=heads, group=group))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 4, 8])
@pytest.mark.parametrize("group", [9, 12, 16])
def test_many_query_heads_in_one_warp(group: int, heads: int) -> None:
    """Batches in which one warp takes all query heads of a KV head."""
    assert len(LENGTHS) >= tuning.WHOLE_BATCH
    assert_right(*random_case(heads=heads, group=group))
    assert_right(*random_case(heads=heads, group=group), logit_cap=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 6, 16])
@pytest.mark.parametrize(("head_dim", "v_dim"), [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_head_dims(head_dim: int, v_dim: int, group: int) -> None:
    assert_right(*random_case(head_dim=head_dim, v_dim=v_dim, group=group))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_quantization_groups(groups: int, head_dim: int, heads: int) -> None:
    assert_right(*random_case(groups=groups, head_dim=head_dim, heads=heads))


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "group", "groups"), [(8, 4, 1), (2, 12, 4)])
@pytest.mark.parametrize(("head_dim", "v_dim"), [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("bits", [(4, 2), (2, 4), (4, 4)], ids=str)
def test_codes_of_four_bits(
    bits: tuple[int, int], head_dim: int, v_dim: int, heads: int, group: int, groups: int
) -> None:
    """Beside codes of two bits or not."""
    shape = {"head_dim": head_dim, "v_dim": v_dim, "groups": groups, "group": group, "heads": heads}
    assert_right(*random_case(bits=bits, **shape))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_records_of_six_pieces_lie_in_all_banks(heads: int) -> None:
    """K of 4 and V of 2 bits: wherever the pieces of a record lie in shared memory."""
    assert_right(*random_case(bits=(4, 2), heads=heads, groups=2))


@pytest.mark.gpu
def test_a_graph_has_layers_of_different_widths() -> None:
    """One graph, one workspace, two layers; each with the results of its own call."""
    (narrow, query), (wide, _) = (random_case(bits=bits) for bits in ((2, 2), (4, 2)))
    layers = [dataclasses.replace(wide, batch=narrow.batch), narrow]
    workspace = Workspace.allocate(
        max(cuda.decode_workspace_numel(x.cache, query.shape[1], len(LENGTHS)) for x in layers),
        "cuda",
    )
    outs = [torch.empty_like(query) for _ in layers]

    def step() -> None:
        for layer, out in zip(layers, outs, strict=True):
            cuda.decode_attention(
                query, layer.cache, layer.batch, sm_scale=0.1, workspace=workspace, out=out
            )

    step()
    want = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for out in outs:
        poison(out)
    graph.replay()
    assert all(torch.equal(out, expected) for out, expected in zip(outs, want, strict=True))
    assert not torch.equal(*want)


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [(0, 0), (0, 256), (64, 0), (16, 33)], ids=str)
@pytest.mark.parametrize("missing", [(0, 0), (16, 0), (16, 10_000), (8, 20)], ids=str)
@pytest.mark.parametrize("more", [0, 7])
def test_windows(windows: tuple[int, int], missing: tuple[int, int], more: int) -> None:
    """Every combination of what a window holds; a read outside of it would be poison."""
    lengths = (1, 15, 16, 17, 33, 64, 65, 300, 700)
    case = random_case(
        lengths,
        sink=windows[0],
        recent=windows[1],
        ring_rows=windows[1] + more,
        sink_from=min(missing[0], windows[0]),
        ring_start=missing[1],
    )
    assert_right(*case)


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_logit_cap_and_value_partner(cap: float, per_head: bool) -> None:
    partner = torch.linalg.qr(
        torch.randn(2 if per_head else 1, 128, 128, device="cuda")
    ).Q.contiguous()
    assert_right(*random_case(), logit_cap=cap, o_partner=partner)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("requests", [1, 8, 40, 150])
def test_blocks_of_stage_2_that_undo_the_value_transform(requests: int, head_dim: int) -> None:
    """On 132 multiprocessors a block merges 1 to 16 rows, of 256 channels a quarter of each."""
    partner = torch.linalg.qr(torch.randn(1, head_dim, head_dim, device="cuda")).Q.contiguous()
    lengths = [1 + 97 * i % 700 for i in range(requests)]
    case = random_case(lengths, head_dim, heads=2 if head_dim == 256 else 8, group=5)
    assert_right(*case, o_partner=partner)


@pytest.mark.gpu
@pytest.mark.parametrize("partner", [False, True])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("requests", [1, 8, 40, 150])
def test_learned_sinks(requests: int, group: int, partner: bool) -> None:
    """In blocks of stage 2 that merge 1 to 24 rows; of the heads, or of every query row."""
    lengths = [1 + 97 * i % 700 for i in range(requests)]
    case = random_case(lengths, 64, heads=8, group=group)
    undone = torch.linalg.qr(torch.randn(1, 64, 64, device="cuda")).Q.contiguous()
    each = torch.randn(8 * group, requests, device="cuda").mul(3).T
    for sinks in (each, each[0].contiguous().expand(requests, -1)):
        assert_right(*case, sink_logits=sinks, o_partner=undone if partner else None)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("group", [4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype, group: int, scale_dtype: str) -> None:
    """Weights enter the tensor cores in float16, so a float32 query is not better than one in
    float16."""
    loose = 2e-3 if dtype == torch.float32 else 1e-6
    assert_right(*random_case(group=group, dtype=dtype, scale_dtype=scale_dtype), atol=loose)


@pytest.mark.gpu
def test_long_integers_and_a_large_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    filling, query = random_case(torch.randint(1, 600, (150,), generator=generator).tolist())
    batch = filling.batch
    wide = BatchView(
        batch.kv_indptr.long(), batch.kv_indices.long(), batch.rows.int(), batch.windows
    )
    assert_right(dataclasses.replace(filling, batch=wide), query)


@pytest.mark.gpu
def test_values_beyond_the_first_bound_keep_their_size() -> None:
    """Scales that grow a thousandfold along a sequence, and logits that grow with them."""
    filling, query = random_case((4000,), sink=0, recent=0)
    order = filling.batch.kv_indices.long()
    growth = torch.logspace(-3, 3, 4000, device="cuda")[:, None, None]
    filling.cache.affine[order] = (filling.cache.affine[order].float() * growth).to(
        filling.cache.affine.dtype
    )
    assert_right(filling, query, sm_scale=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(8192,), (1,), (700,), LENGTHS, (0, 5, 0, 900)], ids=str)
@pytest.mark.parametrize("prefix_stable", [False, True])
@pytest.mark.parametrize("tiles", tuning.VARIANTS, ids=str)
def test_variants(tiles: tuning.CudaTiles, lengths: tuple[int, ...], prefix_stable: bool) -> None:
    assert_right(*random_case(lengths, heads=8), tiles=tiles, prefix_stable=prefix_stable)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_stable", [False, True])
@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("tiles", tuning.VARIANTS, ids=str)
def test_a_launch_that_starts_early_reads_what_the_one_before_wrote(
    tiles: tuning.CudaTiles, heads: int, prefix_stable: bool
) -> None:
    """The query of every launch is the output of the one before."""
    filling, query = random_case((1000,), heads=heads)

    def chain(wait: bool) -> torch.Tensor:
        x, options = query, {"sm_scale": 0.1, "tiles": tiles, "prefix_stable": prefix_stable}
        for _ in range(20):
            x = cuda.decode_attention(10 * x, filling.cache, filling.batch, **options)
            x = cuda.decode_attention(x, filling.cache, filling.batch, **options)
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert want.isfinite().all()
    assert all(torch.equal(chain(False), want) for _ in range(5))


@pytest.mark.gpu
def test_a_graph_follows_lengths_slots_and_padding() -> None:
    """Captured once, replayed after the batch changed in place; padding rows read the dummy slot
    and row."""
    filling, query = random_case((1000, 77, 300, 5))
    batch, cache = filling.batch, filling.cache
    cache.codes[0], cache.affine[0], cache.ring_k[0], cache.ring_v[0] = 0, 0, 0, 0
    cache.sink_k[0], cache.sink_v[0] = 0, 0
    workspace = Workspace.allocate(cuda.decode_workspace_numel(cache, query.shape[1], 4), "cuda")
    out = torch.empty_like(query)
    run = {"sm_scale": 0.1, "workspace": workspace, "out": out}
    cuda.decode_attention(query, cache, batch, **run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        cuda.decode_attention(query, cache, batch, **run)
    batch.kv_indptr.copy_(torch.tensor([0, 1000, 1077, 1078, 1079]))
    batch.kv_indices[1077:1079] = 0
    batch.rows[2:] = 0
    query.normal_()
    graph.replay()
    assert_as_good_as_torch(
        out, lambda q: reference.decode_attention(q, cache, batch, sm_scale=0.1), [query]
    )
