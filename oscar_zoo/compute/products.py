"""Products of rows, chunk by chunk, summed in float64: the only arithmetic behind the moments.

Rows of any float dtype are cast to float64 before the product, so sums of bfloat16 rows are exact
except for the order of rounding. On a GPU, 16-bit rows go through its tensor cores directly. Their
products are exact in float32, `SHORT_CHUNK` of them are summed there, and the sums of
`TOKENS_AT_ONCE` rows are added in float64; `accumulation` names the way that was used. BLAS rounds
the two halves of x^T x differently. Only the lower triangle of a sum counts, and `symmetric`
mirrors it. A file keeps only that triangle, so sums that continue from a file have the same bits as
sums that were never saved.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_ROWS = 1024
"""Rows of one product in float64."""
SHORT_CHUNK = 512
"""Rows of one product on a GPU, summed in float32: relative error below 1e-5, measured 9.8e-7 on an
H200."""
WEIGHTED_CHUNK = 256
"""The same for weighted rows, which are float32: these products are slow, and more of them at once
fill a GPU."""
CHUNKS_AT_ONCE = 16
"""Products in one call on a GPU, 0.4 instead of 1.4 ms per 4,096 tokens of an 8B layer on an H200
for 150 MB more."""
TOKENS_AT_ONCE = 8192
"""Rows of each head whose products are in memory at the same time on a GPU: 34 MB for 32 query
heads of 128."""

SAME = 1e-6
"""Largest relative difference between sums that must be equal, such as those of one KV head on two
ranks."""


_HAS_OUT_DTYPE = "out_dtype" in (torch.bmm.__doc__ or "")


def accumulation(rows: Tensor) -> str:
    """How such rows are summed, in words of the manifest: `float64` or `float32-chunked`."""
    short = rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16)
    return "float32-chunked" if short and _HAS_OUT_DTYPE else "float64"


def add_gram(total: Tensor, rows: Tensor) -> None:
    """Add x^T x over the rows of each head, `[heads * g, N, d]` of any float dtype, to `total`,
    `[heads, d, d]` float64, in place; g in a row belong to one head of `total`."""
    if accumulation(rows) != "float64":
        _add_products(total, rows, rows, SHORT_CHUNK)
        return
    joined = rows.unflatten(0, (total.shape[0], -1)).flatten(1, 2)
    for piece in joined.split(_rows_at_once(rows), 1):
        x = _chunks(piece.double())
        total += (x.mT @ x).sum(1)


def add_sum(total: Tensor, rows: Tensor) -> None:
    """Add the sum over rows `[heads, N, d]` to `total`, `[heads, d]` float64, in place."""
    if accumulation(rows) == "float64":
        total += rows.sum(1, dtype=torch.float64)
    else:  # to float64 a GPU would first write the rows themselves
        for piece in rows.split(TOKENS_AT_ONCE, 1):
            total += piece.sum(1, dtype=torch.float32)


def add_weighted_gram(
    total: Tensor, weights: Tensor, key: Tensor, value: Tensor, target: Tensor
) -> None:
    """Add w v^T v to `total` and w to `weights` over the rows of each head, in place; w = k A k^T.

    Args:
        total: `[heads, dv, dv]` float64.
        weights: `[heads]` float64.
        key, value: `[heads, N, d]` and `[heads, N, dv]` of any float dtype.
        target: A, `[heads, d, d]` float64.
    """
    if accumulation(key) != "float64" and _float32_is_whole():
        for k, v in zip(key.split(TOKENS_AT_ONCE, 1), value.split(TOKENS_AT_ONCE, 1), strict=True):
            k, v = (x.to(torch.float32, memory_format=torch.contiguous_format) for x in (k, v))
            weight = (k @ target.float()).mul_(k).sum(-1)
            weights += weight.sum(-1)
            _add_products(total, v * weight[..., None], v, WEIGHTED_CHUNK)
        return
    at_once = _rows_at_once(key)
    for k, v in zip(key.split(at_once, 1), value.split(at_once, 1), strict=True):
        k, v = k.double(), v.double()
        weight = ((k @ target) * k).sum(-1)
        weights += weight.sum(-1)
        total += (_chunks(weight[..., None] * v).mT @ _chunks(v)).sum(1)


def symmetric(total: Tensor) -> Tensor:
    """The symmetric matrix of a sum: its lower triangle, mirrored; `[..., d, d]`, exact."""
    return total.tril() + total.tril(-1).mT


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two sums differ by rounding only, relative to the largest entry."""
    difference = (one - other.to(one.device)).abs().max()
    return bool(difference <= SAME * one.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def _rows_at_once(rows: Tensor) -> int:
    """Rows of one chunk. A CPU core is fastest when a chunk fits into its cache; a GPU is busy only
    with many small products at once."""
    return CHUNK_ROWS * (1 if rows.device.type == "cpu" else CHUNKS_AT_ONCE)


def _chunks(rows: Tensor) -> Tensor:
    """`[heads, N, d]` as `[heads, chunks, at most CHUNK_ROWS, d]`, filled up with rows of zeros."""
    count = max(1, -(-rows.shape[1] // CHUNK_ROWS))
    length = -(-rows.shape[1] // count)
    missing = count * length - rows.shape[1]
    if missing:  # padding by nothing would copy
        rows = functional.pad(rows, (0, 0, 0, missing))
    return rows.unflatten(1, (count, length))


def _add_products(total: Tensor, left: Tensor, right: Tensor, most: int) -> None:
    """Add x^T y to `total`, in chunks of at most `most` rows; arguments as for `add_gram`. Each
    chunk is summed in float32."""
    heads, group = total.shape[0], left.shape[0] // total.shape[0]
    for start, count, length in _pieces(left.shape[1], most):
        stop = start + count * length
        inside, x = _matrices(left[:, start:stop], count)
        _, y = _matrices(right[:, start:stop], count, inside=inside)
        sums = _multiply(x, y)
        if inside:
            total += sums.unflatten(0, (count, heads, group)).sum((0, 2))
        else:
            total += sums.unflatten(0, (heads, group * count)).sum(1)


def _float32_is_whole() -> bool:
    """Whether float32 products are full float32 in this process, and not TF32."""
    try:
        precision: str = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for some kernels only
        return False
    return precision == "highest"


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    """x^T y of each pair of matrices in float32."""
    return (
        torch.bmm(x.mT, y)
        if x.dtype == torch.float32
        else torch.bmm(x.mT, y, out_dtype=torch.float32)
    )


def _pieces(rows: int, most: int) -> Iterator[tuple[int, int, int]]:
    """`(start, count, length)`: from row `start`, `count` chunks of `length` rows. Together the
    pieces cover all rows once."""
    for begin in range(0, rows, TOKENS_AT_ONCE):
        size = min(TOKENS_AT_ONCE, rows - begin)
        count = -(-size // most)
        length = size // count
        yield begin, count, length
        if rest := size - count * length:  # fewer than there are chunks
            yield begin + count * length, 1, rest


def _matrices(rows: Tensor, count: int, *, inside: bool | None = None) -> tuple[bool, Tensor]:
    """Split the rows of each head, `[heads, N, d]`, into `count` chunks, without a copy where
    possible; `[heads * count, N / count, d]`.

    Models keep the heads of a token side by side; chunk c is then rows c, c + count, .. and matrix
    c * heads + h is that of head h. That is the layout `inside`, which `None` decides by the
    strides and which is returned. Otherwise a chunk is rows in a row, and the matrix of chunk c of
    head h is h * count + c.
    """
    if inside is None:
        inside = rows.stride(0) < rows.stride(1)
    if inside:
        return True, rows.transpose(0, 1).unflatten(0, (-1, count)).flatten(1, 2).transpose(0, 1)
    return False, rows.unflatten(1, (count, -1)).flatten(0, 1)
