"""A batch as kernels read it: tensors on the device, and on the host only what SGLang knows there
anyway.

Kernels of a CUDA graph read a snapshot of the slots taken in front of the graph, never the engine's
table, which the scheduler may already be changing for the next step; rows, lengths and write
locations are the graph's own buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, TokenTargets, WindowState
from oscar_kernels.slot_table.launcher import pack_slots


@dataclass(frozen=True)
class DecodeBatch:
    """One token per request, cached before it reads, itself included.

    Attributes:
        view: the cached tokens of every request.
        targets: where the new tokens go.
    """

    view: BatchView
    targets: TokenTargets


@dataclass(frozen=True)
class Piece:
    """Some consecutive cached tokens of one request.

    Attributes:
        request: its number in the batch.
        count: tokens.
        view: the request alone.
        first: `[1]` int32, position of the first.
        cuts: `[2]` int32, 0 and `count`.
    """

    request: int
    count: int
    view: BatchView
    first: Tensor
    cuts: Tensor


@dataclass(frozen=True)
class ExtendBatch:
    """New tokens on top of cached prefixes.

    Attributes:
        prefix: the cached tokens of every request, without the new ones.
        targets: where the new tokens go.
        cuts: `[B + 1]` int32, the new tokens of request `b` are `cuts[b] .. cuts[b + 1]`.
        prefixes, lengths: of every request, on the host: cached tokens and new ones.
        pieces: all cached tokens, in order.
    """

    prefix: BatchView
    targets: TokenTargets
    cuts: Tensor
    prefixes: tuple[int, ...]
    lengths: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First new token of every request, and the one after its last."""
        ends = list(accumulate(self.lengths))
        return list(zip([0, *ends[:-1]], ends, strict=True))


class DecodeTables:
    """Buffers with fixed addresses, filled in front of every decode step.

    Args:
        max_batch: requests of a step.
        max_tokens: cached tokens of one request.
        device: where they live.
    """

    def __init__(self, max_batch: int, max_tokens: int, device: str | torch.device) -> None:
        def integers(number: int) -> Tensor:
            return torch.zeros(number, dtype=torch.int32, device=device)

        self.indptr, self.positions = integers(max_batch + 1), integers(max_batch)
        self.slots = integers(max_batch * max_tokens)

    @staticmethod
    def nbytes(max_batch: int, max_tokens: int) -> int:
        """Of the buffers."""
        return 4 * (2 * max_batch + 1 + max_batch * max_tokens)

    def fill(self, table: Tensor, rows: Tensor, lengths: Tensor) -> None:
        """Take the snapshot: `lengths` `[B]` tokens of `rows` `[B]`, the new one included."""
        number = rows.numel()
        torch.cumsum(lengths, 0, dtype=torch.int32, out=self.indptr[1 : number + 1])
        torch.sub(lengths, 1, out=self.positions[:number])
        pack_slots(table, rows, self.indptr[: number + 1], self.slots)

    def batch(
        self, rows: Tensor, lengths: Tensor, written: Tensor, windows: WindowState
    ) -> DecodeBatch:
        """Views of the buffers for a batch of this size; `written` `[B]` are the slots of the new
        tokens."""
        number = rows.numel()
        view = BatchView(self.indptr[: number + 1], self.slots, rows, windows)
        return DecodeBatch(view, TokenTargets(written, rows, self.positions[:number], lengths))


def extend_batch(
    table: Tensor,
    rows: Tensor,
    written: Tensor,
    prefixes: list[int],
    lengths: list[int],
    windows: WindowState,
    *,
    piece: int,
) -> ExtendBatch:
    """Build the tensors of an extend step.

    Args:
        table: the engine's slots by row and position.
        rows: `[B]` on the device.
        written: `[tokens]`, slots of the new tokens.
        prefixes, lengths: cached and new tokens of every request.
        windows: of all rows.
        piece: most tokens of a `Piece`.
    """
    device = rows.device
    on_host = torch.tensor([prefixes, lengths], dtype=torch.int32)
    sums = torch.nn.functional.pad(on_host.cumsum(1, dtype=torch.int32), (1, 0))
    both, cached = (
        torch.cat([on_host, sums[:, :-1]]).to(device, non_blocking=True),
        sums.to(device, non_blocking=True),
    )
    slots = torch.empty(max(1, sum(prefixes)), dtype=torch.int32, device=device)
    pack_slots(table, rows, cached[0], slots)
    total = sum(lengths)
    request = torch.repeat_interleave(both[1].long(), output_size=total)
    positions = torch.arange(total, dtype=torch.int32, device=device) + (both[0] - both[3])[request]
    targets = TokenTargets(written, rows[request], positions, (both[0] + both[1])[request])
    view = BatchView(cached[0], slots, rows, windows)
    pieces = _pieces(view, prefixes, piece)
    return ExtendBatch(view, targets, cached[1], tuple(prefixes), tuple(lengths), pieces)


def _pieces(view: BatchView, prefixes: list[int], most: int) -> tuple[Piece, ...]:
    plan = [
        (number, first, min(most, prefix - first))
        for number, prefix in enumerate(prefixes)
        for first in range(0, prefix, most)
    ]
    numbers = torch.tensor(
        [(first, 0, count) for _, first, count in plan], dtype=torch.int32
    ).reshape(-1, 3)
    moved = numbers.to(view.rows.device, non_blocking=True)
    return tuple(
        Piece(
            number,
            count,
            BatchView(
                view.kv_indptr[number : number + 2],
                view.kv_indices,
                view.rows[number : number + 1],
                view.windows,
            ),
            own[:1],
            own[1:],
        )
        for (number, _, count), own in zip(plan, moved, strict=True)
    )
