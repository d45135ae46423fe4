"""The uncompressed tier: per request row a ring of its last tokens and its first tokens, in the type of the model.

Position `p` of a request lies at `p % recent` of its ring. `ring_start` and `sink_from` say from which position on the
current owner of a row wrote there; anything before belongs to an earlier owner and must never be read. A row has a new
owner exactly when SGLang's row allocator handed it out (`fresh`); nothing is inferred from lengths, because another
request can match by chance. Needs no sglang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SideShape:
    """Size of the store of one worker. Row 0 is the padding row of SGLang and a dummy here too."""

    num_layers: int
    num_rows: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    sink: int
    recent: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1:
            raise ValueError(f"sink {self.sink} must be at least 0 and recent {self.recent} at least 1")

    @property
    def token_bytes(self) -> int:
        """Bytes of one uncompressed token over all layers and heads."""
        return self.num_layers * self.num_kv_heads * (self.k_head_dim + self.v_head_dim) * int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store: windows, and three int32 per row."""
        return self.num_rows * ((self.sink + self.recent) * self.token_bytes + 12)


@dataclass(frozen=True)
class Coverage:
    """Which of the positions `[0, length)` of a request come from where; everything else is read as INT2."""

    length: int
    sink: range
    ring: range

    @property
    def compressed(self) -> int:
        """Number of positions that are read as INT2."""
        overlap = len(range(max(self.sink.start, self.ring.start), min(self.sink.stop, self.ring.stop)))
        return self.length - len(self.sink) - len(self.ring) + overlap


def coverage(length: int, *, sink: int, recent: int, sink_from: int, ring_start: int) -> Coverage:
    """Where a query with n cached tokens reads them: `[sink_from, min(sink, n))`, `[max(n - recent, ring_start), n)`.

    Args:
        length: n, tokens of the request that are cached, in positions 0 .. n - 1.
        sink, recent: sizes of the windows.
        sink_from, ring_start: first position of the current owner in each store.
    """
    first = range(sink_from, max(sink_from, min(sink, length)))
    start = max(length - recent, ring_start)
    return Coverage(length, first, range(start, max(start, length)))


class SideStore:
    """Rings and sinks of all rows of one worker."""

    def __init__(self, shape: SideShape, device: str | torch.device) -> None:
        self.shape = shape
        self.fresh: set[int] = set()

        def store(width: int, dim: int) -> Tensor:
            size = (shape.num_layers, shape.num_rows, width, shape.num_kv_heads, dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        self.ring_k, self.ring_v = store(shape.recent, shape.k_head_dim), store(shape.recent, shape.v_head_dim)
        self.sink_k, self.sink_v = store(shape.sink, shape.k_head_dim), store(shape.sink, shape.v_head_dim)
        self.ring_start = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_from = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_block = torch.arange(shape.num_rows, dtype=torch.int32, device=device)

    def hand_out(self, rows: list[int]) -> None:
        """SGLang gave these rows to new owners. Runs in the scheduler: touches the host only."""
        self.fresh.update(rows)

    def take_fresh(self, rows: list[int]) -> list[int]:
        """Those of `rows` whose owner is new since they were last asked about, in order."""
        fresh = [row for row in rows if row in self.fresh]
        self.fresh.difference_update(fresh)
        return fresh

    def begin(self, row: int, prefix: int) -> None:
        """A new owner starts with `prefix` cached tokens: nothing below `prefix` is in its ring or sinks."""
        self.ring_start[row] = prefix
        self.sink_from[row] = prefix

    def coverage(self, rows: list[int], lengths: list[int]) -> list[Coverage]:
        """Where each of `rows` reads its `lengths` cached tokens."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.ring_start.device)
        starts, froms = self.ring_start[index].tolist(), self.sink_from[index].tolist()
        s = self.shape
        return [
            coverage(n, sink=s.sink, recent=s.recent, sink_from=min(first, s.sink), ring_start=start)
            for n, start, first in zip(lengths, starts, froms, strict=True)
        ]

    def record(self, layer: int, row: int, begin: int, k: Tensor, v: Tensor) -> None:
        """Keep positions `begin`, `begin + 1`, ... of the owner of `row`: sinks, and the last ones in the ring.

        Args:
            layer: local layer index.
            row: request row.
            begin: position of the first token.
            k, v: `[tokens, num_kv_heads, head_dim]` float32, transformed; rounded to the type of the store.
        """
        end, shape = begin + k.shape[0], self.shape
        if begin < shape.sink:
            stop = min(shape.sink, end)
            self.sink_k[layer, row, begin:stop] = k[: stop - begin].to(shape.dtype)
            self.sink_v[layer, row, begin:stop] = v[: stop - begin].to(shape.dtype)
        first = max(begin, end - shape.recent)
        at = torch.arange(first, end, device=k.device) % shape.recent
        self.ring_k[layer, row, at] = k[first - begin :].to(shape.dtype)
        self.ring_v[layer, row, at] = v[first - begin :].to(shape.dtype)

    def overlay(self, layer: int, row: int, cover: Coverage, k: Tensor, v: Tensor) -> None:
        """Write the uncompressed tokens of `cover` over `k` and `v`, both `[cover.length, num_kv_heads, head_dim]`."""
        if len(cover.sink):
            own = slice(cover.sink.start, cover.sink.stop)
            k[own], v[own] = self.sink_k[layer, row, own].to(k.dtype), self.sink_v[layer, row, own].to(v.dtype)
        if len(cover.ring):
            at = torch.arange(cover.ring.start, cover.ring.stop, device=k.device) % self.shape.recent
            own = slice(cover.ring.start, cover.ring.stop)
            k[own], v[own] = self.ring_k[layer, row, at].to(k.dtype), self.ring_v[layer, row, at].to(v.dtype)

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor of the store."""
        yield from (self.ring_k, self.ring_v, self.sink_k, self.sink_v)
        yield from (self.ring_start, self.sink_from, self.sink_block)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())
