"""The uncompressed tier: per request row a ring of its last tokens, and blocks with first tokens
that rows share.

Position `p` of a request lies at `p % recent` of its ring. `ring_start` says from which position on
the current owner of a row wrote there, `sink_from` which positions its block `sink_block` holds;
anything before must never be read. A row has a new owner exactly when SGLang's row allocator handed
it out (`fresh`); nothing is inferred from lengths, because another request can match by chance.
`sink_blocks` decides who gets which block. Needs no sglang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_zoo.runtime.sink_blocks import SinkBlocks


@dataclass(frozen=True)
class WindowShape:
    """Size of the store of one worker. Row 0 is the padding row of SGLang and a dummy here too, as
    is block 0.

    `idle` is the number of sink blocks beyond one per row, which keep the first tokens of finished
    requests.
    """

    num_layers: int
    num_rows: int
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    sink: int
    recent: int
    dtype: torch.dtype
    idle: int = 0

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1 or self.idle < 0:
            raise ValueError(
                f"sink {self.sink} and idle {self.idle} must be at least 0 and recent {self.recent}"
                " at least 1"
            )

    @property
    def num_blocks(self) -> int:
        """Sink blocks, the dummy included."""
        return self.num_rows + self.idle

    @property
    def token_bytes(self) -> int:
        """Bytes of one uncompressed token over all layers and heads."""
        return (
            self.num_layers
            * self.num_kv_heads
            * (self.k_head_dim + self.v_head_dim)
            * int(self.dtype.itemsize)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store: rings, sink blocks, and three int32 per row."""
        tokens = self.num_rows * self.recent + self.num_blocks * self.sink
        return tokens * self.token_bytes + 12 * self.num_rows


@dataclass(frozen=True)
class WindowCoverage:
    """Which of the positions `[0, length)` of a request come from where; everything else is read as
    INT2."""

    length: int
    sink: range
    ring: range

    @property
    def compressed(self) -> int:
        """Number of positions that are read as INT2."""
        overlap = len(
            range(max(self.sink.start, self.ring.start), min(self.sink.stop, self.ring.stop))
        )
        return self.length - len(self.sink) - len(self.ring) + overlap

    def compressed_sinks(self, sink: int) -> int:
        """Those of them among the first `sink`."""
        return sum(p not in self.sink and p not in self.ring for p in range(min(sink, self.length)))


def coverage(
    length: int, *, sink: int, recent: int, sink_from: int, ring_start: int
) -> WindowCoverage:
    """Where a query with n cached tokens reads them: `[sink_from, min(sink, n))`,
    `[max(n - recent, ring_start), n)`.

    Args:
        length: n, tokens of the request that are cached, in positions 0 .. n - 1.
        sink, recent: sizes of the windows.
        sink_from, ring_start: first position of the current owner in each store.
    """
    first = range(sink_from, max(sink_from, min(sink, length)))
    start = max(length - recent, ring_start)
    return WindowCoverage(length, first, range(start, max(start, length)))


class WindowStore:
    """Rings of all rows of one worker, and its sink blocks.

    Args:
        shape: sizes.
        device: where the tensors live.
        sinks: who has which block; by default blocks are shared and hits take what they find.
    """

    def __init__(
        self, shape: WindowShape, device: str | torch.device, sinks: SinkBlocks | None = None
    ) -> None:
        self.shape = shape
        self.fresh: set[int] = set()
        self.sinks = sinks or SinkBlocks(shape.sink, shape.num_blocks, None)

        def store(number: int, width: int, dim: int) -> Tensor:
            size = (shape.num_layers, number, width, shape.num_kv_heads, dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        dims = shape.k_head_dim, shape.v_head_dim
        self.ring_k, self.ring_v = (store(shape.num_rows, shape.recent, dim) for dim in dims)
        self.sink_k, self.sink_v = (store(shape.num_blocks, shape.sink, dim) for dim in dims)
        self.ring_start = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_from = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_block = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)

    def hand_out(self, rows: list[int]) -> None:
        """SGLang gave these rows to new owners. Runs in the scheduler: touches the host only."""
        self.fresh.update(rows)

    def take_fresh(self, rows: list[int]) -> list[int]:
        """Those of `rows` whose owner is new since they were last asked about, in order."""
        fresh = [row for row in rows if row in self.fresh]
        self.fresh.difference_update(fresh)
        return fresh

    def begin(self, prefixes: Mapping[int, int]) -> None:
        """New owners start: none of their `prefixes[row]` cached tokens is in the ring of `row`,
        the first ones may be in a block. Runs on the forward stream, in front of the step that
        brings their first tokens."""
        if not prefixes:
            return
        places = self.sinks.begin(list(prefixes.items()))
        numbers = [
            (place.row, prefixes[place.row], place.sink_from, place.block) for place in places
        ]
        device = self.ring_start.device
        rows, starts, froms, blocks = (
            torch.tensor(numbers, dtype=torch.int32).T.contiguous().to(device)
        )
        for table, values in (
            (self.ring_start, starts),
            (self.sink_from, froms),
            (self.sink_block, blocks),
        ):
            table[rows.long()] = values
        self._copy([(place.donor, place.block) for place in places if place.donor is not None])

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Whole blocks, onto others; what lies beyond a prefix is written by its owner before
        anybody reads it."""
        if pairs:
            sources, targets = torch.tensor(pairs).T.contiguous().to(self.ring_start.device)
            for store in (self.sink_k, self.sink_v):
                store[:, targets] = store[:, sources]

    def coverage(self, rows: list[int], lengths: list[int]) -> list[WindowCoverage]:
        """Where each of `rows` reads its `lengths` cached tokens."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.ring_start.device)
        starts, froms = self.ring_start[index].tolist(), self.sink_from[index].tolist()
        s = self.shape
        return [
            coverage(
                n, sink=s.sink, recent=s.recent, sink_from=min(first, s.sink), ring_start=start
            )
            for n, start, first in zip(lengths, starts, froms, strict=True)
        ]

    def record(self, layer: int, row: int, begin: int, k: Tensor, v: Tensor) -> None:
        """Keep positions `begin`, `begin + 1`, ... of the owner of `row`: sinks, and the last ones
        in the ring.

        Args:
            layer: local layer index.
            row: request row.
            begin: position of the first token.
            k, v: `[tokens, num_kv_heads, head_dim]` float32, transformed; rounded to the type of
                the store.
        """
        end, shape = begin + k.shape[0], self.shape
        if begin < shape.sink:
            stop, block = min(shape.sink, end), int(self.sink_block[row])
            self.sink_k[layer, block, begin:stop] = k[: stop - begin].to(shape.dtype)
            self.sink_v[layer, block, begin:stop] = v[: stop - begin].to(shape.dtype)
        first = max(begin, end - shape.recent)
        at = torch.arange(first, end, device=k.device) % shape.recent
        self.ring_k[layer, row, at] = k[first - begin :].to(shape.dtype)
        self.ring_v[layer, row, at] = v[first - begin :].to(shape.dtype)

    def overlay(self, layer: int, row: int, cover: WindowCoverage, k: Tensor, v: Tensor) -> None:
        """Write the uncompressed tokens of `cover` over `k` and `v`, both
        `[cover.length, num_kv_heads, head_dim]`."""
        if len(cover.sink):
            own, block = slice(cover.sink.start, cover.sink.stop), int(self.sink_block[row])
            k[own], v[own] = (
                self.sink_k[layer, block, own].to(k.dtype),
                self.sink_v[layer, block, own].to(v.dtype),
            )
        if len(cover.ring):
            at = (
                torch.arange(cover.ring.start, cover.ring.stop, device=k.device) % self.shape.recent
            )
            own = slice(cover.ring.start, cover.ring.stop)
            k[own], v[own] = (
                self.ring_k[layer, row, at].to(k.dtype),
                self.ring_v[layer, row, at].to(v.dtype),
            )

    def buffers(self) -> Iterator[Tensor]:
        """Every tensor of the store."""
        yield from (self.ring_k, self.ring_v, self.sink_k, self.sink_v)
        yield from (self.ring_start, self.sink_from, self.sink_block)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())
