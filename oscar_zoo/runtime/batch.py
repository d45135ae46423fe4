"""A batch as the ops read it: tensors on the device, and on the host only what the engine knows
there anyway.

Kernels of a CUDA graph read a snapshot of the slots that was taken in front of the graph. They
never read the engine's table, which the scheduler may already change for the next step. Rows,
lengths and write locations are the graph's own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, TokenTargets, WindowState
from oscar_zoo.runtime.engine import SlotSource


@dataclass(frozen=True)
class PrefixPiece:
    """Some consecutive cached tokens of one request.

    Attributes:
        request: index of the request in the batch.
        count: number of tokens.
        view: the request alone.
        first: `[1]` int32, position of the first token.
        out_indptr: `[2]` int32, 0 and `count`.
    """

    request: int
    count: int
    view: BatchView
    first: Tensor
    out_indptr: Tensor


@dataclass(frozen=True)
class Batch:
    """`B` requests with `T` new tokens.

    Attributes:
        kind: a `decode` batch has one new token per request, which is written before it is read. In
            an `extend` batch every request reads its cached prefix, then its new tokens. A `verify`
            batch has as many drafts of every request, which are written before they are read.
        view: the cached tokens of every request; in a decode or verify batch new tokens are among
            them.
        targets: where the new tokens go.
        qo_indptr: `[B + 1]` int32, the new tokens of request `b` are
            `qo_indptr[b] .. qo_indptr[b + 1]`; `None` in other batches.
        prefix_lens, extend_lens: cached and new tokens of every request, on the host; empty in
            other batches.
        pieces: all cached tokens of an extend batch, in order.
        drafts: of a verify batch.
        sinks: blocks that new tokens are written to; `None` for those of their rows.
    """

    kind: Literal["decode", "extend", "verify"]
    view: BatchView
    targets: TokenTargets
    qo_indptr: Tensor | None = None
    prefix_lens: tuple[int, ...] = ()
    extend_lens: tuple[int, ...] = ()
    pieces: tuple[PrefixPiece, ...] = ()
    drafts: Drafts | None = None
    sinks: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return len(self.targets.out_loc)

    @property
    def spans(self) -> list[slice]:
        """The new tokens of every request of an extend batch."""
        ends = list(accumulate(self.extend_lens))
        return [slice(end - new, end) for end, new in zip(ends, self.extend_lens, strict=True)]


class BatchTables:
    """Buffers with fixed addresses that are filled in front of every decode step.

    Args:
        max_tokens: cached tokens of one request.
        device: where the buffers live.
    """

    def __init__(self, max_batch: int, max_tokens: int, device: str | torch.device) -> None:
        def integers(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=torch.int32, device=device)

        self.kv_indptr, self.positions = integers(max_batch + 1), integers(max_batch)
        self.kv_indices = integers(max_batch * max_tokens)

    @staticmethod
    def nbytes(max_batch: int, max_tokens: int) -> int:
        """Bytes of the buffers."""
        return 4 * (2 * max_batch + 1 + max_batch * max_tokens)

    def fill(self, source: SlotSource, rows: Tensor, seq_lens: Tensor) -> None:
        """Take the snapshot of a decode step.

        Args:
            source: has the slots of the cached tokens.
            rows: `[B]`, the row of every request.
            seq_lens: `[B]`, tokens of every request, the new one included.
        """
        number = rows.numel()
        torch.cumsum(seq_lens, 0, dtype=torch.int32, out=self.kv_indptr[1 : number + 1])
        torch.sub(seq_lens, 1, out=self.positions[:number])
        source.pack(rows, self.kv_indptr[: number + 1], self.kv_indices)


def decode_batch(
    tables: BatchTables, rows: Tensor, seq_lens: Tensor, out_loc: Tensor, windows: WindowState
) -> Batch:
    """Views of filled tables for a decode batch of `B` requests; `out_loc` `[B]` are the slots of
    the new tokens."""
    number = rows.numel()
    view = BatchView(tables.kv_indptr[: number + 1], tables.kv_indices, rows, windows)
    return Batch("decode", view, TokenTargets(out_loc, rows, tables.positions[:number], seq_lens))


def extend_batch(
    source: SlotSource,
    rows: Tensor,
    out_loc: Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    windows: WindowState,
    *,
    piece_tokens: int,
) -> Batch:
    """Build the tensors of an extend step.

    Args:
        source: has the slots of the cached tokens.
        rows: `[B]` on the device, the row of every request.
        out_loc: `[T]`, slots of the new tokens.
        prefix_lens, extend_lens: cached and new tokens of every request.
        windows: state of all rows.
        piece_tokens: most tokens of a `PrefixPiece`; 0 for no pieces.
    """
    device = rows.device
    on_host = torch.tensor([list(prefix_lens), list(extend_lens)], dtype=torch.int32)
    sums = torch.nn.functional.pad(on_host.cumsum(1, dtype=torch.int32), (1, 0))
    both, indptr = (
        torch.cat([on_host, sums[:, :-1]]).to(device, non_blocking=True),
        sums.to(device, non_blocking=True),
    )
    kv_indices = torch.empty(max(1, sum(prefix_lens)), dtype=torch.int32, device=device)
    source.pack(rows, indptr[0], kv_indices)
    total = sum(extend_lens)
    request = torch.repeat_interleave(both[1].long(), output_size=total)
    positions = torch.arange(total, dtype=torch.int32, device=device) + (both[0] - both[3])[request]
    ends = (both[0] + both[1]).long()[request]  # the type of a decode step: one compiled write
    targets = TokenTargets(out_loc, rows[request], positions, ends)
    view = BatchView(indptr[0], kv_indices, rows, windows)
    return Batch(
        "extend",
        view,
        targets,
        indptr[1],
        tuple(prefix_lens),
        tuple(extend_lens),
        _pieces(view, prefix_lens, piece_tokens) if piece_tokens else (),
    )


def _pieces(view: BatchView, prefix_lens: Sequence[int], most: int) -> tuple[PrefixPiece, ...]:
    plan = [
        (request, first, min(most, prefix - first))
        for request, prefix in enumerate(prefix_lens)
        for first in range(0, prefix, most)
    ]
    numbers = torch.tensor(
        [(first, 0, count) for _, first, count in plan], dtype=torch.int32
    ).reshape(-1, 3)
    moved = numbers.to(view.rows.device, non_blocking=True)
    return tuple(
        PrefixPiece(request, count, _alone(view, request), own[:1], own[1:])
        for (request, _, count), own in zip(plan, moved, strict=True)
    )


def _alone(view: BatchView, request: int) -> BatchView:
    """One request of a batch. Its entries of `kv_indptr` still count from the first request."""
    return BatchView(
        view.kv_indptr[request : request + 2],
        view.kv_indices,
        view.rows[request : request + 1],
        view.windows,
    )
