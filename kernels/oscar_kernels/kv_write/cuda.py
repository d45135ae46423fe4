"""The write kernel in CUDA C++, compiled at first use by NVRTC: for compute capability 9.0."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.chips import WRITE
from oscar_kernels.kv_write.launcher import check, clip_rank
from oscar_kernels.kv_write.prepared import prepared
from oscar_kernels.reference import Parts
from oscar_kernels.spec import QuantSpec

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "write.cu")

WARPGROUPS = 3
"""Warpgroups of a block of the CUDA kernel. Up to 4 fit a multiprocessor; four of them leave 128
registers per thread.

8,192 tokens take 44, 30, 28 and 29 microseconds with 1 to 4
(`contrib/kernel_bench/run.py --variants --only write`).
"""

HEAD_DIMS = (64, 128, 256)
MOST_RANK, MOST_WIDE_RANK = 16, 64
CHUNK = 64
"""Columns of a matrix of 256 that a block has at a time, twice."""
TILE, STEP_ROWS = 64, 16
"""Rows of a tile, and rows that a block of the kernel for few rows has at a time, one per warp."""
WIDE_TILE = 48
"""Rows of a tile of 256 channels."""
MOST_ROWS = 1 << 30


class NoWriteVariant(ValueError):
    """The CUDA kernel does not do this; the message says what and why, in one line."""


@dataclass(frozen=True)
class WriteVariant:
    """What a kernel is compiled for; every field is a flag of write.cu, which explains it."""

    k_spec: QuantSpec
    v_spec: QuantSpec
    integers: tuple[str, ...]
    """Of slots, rows, positions and ends, as C++ names them."""
    feedback: bool = False
    warpgroups: int = WARPGROUPS

    @property
    def flags(self) -> dict[str, str | int]:
        """Values of the `-D` flags."""
        k_spec, v_spec = self.k_spec, self.v_spec
        return {
            "DK": k_spec.head_dim, "GK": k_spec.num_groups, "BITS_K": k_spec.bits,
            "DV": v_spec.head_dim, "GV": v_spec.num_groups, "BITS_V": v_spec.bits,
            "RANK_K": clip_rank(k_spec), "RANK_V": clip_rank(v_spec),
            "GROUPS": self.warpgroups,
            "AFFINE_BF16": int(k_spec.scale_dtype == "bfloat16"),
            "FEEDBACK": int(self.feedback),
            **dict(zip(("SLOT_T", "ROW_T", "POSITION_T", "END_T"), self.integers, strict=True)),
        }  # fmt: skip

    @property
    def wide(self) -> bool:
        """Whether a matrix does not fit a block; the kernel for few rows is then the only one."""
        return max(self.k_spec.head_dim, self.v_spec.head_dim) > 128

    def shared_bytes(self, *, step: bool) -> int:
        """Bytes of dynamic shared memory: a matrix in halves, its product with the mean, rows as
        they come, transformed rows, and the feedback of a head. Of a matrix of 256 two chunks of
        columns are there at a time, and then the feedback in their place.

        Args:
            step: whether this is the kernel for few rows, which holds all transformed rows of one
                tile; the other one holds a transformed row per warp.
        """
        dim = max(self.k_spec.head_dim, self.v_spec.head_dim)
        if self.wide:
            chunks = 2 * (4 * CHUNK * dim + 32 * CHUNK)
            return chunks + 2 * TILE * dim + 4 * WIDE_TILE * (dim + 8) + 1024
        tiles = 1 if step else self.warpgroups
        transformed = TILE * (dim + 8) if step else self.warpgroups * 4 * dim
        weights = 2 * self.k_spec.head_dim**2 if self.feedback else 0
        return 4 * dim * dim + 32 * dim + tiles * TILE * 2 * dim + 4 * transformed + weights + 1024


def variant(
    cache: LayerCache, transforms: Transforms, targets: TokenTargets, warpgroups: int = WARPGROUPS
) -> WriteVariant:
    """The variant for a cache, transforms and the integer types of targets."""
    integers = tuple(_triton.INTEGERS[x.dtype] for x in vars(targets).values())
    feedback = transforms.k_feedback is not None
    return WriteVariant(cache.k_spec, cache.v_spec, integers, feedback, warpgroups)


def has_matrices(transforms: Transforms) -> bool:
    """Whether the kernel has room for matrices of these sizes."""
    dims = {transforms.k_forward.shape[-1], transforms.v_forward.shape[-1]}
    return dims <= set(HEAD_DIMS)


def misfit(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    targets: TokenTargets,
    *,
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why the kernel cannot run these on any device, because of their types, shapes or addresses;
    `None` if it can."""
    if cache.latent:
        return "latents (MLA)"
    specs = cache.k_spec, cache.v_spec
    most = MOST_WIDE_RANK if 256 in (spec.head_dim for spec in specs) else MOST_RANK
    for spec in specs:
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim}; it has {HEAD_DIMS}"
        if clip_rank(spec) > most:
            return f"a clip at the magnitude of rank {clip_rank(spec)}; it has ranks up to {most}"
    rows = {"key": key, "value": value, "query": query, "query_out": query_out}
    rows |= dict(zip(("rows_out[0]", "rows_out[1]"), rows_out or (), strict=False))
    given = {name: x for name, x in rows.items() if x is not None}
    windows = {name: getattr(cache, name) for name in ("ring_k", "ring_v", "sink_k", "sink_v")}
    for name, x in {**given, **windows}.items():
        if x.dtype != torch.bfloat16:
            return f"{name} of {x.dtype}; it has bfloat16"
    for name, x in given.items():
        if x.data_ptr() % 16 or x.stride(0) % 8 or x.stride(1) % 8 or x.stride(2) != 1:
            return f"{name} with rows that do not begin at multiples of 16 bytes"
        if len(x) * x.shape[1] > MOST_ROWS or max(x.stride(0), x.stride(1) * x.shape[1]) >= 1 << 31:
            return f"{name} {tuple(x.shape)} is too large"
    for name, x in {"codes": cache.codes, "affine": cache.affine, **windows}.items():
        if not x.is_contiguous() or x.data_ptr() % 16:
            return f"{name} is not contiguous from a multiple of 16 bytes on"
    wrong = (x.dtype for x in vars(targets).values() if x.dtype not in _triton.INTEGERS)
    return next((f"{dtype} targets; it has int32 and int64" for dtype in wrong), None)


def unsupported(
    key: Tensor, value: Tensor, cache: LayerCache, targets: TokenTargets, **rows: Any
) -> str | None:
    """Why the CUDA kernel cannot run these, in one line; `None` if it can. `rows` as of
    `misfit`."""
    return misfit(key, value, cache, targets, **rows) or _triton.without_cuda(key.device, WRITE)


def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    *,
    windows: WindowState,
    parts: Parts = "all",
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
    warpgroups: int = WARPGROUPS,
    step: bool | None = None,
) -> Tensor | None:
    """As `reference.write_kv_int2`, in one launch on the current stream; the same bytes by either
    kernel.

    Nothing is allocated if `query_out` is given, after the first call with these transforms. Only
    their matrices are read while the kernel in front still runs.

    Args:
        warpgroups: of a block of the kernel for many rows.
        step: which kernel; by default the one for few rows where that makes a block for a
            multiprocessor at most. Rows of 256 channels have only that one.
    """
    check(key, value, cache, transforms, targets, query, rows_out)
    if query is not None and query_out is None:
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    reason = unsupported(
        key, value, cache, targets, query=query, query_out=query_out, rows_out=rows_out
    )
    made = None if reason else variant(cache, transforms, targets, warpgroups)
    if made is None or (reason := build_failure(made, key.device)):
        raise NoWriteVariant(f"the CUDA write kernel cannot run this: {reason}")
    if len(key):
        launch = arguments(
            key, value, cache, transforms, targets, windows, parts, query, query_out, rows_out,
            _triton.multiprocessors(key.device), step,
        )  # fmt: skip
        kernel = _load(made, key.device)[launch.kernel]
        stream = torch.cuda.current_stream(key.device).cuda_stream
        shared = made.shared_bytes(step=launch.step)
        kernel.launch((launch.blocks, 1), launch.parameters, stream, shared=shared, early=True)
    return query_out


@cache
def build_failure(made: WriteVariant, device: torch.device) -> str | None:
    """Why a variant cannot be compiled and loaded, in one line; `None` once it is."""
    return nvrtc.failure(lambda: _load(made, device))


def build(made: WriteVariant, version: int) -> nvrtc.Build:
    """How a variant is compiled for `WRITE` and a version of the driver."""
    return nvrtc.Build.of(SOURCE, made.flags, "sm_{}{}a".format(*WRITE), version)


@cache
def _load(made: WriteVariant, device: torch.device) -> dict[str, nvrtc.Kernel]:
    """Compile and load once per variant and device."""
    code = build(made, nvrtc.version()).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        many = 128 * made.warpgroups
        threads = {} if made.wide else {"oscar_write": many, "oscar_write_slots": many}
        threads["oscar_write_step"] = 32 * STEP_ROWS
        loaded = dict(zip(threads, nvrtc.load(code, threads), strict=True))
        for name, kernel in loaded.items():
            kernel.allow_shared(made.shared_bytes(step=name == "oscar_write_step"))
    return loaded


class _Side(ctypes.Structure):
    """`Side` of product.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "halves", "mean", "ring", "sink")),
        *((name, ctypes.c_int) for name in (
            "x_token", "x_head", "out_token", "out_head", "halves_head", "mean_head",
            "blocks", "matrices", "heads", "rows",
        )),
        ("magic", ctypes.c_uint), ("shift", ctypes.c_uint),
    )  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of product.cuh."""

    _fields_ = (
        *((name, _Side) for name in ("v", "k", "q")),
        *((name, ctypes.c_void_p) for name in (
            "codes", "affine", "slots", "request_rows", "positions", "ends", "sink_block",
            "feedback",
        )),
        *((name, ctypes.c_int) for name in (
            "tokens", "heads", "recent", "sink", "to_slots", "to_windows", "block_rows",
            "ring_rows",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One launch. The tensors behind its addresses must outlive it.

    Attributes:
        kernel: `oscar_write`, or `oscar_write_slots` if only slots are written, or
            `oscar_write_step` for few rows.
        parameters: the argument of the kernel.
        blocks: blocks of the grid.
    """

    kernel: str
    parameters: Params
    blocks: int

    @property
    def step(self) -> bool:
        """Whether this is the kernel for few rows."""
        return self.kernel == "oscar_write_step"


def arguments(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    windows: WindowState,
    parts: Parts,
    query: Tensor | None,
    query_out: Tensor | None,
    rows_out: tuple[Tensor, Tensor] | None,
    sms: int,
    step: bool | None = None,
) -> Launch:
    """Choose the kernel, its argument and the number of blocks.

    Args:
        sms: multiprocessors of the device; a block takes a whole one.
    """
    k_out, v_out = rows_out or (None, None)
    matrices, heads, quantized = prepared(transforms), cache.num_kv_heads, parts != "windows"
    sides = [
        _side(value, v_out, matrices.v, None, heads, cache.ring_v, cache.sink_v),
        _side(key, k_out, matrices.k, matrices.k_mean, heads, cache.ring_k, cache.sink_k),
    ]
    made = variant(cache, transforms, targets)
    carried = cache.k_spec.head_dim if made.feedback else 0
    costs = [
        tile_cost(clip_rank(cache.v_spec), slots=quantized),
        tile_cost(clip_rank(cache.k_spec), slots=quantized, carried=carried),
    ]
    if query is not None and query_out is not None:
        sides.append(_side(query, query_out, matrices.q, None, heads, None, None))
        costs.append(tile_cost(0, slots=False))

    def tiles(rows: int) -> tuple[int, ...]:
        return tuple(side.matrices * -(-side.rows // rows) for side in sides)

    # With feedback a round of a block for few rows has the instructions of a tile of the others.
    most = WIDE_TILE if made.wide else STEP_ROWS if made.feedback else TILE
    fitting = next((n for n in range(STEP_ROWS, most + 1, STEP_ROWS) if sum(tiles(n)) <= sms), None)
    step = made.wide or (fitting is not None if step is None else step)
    rows = fitting or most
    if step:
        given = tiles(rows)
    else:
        given = shares(tiles(TILE), tuple(x.matrices for x in sides), tuple(costs), sms)
    for side, blocks in zip(sides, given, strict=True):
        side.blocks = blocks
    tensors = (cache.codes, cache.affine, *vars(targets).values(), windows.sink_block)
    weights = transforms.k_feedback
    feedback = None if weights is None else weights.data_ptr()
    parameters = Params(
        sides[0], sides[1], sides[2] if len(sides) > 2 else _Side(),
        *(x.data_ptr() for x in tensors), feedback,
        len(key), cache.num_kv_heads, cache.recent, cache.sink,
        int(parts != "windows"), int(parts != "slots"), rows, cache.ring_rows,
    )  # fmt: skip
    slots = parts == "slots" and rows_out is None
    kernel = "oscar_write_step" if step else "oscar_write_slots" if slots else "oscar_write"
    return Launch(kernel, parameters, sum(side.blocks for side in sides))


def _side(
    x: Tensor,
    out: Tensor | None,
    halves: Tensor,
    mean: Tensor | None,
    kv_heads: int,
    ring: Tensor | None,
    sink: Tensor | None,
) -> _Side:
    """One side of a launch, its blocks left open. A matrix or mean of each head makes the heads
    apart."""
    apart = halves.shape[0] > 1 or (mean is not None and mean.shape[0] > 1)
    matrices = kv_heads if apart else 1
    heads = x.shape[1] // matrices
    magic, shift = divider(heads)

    def pointer(y: Tensor | None) -> int | None:
        return None if y is None else y.data_ptr()

    return _Side(
        *map(pointer, (x, out, halves, mean, ring, sink)), x.stride(0), x.stride(1),
        0 if out is None else out.stride(0), 0 if out is None else out.stride(1),
        halves.stride(0) if halves.shape[0] > 1 else 0,
        mean.stride(0) if mean is not None and mean.shape[0] > 1 else 0,
        0, matrices, heads, len(x) * heads, magic, shift,
    )  # fmt: skip


def divider(divisor: int) -> tuple[int, int]:
    """`magic, shift` with `n // divisor == (n * magic >> 32) >> shift` for all n below 2^31; unused
    for 1.

    Source: T. Granlund, P. L. Montgomery, Division by invariant integers using multiplication
    (1994), for 31 bits.
    """
    if divisor == 1:
        return 0, 0
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), bits - 1


@lru_cache(maxsize=256)  # the layers of a model ask the same
def shares(
    tiles: tuple[int, ...], matrices: tuple[int, ...], costs: tuple[int, ...], blocks: int
) -> tuple[int, ...]:
    """Blocks of every side, in multiples of `matrices`, given where blocks have most to do until no
    side can take more.

    Args:
        tiles: of a side; it gets no more blocks.
        matrices: of a side; a block has one.
        blocks: to share; more are given where sides have more matrices than that.
    """
    given = [min(n, m) for n, m in zip(tiles, matrices, strict=True)]
    while True:
        spare = blocks - sum(given)
        wanting = [i for i, n in enumerate(tiles) if matrices[i] <= min(spare, n - given[i])]
        if not wanting:
            return tuple(given)
        busiest = max(wanting, key=lambda i: tiles[i] * costs[i] / given[i])
        given[busiest] += matrices[busiest]


def tile_cost(rank: int, *, slots: bool, carried: int = 0) -> int:
    """Clock cycles of a tile of the CUDA kernel, counted in the machine code, not measured.

    A product and the work after it hardly overlap, see kernels/measurements.md. Rows of a query
    cost 1,350, rows with codes but without a clip 1,830, and clips of rank 6 and 11 make it 2,720
    and 3,020.

    Args:
        rank: rank of the clip; 0 for none.
        slots: whether the rows are quantized.
        carried: channels of a row with feedback, which cost 3,598 instructions a quarter for 128.
    """
    clip = 530 + 60 * rank if rank else 0
    return 1350 + (480 + clip + 9 * carried**2 // 10 if slots else 0)
