"""What tests and benchmarks of the kernels share: a tolerance rule, poisoned memory, random caches
and trees of drafts.

A random cache holds numbers only where the requests of its batch may look: every other code, scale
and window row is poison, so that one element read too many turns an output into NaN.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oscar_kernels import quantizer, reference
from oscar_kernels.cache import BatchView, LayerCache, WindowState, allocate
from oscar_kernels.spec import QuantSpec, code_bytes


def assert_as_good_as_torch(
    got: Tensor, op: Callable[..., Tensor], inputs: Sequence[Tensor], *, atol: float = 1e-6
) -> None:
    """Bound the error of `got` by twice that of plain PyTorch in the same dtype; float64 is the
    truth. NaN fails.

    Args:
        op: the reference; computes in the dtype of its arguments.
    """
    exact = op(*(x.double() for x in inputs))
    assert got.shape == exact.shape, f"shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    if exact.numel():
        plain = (op(*inputs).double() - exact).abs().max().item()
        error = (got.double() - exact).abs().max().item()
        assert error <= 2 * plain + atol, (
            f"error {error:.2e}; plain torch {plain:.2e}, atol {atol:.0e}"
        )


def errors_beside_bfloat16(
    got: Tensor, filling: Filling, query: Tensor, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Four errors of decode attention, and the same of PyTorch's attention in bfloat16 over the
    same rows; float64 is the truth.

    They are the norm of a head's error and its largest element, each relative to the output's, the
    median and the maximum over all heads.
    """
    cache, batch = filling.cache, filling.batch
    exact = reference.decode_attention(query.double(), cache, batch, sm_scale=sm_scale)
    plain = torch.empty_like(exact)
    for request, q in enumerate(query.bfloat16()):
        rows = reference.cached_rows(cache, batch, request, torch.bfloat16)
        k, v = (x.transpose(0, 1)[None] for x in rows)
        one = scaled_dot_product_attention(q[None, :, None], k, v, scale=sm_scale, enable_gqa=True)
        plain[request] = one[0, :, 0]

    def errors(out: Tensor) -> Tensor:
        away = out - exact
        norm = away.norm(dim=-1) / exact.norm(dim=-1)
        most = away.abs().amax(-1) / exact.abs().amax(-1)
        return torch.stack([norm.median(), norm.max(), most.median(), most.max()])

    return errors(got.double()), errors(plain)


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """New uninitialized memory is NaN, or all ones for integers, so that an element read before it
    is written shows."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    owners = (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
    )
    with contextlib.ExitStack() as stack:
        for owner, name in owners:
            stack.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


def poison(x: Tensor) -> Tensor:
    """Fill in place: NaN, or all ones."""
    if x.is_floating_point():
        return x.fill_(math.nan)
    return x.fill_(255 if x.dtype == torch.uint8 else -1)


@dataclass(frozen=True)
class Filling:
    """A cache, a batch that reads it, and the rows that went in.

    Attributes:
        cache, batch: as the kernels take them.
        keys, values: transformed rows of all tokens, `[tokens, H, head_dim]` float32, packed by
            `batch.kv_indptr`.
    """

    cache: LayerCache
    batch: BatchView
    keys: Tensor
    values: Tensor


def random_cache(
    lengths: Sequence[int],
    k_spec: QuantSpec,
    v_spec: QuantSpec | None = None,
    *,
    num_kv_heads: int = 2,
    sink: int = 64,
    recent: int = 256,
    ring_rows: int | None = None,
    drafts: int = 0,
    sink_from: int | None = None,
    ring_start: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Filling:
    """A batch of requests with random rows in random slots, rows and sink blocks.

    Args:
        lengths: cached tokens of each request, its drafts included.
        k_spec, v_spec: of rows; V like K by default.
        ring_rows: positions of a ring; by default as many as the window and the drafts need.
        drafts: how many of the last tokens of each request are drafts.
        sink_from, ring_start: of every request; drawn for each one by default: nothing missing,
            some or all.
        dtype: of the windows.
    """
    v_spec = v_spec or k_spec
    draw = torch.Generator(device).manual_seed(seed)
    requests, tokens = len(lengths), sum(lengths)
    cache = allocate(
        k_spec,
        v_spec,
        slots=tokens + 8,
        rows=requests + 3,
        num_kv_heads=num_kv_heads,
        sink=sink,
        recent=recent,
        ring_rows=recent + max(0, drafts - 1) if ring_rows is None else ring_rows,
        blocks=requests + 2,
        dtype=dtype,
        device=device,
    )
    for x in (cache.codes, cache.affine, cache.ring_k, cache.ring_v, cache.sink_k, cache.sink_v):
        poison(x)
    host = torch.Generator().manual_seed(seed)
    rows = 1 + torch.randperm(requests + 2, generator=host)[:requests]
    state = torch.zeros(3, requests + 3, dtype=torch.int32)
    state[0, rows] = (1 + torch.randperm(requests + 1, generator=host)[:requests]).int()
    for row, length in zip(rows.tolist(), lengths, strict=True):
        state[1, row] = _missing(sink, host) if sink_from is None else sink_from
        state[2, row] = _missing(length, host) if ring_start is None else ring_start
    indptr = torch.tensor([0, *lengths]).cumsum(0)
    slots = 1 + torch.randperm(tokens + 7, generator=draw, device=device)[:tokens]
    batch = BatchView(
        indptr.int().to(device),
        slots.int(),
        rows.to(device),
        WindowState(*(x.to(device) for x in state)),
    )
    filling = Filling(
        cache,
        batch,
        _rows(tokens, num_kv_heads, k_spec, draw),
        2 * _rows(tokens, num_kv_heads, v_spec, draw),
    )
    _store(filling, rows.tolist(), indptr.tolist(), state, drafts)
    return filling


def _missing(limit: int, host: torch.Generator) -> int:
    return (0, limit // 2, limit)[int(torch.randint(3, (1,), generator=host))]


def _rows(tokens: int, heads: int, spec: QuantSpec, draw: torch.Generator) -> Tensor:
    """Random rows with a mean of their own, so that offsets matter."""
    x = torch.randn(tokens, heads, spec.head_dim, generator=draw, device=draw.device)
    return x + 0.5 * torch.randn(1, heads, 1, generator=draw, device=draw.device)


def _store(
    filling: Filling, rows: list[int], indptr: list[int], state: Tensor, drafts: int
) -> None:
    cache, slots = filling.cache, filling.batch.kv_indices.long()
    split, groups = code_bytes(cache.k_spec), 2 * cache.k_spec.num_groups
    for spec, x, codes, affine in (
        (cache.k_spec, filling.keys, cache.codes[..., :split], cache.affine[..., :groups]),
        (cache.v_spec, filling.values, cache.codes[..., split:], cache.affine[..., groups:]),
    ):
        packed, parameters = quantizer.quantize(x, spec)
        codes[slots], affine[slots] = packed, parameters.flatten(-2)
    for row, first, last in zip(rows, indptr[:-1], indptr[1:], strict=True):
        block, sink_from, ring_start = state[:, row].tolist()
        position = torch.arange(last - first, device=slots.device)
        sure = max(0, last - first - drafts)
        recent = position[min(max(sure + min(1, drafts) - cache.recent, ring_start, 0), sure) :]
        sink = position[:sure][sink_from : cache.sink]
        for x, ring, sinks in (
            (filling.keys, cache.ring_k, cache.sink_k),
            (filling.values, cache.ring_v, cache.sink_v),
        ):
            if len(recent):
                ring[row, recent % cache.ring_rows] = x[first + recent].to(ring.dtype)
            sinks[block, sink] = x[first + sink].to(sinks.dtype)


def random_trees(requests: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Masks of trees in which every node hangs below any earlier one, `[requests * count]`."""
    draw, masks = random.Random(requests), list[int]()
    for _ in range(requests):
        seen = [1]
        for node in range(1, count):
            seen.append(draw.choice(seen) | 1 << node)
        masks += [bits - (1 << 32) if bits >> 31 else bits for bits in seen]
    return torch.tensor(masks, dtype=torch.int32, device=device)


def orthogonal(number: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """`[number, dim, dim]`."""
    return torch.linalg.qr(torch.randn(number, dim, dim, device=device)).Q.contiguous()
