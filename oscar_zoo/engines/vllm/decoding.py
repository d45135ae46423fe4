"""Decode steps, over tensors that stay where they are, as the kernels of a CUDA graph need it."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oscar_kernels.cache import Drafts, NewTokens
from oscar_zoo.runtime.batch import Batch, BatchTables, VerifyTables, decode_batch, moved
from oscar_zoo.runtime.dispatch import Ops
from oscar_zoo.runtime.engine import StepInput
from oscar_zoo.runtime.stores import WindowStore

Rows: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Decoding:
    """Requests that have as many new tokens each: one, and perhaps drafts.

    `set` is what the host does in front of a step, and `fill` the kernels that tell the device of
    it. These read nothing but vLLM's own tensors, which stay where they are too, so they are among
    the first of a CUDA graph.
    """

    def __init__(
        self, ops: Ops, windows: WindowStore, tables: BatchTables, verify: VerifyTables | None
    ) -> None:
        most, device = tables.positions.numel(), tables.positions.device
        sizes = most, most * windows.shape.drafts, most
        self._ops, self._state = ops, windows.state
        self._tables, self._verify = tables, verify
        self._rows, self._slots, self._lengths = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in sizes
        )
        self._order = torch.arange(most, dtype=torch.int64, device=device)
        self._between = torch.zeros(1, device=device)
        self._owners: Rows = np.zeros(0, np.int64)
        self._steps: dict[tuple[int, int], tuple[StepInput, Batch]] = {}

    @classmethod
    def apart(cls, ops: Ops, windows: WindowStore, rows: Rows, longest: int) -> Decoding:
        """For one step, beside other requests of it that decode too."""
        number, drafts, device = len(rows), windows.shape.drafts, windows.state.sink_block.device
        tables = BatchTables(number, longest, device)
        return cls(ops, windows, tables, VerifyTables(tables, windows.state, number, drafts))

    def set(self, rows: Rows, count: int) -> Batch:
        """The rows of the requests, nearly always those of the step before."""
        number = len(rows)
        if not np.array_equal(rows, self._owners):
            self._owners = rows
            self._rows[:number].copy_(moved(torch.from_numpy(rows), self._rows.device))
        known = self._steps.get((number, count))
        if known is None:
            drafts = Drafts(count) if count > 1 else None
            kind: Literal["decode", "verify"] = "verify" if drafts else "decode"
            own = self._rows[:number], (), self._lengths[:number], self._slots[: number * count]
            step = StepInput(kind, *own, drafts=drafts)
            if self._verify is not None and drafts:
                made = self._verify.batch(step)
            else:
                made = decode_batch(
                    self._tables, step.rows, step.seq_lens, step.out_loc, self._state
                )
            known = self._steps[number, count] = step, made
        return known[1]

    def fill(
        self, count: int, slots: Tensor, lengths: Tensor, pages: Tensor, size: int, unused: int
    ) -> None:
        """By the `slots` of the new tokens, the `lengths` with them, and the pages of `size` tokens
        of every request. Padding writes the slot `unused`."""
        number = len(lengths)
        step, batch = self._steps[number, count]
        order = self._order[:number]
        if self._verify is not None and step.drafts:
            step.out_loc.copy_(landing(slots, unused))
            step.seq_lens.copy_((lengths - count).clamp(min=0))
            pack = partial(self._ops.pack, pages, page=size)
            self._verify.fill(lambda rows, *given: pack(order, *given), step)
        else:
            new, view = batch.targets, batch.view
            told = NewTokens(slots, new.out_loc, new.ends, new.positions)
            self._ops.pack(pages, order, lengths, view.kv_indptr, view.kv_indices, size, told)
            if unused:
                new.out_loc.copy_(landing(slots, unused))
        # The kernels of a layer begin before those in front of them have ended. Behind an ordinary
        # one they find the tables whole.
        self._between.zero_()


def landing(slots: Tensor, unused: int) -> Tensor:
    """Slots to write; vLLM gives padding a negative one."""
    return slots.where(slots >= 0, unused) if unused else slots.clamp(min=0)
