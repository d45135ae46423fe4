"""The variants of `write.cu`, and the tensors that no variant fits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.cache import LayerCache, TokenTargets, Transforms
from oscar_kernels.kv_write.arguments import clip_rank
from oscar_kernels.kv_write.tuning import WARPGROUPS
from oscar_kernels.spec import QuantSpec

HEAD_DIMS = (64, 128, 256)
MOST_RANK, MOST_WIDE_RANK = 16, 64
CHUNK = 64
"""Columns of a matrix of 256 that a block has at a time, twice."""
TILE, STEP_ROWS = 64, 16
"""Rows of a tile, and rows that a block of the kernel for few rows has at a time, one per warp."""
WIDE_TILE = 48
"""Rows of a tile of 256 channels."""
MOST_ROWS = 1 << 30

_INTEGER = {torch.int32: "int", torch.int64: "long long"}


@dataclass(frozen=True)
class WriteVariant:
    """What a kernel is compiled for; every field is a flag of write.cu, which explains it."""

    k_spec: QuantSpec
    v_spec: QuantSpec
    integers: tuple[str, str, str, str]
    warpgroups: int = WARPGROUPS

    @property
    def flags(self) -> dict[str, str | int]:
        """Values of the `-D` flags."""
        return {
            "DK": self.k_spec.head_dim,
            "DV": self.v_spec.head_dim,
            "GK": self.k_spec.num_groups,
            "GV": self.v_spec.num_groups,
            "BITS_K": self.k_spec.bits,
            "BITS_V": self.v_spec.bits,
            "RANK_K": clip_rank(self.k_spec),
            "RANK_V": clip_rank(self.v_spec),
            "GROUPS": self.warpgroups,
            "AFFINE_BF16": int(self.k_spec.scale_dtype == "bfloat16"),
            **dict(zip(("SLOT_T", "ROW_T", "POSITION_T", "END_T"), self.integers, strict=True)),
        }

    @property
    def wide(self) -> bool:
        """Whether a matrix does not fit a block, so that the kernel for few rows is the only
        one."""
        return max(self.k_spec.head_dim, self.v_spec.head_dim) > 128

    def shared_bytes(self, *, step: bool) -> int:
        """Bytes of dynamic shared memory: a matrix in halves, its product with the mean, rows as
        they come, and transformed rows. Of a matrix of 256 two chunks of columns are there at a
        time.

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
        return 4 * dim * dim + 32 * dim + tiles * TILE * 2 * dim + 4 * transformed + 1024


def variant(cache: LayerCache, targets: TokenTargets, warpgroups: int = WARPGROUPS) -> WriteVariant:
    """The variant for a cache and the integer types of targets."""
    slots, rows, positions, ends = (
        _INTEGER[x.dtype] for x in (targets.out_loc, targets.rows, targets.positions, targets.ends)
    )
    return WriteVariant(cache.k_spec, cache.v_spec, (slots, rows, positions, ends), warpgroups)


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
    for spec in (cache.k_spec, cache.v_spec):
        if spec.head_dim not in HEAD_DIMS:
            return f"head_dim {spec.head_dim}; it has {HEAD_DIMS}"
        most = (
            MOST_WIDE_RANK if 256 in (cache.k_spec.head_dim, cache.v_spec.head_dim) else MOST_RANK
        )
        if clip_rank(spec) > most:
            return f"a clip at the magnitude of rank {clip_rank(spec)}; it has ranks up to {most}"
    rows = {"key": key, "value": value, "query": query, "query_out": query_out}
    rows |= dict(zip(("rows_out[0]", "rows_out[1]"), rows_out or (), strict=False))
    given = {name: x for name, x in rows.items() if x is not None}
    windows = {
        "ring_k": cache.ring_k,
        "ring_v": cache.ring_v,
        "sink_k": cache.sink_k,
        "sink_v": cache.sink_v,
    }
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
    wrong = (
        x.dtype
        for x in (targets.out_loc, targets.rows, targets.positions, targets.ends)
        if x.dtype not in _INTEGER
    )
    return next((f"{dtype} targets; it has int32 and int64" for dtype in wrong), None)
