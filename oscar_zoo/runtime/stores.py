"""What is cached: every token as INT2 in the slot that the engine gave it, and the BF16 windows:
per row a ring of the last tokens of a request, and sink blocks with first tokens that rows share.

`oscar_kernels.cache` describes the records. A slot is complete once it is written, so any request
may read any slot of a shared prefix. Position `p` of a request lies at `p % ring_rows` of its ring.
Nothing before `ring_start` and `sink_from` may be read: the first position that the current owner
of a row wrote to its ring, and the first one that its block `sink_block` holds. A row has a new
owner exactly when the engine handed it out (`fresh`); another request can match lengths by chance.
`sink_blocks` decides which row gets which block, and `kept_rings` whose ring a new owner takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from oscar_kernels import quantizer
from oscar_kernels.cache import LayerCache, WindowState
from oscar_kernels.spec import QuantSpec, code_bytes, row_bytes
from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.sink_blocks import SinkBlocks

COPY_BYTES = 64 << 20
"""Most bytes that copies of rings take beside the store."""


@dataclass(frozen=True)
class SlotShape:
    # What a row of keys and of values is, for every local layer. Layers differ in bits and clip
    # only.
    specs: tuple[tuple[QuantSpec, QuantSpec], ...]
    num_slots: int  # slots, the dummy page included
    num_kv_heads: int  # local KV heads

    @classmethod
    def alike(
        cls, num_layers: int, num_slots: int, num_kv_heads: int, k: QuantSpec, v: QuantSpec
    ) -> Self:
        return cls(((k, v),) * num_layers, num_slots, num_kv_heads)

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    @property
    def k(self) -> QuantSpec:
        """Keys of the first layer: the channels and groups of all of them."""
        return self.specs[0][0]

    @property
    def v(self) -> QuantSpec:
        return self.specs[0][1]

    def token_bytes(self) -> int:
        rows = (row_bytes(spec) for both in self.specs for spec in both)
        return self.num_kv_heads * sum(rows)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Zeros, which on a CPU take no memory before they are written."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    blank = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)  # `torch.zeros` writes every page
    return torch.from_numpy(blank).view(dtype).view(size)


class SlotStore:
    """Codes and affine parameters of all slots, one pair of tensors per layer.

    Slots are numbered by the engine's allocator. Its first page is a dummy that padding writes."""

    def __init__(
        self,
        shape: SlotShape,
        device: str | torch.device,
        regions: Sequence[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        """`regions`: memory of an engine for the codes of each layer, and for its affine
        parameters, in bytes; allocated here by default."""
        self.shape = shape
        self.stacks: list[Tensor] = []
        self.layers_of: list[list[int]] = []
        """`[layers, num_slots, num_kv_heads, width]`: all of ours, by width, and which layers each
        holds. A copy of slots in every layer is one for each of them."""
        codes = [code_bytes(k) + code_bytes(v) for k, v in shape.specs]
        affine = [2 * (k.num_groups + v.num_groups) for k, v in shape.specs]
        dtype = quantizer.SCALE_DTYPES[shape.k.scale_dtype]
        if regions is None:
            self.codes = self.rows(codes, torch.uint8, device)
            self.affine = self.rows(affine, dtype, device)
            return
        size = shape.num_slots, shape.num_kv_heads, -1
        self.codes = [first.view(size) for first, _ in regions]
        self.affine = [rest.view(dtype).view(size) for _, rest in regions]

    def rows(
        self, widths: Sequence[int], dtype: torch.dtype, device: str | torch.device
    ) -> list[Tensor]:
        """Zeros `[num_slots, num_kv_heads, width]`, one tensor per layer. On a CPU the system gives
        a page when it is first written, so that a store of many gigabytes is there at once."""
        number, heads, layers = self.shape.num_slots, self.shape.num_kv_heads, {}
        for width in sorted({*widths}):
            # An even number of slots, so that every layer begins at a multiple of 16 bytes.
            size = widths.count(width), number + number % 2, heads, width
            stack = zeros(size, dtype, device)[:, :number]
            self.stacks.append(stack)
            self.layers_of.append([one for one, own in enumerate(widths) if own == width])
            layers[width] = iter(stack.unbind())
        return [next(layers[width]) for width in widths]

    def layer(self, index: int, windows: WindowStore) -> LayerCache:
        """The cache of one layer: its slots, with the windows that lie on top of them."""
        return LayerCache(
            *self.shape.specs[index],
            self.codes[index],
            self.affine[index],
            windows.ring_k[index],
            windows.ring_v[index],
            windows.sink_k[index],
            windows.sink_v[index],
            windows.shape.recent,
        )

    def move(self, target: Tensor, source: Tensor) -> None:
        for buffer in self.buffers():
            buffer[target] = buffer[source]

    def buffers(self) -> Iterator[Tensor]:
        yield from self.codes
        yield from self.affine

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())


@dataclass(frozen=True)
class WindowShape:
    """Size of the store of one worker. Row 0 is the engine's padding row and a dummy here too, as
    is block 0."""

    num_layers: int  # local layers
    num_rows: int  # rows, the padding row included
    num_kv_heads: int  # local KV heads
    k_head_dim: int  # both: channels of a row
    v_head_dim: int
    sink: int  # tokens of a sink block
    recent: int  # tokens of the window that is read from a ring
    dtype: torch.dtype  # of the rows
    idle: int = 0  # sink blocks beyond one per row; they keep the first tokens of finished requests
    host: int = 0  # sink blocks that the host keeps beside them
    # Most tokens that a step writes before it is known which of them stay; 1 without speculative
    # decoding.
    drafts: int = 1
    # Ranks that share the heads of a layer, to a multiple of which an engine may pad the requests
    # of a step.
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1 or self.idle < 0:
            raise ValueError(
                f"sink {self.sink} and idle {self.idle} must be at least 0 and recent {self.recent}"
                " at least 1"
            )
        if not 1 <= self.drafts <= self.recent:
            raise ValueError(
                f"{self.drafts} draft tokens of a step do not fit into a recent window of"
                f" {self.recent}"
            )

    @property
    def ring_rows(self) -> int:
        """Tokens of a ring. What a rejected draft overwrites is older than the window of every
        length that the request may have after the step."""
        return self.recent + self.drafts - 1

    @property
    def max_batch(self) -> int:
        requests = self.num_rows - 1
        return max(self.num_rows, -(-requests // self.ranks) * self.ranks)

    @property
    def num_blocks(self) -> int:
        return self.num_rows + self.idle

    @property
    def token_bytes(self) -> int:
        numbers = self.num_layers * self.num_kv_heads * (self.k_head_dim + self.v_head_dim)
        return numbers * int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        tokens = self.num_rows * self.ring_rows + self.num_blocks * self.sink
        return tokens * self.token_bytes + 12 * self.num_rows


class WindowStore:
    """Rings of all rows of one worker, and its sink blocks. `sinks` decides which row has which
    block; by default blocks are shared, and a prefix hit uses what it finds. `rings` decides whose
    ring a new owner takes over; by default nobody's."""

    def __init__(
        self,
        shape: WindowShape,
        device: str | torch.device,
        sinks: SinkBlocks | None = None,
        rings: KeptRings | None = None,
    ) -> None:
        self.shape = shape
        self.fresh: set[int] = set()
        self.sinks = sinks or SinkBlocks(shape.sink, shape.num_blocks, None)
        self.rings = rings or KeptRings(0)
        self.before_step: Callable[[], None] = lambda: None
        """Runs on the stream of a step, in front of all that it does here."""

        def store(number: int, width: int, dim: int) -> Tensor:
            size = (shape.num_layers, number, width, shape.num_kv_heads, dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        dims = shape.k_head_dim, shape.v_head_dim
        self.ring_k, self.ring_v = (store(shape.num_rows, shape.ring_rows, dim) for dim in dims)
        self.sink_k, self.sink_v = (store(shape.num_blocks, shape.sink, dim) for dim in dims)
        # Blocks that were given away; page-locked, so that copies do not hold up the host.
        self.host: tuple[Tensor, ...] = ()
        if self.sinks.host and shape.sink:
            size = (self.sinks.host, shape.num_layers, shape.sink, shape.num_kv_heads)
            pin = torch.device(device).type == "cuda"
            self.host = tuple(
                torch.empty(*size, dim, dtype=shape.dtype, device="cpu", pin_memory=pin)
                for dim in dims
            )
        self.ring_start = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_from = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_block = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)

    @property
    def state(self) -> WindowState:
        return WindowState(self.sink_block, self.sink_from, self.ring_start)

    def hand_out(self, rows: Sequence[int]) -> None:
        """The engine gave these rows to new owners. This runs in the scheduler, so it touches the
        host only."""
        self.fresh.update(rows)
        self.rings.hand_out(rows)

    def take_fresh(self, rows: Sequence[int]) -> list[int]:
        """The rows among `rows` that got a new owner since they were last asked about, in order."""
        fresh = [row for row in rows if row in self.fresh]
        self.fresh.difference_update(fresh)
        return fresh

    def begin(self, prefixes: Mapping[int, int]) -> None:
        """New owners start, in front of the step that brings their first tokens, on its stream. The
        ring of a row holds none of its `prefixes[row]` cached tokens, but for those of a kept ring.
        A sink block may hold the first ones."""
        if not prefixes:
            return
        places = self.sinks.begin(list(prefixes.items()))
        kept = self.rings.begin(prefixes)
        starts = {row: kept[row].first if row in kept else end for row, end in prefixes.items()}
        numbers = [(place.row, starts[place.row], place.sink_from, place.block) for place in places]
        device = self.ring_start.device
        rows, firsts, froms, blocks = (
            torch.tensor(numbers, dtype=torch.int32).T.contiguous().to(device)
        )
        at = rows.long()
        self.ring_start[at], self.sink_from[at], self.sink_block[at] = firsts, froms, blocks
        blocks = self.sink_k, self.sink_v
        for store, host in zip(blocks, self.host, strict=False):
            for place in places:
                if place.saved is not None:
                    host[place.saved].copy_(store[:, place.block], non_blocking=True)
        self._copy([(place.donor, place.block) for place in places if place.donor is not None])
        for store, host in zip(blocks, self.host, strict=False):
            for place in places:
                if place.host is not None:
                    store[:, place.block].copy_(host[place.host], non_blocking=True)
        self._copy_rings([(one.row, row) for row, one in kept.items() if one.row != row])

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks. The new owner writes what lies beyond its prefix before anybody reads
        it."""
        if pairs:
            sources, targets = torch.tensor(pairs).T.contiguous().to(self.ring_start.device)
            for store in (self.sink_k, self.sink_v):
                store[:, targets] = store[:, sources]

    def _copy_rings(self, pairs: list[tuple[int, int]]) -> None:
        """Copy whole rings, a few layers at a time. Of a layer all are read before any is
        written."""
        if not pairs:
            return
        sources, targets = torch.tensor(pairs).T.contiguous().to(self.ring_start.device)
        for store in (self.ring_k, self.ring_v):
            layers = max(1, COPY_BYTES // (len(pairs) * store[0, 0].nbytes))
            for part in store.split(layers):
                part[:, targets] = part[:, sources]

    def buffers(self) -> Iterator[Tensor]:
        yield from (self.ring_k, self.ring_v, self.sink_k, self.sink_v)
        yield from (self.ring_start, self.sink_from, self.sink_block)

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers())
