"""Writing new tokens by `write.cu`: checks, choice of the variant, shares of the blocks, launch.

A new token and KV head costs `2 (Dk + Dv)` bytes to read and a record to write; at head_dim 128 and both clips that is
a quarter of the time, and waiting for instructions a third (kernels/README.md has the profile).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.kv_write.arguments import check, clip_rank
from oscar_kernels.kv_write.cuda.prepared import prepared
from oscar_kernels.kv_write.reference import Parts
from oscar_kernels.kv_write.tuning import WARPGROUPS, tile_cost
from oscar_kernels.nvrtc import compile as nvrtc
from oscar_kernels.nvrtc import driver
from oscar_kernels.spec import QuantSpec

SOURCE = nvrtc.Source(__name__.rpartition(".")[0], "write.cu")

HEAD_DIMS = (64, 128)
MOST_RANK = 16
TILE, STEP_ROWS = 64, 16
"""Rows of a tile, and those that a block of the kernel for few rows has at a time: a warp each."""
MOST_ROWS = 1 << 30

_INTEGER = {torch.int32: "int", torch.int64: "long long"}


class Unsupported(ValueError):
    """The CUDA kernel does not do this; the message says what and why, in one line."""


class _Side(ctypes.Structure):
    """`Side` of types.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "halves", "sums", "ring", "sink")),
        *((name, ctypes.c_int) for name in (
            "x_token", "x_head", "out_token", "out_head", "halves_head", "sums_head",
            "blocks", "matrices", "heads", "rows",
        )),
        ("magic", ctypes.c_uint), ("shift", ctypes.c_uint),
    )  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of types.cuh."""

    _fields_ = (
        *((name, _Side) for name in ("v", "k", "q")),
        *((name, ctypes.c_void_p) for name in (
            "codes", "affine", "slots", "request_rows", "positions", "ends", "sink_block",
        )),
        *((name, ctypes.c_int) for name in ("tokens", "heads", "recent", "sink", "to_slots", "to_windows", "block_rows",
        )),
    )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What a compiled kernel is for; every field is a flag of write.cu, see there."""

    k_spec: QuantSpec
    v_spec: QuantSpec
    integers: tuple[str, str, str, str]
    warpgroups: int = WARPGROUPS

    @property
    def flags(self) -> dict[str, str | int]:
        """Values of the `-D` flags."""
        return {
            "DK": self.k_spec.head_dim, "DV": self.v_spec.head_dim, "GK": self.k_spec.num_groups,
            "GV": self.v_spec.num_groups, "RANK_K": clip_rank(self.k_spec), "RANK_V": clip_rank(self.v_spec),
            "GROUPS": self.warpgroups, "AFFINE_BF16": int(self.k_spec.scale_dtype == "bfloat16"),
            **dict(zip(("SLOT_T", "ROW_T", "POSITION_T", "END_T"), self.integers, strict=True)),
        }  # fmt: skip

    def shared_bytes(self, *, step: bool) -> int:
        """Dynamic shared memory: a matrix in two halves, tiles, sums of the mean, alignment.

        Args:
            step: of the kernel for few rows, with one tile and what it becomes; else two tiles of each warpgroup.
        """
        dim = max(self.k_spec.head_dim, self.v_spec.head_dim)
        tiles = TILE * (2 * dim + 4 * (dim + 8)) if step else self.warpgroups * 4 * TILE * dim
        return 4 * dim * dim + tiles + 4 * dim + 1024


@dataclass(frozen=True)
class Launch:
    """What a launch passes to the kernel, which tensors must outlive.

    Attributes:
        parameters: its argument.
        blocks: of the grid.
        step: it is the kernel for few rows.
    """

    parameters: Params
    blocks: int
    step: bool


@dataclass(frozen=True)
class _Loaded:
    many: driver.Kernel
    few: driver.Kernel


def variant(cache: LayerCache, targets: TokenTargets, warpgroups: int = WARPGROUPS) -> Variant:
    """The variant for a cache and the integer types of targets."""
    slots, rows, positions, ends = (
        _INTEGER[x.dtype] for x in (targets.slots, targets.rows, targets.positions, targets.ends)
    )
    return Variant(cache.k_spec, cache.v_spec, (slots, rows, positions, ends), warpgroups)


def unsupported(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    targets: TokenTargets,
    *,
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    rows_out: tuple[Tensor, Tensor] | None = None,
) -> str | None:
    """Why the CUDA kernel cannot run these, in one line; `None` if it can."""
    reason = misfit(key, value, cache, targets, query=query, query_out=query_out, rows_out=rows_out)
    if reason:
        return reason
    if key.device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, the keys are on {key.device.type}"
    if torch.cuda.get_device_capability(key.device) != (9, 0):
        return f"needs compute capability 9.0, not {torch.cuda.get_device_name(key.device)}"
    return None


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
    """`unsupported` for any device: what of types, shapes and addresses the kernel does not have."""
    for spec in (cache.k_spec, cache.v_spec):
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim}; it has {HEAD_DIMS}"
        if clip_rank(spec) > MOST_RANK:
            return f"a clip at the magnitude of rank {clip_rank(spec)}; it has ranks up to {MOST_RANK}"
    rows = {"key": key, "value": value, "query": query, "query_out": query_out}
    rows |= dict(zip(("rows_out[0]", "rows_out[1]"), rows_out or (), strict=False))
    given = {name: x for name, x in rows.items() if x is not None}
    windows = {"ring_k": cache.ring_k, "ring_v": cache.ring_v, "sink_k": cache.sink_k, "sink_v": cache.sink_v}
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
    wrong = (x.dtype for x in (targets.slots, targets.rows, targets.positions, targets.ends) if x.dtype not in _INTEGER)
    return next((f"{dtype} targets; it has int32 and int64" for dtype in wrong), None)


def unbuildable(cache: LayerCache, targets: TokenTargets) -> str | None:
    """Why the variant that these need cannot be compiled and loaded, in one line; `None` once it is."""
    return _build_failure(variant(cache, targets), cache.codes.device)


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
    """As `reference.write_kv_int2`, in one launch on the current stream; the same bytes by either kernel.

    Nothing is allocated if `query_out` is given, after the first call with these transforms. Only their matrices are
    read while the kernel in front still runs.

    Args:
        warpgroups: of a block of the kernel for many rows.
        step: which kernel; by default the one for few rows where that makes a block for a multiprocessor at most.

    Raises:
        ValueError: shapes or types do not fit.
        Unsupported: see `unsupported` and `unbuildable`; nothing has been launched.
    """
    check(key, value, cache, transforms, targets, query, rows_out)
    if query is not None and query_out is None:
        query_out = torch.empty_like(query, memory_format=torch.contiguous_format)
    reason = unsupported(key, value, cache, targets, query=query, query_out=query_out, rows_out=rows_out)
    made = variant(cache, targets, warpgroups)
    reason = reason or _build_failure(made, key.device)
    if reason:
        raise Unsupported(f"the CUDA write kernel cannot run this: {reason}")
    if len(key):
        launch = arguments(
            key, value, cache, transforms, targets, windows, parts, query, query_out, rows_out, _sms(key.device), step
        )
        loaded = _load(made, key.device)
        kernel = loaded.few if launch.step else loaded.many
        stream = torch.cuda.current_stream(key.device).cuda_stream
        shared = made.shared_bytes(step=launch.step)
        kernel.launch((launch.blocks, 1), launch.parameters, stream, shared=shared, early=True)
    return query_out


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
    """Which kernel is launched, with what, in how many blocks.

    Args:
        sms: multiprocessors; a block takes a whole one.
        step: as `write_kv_int2`.
    """
    k_out, v_out = rows_out or (None, None)
    matrices = prepared(transforms)
    sides = [
        _side(value, v_out, matrices.v, None, cache.num_kv_heads, cache.ring_v, cache.sink_v),
        _side(key, k_out, matrices.k, matrices.k_sums, cache.num_kv_heads, cache.ring_k, cache.sink_k),
    ]
    costs = [tile_cost(clip_rank(spec), slots=parts != "windows") for spec in (cache.v_spec, cache.k_spec)]
    if query is not None and query_out is not None:
        sides.append(_side(query, query_out, matrices.q, None, cache.num_kv_heads, None, None))
        costs.append(tile_cost(0, slots=False))

    def tiles(rows: int) -> list[int]:
        return [side.matrices * -(-side.rows // rows) for side in sides]

    fitting = next((n for n in range(STEP_ROWS, TILE + 1, STEP_ROWS) if sum(tiles(n)) <= sms), None)
    step = fitting is not None if step is None else step
    rows = fitting or TILE
    given = tiles(rows) if step else shares(tiles(TILE), [x.matrices for x in sides], costs, sms)
    for side, blocks in zip(sides, given, strict=True):
        side.blocks = blocks
    tensors = (
        cache.codes, cache.affine, targets.slots, targets.rows, targets.positions, targets.ends, windows.sink_block
    )  # fmt: skip
    parameters = Params(
        sides[0], sides[1], sides[2] if len(sides) > 2 else _Side(), *(x.data_ptr() for x in tensors), len(key),
        cache.num_kv_heads, cache.recent, cache.sink, int(parts != "windows"), int(parts != "slots"), rows,
    )  # fmt: skip
    return Launch(parameters, sum(side.blocks for side in sides), step)


def _side(
    x: Tensor,
    out: Tensor | None,
    halves: Tensor,
    sums: Tensor | None,
    kv_heads: int,
    ring: Tensor | None,
    sink: Tensor | None,
) -> _Side:
    """One side of a launch, its blocks left open. A matrix or mean of each head makes the heads apart."""
    apart = halves.shape[0] > 1 or (sums is not None and sums.shape[0] > 1)
    matrices = kv_heads if apart else 1
    heads = x.shape[1] // matrices
    magic, shift = divider(heads)

    def pointer(y: Tensor | None) -> int | None:
        return None if y is None else y.data_ptr()

    return _Side(
        *map(pointer, (x, out, halves, sums, ring, sink)), x.stride(0), x.stride(1),
        0 if out is None else out.stride(0), 0 if out is None else out.stride(1),
        halves.stride(0) if halves.shape[0] > 1 else 0,
        sums.stride(0) if sums is not None and sums.shape[0] > 1 else 0,
        0, matrices, heads, len(x) * heads, magic, shift,
    )  # fmt: skip


def divider(divisor: int) -> tuple[int, int]:
    """`magic, shift` with `n // divisor == (n * magic >> 32) >> shift` for all n below 2^31; unused for 1.

    Source: T. Granlund, P. L. Montgomery, Division by invariant integers using multiplication (1994), for 31 bits.
    """
    if divisor == 1:
        return 0, 0
    bits = (divisor - 1).bit_length()
    return -(-(1 << (31 + bits)) // divisor), bits - 1


def shares(tiles: list[int], matrices: list[int], costs: list[int], blocks: int) -> list[int]:
    """Blocks of every side: one for each tile if there are enough, else by cost; multiples of `matrices`.

    Args:
        tiles: of a side.
        matrices: of a side; a block has one.
        costs: of a tile.
        blocks: to share; more are given where sides have more matrices than that.
    """
    if sum(tiles) <= blocks:
        return list(tiles)
    whole = sum(n * cost for n, cost in zip(tiles, costs, strict=True))
    fair = [blocks * n * cost // whole for n, cost in zip(tiles, costs, strict=True)]
    return [min(n, max(1, share // m) * m) for n, m, share in zip(tiles, matrices, fair, strict=True)]


@cache
def _build_failure(made: Variant, device: torch.device) -> str | None:
    try:
        _load(made, device)
    except (nvrtc.CompilerMissing, nvrtc.CompilationFailed, driver.DriverError) as error:
        return " ".join(str(error).split())
    return None


@cache
def _load(made: Variant, device: torch.device) -> _Loaded:
    """Compile and load once per variant and device."""
    code = nvrtc.compiled(SOURCE, made.flags, "sm_90a", driver=driver.version())
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        many, few = driver.load(code, {"oscar_write": 128 * made.warpgroups, "oscar_write_step": 32 * STEP_ROWS})
        many.allow_shared(made.shared_bytes(step=False))
        few.allow_shared(made.shared_bytes(step=True))
    return _Loaded(many, few)


@cache
def _sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
