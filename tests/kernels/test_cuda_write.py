"""The CUDA write kernel: its parameters, compiled where NVRTC is, and on a GPU."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_write_jobs import (
    LONG,
    PLAIN,
    STORES,
    assert_same,
    bfloat16_job,
    bits,
    differing,
    fed_back,
    integers,
    on_cpu,
)
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import BatchView, Transforms
from oscar_kernels.chips import WRITE, Target
from oscar_kernels.decode_attention import cuda as decode
from oscar_kernels.decode_attention import tuning
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.kv_write import cuda, dispatch
from oscar_kernels.kv_write import launcher as triton_launcher
from oscar_kernels.kv_write.prepared import prepared
from oscar_kernels.spec import QuantSpec, code_bytes


@pytest.mark.parametrize("divisor", [2, 3, 5, 6, 7, 8, 12, 48, 96, 1000])
def test_division_by_multiplication_is_exact(divisor: int) -> None:
    magic, shift = cuda.divider(divisor)
    assert magic < 1 << 32
    top = (1 << 31) - 1
    for n in [*range(5000), *range(top - 2000, top + 1), *range(top // divisor * divisor - 3, top)]:
        assert (n * magic >> 32) >> shift == n // divisor


def test_blocks_are_shared_by_cost_and_no_tile_is_without_one() -> None:
    assert cuda.shares((8, 8, 32), (1, 1, 1), (10, 10, 10), 132) == (8, 8, 32)
    assert cuda.shares((1024, 1024), (1, 1), (13, 11), 132) == (71, 61)
    assert cuda.shares((1024, 1024, 4), (8, 8, 8), (10, 10, 10), 132) == (64, 64, 4)


SIDES = st.tuples(st.integers(1, 3000), st.sampled_from([1, 2, 8]), st.integers(1000, 1500))


@settings(max_examples=200)
@given(st.lists(SIDES, min_size=1, max_size=3))
def test_no_block_is_left_that_a_side_could_use(sides: list[tuple[int, int, int]]) -> None:
    matrices, costs = tuple(m for _, m, _ in sides), tuple(cost for _, _, cost in sides)
    tiles = tuple(m * -(-n // m) for n, m, _ in sides)
    found = cuda.shares(tiles, matrices, costs, 132)
    assert all(0 < x <= n and x % m == 0 for x, n, m in zip(found, tiles, matrices, strict=True))
    assert sum(found) <= 132 and all(
        x == n or sum(found) + m > 132 for x, n, m in zip(found, tiles, matrices, strict=True)
    )


def test_few_rows_have_a_kernel_of_their_own() -> None:
    """The one for few rows where every block of it has a multiprocessor: 128 requests of an 8B
    model, not 256."""

    def launch(tokens: int, change: Any = lambda job: job) -> cuda.Launch:
        job = change(bfloat16_job(*PLAIN, tokens=tokens, heads=8, group=4, mean=False))
        rows = job.key, job.value, job.cache, job.transforms, job.targets, job.windows
        return cuda.arguments(*rows, "all", job.query, torch.empty_like(job.query), None, 132)

    found = {n: launch(n) for n in (1, 23, 64, 128, 256)}
    assert {n: (x.step, x.blocks) for n, x in found.items()} == {
        1: (True, 4), 23: (True, 70), 64: (True, 96), 128: (True, 130), 256: (False, 132)
    }  # fmt: skip
    assert [x.parameters.block_rows for x in found.values()] == [16, 16, 32, 48, 64]
    carried = [launch(n, fed_back) for n in (16, 64, 512)]
    assert [x.step for x in carried] == [True, False, False]
    assert carried[-1].parameters.k.blocks > carried[-1].parameters.v.blocks


def test_what_is_compiled_ahead_knows_of_feedback() -> None:
    plain, gpu = bfloat16_job(*PLAIN, tokens=8192), Target(WRITE, 1 << 18, 132, 13000)
    found = {
        dispatch.planned(job.key, job.value, job.cache, job.transforms, job.targets, gpu)
        for job in (plain, fed_back(plain))
    }
    assert len(found) == 2 and None not in found


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize(("dim", "warpgroups"), [(128, 1), (128, 3), (128, 4), (256, 3)])
def test_source_compiles(dim: int, warpgroups: int, feedback: bool, compiler: Path) -> None:
    specs = QuantSpec(dim, 128, 0.96), QuantSpec(64, 16, 0.92)
    made = cuda.WriteVariant(*specs, LONG, feedback, warpgroups)
    assert b"oscar_write" in cuda.build(made, 0).code()
    assert max(made.shared_bytes(step=step) for step in (False, True)) <= 227 * 1024


def test_what_the_kernel_does_not_have_is_told() -> None:
    job = bfloat16_job(QuantSpec(128, 128, 0.96))

    def reason(job: Any, **options: Any) -> str:
        return str(cuda.unsupported(job.key, job.value, job.cache, job.targets, **options))

    assert "float16" in reason(replace(job, key=job.key.half()))
    assert "head_dim 96" in reason(bfloat16_job(QuantSpec(96, 96)))
    assert "rank 64" in reason(bfloat16_job(QuantSpec(128, 128, 0.5)))
    assert "16 bytes" in reason(
        job, query=torch.zeros(21 * 4 * 128 + 1).bfloat16()[1:].view(21, 4, 128)
    )
    if not torch.cuda.is_available():
        assert "needs an NVIDIA GPU" in reason(job)
    short = replace(job.targets, rows=job.targets.rows.short())
    with pytest.raises(cuda.NoWriteVariant, match="int16"):
        replace(job, targets=short).write(cuda)


@pytest.mark.gpu
def test_on_a_gpu_the_other_kernel_is_taken_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    dispatch._tell.cache_clear()
    odd = bfloat16_job(QuantSpec(32, 32, 0.9))
    for asked, told in (("0", 0), ("1", 1)):
        monkeypatch.setenv(dispatch.VARIABLE, asked)
        assert_same(dispatch, odd, error=2**-16, allowed=3, rows=2**-7)
        assert len([x for x in caplog.records if "head_dim 32" in x.getMessage()]) == told


def test_matrices_are_prepared_once_and_kept_as_long_as_their_transforms() -> None:
    job = bfloat16_job(*PLAIN, per_head=True)
    first = prepared(job.transforms)
    assert prepared(job.transforms) is first
    one = job.transforms.k_forward
    same = prepared(Transforms(one, one, job.transforms.v_forward, one))
    assert same.q is same.k and torch.equal(same.k, first.k)
    assert not same.k_mean.view(torch.bfloat16).any()
    gone = weakref.ref(same.k)
    del same
    gc.collect()
    assert gone() is None
    used = sum(x.nbytes for x in (first.k, first.v, first.q, first.k_mean))
    theirs = sum(getattr(job.transforms, x).nbytes for x in ("k_forward", "q_partner", "v_forward"))
    assert used <= theirs + 32 * len(one) * one.shape[1]


GPU_CASES = [
    (QuantSpec(128, 128, 0.96), QuantSpec(128, 128, 0.92)),
    (QuantSpec(128, 32, 0.92), QuantSpec(64, 64)),
    (QuantSpec(64, 64, 0.96, "bfloat16"), QuantSpec(128, 64, 0.985, "bfloat16")),
    (QuantSpec(128, 128, 0.98, bits=4), QuantSpec(128, 128, 0.92)),
    (QuantSpec(64, 64, bits=4), QuantSpec(128, 32, 0.96, bits=4)),
]
WIDE_CASES = [
    (QuantSpec(256, 128, 0.96), QuantSpec(256, 128, 0.92)),
    (QuantSpec(256, 256, 0.92), QuantSpec(256, 64)),
    (QuantSpec(256, 64), QuantSpec(128, 128, 0.92)),
    (QuantSpec(256, 128, 0.96, bits=4), QuantSpec(256, 128, 0.92, bits=4)),
]
"""Rows that have the kernel for few rows alone."""
WINDOWS = {"heads": 8, "group": 3, "sink": 64, "recent": 256}


@pytest.mark.gpu
@pytest.mark.parametrize(("k_spec", "v_spec"), GPU_CASES + WIDE_CASES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 700, 5000])
def test_on_a_gpu(k_spec: QuantSpec, v_spec: QuantSpec, per_head: bool, tokens: int) -> None:
    options = WINDOWS | {"ring_rows": 263 if per_head else 256, "per_head": per_head}
    options["mean"] = per_head
    job = bfloat16_job(k_spec, v_spec, tokens=tokens, **options)
    values = tokens * 8 * (k_spec.head_dim + v_spec.head_dim)
    for parts in ("all", "slots", "windows"):
        assert_same(cuda, job, error=2**-16, allowed=values // 5000 + 5, rows=2**-7, parts=parts)
    together, _ = job.write(cuda)
    for chosen in (slice(0, 1), slice(tokens // 3, tokens // 2 + 1), slice(0, tokens)):
        some = job.only(chosen)
        alone, slots = some.write(cuda)[0], some.targets.out_loc.long()
        assert torch.equal(alone.codes[slots], together.codes[slots])
        assert torch.equal(bits(alone.affine[slots]), bits(together.affine[slots]))


@pytest.mark.gpu
@pytest.mark.parametrize(("k_spec", "v_spec"), GPU_CASES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_the_kernel_for_few_rows_writes_the_same_bytes(
    k_spec: QuantSpec, v_spec: QuantSpec, per_head: bool, tokens: int
) -> None:
    options = WINDOWS | {"per_head": per_head, "mean": per_head}
    job = bfloat16_job(k_spec, v_spec, tokens=tokens, **options)
    slots, _ = job.write(cuda, parts="slots", query=None, step=False)
    whole, _ = job.write(cuda, step=False)
    assert not differing(slots, whole) & {"codes", "affine"}
    for parts in ("all", "slots", "windows"):
        few, query = job.write(cuda, parts=parts, step=True)
        many, other = job.write(cuda, parts=parts, step=False)
        assert not differing(few, many) and torch.equal(bits(query), bits(other))


@pytest.mark.gpu
@pytest.mark.parametrize(("k_spec", "v_spec"), GPU_CASES + WIDE_CASES, ids=str)
@pytest.mark.parametrize("tokens", [1, 17, 2000])
def test_errors_of_keys_are_carried_on_alike_by_all_kernels(
    k_spec: QuantSpec, v_spec: QuantSpec, tokens: int
) -> None:
    """Sums are exact, so rows differ from the reference's only where the order in which errors are
    added up moves a channel over a tie."""
    job = fed_back(integers(bfloat16_job(k_spec, v_spec, tokens=tokens, **WINDOWS)))
    few, many = (job.write(cuda, step=step)[0] for step in (True, False))
    assert not differing(few, many)
    want, slots = on_cpu(job).write(reference)[0], job.targets.out_loc.long().cpu()
    for name, got in (("cuda", job.write(cuda)[0]), ("triton", job.write(triton_launcher)[0])):
        got = on_cpu(got)
        assert torch.equal(got.affine[slots], want.affine[slots]), name
        keys = (one.codes[slots, :, : code_bytes(k_spec)] for one in (got, want))
        differ = torch.ne(*keys).any(-1)  # of values, ties differ
        assert int(differ.sum()) <= 1 + 0.02 * differ.numel(), (name, int(differ.sum()))


@pytest.mark.gpu
def test_both_kernels_give_nearly_the_same_codes_and_the_same_each_time() -> None:
    job = bfloat16_job(*PLAIN, tokens=8192, heads=8, mean=False)
    first, again = (job.write(cuda, query=None)[0] for _ in "ab")
    assert not differing(first, again) & {"codes", "affine"}
    triton = job.write(triton_launcher, query=None)[0]
    assert int((first.codes != triton.codes).sum()) <= job.key.numel() // 50_000


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_stable", [False, True])
@pytest.mark.parametrize("tiles", tuning.VARIANTS, ids=str)
def test_attention_behind_a_write_sees_it(tiles: tuning.CudaTiles, prefix_stable: bool) -> None:
    """Attention may start while the write runs; it must wait for the ring rows and the query.

    With `prefix_stable` only the newest token is written, as in a decode step."""
    job = bfloat16_job(*PLAIN, tokens=2000, heads=8, group=4, sink=64, recent=256, mean=False)
    cache, _ = job.write(cuda)
    one = (job.targets.rows == 3).nonzero()[:, 0]  # the request that begins at position 0
    new = one[-1:] if prefix_stable else one
    batch = BatchView(
        torch.tensor([0, len(one)], device="cuda").int(), job.targets.out_loc[one].int(),
        job.targets.rows[one][:1], job.windows,
    )  # fmt: skip

    numel = decode.decode_workspace_numel(cache, job.query.shape[1], 1)
    options = {"sm_scale": 0.1, "tiles": tiles, "prefix_stable": prefix_stable}
    options |= {"workspace": Workspace.allocate(numel, "cuda")}

    def chain(wait: bool) -> Tensor:
        out, query = [], job.query[new]
        for i in range(10):
            rows = (job.key[one].roll(i, 0)[-len(new) :], job.value[one].roll(i, 0)[-len(new) :])
            torch.cuda.synchronize()
            to = cache, job.transforms, job.only(new).targets
            x = cuda.write_kv_int2(*rows, *to, windows=job.windows, query=query, parts="all")
            if wait:
                torch.cuda.synchronize()
            again = {"same_batch": i > 0, **options}
            out.append(decode.decode_attention(x[-1:], cache, batch, **again))
        return torch.stack(out)

    want = chain(True)
    assert want.isfinite().all() and all(torch.equal(chain(False), want) for _ in range(3))


@pytest.mark.gpu
def test_a_graph_replays_the_cuda_kernel_with_new_tokens() -> None:
    job = bfloat16_job(QuantSpec(128, 128, 0.96), tokens=64, heads=8, sink=64, recent=256)
    want, want_query = job.write(cuda)
    held = replace(job, key=torch.zeros_like(job.key), value=torch.zeros_like(job.value))
    cache = replace(job.cache, **{name: getattr(job.cache, name).clone() for name in STORES})
    out = want_query.clone()
    options = {"windows": job.windows, "query": job.query, "query_out": out.zero_()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.write_kv_int2(held.key, held.value, cache, job.transforms, job.targets, **options)
    held.key.copy_(job.key), held.value.copy_(job.value)
    graph.replay()
    assert not differing(cache, want)
    assert torch.equal(out, job.write(cuda)[1])
