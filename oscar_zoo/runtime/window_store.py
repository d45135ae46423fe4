"""The BF16 windows: per row a ring of the last tokens of a request, and sink blocks with first
tokens that rows share.

Position `p` of a request lies at `p % ring_rows` of its ring. `ring_start` is the first position
that the current owner of a row wrote there, and `sink_from` the first position that its block
`sink_block` holds. Nothing before them may be read. A row has a new owner exactly when the engine
handed it out (`fresh`). Nothing is inferred from lengths, because another request can match by
chance. `sink_blocks` decides which row gets which block, and `kept_rings` whose ring a new owner
takes over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.cache import WindowState
from oscar_zoo.runtime.kept_rings import KeptRings
from oscar_zoo.runtime.sink_blocks import SinkBlocks

COPY_BYTES = 64 << 20
"""Most bytes that copies of rings take beside the store."""


@dataclass(frozen=True)
class WindowShape:
    """Size of the store of one worker.

    Row 0 is the engine's padding row and a dummy here too, as is block 0.

    Attributes:
        num_layers: local layers.
        num_rows: rows, the padding row included.
        num_kv_heads: local KV heads.
        k_head_dim, v_head_dim: channels of a row.
        sink: tokens of a sink block.
        recent: tokens of the window that is read from a ring.
        dtype: of the rows.
        idle: sink blocks beyond one per row; they keep the first tokens of finished requests.
        drafts: most tokens that a step writes before it is known which of them stay; 1 without
            speculative decoding.
        ranks: ranks that share the heads of a layer, to a multiple of which an engine may pad the
            requests of a step.
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
    drafts: int = 1
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
        """Most requests of a step, padding included."""
        requests = self.num_rows - 1
        return max(self.num_rows, -(-requests // self.ranks) * self.ranks)

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
        tokens = self.num_rows * self.ring_rows + self.num_blocks * self.sink
        return tokens * self.token_bytes + 12 * self.num_rows


class WindowStore:
    """Rings of all rows of one worker, and its sink blocks.

    Args:
        shape: sizes.
        device: where the tensors live.
        sinks: decides which row has which block; by default blocks are shared, and a prefix hit
            uses what it finds.
        rings: decides whose ring a new owner takes over; by default nobody's.
    """

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

        def store(number: int, width: int, dim: int) -> Tensor:
            size = (shape.num_layers, number, width, shape.num_kv_heads, dim)
            return torch.zeros(size, dtype=shape.dtype, device=device)

        dims = shape.k_head_dim, shape.v_head_dim
        self.ring_k, self.ring_v = (store(shape.num_rows, shape.ring_rows, dim) for dim in dims)
        self.sink_k, self.sink_v = (store(shape.num_blocks, shape.sink, dim) for dim in dims)
        self.ring_start = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_from = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)
        self.sink_block = torch.zeros(shape.num_rows, dtype=torch.int32, device=device)

    @property
    def state(self) -> WindowState:
        """What of the windows is present, per row."""
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
        """New owners start.

        The ring of a row holds none of its `prefixes[row]` cached tokens, but for those of a kept
        ring. A sink block may hold the first ones. This runs on the forward stream, in front of the
        step that brings their first tokens.
        """
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
        for table, values in (
            (self.ring_start, firsts),
            (self.sink_from, froms),
            (self.sink_block, blocks),
        ):
            table[rows.long()] = values
        self._copy([(place.donor, place.block) for place in places if place.donor is not None])
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
        """Every tensor of the store."""
        yield from (self.ring_k, self.ring_v, self.sink_k, self.sink_v)
        yield from (self.ring_start, self.sink_from, self.sink_block)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole store, as allocated."""
        return sum(buffer.nbytes for buffer in self.buffers())
