"""The CUDA write kernel, run by an emulator where g++ is."""

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation import Emulator
from kv_write_jobs import (
    LONG,
    PLAIN,
    assert_same,
    bfloat16_job,
    bits,
    differing,
    fed_back,
    integers,
)
from torch import Tensor

from oscar_kernels import reference
from oscar_kernels.cache import Transforms
from oscar_kernels.kv_write import cuda
from oscar_kernels.kv_write.launcher import clip_rank
from oscar_kernels.quantizer import clip_rows, unpack
from oscar_kernels.spec import WIDTHS, QuantSpec, code_bytes

EXACT = {"error": 2**-16, "allowed": 3, "rows": 2**-7}
"""Of bfloat16 rows: ties within the error of a matrix in two bfloat16 halves, and few of them."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[cuda.WriteVariant], ctypes.CDLL]:
    """Compiles the kernel for the emulator, once per variant."""
    folder = tmp_path_factory.mktemp("emulator")
    emulator = Emulator(cuda.SOURCE, "write.cpp", cuda.Params, folder)

    def library(variant: cuda.WriteVariant) -> ctypes.CDLL:
        found = emulator.library(variant.flags)
        found.emulate_clip.restype = ctypes.c_bool
        return found

    return library


class Emulated:
    """The emulator as a module with the op; `blocks` multiprocessors."""

    def __init__(
        self, build: Any, blocks: int = 6, warpgroups: int = 2, *, step: bool | None = None
    ) -> None:
        self.build, self.blocks, self.warpgroups, self.step = build, blocks, warpgroups, step
        self.runs = 0

    def write_kv_int2(
        self, *rows: Any, windows: Any, parts: Any = "all", query: Tensor | None = None,
        query_out: Tensor | None = None, rows_out: Any = None,
    ) -> Tensor | None:  # fmt: skip
        key, value, cache, transforms, targets = rows
        if query is not None and query_out is None:
            query_out = torch.full_like(query, math.nan)
        options = {"query": query, "query_out": query_out, "rows_out": rows_out}
        assert cuda.misfit(key, value, cache, targets, **options) is None
        variant = cuda.variant(cache, transforms, targets, self.warpgroups)
        launch = cuda.arguments(*rows, windows, parts, *options.values(), self.blocks, self.step)
        self.runs += 1
        message = ctypes.create_string_buffer(201)
        good = self.build(variant).emulate(
            launch.kernel.encode(), ctypes.byref(launch.parameters), launch.blocks,
            variant.shared_bytes(step=launch.step), self.runs % 2 == 0, self.runs, message,
        )  # fmt: skip
        assert good, message.value.decode()
        return query_out


CASES = [
    (*PLAIN, {"tokens": 90, "heads": 3}),
    (*PLAIN, {"tokens": 70, "per_head": True, "mean": False}),
    (QuantSpec(128, 32, 0.985), QuantSpec(64, 32, 0.75),
     {"tokens": 45, "per_head": True, "group": 3}),
    (QuantSpec(64, 64, 0.96, "bfloat16"), QuantSpec(64, 16, 0.0, "bfloat16"), {"tokens": 33}),
    (QuantSpec(128, 64, 0.96, bits=4), QuantSpec(64, 64, 0.92, bits=4), {"tokens": 30}),
    (QuantSpec(64, 16, bits=4), QuantSpec(128, 128, 0.92), {"tokens": 30, "per_head": True}),
]  # fmt: skip
WIDE = [
    (QuantSpec(256, 128, 0.96), QuantSpec(256, 128, 0.92), {"tokens": 35, "heads": 2, "group": 4}),
    (QuantSpec(256, 64, 0.0), QuantSpec(256, 256, 0.8), {"tokens": 21, "per_head": True}),
    (QuantSpec(256, 256, 0.985), QuantSpec(64, 32, 0.75), {"tokens": 40, "mean": False}),
    (QuantSpec(256, 128, 0.96, bits=4), QuantSpec(256, 256, 0.8), {"tokens": 20}),
    (QuantSpec(64, 64, 0.0), QuantSpec(256, 64, bits=4), {"tokens": 20, "heads": 3}),
]
"""Rows that have the kernel for few rows alone."""


EITHER = pytest.mark.parametrize("step", [False, True], ids=["many rows", "few rows"])


@EITHER
@pytest.mark.parametrize(
    ("k_spec", "v_spec", "options"), CASES, ids=lambda x: "" if isinstance(x, dict) else str(x)
)
def test_the_emulated_kernel_writes_what_the_reference_writes(
    build: Any, k_spec: QuantSpec, v_spec: QuantSpec, options: dict[str, Any], step: bool
) -> None:
    emulated = Emulated(build, step=step)
    job = bfloat16_job(k_spec, v_spec, **options)
    assert_same(emulated, job, **EXACT)
    together, query = job.write(emulated)
    for alike in (Emulated(build, 1000, 1, step=False), Emulated(build, 1000, step=True)):
        single, other = job.write(alike)
        assert differing(single, together) == set()
        assert torch.equal(bits(query), bits(other))
    alone, _ = job.write(emulated, parts="slots", query=None)
    assert not differing(alone, together) & {"codes", "affine"}
    few = job.only(torch.arange(7, 20))
    alone, slots = few.write(emulated)[0], few.targets.out_loc.long()
    assert torch.equal(alone.codes[slots], together.codes[slots])
    assert torch.equal(bits(alone.affine[slots]), bits(together.affine[slots]))


@pytest.mark.parametrize(
    ("k_spec", "v_spec", "options"), WIDE, ids=lambda x: "" if isinstance(x, dict) else str(x)
)
def test_rows_of_256_are_written_as_the_reference_writes_them(
    build: Any, k_spec: QuantSpec, v_spec: QuantSpec, options: dict[str, Any]
) -> None:
    """With many rows in a block or with few, and whichever of the stores are wanted."""
    job = bfloat16_job(k_spec, v_spec, **options)
    assert_same(Emulated(build), job, **EXACT)
    (together, query), (single, other) = (job.write(Emulated(build, n)) for n in (6, 1000))
    assert torch.equal(bits(query), bits(other)) and differing(single, together) == set()
    alone, _ = job.write(Emulated(build), parts="slots", query=None)
    assert not differing(alone, together) & {"codes", "affine"}


@EITHER
def test_the_emulated_kernel_writes_a_ring_larger_than_its_window(build: Any, step: bool) -> None:
    job = bfloat16_job(*PLAIN, tokens=60, sink=3, recent=5, ring_rows=9)
    assert_same(Emulated(build, step=step), job, **EXACT)


@EITHER
@pytest.mark.parametrize("parts", ["slots", "windows"])
def test_the_emulated_kernel_leaves_the_rest_alone(build: Any, parts: str, step: bool) -> None:
    emulated = Emulated(build, blocks=2, step=step)
    job = bfloat16_job(*PLAIN, tokens=200, sink=0, recent=3)
    assert_same(emulated, job, **EXACT, parts=parts, query=None)
    cache, _ = job.write(emulated, parts=parts, query=None)
    assert (
        differing(cache, job.cache)
        == {"slots": {"codes", "affine"}, "windows": {"ring_k", "ring_v"}}[parts]
    )


@EITHER
def test_the_emulated_kernel_takes_slices_and_gives_rows(build: Any, step: bool) -> None:
    job = bfloat16_job(*PLAIN, tokens=40)
    query, key, value = torch.cat([job.query, job.key, job.value], 1).split(
        [job.query.shape[1], 2, 2], 1
    )
    job = replace(job, query=query, key=key, value=value)
    got, want = [tuple(torch.full((40, 2, 128), math.nan).bfloat16() for _ in "kv") for _ in "ab"]
    job.write(Emulated(build, step=step), rows_out=got)
    job.write(reference, rows_out=want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0.05)


def strange_rows(dim: int) -> Tensor:
    """Rows on which a search on a 16-bit scale goes wrong if it can."""
    draw = torch.Generator().manual_seed(0)
    normal = torch.randn(64, dim, generator=draw)
    spike = normal.clone()
    spike[:, 5] = 1e6
    near = 1 + torch.randint(-40, 40, (32, dim), generator=draw) * 2.0**-23
    few = torch.randint(-3, 4, (32, dim), generator=draw).float()
    sizes = normal * 10.0 ** torch.linspace(-37, 37, 64)[:, None]
    steps = torch.arange(dim).float().expand(16, dim)
    rows = [normal, spike, near, few, sizes, steps, torch.zeros(16, dim)]
    rows.append(torch.full((16, dim), -7.5))
    rows.append(normal[:16] * 2.0 ** torch.randint(-30, 30, (16, dim), generator=draw))
    return torch.cat([x[torch.arange(len(x) // 16 * 16)] for x in rows])


@pytest.mark.parametrize(("k_spec", "v_spec"), [case[:2] for case in CASES[1:]], ids=str)
def test_clips_are_exact_order_statistics(build: Any, k_spec: QuantSpec, v_spec: QuantSpec) -> None:
    library = build(cuda.WriteVariant(k_spec, v_spec, LONG, warpgroups=2))
    message = ctypes.create_string_buffer(201)
    for spec, value in ((k_spec, False), (v_spec, True)):
        rows = strange_rows(spec.head_dim)
        limits = torch.full((len(rows), 4), math.nan)
        x, out = (ctypes.c_void_p(y.data_ptr()) for y in (rows, limits))
        assert library.emulate_clip(x, out, len(rows), value, message), message.value.decode()
        if clip_rank(spec):
            assert torch.equal(limits, clip_rows(rows, spec).abs().amax(-1)[:, None].expand(-1, 4))


@EITHER
@pytest.mark.parametrize("width", WIDTHS)
def test_strange_rows_get_the_codes_of_the_reference(build: Any, step: bool, width: int) -> None:
    """Transformed by nothing, so that sums are exact: small integers, which are full of ties, have
    no code wrong."""
    k_spec, v_spec = (replace(spec, bits=width) for spec in PLAIN)
    rows = strange_rows(128)
    rows = torch.cat(
        [rows, rows.abs(), 1000 + torch.randint(-3, 4, (48, 128)), -rows[96:160].abs()]
    ).bfloat16()
    rows = rows[rows.float().abs().amax(-1) < 1e36][: len(rows) // 2 * 2].unflatten(0, (-1, 2))
    job = bfloat16_job(k_spec, v_spec, tokens=len(rows), mean=False)
    one = torch.eye(128)[None]
    job = replace(job, key=rows, value=rows.flip(0), transforms=Transforms(one, one, one, one))
    modules = Emulated(build, step=step), reference
    got, want = (job.write(module, query=None, parts="slots")[0] for module in modules)
    assert torch.equal(bits(got.affine), bits(want.affine))
    split = code_bytes(k_spec)
    for spec, x, part in ((k_spec, rows, slice(split)), (v_spec, rows.flip(0), slice(split, None))):
        codes, expected = (
            unpack(cache.codes[job.targets.out_loc][..., part], width).int()
            for cache in (got, want)
        )
        clipped = clip_rows(x, spec).double()
        low, high = clipped.amin(-1, keepdim=True), clipped.amax(-1, keepdim=True)
        exact = (spec.levels - 1) * (clipped - low) / (high - low).clamp_min(1e-8) + 0.5
        differ = codes != expected
        assert ((exact - exact.round()).abs()[differ] < 4e-7 * spec.levels).all()
        assert (codes - expected).abs().max() <= 1
        whole = (x == x.round()).all(-1) & (x.abs() < 8).all(-1)
        assert whole.sum() > 60 and not differ[whole].any()


def test_rows_that_are_not_there_do_not_go_the_long_way(build: Any) -> None:
    """Behind the last row it is there again, and is neither searched nor stored."""
    emulated, job = Emulated(build, step=False), bfloat16_job(*PLAIN, mean=False)
    library = build(cuda.variant(job.cache, job.transforms, job.targets, emulated.warpgroups))
    for tokens in (1, 3, 11):
        before = library.long_ways()
        job.only(slice(0, tokens)).write(emulated)
        assert library.long_ways() == before
        last = replace(job.only(slice(0, tokens)), key=job.key[:tokens].clone())
        last.key[-1, -1] = 0.0
        last.write(emulated)
        assert library.long_ways() == before + 1


@EITHER
@pytest.mark.parametrize("feedback", [False, True])
def test_a_broken_row_harms_no_other(build: Any, step: bool, feedback: bool) -> None:
    job = bfloat16_job(*PLAIN, mean=False)
    job = fed_back(job) if feedback else job
    broken = replace(job, key=job.key.clone(), value=job.value.clone())
    broken.key[4, 0, 3], broken.key[6, 1, 4], broken.value[9, 1] = math.nan, math.inf, -math.inf
    good, got = (x.write(Emulated(build, step=step))[0] for x in (job, broken))
    spared = torch.ones(len(good.codes), dtype=torch.bool)
    spared[job.targets.out_loc[[4, 6, 9]].long()] = False
    assert torch.equal(got.codes[spared], good.codes[spared])
    assert torch.equal(bits(got.affine[spared]), bits(good.affine[spared]))


def test_a_mistake_in_a_launch_is_told(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.WriteVariant, "shared_bytes", lambda *_, **__: 1024)
    with pytest.raises(AssertionError, match="address outside of shared memory"):
        bfloat16_job(*PLAIN).write(Emulated(build, step=False))


FED_BACK = [
    (QuantSpec(128, 128, 0.96), QuantSpec(64, 64, 0.92), {"tokens": 70, "heads": 3}),
    (QuantSpec(128, 32, 0.96), QuantSpec(128, 128, 0.92), {"tokens": 20, "per_head": True}),
    (QuantSpec(64, 64, 0.96), QuantSpec(64, 64, 0.92), {"tokens": 45, "mean": False}),
    (QuantSpec(64, 32, 0.0), QuantSpec(64, 64, 0.92), {"tokens": 20, "per_head": True}),
    (QuantSpec(64, 16, 0.96), QuantSpec(64, 64, 0.92), {"tokens": 20}),
    (QuantSpec(128, 64, bits=4), QuantSpec(128, 128, 0.92), {"tokens": 20}),
    (QuantSpec(64, 64, bits=4), QuantSpec(64, 64, 0.92), {"tokens": 20}),
    (QuantSpec(256, 128, 0.96), QuantSpec(256, 256, 0.92), {"tokens": 40, "heads": 1}),
]


@pytest.mark.parametrize(
    ("k_spec", "v_spec", "options"), FED_BACK, ids=lambda x: "" if isinstance(x, dict) else str(x)
)
def test_the_emulated_kernel_carries_errors_of_keys_on(
    build: Any, k_spec: QuantSpec, v_spec: QuantSpec, options: dict[str, Any]
) -> None:
    """Sums are exact, so rows differ only where the order in which errors are added up moves one
    of their channels over a tie."""
    job = fed_back(integers(bfloat16_job(k_spec, v_spec, **options)))
    want, _ = job.write(reference)
    written = [
        job.write(Emulated(build, blocks, step=step))[0]
        for blocks, step in ((6, True), (1000, True), (6, False), (1000, False))
    ]
    slots = job.targets.out_loc.long()
    for got in written:
        assert differing(got, written[0]) == set()
        assert torch.equal(got.affine[slots], want.affine[slots])
        same = (got.codes[slots] == want.codes[slots]).all(-1)
        assert float(same.float().mean()) > 0.98
    plain, _ = replace(job, transforms=replace(job.transforms, k_feedback=None)).write(reference)
    bytes_of_keys = code_bytes(k_spec)
    assert not torch.equal(plain.codes[..., :bytes_of_keys], want.codes[..., :bytes_of_keys])
