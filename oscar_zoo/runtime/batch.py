"""A batch as the ops read it: tensors on the device, and on the host only what the engine knows
there anyway; tables of decode steps and of steps that verify drafts.

Kernels of a CUDA graph read a snapshot of the slots that was taken in front of the graph. They
never read the engine's table, which the scheduler may already change for the next step. Rows,
lengths and write locations are the graph's own buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, TokenTargets, WindowState
from oscar_kernels.slots import accepted_nodes
from oscar_zoo.runtime.engine import StepInput

Pack: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""Copies the slots of the requests in rows `[B]`, in order of position, from an engine's table to a
list: those of request `b` to `out[kv_indptr[b] : kv_indptr[b + 1]]`. Nothing is read on the host.
The arguments are the rows, the lengths of the requests `[B]`, and `kv_indptr` and `out`, which are
written."""


@dataclass(frozen=True)
class PrefixPiece:
    """Some consecutive cached tokens of one request."""

    request: int  # index of the request in the batch
    count: int  # number of tokens
    view: BatchView  # the request alone
    first: Tensor  # `[1]` int32, position of the first token
    out_indptr: Tensor  # `[2]` int32, 0 and `count`


@dataclass(frozen=True)
class Batch:
    # A `decode` batch has one new token per request, which is written before it is read. In an
    # `extend` batch every request reads its cached prefix, then its new tokens. A `verify` batch
    # has as many drafts of every request, which are written before they are read.
    kind: Literal["decode", "extend", "verify"]
    # The cached tokens of every request; in a decode or verify batch new tokens are among them.
    view: BatchView
    targets: TokenTargets  # where the new tokens go
    # `[B + 1]` int32, the new tokens of request `b` are `qo_indptr[b] .. qo_indptr[b + 1]`; `None`
    # in other batches.
    qo_indptr: Tensor | None = None
    # Both: cached and new tokens of every request, on the host; empty in other batches.
    prefix_lens: tuple[int, ...] = ()
    extend_lens: tuple[int, ...] = ()
    pieces: tuple[PrefixPiece, ...] = ()  # all cached tokens of an extend batch, in order
    drafts: Drafts | None = None  # of a verify batch
    # Blocks that new tokens are written to; `None` for those of their rows.
    sinks: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.targets.out_loc)

    @property
    def spans(self) -> list[slice]:
        ends = list(accumulate(self.extend_lens))
        return [slice(end - new, end) for end, new in zip(ends, self.extend_lens, strict=True)]


class BatchTables:
    """Buffers with fixed addresses that are filled in front of every decode step."""

    def __init__(self, max_batch: int, max_tokens: int, device: str | torch.device) -> None:
        def integers(numel: int) -> Tensor:
            return torch.zeros(numel, dtype=torch.int32, device=device)

        self.kv_indptr, self.positions = integers(max_batch + 1), integers(max_batch)
        self.kv_indices = integers(max_batch * max_tokens)

    @staticmethod
    def nbytes(max_batch: int, max_tokens: int) -> int:
        return 4 * (2 * max_batch + 1 + max_batch * max_tokens)

    def fill(self, pack: Pack, rows: Tensor, seq_lens: Tensor) -> None:
        number = rows.numel()
        torch.sub(seq_lens, 1, out=self.positions[:number])
        pack(rows, seq_lens, self.kv_indptr[: number + 1], self.kv_indices)


def decode_batch(
    tables: BatchTables, rows: Tensor, seq_lens: Tensor, out_loc: Tensor, windows: WindowState
) -> Batch:
    """Views of filled tables for a decode batch; `out_loc` `[B]` are slots of the new tokens."""
    number = rows.numel()
    view = BatchView(tables.kv_indptr[: number + 1], tables.kv_indices, rows, windows)
    return Batch("decode", view, TokenTargets(out_loc, rows, tables.positions[:number], seq_lens))


def moved(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device, without waiting for the steps before, as pageable memory would."""
    pinned = numbers.pin_memory() if device.type == "cuda" else numbers
    return pinned.to(device, non_blocking=True)


def extend_batch(
    pack: Pack,
    rows: Tensor,
    out_loc: Tensor,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    windows: WindowState,
    *,
    piece_tokens: int,
) -> Batch:
    """Build the tensors of an extend step of `rows` `[B]`, whose new tokens have the slots
    `out_loc` `[T]`. `piece_tokens`: most tokens of a `PrefixPiece`; 0 for no pieces."""
    device = rows.device
    on_host = torch.tensor([list(prefix_lens), list(extend_lens)], dtype=torch.int32)
    sums = torch.nn.functional.pad(on_host.cumsum(1, dtype=torch.int32), (1, 0))
    both, indptr = (moved(x, device) for x in (torch.cat([on_host, sums[:, :-1]]), sums))
    kv_indices = torch.empty(max(1, sum(prefix_lens)), dtype=torch.int32, device=device)
    pack(rows, both[0], indptr[0], kv_indices)
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
    return tuple(
        PrefixPiece(
            request,
            count,
            # Its entries of `kv_indptr` still count from the first request.
            replace(
                view,
                kv_indptr=view.kv_indptr[request : request + 2],
                rows=view.rows[request : request + 1],
            ),
            own[:1],
            own[1:],
        )
        for (request, _, count), own in zip(plan, moved(numbers, view.rows.device), strict=True)
    )


class VerifyTables:
    """Buffers with fixed addresses that are filled in front of every step with drafts."""

    def __init__(
        self, tables: BatchTables, windows: WindowState, max_batch: int, drafts: int
    ) -> None:
        self._tables, self._windows, self._most = tables, windows, drafts
        device = tables.kv_indptr.device
        numel = max_batch * drafts
        # Types as those of a decode step, so that both run the same compiled kernels.
        self._rows, self._ends = (
            torch.zeros(numel, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._positions, self._mask = (
            torch.zeros(numel, dtype=torch.int32, device=device) for _ in range(2)
        )
        # Block 0 is nobody's: the drafts of a tree write their sinks there.
        self._no_sinks = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._steps = torch.arange(drafts, dtype=torch.int32, device=device)
        self._last: StepInput | None = None

    @staticmethod
    def nbytes(max_batch: int, drafts: int) -> int:
        return 24 * max_batch * drafts + 4 * (max_batch + drafts)

    def fill(self, pack: Pack, step: StepInput) -> None:
        drafts = _drafts_of(step)
        number, count = step.rows.numel(), drafts.count
        if count > self._most:
            raise ValueError(f"{count} drafts of a request; the ring has room for {self._most}")
        lengths, total = step.seq_lens, number * count
        ends = lengths + count
        self._ends[:total].view(number, count).copy_(ends[:, None].expand(-1, count))
        torch.add(
            lengths[:, None], self._steps[:count], out=self._positions[:total].view(number, count)
        )
        self._rows[:total].view(number, count).copy_(step.rows[:, None].expand(-1, count))
        if drafts.mask is not None:
            self._mask[:total].copy_(drafts.mask)
        pack(step.rows, ends, self._tables.kv_indptr[: number + 1], self._tables.kv_indices)
        self._last = step

    def batch(self, step: StepInput) -> Batch:
        drafts = _drafts_of(step)
        number, total = step.rows.numel(), step.rows.numel() * drafts.count
        view = BatchView(
            self._tables.kv_indptr[: number + 1], self._tables.kv_indices, step.rows, self._windows
        )
        targets = TokenTargets(
            step.out_loc, self._rows[:total], self._positions[:total], self._ends[:total]
        )
        if drafts.mask is None:
            return Batch("verify", view, targets, drafts=Drafts(drafts.count))
        tree = Drafts(drafts.count, self._mask[:total])
        return Batch("verify", view, targets, drafts=tree, sinks=self._no_sinks)

    def accepted(self, target: Tensor, source: Tensor) -> dict[str, Any]:
        """The arguments of `draft_commit` beside the windows; see `Int2Cache.commit`."""
        if self._last is None or _drafts_of(self._last).mask is None:
            raise RuntimeError("no tree of drafts was verified")
        out_loc, count = self._last.out_loc.long(), _drafts_of(self._last).count
        number = out_loc.numel() // count  # requests of a graph beyond these are padding
        nodes = slice(0, number * count, count)  # the first one of each request
        return {
            "accepted": accepted_nodes(out_loc, count, target.long(), source.long()),
            "count": count,
            "rows": self._rows[nodes].contiguous(),
            "lengths": self._positions[nodes].contiguous(),
            "out_loc": out_loc,
        }


def _drafts_of(step: StepInput) -> Drafts:
    if step.drafts is None:
        raise ValueError("a verify step without drafts")
    return step.drafts


def ancestors(mask: Tensor, lengths: Tensor, count: int, real: int) -> Tensor:
    """Which drafts every draft sees, `[B * count]` int32 as `oscar_kernels.cache.Drafts.mask`.
    Nothing is read on the host.

    Args:
        mask: bool, one dimension; for each real request `[count, count]`, or
            `[count, length + count]` with the tokens in front of the drafts.
        lengths: `[B]`, tokens of each request in front of its drafts.
        real: requests with a mask; a draft of the others, which are padding, sees itself.
    """
    device, used = mask.device, lengths[:real]
    node = torch.arange(count, device=device)
    before = torch.zeros_like(used) if mask.numel() == real * count**2 else used
    width = (before + count).long()
    first = (width.cumsum(0) - width) * count + before
    at = first[:, None, None] + node[:, None] * width[:, None, None] + node
    own = node == node[:, None]
    seen = own.repeat(lengths.numel(), 1, 1)
    seen[:real] |= mask[at.clamp(max=mask.numel() - 1)] & (node < node[:, None])
    bits = (seen * (1 << node)).sum(-1)
    return bits.flatten().to(torch.int32)  # the bit of draft 31 is the sign


def longest_chains(tokens: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> Any:
    """A chain in place of every tree: its longest path, and behind it the other drafts, which are
    wrong there unless the model says the same. `tokens` are the drafts of each tree, parents in
    front of children; `mask` has for each `[count, count]`, which drafts every draft sees, itself
    among them. Both have one dimension, and so have the results."""
    count = mask.size // tokens.size
    seen = mask.reshape(-1, count, count).astype(bool)
    last = seen.sum(-1).argmax(-1)
    path = np.take_along_axis(seen, last[:, None, None], 1)[:, 0]
    order = np.argsort(~path, axis=1, kind="stable")
    chains = np.take_along_axis(tokens.reshape(-1, count), order, 1)
    everything_before = np.tri(count, dtype=mask.dtype).reshape(-1)
    return chains.reshape(-1), np.tile(everything_before, len(seen))
