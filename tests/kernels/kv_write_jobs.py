"""New tokens for the write kernels, and how what was written is compared: equal bytes but for
counted ties."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from random_caches import poison
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState, allocate
from oscar_kernels.quantizer import unpack
from oscar_kernels.spec import PLAIN as ROTARY_BITS
from oscar_kernels.spec import QuantSpec, code_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LONG = ("long long",) * 4
"""Integer types of targets, as `WriteVariant` names them."""
PLAIN = (QuantSpec(128, 128, 0.96), QuantSpec(128, 128, 0.92))
"""K and V of most models."""
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
        options = {"query": self.query, "windows": self.windows, **options}
        rows = self.key, self.value, cache, self.transforms, self.targets
        return cache, module.write_kv_int2(*rows, **options)

    def only(self, chosen: Tensor | slice) -> Job:
        """The same for some of the tokens."""
        targets = TokenTargets(*(x[chosen].contiguous() for x in vars(self.targets).values()))
        rows = {name: getattr(self, name)[chosen] for name in ("key", "value", "query")}
        return replace(self, **rows, targets=targets)


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
    ring_rows: int | None = None,
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

    windows = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    cache = allocate(
        k_spec, v_spec,
        slots=tokens + 9, rows=5, num_kv_heads=heads, sink=sink, recent=recent,
        ring_rows=ring_rows, blocks=6, dtype=windows, device=DEVICE,
    )  # fmt: skip
    for store in cache.stores:
        poison(store)
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
        (
            normal(tokens, heads, v_dim)
            * 2.0 ** torch.randint(-8, 8, (tokens, heads, 1), generator=draw)
        ).to(DEVICE, dtype),
        normal(tokens, heads * group, cache.query_dim).to(DEVICE, dtype),
        cache,
        Transforms(*(matrix(dim) for dim in (k_dim, k_dim, cache.out_dim, cache.out_dim)), k_mean),
        TokenTargets(*(getattr(targets, f.name).to(DEVICE, index) for f in fields(targets))),
        WindowState(
            *(
                torch.tensor(x, dtype=torch.int32, device=DEVICE)
                for x in ([0, 5, 2, 1, 3], [0] * 5, [0] * 5)
            )
        ),
    )


def bfloat16_job(k_spec: QuantSpec, v_spec: QuantSpec | None = None, **options: Any) -> Job:
    """A job of the only type that the CUDA kernel has."""
    return make_job(k_spec, v_spec, **{"dtype": torch.bfloat16, "index": torch.int64, **options})


def integers(job: Job) -> Job:
    """The same with small integers for inputs and matrices: every sum is exact, in whatever order
    it is taken."""
    pairs = job.transforms
    matrices = {
        f.name: (8 * getattr(pairs, f.name)).round()
        for f in fields(pairs)
        if f.name not in ("k_mean", "k_feedback")
    }
    mean = None if pairs.k_mean is None else pairs.k_mean.round()
    inputs = {
        name: (2 * getattr(job, name)).round().clamp(-99, 99) for name in ("key", "value", "query")
    }
    return replace(job, **inputs, transforms=Transforms(**matrices, k_mean=mean))


def fed_back(job: Job) -> Job:
    """The same with weights of feedback that are as large as those of real models."""
    heads, dim = job.key.shape[1:]
    draw = torch.Generator().manual_seed(9)
    weights = (0.1 * torch.randn(heads, dim, dim, generator=draw)).triu(1).half()
    forward = job.transforms.k_forward.expand(heads, dim, dim).contiguous()
    made = replace(job.transforms, k_forward=forward, k_feedback=weights.to(DEVICE))
    return replace(job, transforms=made)


def on_cpu(part: Any) -> Any:
    """A job, or a part of it, with all tensors on the CPU, where sums have the full precision of
    float32."""
    if isinstance(part, Tensor):
        return part.cpu()
    if not is_dataclass(part) or isinstance(part, type):
        return part
    return replace(part, **{f.name: on_cpu(getattr(part, f.name)) for f in fields(part)})


def ties(got: LayerCache, want: LayerCache, job: Job, error: float) -> int:
    """Codes that differ, each by one and only where the exact value lies within `error` of a
    rounding boundary.

    `error` is relative to the sum of the magnitudes that make up a transformed value.
    """
    slots, split, count = job.targets.out_loc.long(), code_bytes(got.k_spec), 0
    none = torch.zeros((), dtype=torch.float64, device=job.key.device)
    k_mean = none if job.transforms.k_mean is None else job.transforms.k_mean.double()
    for spec, x, mean, matrix, part in (
        (got.k_spec, job.key.double(), k_mean, job.transforms.k_forward, slice(None, split)),
        (got.v_spec, job.value.double(), none, job.transforms.v_forward, slice(split, None)),
    ):
        if spec.bits == ROTARY_BITS:
            assert torch.equal(got.codes[..., part], want.codes[..., part])
            continue
        codes, expected = (unpack(cache.codes[..., part], spec.bits).int() for cache in (got, want))
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
    """Distance of every value from a rounding boundary, in codes, and how far a relative error of 1
    would move it."""
    matrices = matrix.repeat_interleave(x.shape[1] // len(matrix), 0)
    rows = torch.einsum("thd,hde->the", x - mean, matrices)
    if spec.clip_index is not None:
        limit = rows.abs().sort(-1).values[..., spec.clip_index, None]
        rows = rows.clamp(-limit, limit)
    groups = rows.unflatten(-1, (spec.num_groups, spec.group_size))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp_min(1e-8) / (spec.levels - 1)
    codes = (groups - low) / scale + 0.5
    terms = torch.einsum("thd,hde->the", x.abs() + mean.abs(), matrices.abs()).amax(-1)[
        ..., None, None
    ]
    return (codes - codes.round()).abs().flatten(-2), (terms / scale).expand_as(codes).flatten(-2)


def assert_same(
    module: Any,
    job: Job,
    *,
    error: float = 1e-6,
    allowed: int = 1,
    rows: float = 1e-5,
    **options: Any,
) -> None:
    """`module` writes what the reference writes: `error` at ties, at most `allowed` of them; `rows`
    in windows."""
    want, want_query = job.write(reference, **options)
    got, got_query = job.write(module, **options)
    assert ties(got, want, job, error) <= allowed
    close = {
        "rtol": 2**-9 if got.affine.dtype == torch.float16 else 2**-6,
        "atol": 50 * error,
        "equal_nan": True,
    }
    torch.testing.assert_close(got.affine, want.affine, **close)
    for name in STORES[2:]:
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=rows, atol=20 * rows, equal_nan=True)
    if want_query is None:
        assert got_query is None
    else:
        torch.testing.assert_close(got_query, want_query, rtol=rows, atol=20 * rows)


def bits(x: Tensor) -> Tensor:
    """Bytes, for comparisons in which NaN equals itself."""
    return x.view(torch.uint8)


def differing(a: LayerCache, b: LayerCache) -> set[str]:
    """Names of the stores that have different bytes."""
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in STORES)
    return {name for name, x, y in pairs if not torch.equal(bits(x), bits(y))}
