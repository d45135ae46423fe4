"""Tables of a step that verifies drafts, and what is committed after it.

The drafts of a request follow its committed tokens in slots and in the ring, whatever their depth
in a tree. A rejected draft needs nothing: the next step writes over it, and what it overwrote was
older than any window. The drafts of a chain are in their places already. Those of a tree are not
written to the sinks before they are accepted: sinks have one place for each position.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from oscar_kernels.cache import BatchView, Drafts, TokenTargets, WindowState
from oscar_kernels.slots import accepted_nodes
from oscar_zoo.runtime.batch import Batch, BatchTables
from oscar_zoo.runtime.engine import SlotSource, StepInput


class Committed(TypedDict):
    """Arguments of `draft_commit`, without the windows."""

    accepted: Tensor
    count: int
    rows: Tensor
    lengths: Tensor
    out_loc: Tensor


class VerifyTables:
    """Buffers with fixed addresses that are filled in front of every step with drafts.

    Args:
        tables: of decode steps; slots and their bounds are kept there.
        windows: state of all rows.
    """

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
        """Bytes of the buffers."""
        return 24 * max_batch * drafts + 4 * (max_batch + drafts)

    def fill(self, source: SlotSource, step: StepInput) -> None:
        """Take the snapshot of a step.

        Args:
            source: has the slots of committed tokens and drafts.
        """
        drafts = _drafts_of(step)
        number, count = step.rows.numel(), drafts.count
        if count > self._most:
            raise ValueError(f"{count} drafts of a request; the ring has room for {self._most}")
        lengths, total = step.seq_lens, number * count
        ends = self._ends[:total].view(number, count)
        ends.copy_((lengths + count)[:, None].expand(-1, count))
        torch.add(
            lengths[:, None],
            self._steps[:count],
            out=self._positions[:total].view(number, count),
        )
        self._rows[:total].view(number, count).copy_(step.rows[:, None].expand(-1, count))
        if drafts.mask is not None:
            self._mask[:total].copy_(drafts.mask)
        indptr = self._tables.kv_indptr[: number + 1]
        torch.cumsum(ends[:, 0], 0, dtype=torch.int32, out=indptr[1:])
        source.pack(step.rows, indptr, self._tables.kv_indices)
        self._last = step

    def batch(self, step: StepInput) -> Batch:
        """Views of filled tables for a step."""
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

    def accepted(self, target: Tensor, source: Tensor) -> Committed:
        """What of the last step is committed; see `Int2Cache.commit`."""
        if self._last is None or _drafts_of(self._last).mask is None:
            raise RuntimeError("no tree of drafts was verified")
        out_loc, count = self._last.out_loc.long(), _drafts_of(self._last).count
        number = out_loc.numel() // count  # requests of a graph beyond these are padding
        nodes = slice(0, number * count, count)  # the first one of each request
        return Committed(
            accepted=accepted_nodes(out_loc, count, target.long(), source.long()),
            count=count,
            rows=self._rows[nodes].contiguous(),
            lengths=self._positions[nodes].contiguous(),
            out_loc=out_loc,
        )


def _drafts_of(step: StepInput) -> Drafts:
    if step.drafts is None:
        raise ValueError("a verify step without drafts")
    return step.drafts
