"""The CUDA decode kernel, run by an emulator where g++ is, against plain torch in float64."""

import ctypes
import math
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch
from emulation import Emulator
from random_caches import (
    Filling,
    assert_as_good_as_torch,
    errors_beside_bfloat16,
    orthogonal,
    poison,
    random_cache,
    random_trees,
)
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import Drafts
from oscar_kernels.decode_attention import cuda, tuning
from oscar_kernels.decode_attention import variant as variants
from oscar_kernels.spec import QuantSpec

SHARED = 227 << 10
"""Bytes of shared memory of a block, as on compute capability 9.0."""
SINK, RECENT = 16, 40
LENGTHS = (0, 1, 15, 17, 40, 57, 72, 73, 88, 89, 300)
"""Committed tokens: none, fewer than the sink, than the window, than both; then 1, 16, 17, 32, 33
and 244 that a decode step reads from INT2."""
OTHER_LENGTHS = (0, 97, 184, 185)
"""With 128 INT2 tokens, which fill a tile of eight warps and two KV heads, and with 129."""

HALF, runs = torch.bfloat16, count()


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("emulator")
    return Emulator(cuda.SOURCE, "decode.cpp", cuda.Params, folder)


class Job(NamedTuple):
    """What a launch is given, and what it should give."""

    filling: Filling
    query: Tensor
    drafts: Drafts | None
    options: dict[str, Any]

    def expected(self, query: Tensor) -> Tensor:
        """In the dtype of the query."""
        cache, batch = self.filling.cache, self.filling.batch
        return reference.decode_attention(query, cache, batch, drafts=self.drafts, **self.options)


def job(
    nodes: int = 0,
    *,
    tree: bool = False,
    group: int = 4,
    heads: int = 2,
    head_dim: int = 128,
    bits: tuple[int, int] = (2, 2),
    lengths: tuple[int, ...] = LENGTHS,
    spare: int = 0,
    starts: int | None = None,
    **options: Any,
) -> Job:
    """A batch; `nodes` drafts of each request, whose codes are poison, or none.

    The last request is padding. A ring has `spare` rows more than it needs. Sinks
    and rings hold positions from `starts` on, or each of them all, some or none.
    """
    k_spec, v_spec = (QuantSpec(head_dim, head_dim, 0.96, bits=x) for x in bits)
    found = [*(length + nodes for length in lengths), 0]
    filling = random_cache(
        found, k_spec, v_spec,
        num_kv_heads=heads, sink=SINK, recent=RECENT, drafts=nodes, dtype=torch.bfloat16,
        ring_rows=RECENT + max(0, nodes - 1) + spare, sink_from=starts, ring_start=starts,
    )  # fmt: skip
    for length, end in zip(found, filling.batch.kv_indptr.tolist()[1:], strict=True):
        slots = filling.batch.kv_indices[end - min(nodes, length) : end].long()
        filling.cache.affine[slots] = torch.nan
    query = torch.randn(len(found) * max(1, nodes), heads * group, head_dim).bfloat16()
    drafts = Drafts(nodes, random_trees(len(found), nodes) if tree else None) if nodes else None
    return Job(filling, query, drafts, {"sm_scale": 0.1, "logit_cap": 0.0, **options})


def emulate(
    emulator: Emulator,
    job: Job,
    *,
    blocks: int,
    merged: int,
    stable: bool,
    whole: bool = False,
    tiles: tuning.CudaTiles = tuning.CUDA,
) -> Tensor:
    """A plan and both stages with poisoned scratch and output; `merged` rows for each block of
    stage 2. One warp takes all rows of a KV head in large batches, or if `whole`."""
    cache, batch, query, drafts = job.filling.cache, job.filling.batch, job.query, job.drafts
    assert variants.misfit(query, cache, batch, drafts) is None
    options = {"o_partner": None, "sink_logits": None, **job.options}
    partner, sinks = options["o_partner"], options["sink_logits"]
    learned = sinks is not None
    made = variants.variant(
        query, cache, batch, options["logit_cap"], tiles, drafts, learned_sinks=learned
    )
    made = variants.fitting(replace(made, whole=made.whole or whole), SHARED)
    library, message = emulator.library(made.flags), ctypes.create_string_buffer(201)
    requests, heads = len(batch.rows), cache.num_kv_heads
    sizes = cuda.scratch_sizes(cache, made.rows * heads, requests, blocks)
    scratch = tuple(torch.full((n,), math.nan) for n in sizes)
    out = poison(query.new_empty(*query.shape[:2], cache.v_spec.head_dim))
    options |= {"drafts": drafts, "prefix_stable": stable}
    given = cuda.arguments(query, cache, batch, scratch=scratch, out=out, blocks=blocks, **options)
    lists = (batch.kv_indptr, batch.kv_indices, batch.rows, *batch.windows.tensors)
    rest = (partner, sinks, drafts.mask if drafts else None)
    library.forget()
    for x in (query, *cache.stores, *lists, *scratch, *(x for x in rest if x is not None)):
        library.allow(ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(_bytes(x)))
    rows, run = query.shape[0] * (query.shape[1] // heads), next(runs)
    for stage, columns, lines, size in (
        (-1, 1, 1, 8 * requests + 4),
        (0, blocks, 1, variants.ring_bytes(made.flags)),
        (merged, -(-rows // merged) * made.slices, heads, made.partner_bytes),
    ):
        good = library.emulate(
            stage, ctypes.byref(given), columns, lines, size, run % 2 == 0, run, message
        )
        assert good, message.value.decode()
    return out


def _bytes(x: Tensor) -> int:
    """That the elements of a tensor cover, from its first one on."""
    last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size() if x.numel() else 0


def assert_right(emulator: Emulator, job: Job) -> None:
    """Shares of a block end within a request or take in several; with the tolerance of the tests on
    a GPU."""
    nodes = job.drafts.count if job.drafts else 1
    for blocks, merged, stable in ((5, 1, False), (16, 8, True), (3, 24, True)):
        out = emulate(emulator, job, blocks=blocks, merged=merged, stable=stable)
        assert_as_good_as_torch(out, job.expected, [job.query])
        assert not out[-nodes:].any()


@pytest.mark.parametrize(("group", "options"), [
    (1, {"head_dim": 64}), (4, {"bits": (4, 2)}), (16, {"heads": 1}),
], ids=["1 row of 64", "4 rows, K4V2", "16 rows"])  # fmt: skip
def test_a_decode_step(emulator: Emulator, group: int, options: dict[str, Any]) -> None:
    assert_right(emulator, job(group=group, starts=0, **options))
    assert_right(emulator, job(group=group, spare=7, lengths=OTHER_LENGTHS, **options))


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("nodes", "options"), [
    (4, {"group": 1}), (3, {"group": 2, "bits": (4, 2)}), (4, {"group": 4}), (8, {"group": 4}),
], ids=["4 rows", "6 rows, K4V2", "16 rows", "32 rows"])  # fmt: skip
def test_drafts(emulator: Emulator, nodes: int, options: dict[str, Any], tree: bool) -> None:
    assert_right(emulator, job(nodes, tree=tree, starts=0, **options))
    assert_right(emulator, job(nodes, tree=tree, spare=5, lengths=OTHER_LENGTHS, **options))


def test_the_transform_of_values_is_undone(emulator: Emulator) -> None:
    partner = orthogonal(2, 128)
    assert_right(emulator, job(4, tree=True, lengths=(3, 90), o_partner=partner))


@pytest.mark.parametrize(("nodes", "options"), [
    (11, {"group": 3}), (8, {"group": 8, "heads": 1, "head_dim": 256}),
    (3, {"group": 8, "heads": 1, "head_dim": 256}), (8, {"group": 4, "heads": 1}),
], ids=["33 rows", "64 rows of 256", "24 rows of 256", "32 rows of a head"])  # fmt: skip
def test_rows_of_over_two_warps(emulator: Emulator, nodes: int, options: dict[str, Any]) -> None:
    lengths = (0, 17, 73, 150)
    assert_right(emulator, job(nodes, tree=True, starts=0, lengths=lengths, **options))


@pytest.mark.parametrize(("group", "tree"), [(4, True), (8, False)], ids=["a tree", "a step"])
def test_learned_sinks(emulator: Emulator, group: int, tree: bool) -> None:
    """Of the query heads, or of every query row where keys are centred; without any effect, or with
    nearly all of the weight."""
    nodes, heads = (2, 2 * group) if tree else (0, 2 * group)
    rows = (len(LENGTHS) + 1) * max(1, nodes)
    each = torch.linspace(-8, 8, rows * heads).reshape(heads, rows).T
    own = torch.randn(heads).expand(rows, -1)
    for sinks in (each, own, torch.full((rows, heads), -1e4)):
        shape = {"group": group, "head_dim": 64, "sink_logits": sinks}
        assert_right(emulator, job(nodes, tree=tree, starts=0, **shape))


@pytest.mark.parametrize("merged", [1, 4, 24])
def test_rows_of_256_channels(emulator: Emulator, merged: int) -> None:
    """Blocks of stage 2 have a slice of the output channels each."""
    partner = orthogonal(1, 256)
    wide = job(group=8, heads=1, head_dim=256, lengths=(0, 17, 150), starts=0, o_partner=partner)
    out = emulate(emulator, wide, blocks=3, merged=merged, stable=True)
    assert_as_good_as_torch(out, wide.expected, [wide.query])


@pytest.mark.parametrize("merged", [2, 4, 16])
def test_a_request_alone(emulator: Emulator, merged: int) -> None:
    filling, query, _, options = job(4, lengths=(300,))
    batch = filling.batch
    batch = replace(batch, kv_indptr=batch.kv_indptr[:2], rows=batch.rows[:1])
    alone = Job(replace(filling, batch=batch), query[:4], Drafts(4), options)
    out = emulate(emulator, alone, blocks=9, merged=merged, stable=True)
    assert_as_good_as_torch(out, alone.expected, [alone.query])


@pytest.mark.parametrize(("group", "head_dim", "dtype", "sharp", "most"), [
    (4, 128, HALF, 1, 1), (8, 128, torch.float16, 1, 1),
    (8, 64, HALF, 3, 3), (8, 128, HALF, 3, 3), (16, 128, HALF, 3, 3), (8, 256, HALF, 3, 3),
])  # fmt: skip
def test_errors_beside_attention_in_bfloat16(
    emulator: Emulator, group: int, head_dim: int, dtype: torch.dtype, sharp: float, most: float
) -> None:
    """Only a query of bytes has more error, the more the sharper attention is."""
    shape = {"group": group, "heads": 1, "head_dim": head_dim, "sm_scale": sharp * head_dim**-0.5}
    case = job(lengths=(700, 400), starts=10_000, **shape)
    given = case._replace(query=case.query.to(dtype))
    out = emulate(emulator, given, blocks=5, merged=4, stable=True)[:2]
    scale = case.options["sm_scale"]
    ours, theirs = errors_beside_bfloat16(out, case.filling, case.query[:2], scale)
    assert (ours < most * theirs).all()


@pytest.mark.parametrize(("group", "dtype"), [(4, HALF), (8, HALF), (8, torch.float16)])
@pytest.mark.parametrize("sharp", [3, 30])
def test_maxima_that_rise(emulator: Emulator, group: int, dtype: torch.dtype, sharp: float) -> None:
    """Logits of later tiles are far above those of the first, by more than a float's range."""
    case = job(group=group, heads=1, lengths=(700, 90), starts=10_000, sm_scale=0.01)
    case.query[:] = torch.randint(-8, 8, case.query.shape) * 16  # exact as bytes
    case.query[..., 0] = 127
    keys, indices = case.filling.cache.affine[..., :2], case.filling.batch.kv_indices.long()
    keys[indices] *= torch.linspace(0.01, sharp, len(indices)).reshape(-1, 1, 1).to(keys.dtype)
    given = case._replace(query=case.query.to(dtype))
    out = emulate(emulator, given, blocks=2, merged=4, stable=True)
    assert_as_good_as_torch(out, case.expected, [case.query])


def test_what_rounding_takes_from_all_channels_is_given_back(emulator: Emulator) -> None:
    """Every channel of the query but one is rounded down by 0.375 of a step. That moves the logit
    of a token by its scale, unless it counts from the middle of the codes."""
    case = job(group=8, heads=1, lengths=(700,), starts=10_000, sm_scale=0.002)
    keys = case.filling.cache.affine[..., :2]  # of tokens whose scales differ, as in a model
    keys *= torch.rand(len(keys), 1, 1).add(0.1).to(keys.dtype)
    case.query[:] = 10.375
    case.query[..., 5] = 127
    out = emulate(emulator, case, blocks=5, merged=4, stable=True)[:1].double()
    exact = case.expected(case.query.double())[:1]
    assert (out - exact).norm() < 0.02 * exact.norm()  # 0.039 without


def test_one_block_takes_more_tiles_than_it_has_stages(emulator: Emulator) -> None:
    """Once with copies that land late, and once with copies that land as soon as they may."""
    long = job(bits=(4, 2), lengths=(900, 700), starts=0)
    for stable in (False, True):
        out = emulate(emulator, long, blocks=1, merged=8, stable=stable)
        assert_as_good_as_torch(out, long.expected, [long.query])


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize(("start", "head_dim"), [(0, 128), (5, 128), (2, 256)])
def test_the_beginning_of_a_segment_counts_as_tiles(
    emulator: Emulator, start: int, head_dim: int, blocks: int
) -> None:
    """Shares end before, in and behind one; some have nothing else."""
    tiles = replace(tuning.CUDA, start=start)
    case = job(group=4, head_dim=head_dim, lengths=(300, 0, 40, 5), starts=0)
    out = emulate(emulator, case, blocks=blocks, merged=4, stable=blocks % 2 == 0, tiles=tiles)
    assert_as_good_as_torch(out, case.expected, [case.query])
