"""The CUDA decode kernel, drafts included: compilation anywhere NVRTC is, refusals anywhere, and
numbers on a GPU against float64."""

import dataclasses
import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from random_caches import (
    Filling,
    assert_as_good_as_torch,
    errors_beside_bfloat16,
    orthogonal,
    poison,
    random_cache,
    random_trees,
)

from oscar_kernels import nvrtc, reference
from oscar_kernels.cache import BatchView, Drafts
from oscar_kernels.decode_attention import cuda, dispatch, tuning
from oscar_kernels.decode_attention import variant as variants
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec

HALF = torch.bfloat16


def variant(
    head_dim: int = 128,
    group: int = 4,
    heads: int = 8,
    groups: int = 1,
    bits: tuple[int, int] = (2, 2),
    **fields: Any,
) -> variants.AttentionVariant:
    k_spec, v_spec = (QuantSpec(head_dim, head_dim // groups, bits=width) for width in bits)
    integers = ("int", "int", "long long")
    return variants.AttentionVariant(k_spec, v_spec, group, heads, *integers, 0, False, **fields)


@pytest.mark.parametrize(("made", "arch"), [
    (variant(64, 8, 1, 2), "sm_80"),
    (variant(bits=(4, 2)), "sm_90"),
    (variant(group=12, heads=4, whole=True), "sm_80"),
    (variant(256, 16, 4, bits=(2, 4), tiles=tuning.VARIANTS[-1]), "sm_90"),
], ids=str)  # fmt: skip
def test_source_compiles_without_a_gpu_and_is_kept(
    made: variants.AttentionVariant, arch: str, compiler: Path
) -> None:
    """`test_chips` compiles the usual variant for every chip."""
    code = nvrtc.Build.of(cuda.SOURCE, made.flags, arch).code()
    assert code.startswith(b"\x7fELF")
    assert all(name.encode() in code for name in ("oscar_decode_stage1", "oscar_decode_stage2"))
    assert nvrtc.Build.of(cuda.SOURCE, made.flags, arch).code() == code
    assert len(list(compiler.iterdir())) == 1


@pytest.mark.parametrize(("group", "drafts"), [(4, 4), (1, 7), (16, 2), (8, 8)])
def test_variants_for_drafts_spill_no_registers(group: int, drafts: int, compiler: Path) -> None:
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    made = variant(group=group, whole=True, drafts=drafts)
    nvrtc.Build.of(cuda.SOURCE, made.flags, "sm_90").code()
    (kept,) = compiler.iterdir()
    kept.write_bytes(kept.read_bytes()[32:])  # the code behind its digest
    said = subprocess.run([program, "-res-usage", kept], capture_output=True, text=True, check=True)
    stacks = [int(x) for x in re.findall(r"STACK:(\d+)", said.stdout)]
    assert stacks == [0] * (2 + len(cuda.MERGED_ROWS))


@pytest.mark.parametrize(("dim", "slices"), [(128, 1), (256, 2)])
@pytest.mark.parametrize("places", [1, 20, 132])
@pytest.mark.parametrize("rows", [1, 7, 16, 33, 100, 4096])
def test_stage_2_has_a_block_for_every_row(rows: int, places: int, dim: int, slices: int) -> None:
    found, blocks = cuda.merge_grid(rows, 2, variant(dim), places)
    assert found * (blocks - slices) < rows * slices <= found * blocks
    assert found > 1 or rows * 2 * slices <= places


@pytest.mark.parametrize("shared", [99 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("made", [
    variant(),
    variant(64, 8, 1, 2),
    variant(256, 16, 4, 4),
    variant(128, 4, 4),
    variant(256, 4, 8, 1, (4, 4)),
    variant(128, 4, 8, 4, (4, 2)),
], ids=str)  # fmt: skip
def test_stages_fit_into_the_memory_of_blocks(made: variants.AttentionVariant, shared: int) -> None:
    def room(stages: int) -> int:
        tiles = dataclasses.replace(made.tiles, stages=stages)
        used = variants.ring_bytes(dataclasses.replace(made, tiles=tiles).flags)
        return shared - used - variants.STATIC_BYTES

    got = variants.fitting(made, shared).tiles.stages
    assert tuning.LEAST_STAGES <= got <= tuning.CUDA.stages
    assert room(got) >= 0 or got == tuning.LEAST_STAGES
    assert got == tuning.CUDA.stages or room(got + 1) < 0


def test_tiles_share_a_block_of_eight_warps() -> None:
    for heads, group in product(range(1, 17), (1, 4, 8, 9, 16)):
        flags = variant(group=group, heads=heads).flags
        assert int(flags["HB"]) * int(flags["VH"]) * int(flags["TW"]) == variants.WARPS
        assert heads % int(flags["HB"]) == 0


@pytest.mark.parametrize(
    ("group", "drafts", "warps"),
    [(4, 0, 1), (4, 2, 1), (4, 4, 1), (4, 8, 2), (1, 32, 2), (3, 11, 4), (8, 8, 4)],
)
def test_a_warp_has_up_to_sixteen_query_rows(group: int, drafts: int, warps: int) -> None:
    flags = variant(group=group, whole=True, drafts=drafts).flags
    assert flags["VH"] == warps
    assert flags["GROUP"] == group * max(1, drafts) <= 16 * warps


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


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("heads", [1, 4, 6, 32])
def test_scratch_has_room_for_every_variant(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """For what a block leaves of every segment, whatever shares a KV head."""
    spec, blocks = QuantSpec(head_dim, head_dim), 132
    for group, count in ((1, 0), (9, 0), (15, 0), (16, 0), (2, 17), (5, 3), (3, 11), (8, 8)):
        filling = random_cache([count], spec, num_kv_heads=heads, drafts=count, dtype=HALF)
        query = torch.zeros(max(1, count), heads * group, head_dim, dtype=dtype)
        drafts = Drafts(count) if count else None
        made = variants.variant(query, filling.cache, filling.batch, 0.0, drafts=drafts)
        for whole in (made.whole, False):
            flags = dataclasses.replace(made, whole=whole).flags
            each = -(-made.rows // int(flags["VH"]))
            for requests in (1, 60, 1000):
                sizes = cuda.scratch_sizes(filling.cache, made.rows * heads, requests, blocks)
                segments = blocks + 2 * (heads // int(flags["HB"])) * requests
                left = int(flags["HB"]) * int(flags["VH"]) * each
                assert sizes[1] >= 2 * segments * left, (group, count, flags)
                parts = heads // int(flags["HB"]) * requests
                assert sizes[2] > cuda.SEGMENT * (blocks + segments) + parts


INT64 = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(("change", "words"), [
    ({}, "NVIDIA GPU"),
    ({"head_dim": 96}, "96 of K"),
    ({"heads": 5}, "5 query heads over 2 KV heads"),
    ({"heads": 34}, "34 query heads"),
    ({"dtype": torch.float64}, "float64"),
    ({"kv_indices": torch.zeros(50, dtype=torch.int16)}, "int16 indices"),
    ({"kv_indptr": torch.zeros(1, dtype=torch.int32)}, "1 requests"),
    ({"width": 64}, "(1, 4, 64)"),
    ({"tokens": 2}, "(2, 4, 128)"),
    ({"count": 16, "mask": torch.zeros(16, dtype=torch.int32)}, "NVIDIA GPU"),
    ({"count": 8, "heads": 16, "head_dim": 256}, "NVIDIA GPU"),
    ({"count": 22, "heads": 6}, "66 query rows of a KV head, 22 drafts"),
    ({"count": 3, "tokens": 4}, "(4, 4, 128)"),
    ({"count": 33, "heads": 2}, "33 drafts"),
    ({"count": 16, "ring_rows": 50}, "a ring of 50"),
    ({"count": 2, "mask": INT64}, "int64"),
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_refusals_name_what_was_seen(change: dict[str, Any], words: str) -> None:
    given = {"count": 0, "heads": 4, "head_dim": 128, "ring_rows": 71, "dtype": HALF} | change
    spec, count = QuantSpec(given["head_dim"], given["head_dim"]), given["count"]
    made = random_cache([50], spec, drafts=32, recent=40, ring_rows=given["ring_rows"], dtype=HALF)
    tokens = given.get("tokens", max(1, count))
    width = given.get("width", given["head_dim"])
    query = torch.zeros(tokens, given["heads"], width, dtype=given["dtype"])
    changed = {name: x for name, x in change.items() if name.startswith("kv_")}
    batch = dataclasses.replace(made.batch, **changed)
    drafts = Drafts(count, given.get("mask")) if count else None
    assert words in (cuda.unsupported(query, made.cache, batch, drafts) or "nothing")


@pytest.mark.parametrize(("checked", "dim", "reason"), [
    (False, 128, "an NVIDIA GPU"), (True, 128, "not contiguous"), (True, 256, "o_partner is torch"),
])  # fmt: skip
def test_what_was_checked_is_not_asked_again(checked: bool, dim: int, reason: str) -> None:
    filling = random_cache([5], QuantSpec(128, 128), sink=4, recent=4, dtype=HALF)
    query, partner = torch.zeros(1, 4, 128, dtype=HALF), torch.zeros(1, dim, 256)
    options = {"o_partner": partner[..., :: 256 // dim], "checked": checked}
    with pytest.raises(cuda.NoAttentionVariant, match=reason):
        cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0, **options)


LENGTHS = (1, 17, 320, 63, 1000, 3001)
COMMITTED = (1000, 0, 4, 17, 61, 66, 300, 3001)
"""Tokens of requests in front of their drafts."""
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BITS = ((4, 2), (2, 4), (4, 4))
WIDTHS = [{"head_dim": k, "v_dim": v} for k, v in ((64, 64), (128, 128), (256, 256), (192, 128))]
MISSING = ((0, 0), (16, 0), (16, 10_000), (8, 20))
"""Positions that sinks and rings do not hold."""


def case(
    lengths: Any = None,
    count: int = 0,
    *,
    tree: bool = True,
    head_dim: int = 128,
    v_dim: int | None = None,
    heads: int = 2,
    group: int = 4,
    groups: int = 1,
    bits: tuple[int, int] = (2, 2),
    scale_dtype: str = "float16",
    dtype: torch.dtype = HALF,
    **cache: Any,
) -> tuple[Filling, torch.Tensor, Drafts | None]:
    """A cache, a query, and `count` drafts of each request, whose codes are poison; with drafts the
    last request is padding."""
    dims = head_dim, v_dim or head_dim
    k_spec, v_spec = (
        QuantSpec(dim, dim // groups, 0.96, scale_dtype, width)
        for dim, width in zip(dims, bits, strict=True)
    )
    lengths = lengths or (COMMITTED if count else LENGTHS)
    found = [*(length + count for length in lengths), 0] if count else lengths
    stores = {"num_kv_heads": heads, "drafts": count, "dtype": HALF, "device": "cuda", **cache}
    filling = random_cache(found, k_spec, v_spec, **stores)
    for length, end in zip(found, filling.batch.kv_indptr.tolist()[1:], strict=True):
        slots = filling.batch.kv_indices[end - min(count, length) : end].long()
        filling.cache.affine[slots] = torch.nan
    rows = len(found) * max(1, count)
    query = torch.randn(rows, heads * group, head_dim, device="cuda").to(dtype)
    mask = random_trees(len(found), count, "cuda") if count and tree else None
    return filling, query, Drafts(count, mask) if count else None


def workspace_for(filling: Filling, query: torch.Tensor, drafts: Drafts | None = None) -> Workspace:
    """Poisoned."""
    requests, count = len(filling.batch.rows), drafts.count if drafts else 1
    numel = cuda.decode_workspace_numel(filling.cache, query.shape[1], requests, count)
    workspace = Workspace.allocate(numel, "cuda")
    poison(workspace.scratch)
    return workspace


def assert_right(
    filling: Filling,
    query: torch.Tensor,
    drafts: Drafts | None,
    *,
    atol: float = 1e-6,
    stable: bool | None = None,
    tiles: tuning.CudaTiles = tuning.CUDA,
    **options: Any,
) -> None:
    """Against plain torch in float64, with poisoned scratch and output; twice, because nothing may
    stay in scratch. Drafts are read with and without a stable prefix."""
    cache, batch = filling.cache, filling.batch
    workspace = workspace_for(filling, query, drafts)
    out = poison(query.new_empty(*query.shape[:2], cache.v_spec.head_dim))
    options = {"sm_scale": 0.1 if drafts else query.shape[-1] ** -0.5, "drafts": drafts, **options}
    for second in (False, True):
        given = {"prefix_stable": bool(drafts) and second if stable is None else stable, **options}
        cuda.decode_attention(
            query, cache, batch, workspace=workspace, out=out, tiles=tiles, **given
        )
        if drafts or second:
            assert_as_good_as_torch(
                out,
                lambda q: reference.decode_attention(q, cache, batch, **options),
                [query],
                atol=atol,
            )
    assert drafts is None or not out[-drafts.count :].any()


SHAPES: list[dict[str, Any]] = [
    *({"group": group} for group in GROUPS),
    *({"heads": h, "group": g, "lengths": n} for h, g, n in product(
        (1, 2, 3, 4, 8, 16), (4, 6), (LENGTHS, (2000,), (0, 5, 0, 900)))),
    # batches in which one warp takes all query heads of a KV head
    *({"heads": h, "group": g} for h, g in product((1, 3, 4, 8), (9, 12, 16))),
    *(dims | {"group": g} for dims, g in product(WIDTHS, (4, 6, 16))),
    *({"groups": n, "head_dim": d, "heads": h} for n, d, h in product(
        (1, 2, 4), (64, 128, 256), (1, 8))),
    *(dims | {"bits": bits, "heads": h, "group": g, "groups": n}
      for dims, bits, (h, g, n) in product(WIDTHS, BITS, ((8, 4, 1), (2, 12, 4)))),
    # wherever the six pieces of a record lie in shared memory
    *({"bits": (4, 2), "heads": h, "groups": 2} for h in (1, 2, 4)),
    # every combination of what a window holds; a read outside of it would be poison
    *({"lengths": (1, 15, 16, 17, 33, 64, 65, 300, 700), "sink": sink, "recent": recent,
       "ring_rows": recent + more, "sink_from": min(sink_from, sink), "ring_start": start}
      for (sink, recent), (sink_from, start), more in product(
        ((0, 0), (0, 256), (64, 0), (16, 33)), MISSING, (0, 7))),
]  # fmt: skip
DRAFTED: list[dict[str, Any]] = [
    *({"count": n, "tree": tree} for n, tree in product(range(1, 9), (False, True))),
    *({"count": n, "group": g, "heads": h} for (n, g), h in product(
        ((4, 4), (2, 3), (8, 4)), (1, 2, 3, 4, 8))),
    # two drafts, and as many as two and eight warps have rows for
    *({"count": n, "group": g} for g in GROUPS for n in (2, 32 // g, min(32, 64 // g))),
    # two to eight warps share the query rows of a KV head
    *({"count": n, "group": 8, "heads": h, "head_dim": 256} for n, h in product(
        (2, 3, 4, 8), (1, 2, 4))),
    *({"count": 4, "bits": bits, "head_dim": d, "groups": g} for bits, (d, g) in product(
        BITS, ((64, 2), (128, 1), (128, 4)))),
    # requests shorter than sink or window, and every place of the edge between the tiers
    *({"count": n, "sink": sink, "recent": recent, "ring_rows": recent + n + 5,
       "sink_from": min(sink_from, sink), "ring_start": start, "lengths": (
        0, 1, 15, 16, 17, 31, 32, 33, 39, 40, 47, 48, 63, 64, 65, 72, 80, 96, 300)}
      for n, (sink, recent), (sink_from, start) in product(
        (4, 8), ((0, 8), (64, 8), (16, 33), (64, 256), (0, 256)), MISSING)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("options", SHAPES + DRAFTED, ids=str)
def test_shapes(options: dict[str, Any]) -> None:
    assert_right(*case(**options))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [
    *({"group": g, "scale_dtype": s} for g, s in product((4, 8, 16), ("float16", "bfloat16"))),
    *({"count": 3, "head_dim": dim, "recent": 40} for dim in (64, 256)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [HALF, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Weights enter the tensor cores in float16, so a float32 query is not better than one in
    float16."""
    loose = 2e-3 if dtype == torch.float32 else 1e-6
    assert_right(*case(dtype=dtype, **options), atol=loose)


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "dtype", "most"), [
    (4, HALF, 1.2), (8, torch.float16, 1.2), (8, HALF, 3), (16, HALF, 3),
])  # fmt: skip
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("sharp", [1, 3])
def test_errors_beside_attention_in_bfloat16(
    head_dim: int, group: int, dtype: torch.dtype, most: float, sharp: float
) -> None:
    """Like the test in the emulator."""
    filling, query, _ = case((700, 4000), head_dim=head_dim, group=group, sink=0, recent=0)
    options = {"sm_scale": sharp * head_dim**-0.5, "workspace": workspace_for(filling, query)}
    out = cuda.decode_attention(query.to(dtype), filling.cache, filling.batch, **options)
    ours, theirs = errors_beside_bfloat16(out, filling, query, options["sm_scale"])
    assert (ours < most * theirs).all()


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("cap", [0.0, 2.5])
def test_logit_cap_and_value_partner(cap: float, per_head: bool) -> None:
    partner = orthogonal(2 if per_head else 1, 128, "cuda")
    assert_right(*case(), logit_cap=cap, o_partner=partner)
    assert_right(*case(count=4), logit_cap=cap, o_partner=partner)
    for heads, group in product((1, 3, 4, 8), (9, 12, 16)):
        assert_right(*case(heads=heads, group=group), logit_cap=cap)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("requests", [1, 8, 40, 150])
def test_blocks_of_stage_2_that_undo_the_value_transform(requests: int, head_dim: int) -> None:
    """On 132 multiprocessors a block merges 1 to 16 rows, of 256 channels a quarter of each."""
    lengths = [1 + 97 * i % 700 for i in range(requests)]
    made = case(lengths, head_dim=head_dim, heads=2 if head_dim == 256 else 8, group=5)
    assert_right(*made, o_partner=orthogonal(1, head_dim, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("partner", [False, True])
@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("requests", [1, 8, 40, 150])
def test_learned_sinks(requests: int, group: int, partner: bool) -> None:
    """In blocks of stage 2 that merge 1 to 24 rows; of the heads, or of every query row."""
    made = case([1 + 97 * i % 700 for i in range(requests)], head_dim=64, heads=8, group=group)
    undone = orthogonal(1, 64, "cuda") if partner else None
    each = torch.randn(8 * group, requests, device="cuda").mul(3).T
    for sinks in (each, each[0].contiguous().expand(requests, -1)):
        assert_right(*made, sink_logits=sinks, o_partner=undone)


@pytest.mark.gpu
def test_long_integers_and_a_large_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    filling, query, _ = case(torch.randint(1, 600, (150,), generator=generator).tolist())
    batch = filling.batch
    wide = BatchView(
        batch.kv_indptr.long(), batch.kv_indices.long(), batch.rows.int(), batch.windows
    )
    assert_right(dataclasses.replace(filling, batch=wide), query, None)


@pytest.mark.gpu
def test_values_beyond_the_first_bound_keep_their_size() -> None:
    """Scales that grow a thousandfold along a sequence, and logits that grow with them."""
    filling, query, _ = case((4000,), sink=0, recent=0)
    order, affine = filling.batch.kv_indices.long(), filling.cache.affine
    growth = torch.logspace(-3, 3, 4000, device="cuda")[:, None, None]
    affine[order] = (affine[order].float() * growth).to(affine.dtype)
    assert_right(filling, query, None, sm_scale=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(8192,), (1,), (700,), LENGTHS, (0, 5, 0, 900)], ids=str)
@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("tiles", tuning.VARIANTS, ids=str)
def test_variants(tiles: tuning.CudaTiles, lengths: tuple[int, ...], stable: bool) -> None:
    assert_right(*case(lengths, heads=8), tiles=tiles, stable=stable)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_stable", [False, True])
@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.parametrize("tiles", tuning.VARIANTS, ids=str)
def test_a_launch_that_starts_early_reads_what_the_one_before_wrote(
    tiles: tuning.CudaTiles, heads: int, prefix_stable: bool
) -> None:
    """The query of every launch is the output of the one before."""
    filling, query, _ = case((1000,), heads=heads)
    options = {"sm_scale": 0.1, "tiles": tiles, "prefix_stable": prefix_stable}
    options |= {"workspace": workspace_for(filling, query)}

    def chain(wait: bool) -> torch.Tensor:
        x, given = query, (filling.cache, filling.batch)
        for i in range(20):
            x = cuda.decode_attention(10 * x, *given, same_batch=i > 0, **options)
            x = cuda.decode_attention(x, *given, same_batch=True, **options)
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert want.isfinite().all()
    assert all(torch.equal(chain(False), want) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("length", [9000, 5])
def test_the_drafts_of_a_request_alone(length: int) -> None:
    filling, query, drafts = case((length,), 4, heads=8)
    assert drafts is not None and drafts.mask is not None
    indptr, rows = filling.batch.kv_indptr[:2], filling.batch.rows[:1]
    batch = dataclasses.replace(filling.batch, kv_indptr=indptr, rows=rows)
    options = {"sm_scale": 0.1, "drafts": Drafts(4, drafts.mask[:4])}
    assert_as_good_as_torch(
        cuda.decode_attention(query[:4], filling.cache, batch, **options),
        lambda q: reference.decode_attention(q, filling.cache, batch, **options),
        [query[:4]],
    )


@pytest.mark.gpu
def test_a_chain_of_one_draft_is_a_decode_step() -> None:
    filling, query, drafts = case(count=1, tree=False, sink=0, ring_start=0)
    got = cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1, drafts=drafts)
    want = cuda.decode_attention(query, filling.cache, filling.batch, sm_scale=0.1)
    torch.testing.assert_close(got, want)


@pytest.mark.gpu
def test_the_dispatcher_takes_the_kernel_for_drafts(caplog: pytest.LogCaptureFixture) -> None:
    filling, query, drafts = case(count=4)
    got, want = (
        op(query, filling.cache, filling.batch, sm_scale=0.1, drafts=drafts)
        for op in (dispatch.decode_attention, cuda.decode_attention)
    )
    assert torch.equal(got, want)
    assert not [x for x in caplog.records if x.name == dispatch.__name__]


@pytest.mark.gpu
def test_a_graph_has_layers_of_different_widths() -> None:
    """One graph, one workspace, two layers; each with the results of its own call."""
    (narrow, query, _), (wide, _, _) = (case(bits=bits) for bits in ((2, 2), (4, 2)))
    layers = [dataclasses.replace(wide, batch=narrow.batch), narrow]
    workspace = max((workspace_for(x, query) for x in layers), key=lambda x: x.scratch.numel())
    outs = [torch.empty_like(query) for _ in layers]

    def step() -> None:
        options = {"sm_scale": 0.1, "workspace": workspace}
        for i, (layer, out) in enumerate(zip(layers, outs, strict=True)):
            given = {**options, "out": out, "same_batch": i > 0}
            cuda.decode_attention(query, layer.cache, layer.batch, **given)

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
@pytest.mark.parametrize("count", [0, 4])
def test_a_graph_follows_lengths_slots_masks_and_padding(count: int) -> None:
    """Captured once, replayed after the batch changed in place; padding rows read the dummy slot
    and row."""
    filling, query, drafts = case((1000, 77, 300, 5), count)
    cache, batch = filling.cache, filling.batch
    out = torch.empty_like(query)
    run = {"sm_scale": 0.1, "workspace": workspace_for(filling, query, drafts), "out": out}
    run["drafts"] = drafts
    cuda.decode_attention(query, cache, batch, **run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.zero_()
        cuda.decode_attention(query, cache, batch, **run)
    if drafts is None:
        for store in cache.stores:
            store[0] = 0
        batch.kv_indptr.copy_(torch.tensor([0, 1000, 1077, 1078, 1079]))
        batch.kv_indices[1077:1079] = 0
        batch.rows[2:] = 0
    else:
        other = random_cache(
            [9, 1200, 0, 99, 4], cache.k_spec,
            num_kv_heads=2, drafts=4, seed=1, dtype=HALF, device="cuda",
        )  # fmt: skip
        for target, source in zip(cache.stores, other.cache.stores, strict=True):
            poison(target)[: len(source)].copy_(source)
        poison(batch.kv_indices)[: len(other.batch.kv_indices)] = other.batch.kv_indices
        batch.kv_indptr.copy_(other.batch.kv_indptr)
        batch.rows.copy_(other.batch.rows)
        for x, y in zip(batch.windows.tensors, other.batch.windows.tensors, strict=True):
            x.copy_(y)
        assert drafts.mask is not None
        drafts.mask.copy_(random_trees(6, 4, "cuda")[4:])
    query.normal_()
    graph.replay()
    assert_as_good_as_torch(
        out,
        lambda q: reference.decode_attention(q, cache, batch, sm_scale=0.1, drafts=drafts),
        [query],
    )
