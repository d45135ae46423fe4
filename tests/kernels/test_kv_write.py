"""The write kernel against its reference: bytes equal but for counted ties, and nothing else touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_kernels import testing
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState, allocate
from oscar_kernels.kv_write import launcher, reference
from oscar_kernels.layout import code_bytes
from oscar_kernels.quantizer import unpack
from oscar_kernels.spec import QuantSpec

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")


@dataclass(frozen=True)
class Job:
    """New tokens of three requests, and an empty, poisoned cache for them."""

    key: Tensor
    value: Tensor
    query: Tensor
    cache: LayerCache
    transforms: Transforms
    targets: TokenTargets
    windows: WindowState

    def write(self, module: Any, **options: Any) -> tuple[LayerCache, Tensor | None]:
        """Run an implementation on a cache of its own."""
        cache = replace(self.cache, **{name: getattr(self.cache, name).clone() for name in STORES})
        options = {"query": self.query, **options}
        out = module.write_kv_int2(
            self.key, self.value, cache, self.transforms, self.targets, windows=self.windows, **options
        )
        return cache, out

    def only(self, chosen: Tensor | slice) -> Job:
        """The same for some of the tokens."""
        targets = TokenTargets(*(getattr(self.targets, f.name)[chosen].contiguous() for f in fields(self.targets)))
        return replace(self, key=self.key[chosen], value=self.value[chosen], query=self.query[chosen], targets=targets)


def make_job(
    k_spec: QuantSpec,
    v_spec: QuantSpec | None = None,
    *,
    tokens: int = 21,
    heads: int = 2,
    group: int = 2,
    per_head: bool = False,
    mean: bool = True,
    sink: int = 3,
    recent: int = 5,
    index: torch.dtype = torch.int32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Job:
    v_spec = v_spec or k_spec
    draw = torch.Generator().manual_seed(seed)
    matrices = heads if per_head else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def matrix(dim: int) -> Tensor:  # well conditioned, not orthogonal
        rotation = torch.linalg.qr(normal(matrices, dim, dim))[0]
        return (rotation + 0.1 * normal(matrices, dim, dim) / dim).contiguous().to(DEVICE)

    cache = allocate(
        k_spec, v_spec, slots=tokens + 9, rows=5, num_kv_heads=heads, sink=sink, recent=recent, blocks=6,
        dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32, device=DEVICE,
    )  # fmt: skip
    for name in STORES:
        testing.poison(getattr(cache, name))
    request = torch.randint(3, (tokens,), generator=draw).sort().values
    counts = torch.bincount(request, minlength=3)
    starts = torch.tensor([0, 2, 40])
    positions = torch.arange(tokens) - (counts.cumsum(0) - counts)[request] + starts[request]
    targets = TokenTargets(
        1 + torch.randperm(tokens + 8, generator=draw)[:tokens],
        torch.tensor([3, 1, 4])[request],
        positions,
        (starts + counts)[request],
    )
    k_dim, v_dim = k_spec.head_dim, v_spec.head_dim
    k_mean = 3 * normal(matrices, k_dim).to(DEVICE) if mean else None
    return Job(
        (normal(tokens, heads, k_dim) + (0 if k_mean is None else k_mean.cpu())).to(DEVICE, dtype),
        (normal(tokens, heads, v_dim) * 2.0 ** torch.randint(-8, 8, (tokens, heads, 1), generator=draw)).to(
            DEVICE, dtype
        ),
        normal(tokens, heads * group, k_dim).to(DEVICE, dtype),
        cache,
        Transforms(matrix(k_dim), matrix(k_dim), matrix(v_dim), matrix(v_dim), k_mean),
        TokenTargets(*(getattr(targets, f.name).to(DEVICE, index) for f in fields(targets))),
        WindowState(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, 5, 2, 1, 3], [0] * 5, [0] * 5))),
    )


def integers(job: Job) -> Job:
    """The same with small integers for inputs and matrices: every sum is exact, in whatever order it is taken."""
    pairs = job.transforms
    matrices = {f.name: (8 * getattr(pairs, f.name)).round() for f in fields(pairs) if f.name != "k_mean"}
    mean = None if pairs.k_mean is None else pairs.k_mean.round()
    inputs = {name: (2 * getattr(job, name)).round().clamp(-99, 99) for name in ("key", "value", "query")}
    return replace(job, **inputs, transforms=Transforms(**matrices, k_mean=mean))


def ties(got: LayerCache, want: LayerCache, job: Job, error: float) -> int:
    """Codes that differ, each by one and only where the exact value lies within `error` of a rounding boundary.

    `error` is relative to the sum of the magnitudes that make up a transformed value.
    """
    slots, split, count = job.targets.slots.long(), code_bytes(got.k_spec), 0
    none = torch.zeros((), dtype=torch.float64, device=job.key.device)
    k_mean = none if job.transforms.k_mean is None else job.transforms.k_mean.double()
    for spec, x, mean, matrix, part in (
        (got.k_spec, job.key.double(), k_mean, job.transforms.k_forward, slice(None, split)),
        (got.v_spec, job.value.double(), none, job.transforms.v_forward, slice(split, None)),
    ):
        codes, expected = unpack(got.codes[..., part]).int(), unpack(want.codes[..., part]).int()
        untouched = torch.ones(len(codes), dtype=torch.bool, device=codes.device)
        untouched[slots] = False
        assert torch.equal(codes[untouched], expected[untouched])
        differs = codes[slots] != expected[slots]
        assert ((codes - expected).abs() <= 1).all()
        margins, allowed = _margins(x, mean, matrix.double(), spec)
        assert (margins[differs] <= error * allowed[differs]).all()
        count += int(differs.sum())
    return count


def _margins(x: Tensor, mean: Tensor, matrix: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Distance of every value from a rounding boundary, in codes, and how far a relative error of 1 would move it."""
    matrices = matrix.repeat_interleave(x.shape[1] // len(matrix), 0)
    rows = torch.einsum("thd,hde->the", x - mean, matrices)
    if spec.clip_index is not None:
        limit = rows.abs().sort(-1).values[..., spec.clip_index, None]
        rows = rows.clamp(-limit, limit)
    groups = rows.unflatten(-1, (spec.num_groups, spec.group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp_min(1e-8) / 3
    codes = (groups - low) / scale + 0.5
    terms = torch.einsum("thd,hde->the", x.abs() + mean.abs(), matrices.abs()).amax(-1)[..., None, None]
    return (codes - codes.round()).abs().flatten(-2), (terms / scale).expand_as(codes).flatten(-2)


def assert_same(job: Job, *, error: float = 1e-6, allowed: int = 1, rows: float = 1e-5, **options: Any) -> None:
    """The launcher writes what the reference writes: `error` at ties, at most `allowed` of them; `rows` in windows."""
    want, want_query = job.write(reference, **options)
    got, got_query = job.write(launcher, **options)
    assert ties(got, want, job, error) <= allowed
    close = {"rtol": 2**-9 if got.affine.dtype == torch.float16 else 2**-6, "atol": 50 * error, "equal_nan": True}
    torch.testing.assert_close(got.affine, want.affine, **close)
    for name in STORES[2:]:
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=rows, atol=20 * rows, equal_nan=True)
    if want_query is None:
        assert got_query is None
    else:
        torch.testing.assert_close(got_query, want_query, rtol=rows, atol=20 * rows)


SHAPES = [
    (QuantSpec(64, 64, 0.96), None),
    (QuantSpec(128, 128, 0.96), QuantSpec(128, 128, 0.92)),
    (QuantSpec(128, 32, 0.92), QuantSpec(128, 64)),
    (QuantSpec(96, 48, 0.96), QuantSpec(96, 96, 0.92)),
    (QuantSpec(192, 192, 0.96), QuantSpec(128, 128, 0.92)),
    (QuantSpec(256, 128, 0.92), QuantSpec(64, 16, 0.5)),
    (QuantSpec(16, 4, 1.0), QuantSpec(32, 8, 0.01)),
]


@pytest.mark.parametrize(("k_spec", "v_spec"), SHAPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_bytes_equal_the_reference(k_spec: QuantSpec, v_spec: QuantSpec | None, per_head: bool) -> None:
    assert_same(make_job(k_spec, v_spec, per_head=per_head, mean=per_head))


@pytest.mark.parametrize("parts", ["slots", "windows", "all"])
@pytest.mark.parametrize("query", [False, True])
def test_parts_leave_the_rest_alone(parts: str, query: bool) -> None:
    job = make_job(QuantSpec(32, 32, 0.9), index=torch.int64)
    assert_same(job, parts=parts, **({} if query else {"query": None}))
    cache, _ = job.write(launcher, parts=parts)
    touched = {name for name in STORES if not torch.equal(_bits(getattr(cache, name)), _bits(getattr(job.cache, name)))}
    assert touched == {"slots": set(STORES[:2]), "windows": set(STORES[2:]), "all": set(STORES)}[parts]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (0, 7), (4, 0), (30, 30)])
def test_any_windows(sink: int, recent: int) -> None:
    assert_same(make_job(QuantSpec(16, 16, 0.9), sink=sink, recent=recent, tokens=50))


def test_a_token_has_the_same_bytes_whatever_it_is_written_with() -> None:
    job = integers(make_job(QuantSpec(64, 32, 0.96), tokens=37, sink=40, recent=40))
    together, query = job.write(launcher)
    for chosen in (slice(0, 1), slice(5, 6), slice(9, 30), torch.tensor([36, 3])):
        some = job.only(chosen)
        alone, some_query = some.write(launcher)
        slots = some.targets.slots.long()
        assert torch.equal(alone.codes[slots], together.codes[slots])
        assert torch.equal(_bits(alone.affine[slots]), _bits(together.affine[slots]))
        assert torch.equal(some_query, query[chosen])
        rows, places = some.targets.rows.long(), some.targets.positions.long() % 40
        assert torch.equal(alone.ring_k[rows, places], together.ring_k[rows, places])


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    assert_same(make_job(QuantSpec(32, 32, 0.9), tokens=tokens))


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
    assert_same(replace(job, query=query, key=key, value=value))


def test_padding_goes_to_the_dummies() -> None:
    job = make_job(QuantSpec(32, 32, 0.9), tokens=12)
    targets = TokenTargets(*(getattr(job.targets, f.name).clone() for f in fields(job.targets)))
    for name, dummy in (("slots", 0), ("rows", 0), ("positions", 0), ("ends", 1)):
        getattr(targets, name)[7:] = dummy
    padded, _ = replace(job, targets=targets).write(launcher)
    alone, _ = job.only(slice(0, 7)).write(launcher)
    for name in STORES:
        start = 0 if name.startswith("sink") else 1  # row 0 has sink block 0
        a, b = _bits(getattr(padded, name)), _bits(getattr(alone, name))
        assert torch.equal(a[1:], b[1:]) and not torch.equal(a[:1], b[:1]), (name, start)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_token_harms_no_other(bad: float) -> None:
    job = make_job(QuantSpec(32, 16, 0.9), mean=False)
    broken = replace(job, key=job.key.clone(), value=job.value.clone())
    broken.key[4, 0, 3], broken.value[9, 1] = bad, bad
    good, got = job.write(launcher)[0], broken.write(launcher)[0]
    spared = torch.ones(len(good.codes), dtype=torch.bool)
    spared[job.targets.slots[[4, 9]].long().cpu()] = False
    assert torch.equal(got.codes[spared], good.codes[spared])
    assert torch.equal(_bits(got.affine[spared]), _bits(good.affine[spared]))


def test_large_values_saturate() -> None:
    job = make_job(QuantSpec(32, 32))
    job = replace(job, key=job.key * 1e6, value=job.value * 1e-12)
    cache, _ = job.write(launcher)
    affine = cache.affine[job.targets.slots.long()].float()
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
    assert_same(make_job(spec, tokens=tokens, heads=heads, group=group, seed=seed))


@pytest.mark.parametrize(("change", "words"), [
    ({"key": torch.zeros(3, 2, 32)}, "key"),
    ({"query": torch.zeros(21, 3, 32)}, "query"),
    ({"targets": TokenTargets(*[torch.zeros(4)] * 4)}, "targets.slots"),
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
    from oscar_kernels.kv_write.order_kernel import sorting

    for values in itertools.product((0, 1), repeat=size):
        assert run_network(sorting(size), values) == sorted(values, reverse=True)


@pytest.mark.parametrize("size", [4, 6, 8, 12, 16])
def test_merging_networks_sort_what_falls_and_then_rises(size: int) -> None:
    from oscar_kernels.kv_write.order_kernel import merging

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
    job = make_job(
        k_spec, v_spec, tokens=700, heads=4, group=3, per_head=per_head, mean=per_head, sink=64, recent=256,
        dtype=torch.bfloat16,
    )  # fmt: skip
    values = 700 * 4 * (k_spec.head_dim + (v_spec or k_spec).head_dim)
    assert_same(job, error=2**-16, allowed=values // 5000, rows=2**-7)
    together, _ = job.write(launcher)
    for chosen in (slice(0, 64), slice(100, 101), slice(300, 363), slice(0, 600)):
        some = job.only(chosen)
        alone, slots = some.write(launcher)[0], some.targets.slots.long()
        assert torch.equal(alone.codes[slots], together.codes[slots])
        assert torch.equal(_bits(alone.affine[slots]), _bits(together.affine[slots]))


@pytest.mark.gpu
def test_a_graph_replays_with_new_tokens() -> None:
    job = make_job(QuantSpec(128, 128, 0.96), tokens=64, heads=8, sink=64, recent=256, dtype=torch.bfloat16)
    want, want_query = job.write(launcher)
    held = replace(job, key=torch.zeros_like(job.key), value=torch.zeros_like(job.value))
    cache = replace(job.cache, **{name: getattr(job.cache, name).clone() for name in STORES})
    out = torch.empty_like(job.query)
    held.write(launcher)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launcher.write_kv_int2(
            held.key,
            held.value,
            cache,
            job.transforms,
            job.targets,
            windows=job.windows,
            query=job.query,
            query_out=out,
        )
    held.key.copy_(job.key), held.value.copy_(job.value)
    graph.replay()
    for name in STORES:
        assert torch.equal(_bits(getattr(cache, name)), _bits(getattr(want, name)))
    assert torch.equal(out, want_query)
