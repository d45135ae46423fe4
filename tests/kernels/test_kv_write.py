"""The write kernel against its reference: bytes equal but for counted ties, and nothing else
touched."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kv_write_jobs import STORES, assert_same, bits, differing, fed_back, integers, make_job

from oscar_kernels import reference
from oscar_kernels.cache import TokenTargets
from oscar_kernels.kv_write import dispatch, launcher
from oscar_kernels.spec import PLAIN, QuantSpec

SHAPES = [
    (QuantSpec(64, 64, 0.96), None),
    (QuantSpec(128, 128, 0.96), QuantSpec(128, 128, 0.92)),
    (QuantSpec(128, 32, 0.92), QuantSpec(128, 64)),
    (QuantSpec(96, 48, 0.96), QuantSpec(96, 96, 0.92)),
    (QuantSpec(192, 192, 0.96), QuantSpec(128, 128, 0.92)),
    (QuantSpec(256, 128, 0.92), QuantSpec(64, 16, 0.5)),
    (QuantSpec(512, 128, 0.96), QuantSpec(512, 256, 0.92)),
    (QuantSpec(16, 4, 1.0), QuantSpec(32, 8, 0.01)),
    (QuantSpec(128, 128, 0.99, bits=4), QuantSpec(128, 128, 0.92)),
    (QuantSpec(96, 48, 0.96), QuantSpec(64, 16, 0.98, bits=4)),
    (QuantSpec(16, 4, bits=4), QuantSpec(24, 24, 0.01, bits=4)),
]


@pytest.mark.parametrize(("k_spec", "v_spec"), SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_bytes_equal_the_reference(
    k_spec: QuantSpec, v_spec: QuantSpec | None, per_head: bool
) -> None:
    assert_same(launcher, make_job(k_spec, v_spec, per_head=per_head, mean=per_head))


ROTARY = QuantSpec(32, 32, bits=PLAIN)


@pytest.mark.parametrize("spec", [QuantSpec(128, 128, 0.96), QuantSpec(512, 128)], ids=str)
@pytest.mark.parametrize("carried", [False, True])
def test_latents_and_their_rotary_keys(spec: QuantSpec, carried: bool) -> None:
    """The rotary part of a query and of a row stays as it is."""
    job = make_job(spec, ROTARY, heads=1, group=3, mean=False, tokens=7 if carried else 21)
    job = replace(job, value=job.value.bfloat16().float())  # the interpreter cuts bits off
    job = fed_back(job) if carried else job
    assert_same(launcher, job)
    got = torch.full_like(job.key, math.nan), torch.full_like(job.value, math.nan)
    _, query = job.write(launcher, rows_out=got)
    assert query is not None and torch.equal(got[1], job.value)
    assert torch.equal(query[..., spec.head_dim :], job.query[..., spec.head_dim :])
    for parts, touched in (("slots", set(STORES[:2])), ("windows", set(STORES[2:]))):
        assert differing(job.write(launcher, parts=parts)[0], job.cache) == touched


@pytest.mark.parametrize("parts", ["slots", "windows", "all"])
@pytest.mark.parametrize("query", [False, True])
def test_parts_leave_the_rest_alone(parts: str, query: bool) -> None:
    job = make_job(QuantSpec(32, 32, 0.9), index=torch.int64)
    assert_same(launcher, job, parts=parts, **({} if query else {"query": None}))
    cache, _ = job.write(launcher, parts=parts)
    touched = {"slots": set(STORES[:2]), "windows": set(STORES[2:]), "all": set(STORES)}
    assert differing(cache, job.cache) == touched[parts]


@pytest.mark.parametrize(
    ("sink", "recent", "ring_rows"), [(0, 0, 0), (0, 7, 7), (4, 0, 0), (30, 30, 30), (4, 7, 11)]
)
def test_any_windows(sink: int, recent: int, ring_rows: int) -> None:
    windows = {"sink": sink, "recent": recent, "ring_rows": ring_rows}
    assert_same(launcher, make_job(QuantSpec(16, 16, 0.9), tokens=50, **windows))


def test_a_token_has_the_same_bytes_whatever_it_is_written_with() -> None:
    job = integers(make_job(QuantSpec(64, 32, 0.96), tokens=37, sink=40, recent=40))
    together, query = job.write(launcher)
    for chosen in (slice(0, 1), slice(5, 6), slice(9, 30), torch.tensor([36, 3])):
        some = job.only(chosen)
        alone, some_query = some.write(launcher)
        slots = some.targets.out_loc.long()
        assert torch.equal(alone.codes[slots], together.codes[slots])
        assert torch.equal(bits(alone.affine[slots]), bits(together.affine[slots]))
        assert torch.equal(some_query, query[chosen])
        rows, places = some.targets.rows.long(), some.targets.positions.long() % 40
        assert torch.equal(alone.ring_k[rows, places], together.ring_k[rows, places])


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    assert_same(launcher, make_job(QuantSpec(32, 32, 0.9), tokens=tokens))


def test_rows_and_query_go_where_the_caller_says() -> None:
    job = make_job(QuantSpec(32, 16, 0.9), QuantSpec(16, 16, 0.9))
    got = torch.full_like(job.key, math.nan), torch.full_like(job.value, math.nan)
    want = torch.empty_like(job.key), torch.empty_like(job.value)
    place = torch.full_like(job.query, math.nan)
    _, out = job.write(launcher, query_out=place, rows_out=got, parts="windows")
    job.write(reference, rows_out=want)
    assert out is place and not place.isnan().any()
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-4)


def test_inputs_may_be_slices_of_one_projection() -> None:
    job = make_job(QuantSpec(32, 32, 0.9))
    joined = torch.cat([job.query, job.key, job.value], 1)
    query, key, value = joined.split([job.query.shape[1], 2, 2], 1)
    assert not key.is_contiguous()
    assert_same(launcher, replace(job, query=query, key=key, value=value))


def test_padding_goes_to_the_dummies() -> None:
    job = make_job(QuantSpec(32, 32, 0.9), tokens=12)
    targets = TokenTargets(*(x.clone() for x in vars(job.targets).values()))
    for name, dummy in (("out_loc", 0), ("rows", 0), ("positions", 0), ("ends", 1)):
        getattr(targets, name)[7:] = dummy
    padded, _ = replace(job, targets=targets).write(launcher)
    alone, _ = job.only(slice(0, 7)).write(launcher)
    for name in STORES:
        a, b = bits(getattr(padded, name)), bits(getattr(alone, name))
        assert torch.equal(a[1:], b[1:]) and not torch.equal(a[:1], b[:1]), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_token_harms_no_other(bad: float) -> None:
    job = make_job(QuantSpec(32, 16, 0.9), mean=False)
    broken = replace(job, key=job.key.clone(), value=job.value.clone())
    broken.key[4, 0, 3], broken.value[9, 1] = bad, bad
    good, got = job.write(launcher)[0], broken.write(launcher)[0]
    spared = torch.ones(len(good.codes), dtype=torch.bool)
    spared[job.targets.out_loc[[4, 9]].long().cpu()] = False
    assert torch.equal(got.codes[spared], good.codes[spared])
    assert torch.equal(bits(got.affine[spared]), bits(good.affine[spared]))


def test_large_values_saturate() -> None:
    job = make_job(QuantSpec(32, 32))
    job = replace(job, key=job.key * 1e6, value=job.value * 1e-12)
    cache, _ = job.write(launcher)
    affine = cache.affine[job.targets.out_loc.long()].float()
    assert affine.isfinite().all() and (affine[..., 1] == -65504).any()


@given(
    head_dim=st.sampled_from([16, 32, 48, 64]),
    groups=st.sampled_from([1, 2, 4]),
    ratio=st.floats(0, 1),
    tokens=st.integers(1, 40),
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
def test_random_shapes(
    head_dim: int, groups: int, ratio: float, tokens: int, heads: int, group: int, seed: int
) -> None:
    spec = QuantSpec(head_dim, head_dim // groups, ratio)
    assert_same(launcher, make_job(spec, tokens=tokens, heads=heads, group=group, seed=seed))


@pytest.mark.parametrize(("change", "words"), [
    ({"key": torch.zeros(3, 2, 32)}, "key"),
    ({"query": torch.zeros(21, 3, 32)}, "query"),
    ({"targets": TokenTargets(*[torch.zeros(4)] * 4)}, "targets.out_loc"),
    ({"key": torch.zeros(21, 2, 32).bfloat16()}, "the Triton path cannot run"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(make_job(QuantSpec(32, 32)), **change).write(launcher)


def run_network(wires: Sequence[int], values: Sequence[int]) -> list[int]:
    out = list(values)
    for a, b in zip(wires[::2], wires[1::2], strict=True):
        out[a], out[b] = max(out[a], out[b]), min(out[a], out[b])
    return out


@pytest.mark.parametrize("size", [4, 8, 16])
def test_sorting_networks_sort_every_sequence_of_zeros_and_ones(size: int) -> None:
    from oscar_kernels.kv_write.slot_kernel import sorting

    for values in itertools.product((0, 1), repeat=size):
        assert run_network(sorting(size), values) == sorted(values, reverse=True)


@pytest.mark.parametrize("size", [4, 6, 8, 12, 16])
def test_merging_networks_sort_what_falls_and_then_rises(size: int) -> None:
    from oscar_kernels.kv_write.slot_kernel import merging

    wires = merging(size)
    for fall in range(size + 1):
        for rise in range(fall, size + 1):
            values = [1] * fall + [0] * (rise - fall) + [1] * (size - rise)
            merged = run_network(wires[:-size], values)
            assert [merged[wire] for wire in wires[-size:]] == sorted(values, reverse=True)


GPU_SHAPES: Sequence[tuple[QuantSpec, QuantSpec | None]] = [
    *SHAPES[:5],
    (QuantSpec(256, 256, 0.96), QuantSpec(256, 64, 0.92)),
    (QuantSpec(128, 128, 0.96, "bfloat16"), QuantSpec(128, 128, 0.92, "bfloat16")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("k_spec", "v_spec"), GPU_SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_bfloat16_on_a_gpu(k_spec: QuantSpec, v_spec: QuantSpec | None, per_head: bool) -> None:
    windows = {"sink": 64, "recent": 256, "dtype": torch.bfloat16}
    shape = {"tokens": 700, "heads": 4, "group": 3, "per_head": per_head, "mean": per_head}
    job = make_job(k_spec, v_spec, **shape, **windows)
    values = 700 * 4 * (k_spec.head_dim + (v_spec or k_spec).head_dim)
    assert_same(launcher, job, error=2**-16, allowed=values // 5000, rows=2**-7)
    together, _ = job.write(launcher)
    for chosen in (slice(0, 64), slice(100, 101), slice(300, 363), slice(0, 600)):
        some = job.only(chosen)
        alone, slots = some.write(launcher)[0], some.targets.out_loc.long()
        assert torch.equal(alone.codes[slots], together.codes[slots])
        assert torch.equal(bits(alone.affine[slots]), bits(together.affine[slots]))


@pytest.mark.gpu
@pytest.mark.parametrize(("k_dim", "v_dim"), [(96, 96), (192, 128), (128, 128), (512, 512)])
def test_a_server_prepares_and_writes_any_width(k_dim: int, v_dim: int) -> None:
    job = make_job(QuantSpec(k_dim, k_dim), QuantSpec(v_dim, v_dim), dtype=torch.bfloat16)
    dispatch.prepare(job.transforms)
    values = len(job.key) * job.key.shape[1] * (k_dim + v_dim)
    assert_same(dispatch, job, error=2**-16, allowed=2 + values // 5000, rows=2**-7)


@pytest.mark.gpu
def test_a_graph_replays_with_new_tokens() -> None:
    job = make_job(
        QuantSpec(128, 128, 0.96), tokens=64, heads=8, sink=64, recent=256, dtype=torch.bfloat16
    )
    want, want_query = job.write(launcher)
    held = replace(job, key=torch.zeros_like(job.key), value=torch.zeros_like(job.value))
    cache = replace(job.cache, **{name: getattr(job.cache, name).clone() for name in STORES})
    out = torch.empty_like(job.query)
    held.write(launcher)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows = held.key, held.value, cache, job.transforms, job.targets
        launcher.write_kv_int2(*rows, windows=job.windows, query=job.query, query_out=out)
    held.key.copy_(job.key), held.value.copy_(job.value)
    graph.replay()
    assert not differing(cache, want)
    assert torch.equal(out, want_query)


@pytest.mark.parametrize(
    "k_spec",
    [
        QuantSpec(64, 64, 0.96),
        QuantSpec(32, 8, 0.9),
        QuantSpec(48, 24),
        QuantSpec(64, 32, 0.96, bits=4),
        QuantSpec(128, 128, 0.92),
    ],
)
def test_errors_of_keys_are_carried_on(k_spec: QuantSpec) -> None:
    """Sums are exact, so rows differ only where the order in which errors are added up moves one
    of their channels over a tie."""
    job = fed_back(integers(make_job(k_spec, QuantSpec(32, 32, 0.9), tokens=37)))
    (got, _), (want, _) = job.write(launcher), job.write(reference)
    slots = job.targets.out_loc.long()
    assert torch.equal(got.affine[slots], want.affine[slots])
    same = (got.codes[slots] == want.codes[slots]).all(-1)
    assert float(same.float().mean()) > 0.98
    plain, _ = replace(job, transforms=replace(job.transforms, k_feedback=None)).write(reference)
    assert not torch.equal(plain.codes[slots], want.codes[slots])
    assert differing(plain, want) == {"codes"}
    alone, _ = job.only(slice(9, 30)).write(launcher)
    some = slots[9:30]
    assert torch.equal(alone.codes[some], got.codes[some])


@pytest.mark.parametrize(
    "weights",
    [
        torch.zeros(1, 32, 32).half(),
        torch.zeros(2, 32, 32),
        torch.zeros(2, 32, 64).half()[..., ::2],
    ],
)
def test_weights_that_do_not_fit_are_refused(weights: torch.Tensor) -> None:
    job = make_job(QuantSpec(32, 32, 0.9))
    with pytest.raises(ValueError, match="k_feedback"):
        replace(job, transforms=replace(job.transforms, k_feedback=weights)).write(launcher)
