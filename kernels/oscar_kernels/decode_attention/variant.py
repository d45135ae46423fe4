"""The variants of `decode.cu`, and the tensors that no variant fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oscar_kernels import nvrtc
from oscar_kernels._triton import INTEGERS
from oscar_kernels.cache import MOST_DRAFTS, BatchView, Drafts, LayerCache
from oscar_kernels.decode_attention.tuning import (
    CROWD,
    CUDA,
    LEAST_STAGES,
    MOST_RESIDENT,
    NARROW_DIM,
    WHOLE_BATCH,
    WHOLE_DIM,
    CudaTiles,
    most_stages,
    window_cost,
)
from oscar_kernels.spec import QuantSpec

MAX_BATCH = 1024
MAX_GROUP = 16
WARPS = 8
WARP_ROWS = 16
"""Most query rows of a warp; several warps share more of a KV head."""
WIDE_WARP_ROWS = 8
"""The same where the outputs of more do not fit into registers, or fewer take less time."""
MOST_ROWS = WARPS * WIDE_WARP_ROWS
"""Query rows of a KV head of a request, of all of its drafts."""
KEY_DIMS = (64, 128, 192, 256)
VALUE_DIMS = (64, 128, 256)
RESERVED_BYTES = 1024
"""Bytes of shared memory of a block that the system keeps, from sm_80 on."""
STATIC_BYTES = 1024
"""Most bytes of shared memory that the kernel declares and the system keeps."""

_QUERY = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


@dataclass(frozen=True)
class AttentionVariant:
    """What a kernel is compiled for; `flags` are those that decode.cu explains."""

    k_spec: QuantSpec
    v_spec: QuantSpec
    group: int
    heads: int
    slot: str
    indptr: str
    row: str
    query: int
    capped: bool
    tiles: CudaTiles = CUDA
    whole: bool = False
    """Whether a warp takes up to `WARP_ROWS` query rows of a KV head, else `WIDE_WARP_ROWS`."""
    drafts: int = 0
    """Drafts of a request that are verified, with a query row for each query head; 0 for a decode
    step."""
    learned_sinks: bool = False
    crowded: bool = False
    """Whether up to `MOST_RESIDENT` blocks share a multiprocessor, whatever the tiles say."""

    @property
    def resident(self) -> int:
        """Most blocks of a multiprocessor."""
        return MOST_RESIDENT if self.crowded else self.tiles.resident

    @property
    def rows(self) -> int:
        """Query rows of a KV head of a request."""
        return self.group * max(1, self.drafts)

    @property
    def slices(self) -> int:
        """`SLICES` of merge.cuh: blocks that share the output channels of a row."""
        return max(1, self.v_spec.head_dim // WHOLE_DIM)

    @property
    def partner_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block of stage 2."""
        return 4 * self.v_spec.head_dim * WHOLE_DIM if self.slices > 1 else 0

    @property
    def flags(self) -> dict[str, str | int]:
        """Values of the `-D` flags."""
        shares = sharing(self.rows, WARP_ROWS if self.whole else WIDE_WARP_ROWS)
        together = math.gcd(self.heads, WARPS // shares)
        wide = self.k_spec.head_dim + self.v_spec.head_dim > 256 or self.rows > 4
        k_spec, v_spec, tiles = self.k_spec, self.v_spec, self.tiles
        shape = v_spec.head_dim, -(-self.rows // shares)
        return {
            "DK": k_spec.head_dim, "GK": k_spec.num_groups, "BITS_K": k_spec.bits,
            "DV": v_spec.head_dim, "GV": v_spec.num_groups, "BITS_V": v_spec.bits,
            "GROUP": self.rows, "DRAFTS": self.drafts,
            "HB": together, "VH": shares, "TW": WARPS // shares // together,
            "STAGES": min(tiles.stages, most_stages(*shape, together * shares == WARPS)),
            "SLOT_T": self.slot, "INDPTR_T": self.indptr, "ROW_T": self.row,
            "QUERY": self.query,
            "AFFINE_BF16": int(k_spec.scale_dtype == "bfloat16"),
            "CAPPED": int(self.capped),
            "LEARNED": int(self.learned_sinks),
            "BLOCKS": 1 if wide else self.resident,
            "WINDOW_COST": tiles.window_cost or window_cost(*shape), "START": tiles.start,
        }  # fmt: skip


def sharing(rows: int, warp_rows: int) -> int:
    """Warps that share `rows` query rows of a KV head, of which each takes up to `warp_rows`; all
    of a block if even they cannot."""
    return next((n for n in (1, 2, 4) if rows <= n * warp_rows), WARPS)


def misfit(
    query: Tensor, cache: LayerCache, batch: BatchView, drafts: Drafts | None = None
) -> str | None:
    """Why the kernel cannot run these on any device, because of their types, shapes or addresses;
    `None` if it can."""
    k_dim, v_dim, heads = cache.k_spec.head_dim, cache.v_spec.head_dim, cache.num_kv_heads
    group, remainder = divmod(query.shape[1], heads)
    if k_dim not in KEY_DIMS or v_dim not in VALUE_DIMS:
        return f"head_dim {k_dim} of K and {v_dim} of V; it has {KEY_DIMS} and {VALUE_DIMS}"
    if remainder or not 1 <= group <= MAX_GROUP:
        return (
            f"{query.shape[1]} query heads over {heads} KV heads; it has whole groups of 1 to"
            f" {MAX_GROUP}"
        )
    if query.dtype not in _QUERY:
        return f"query dtype {query.dtype}"
    if query.data_ptr() % 16:
        return "a query that does not begin at a multiple of 16 bytes"
    if cache.ring_k.dtype != torch.bfloat16:
        return f"windows of {cache.ring_k.dtype}; it has bfloat16"
    count, requests = drafts.count if drafts else 1, len(batch.rows)
    if query.shape[::2] != (requests * count, k_dim) or len(batch.kv_indptr) <= requests:
        need = f"{requests} requests need [{requests * count}, heads, {k_dim}] and their kv_indptr"
        return f"a query {tuple(query.shape)}; {need}"
    if requests > MAX_BATCH:
        return f"{requests} requests; it has up to {MAX_BATCH}"
    if drafts and (reason := _misfit_of_drafts(query, cache, drafts)):
        return reason
    wrong = {x.dtype for x in (batch.kv_indptr, batch.kv_indices, batch.rows)} - {*INTEGERS}
    return f"{wrong.pop()} indices; it has int32 and int64" if wrong else None


def _misfit_of_drafts(query: Tensor, cache: LayerCache, drafts: Drafts) -> str | None:
    count, mask = drafts.count, drafts.mask
    if not 1 <= count <= MOST_DRAFTS:
        return f"{count} drafts of a request; it has 1 to {MOST_DRAFTS}"
    if cache.recent < count or cache.ring_rows < cache.recent + count - 1:
        return (
            f"{count} drafts, a window of {cache.recent} and a ring of {cache.ring_rows}; the"
            f" window needs {count} positions and the ring {count - 1} more"
        )
    rows = count * (query.shape[1] // cache.num_kv_heads)
    if rows > MOST_ROWS:
        return (
            f"{rows} query rows of a KV head, {count} drafts of each head; it has up to {MOST_ROWS}"
        )
    if mask is not None and (
        mask.dtype != torch.int32 or mask.numel() != query.shape[0] or not mask.is_contiguous()
    ):
        return f"a mask that is {mask.dtype} {tuple(mask.shape)}; it has int32 [{query.shape[0]}]"
    return None


def _crowded(cache: LayerCache, requests: int) -> bool:
    """Whether two blocks of a multiprocessor are faster than one."""
    wide = max(cache.k_spec.head_dim, cache.v_spec.head_dim)
    return wide <= NARROW_DIM and requests * cache.num_kv_heads >= CROWD


def _whole(query: Tensor, cache: LayerCache) -> bool:
    """Whether a warp can hold `WARP_ROWS` query rows."""
    wide = max(cache.k_spec.head_dim, cache.v_spec.head_dim)
    return wide <= WHOLE_DIM and query.dtype != torch.float32


def variant(
    query: Tensor,
    cache: LayerCache,
    batch: BatchView,
    logit_cap: float,
    tiles: CudaTiles = CUDA,
    drafts: Drafts | None = None,
    *,
    learned_sinks: bool = False,
) -> AttentionVariant:
    """The variant for a query, a cache and a batch that are no `misfit`."""
    group = query.shape[1] // cache.num_kv_heads
    count = drafts.count if drafts else 0
    whole = group * max(1, count) > 8 and _whole(query, cache)
    return AttentionVariant(
        cache.k_spec, cache.v_spec, group, cache.num_kv_heads, INTEGERS[batch.kv_indices.dtype],
        INTEGERS[batch.kv_indptr.dtype], INTEGERS[batch.rows.dtype], _QUERY[query.dtype],
        logit_cap != 0, tiles, whole and (count > 0 or query.shape[0] >= WHOLE_BATCH), count,
        learned_sinks, count == 0 and _crowded(cache, query.shape[0]),
    )  # fmt: skip


def fitting(made: AttentionVariant, shared: int) -> AttentionVariant:
    """The variant with as many stages as fit the shared memory of a block, but at least
    `LEAST_STAGES`."""
    while made.tiles.stages > LEAST_STAGES and ring_bytes(made.flags) + STATIC_BYTES > shared:
        made = replace(made, tiles=replace(made.tiles, stages=made.tiles.stages - 1))
    return made


def too_large(made: AttentionVariant, shared: int) -> str | None:
    """Why a block has too little shared memory for a variant that was made `fitting`; `None` if it
    has enough for what the launch asks for. The little that the kernel declares is for the driver
    to judge."""
    needed = ring_bytes(made.flags)
    if needed <= shared:
        return None
    return f"a block needs {needed:,} bytes of shared memory and has {shared:,}"


def ring_bytes(flags: nvrtc.Flags) -> int:
    """Bytes of dynamic shared memory of a block of stage 1: tiles, and two barriers for each."""
    size = {name: int(value) for name, value in flags.items() if not isinstance(value, str)}
    tokens = 32 * size["TW"]
    codes = (size["DK"] * size["BITS_K"] + size["DV"] * size["BITS_V"]) // 8
    rows = tokens * size["HB"] * (codes + 4 * (size["GK"] + size["GV"]))
    of_warp = -(-size["GROUP"] // size["VH"])
    gathered = WARPS * of_warp * (4 * (size["DV"] + 8) + 8) if size["TW"] > 1 else 0
    return max(size["STAGES"] * -(-rows // 128) * 128, gathered) + 16 * size["STAGES"]


def exclusive_bytes(per_multiprocessor: int, resident: int) -> int:
    """Bytes of dynamic shared memory with which a multiprocessor holds `resident` blocks of stage
    1, and no more.

    All blocks start at once, with equal shares of the work. While blocks of the kernel in front
    still hold registers of some multiprocessors, others would otherwise take the blocks of these
    as well, and take twice as long.

    Args:
        per_multiprocessor: bytes of shared memory.
    """
    return -(-(per_multiprocessor // (resident + 1) + 1 - RESERVED_BYTES) // 128) * 128
