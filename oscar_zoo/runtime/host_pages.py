"""Pages of token slots in the host's memory, copied there and back whole.

A record is one page of tokens: the codes and the affine parameters of all layers, which may differ
in width. An engine decides which page of which request lies where. It holds the pages for as long
as a copy runs, and lets nobody read one before its copy is done.

On a GPU a record crosses the bus in one piece, through a small buffer beside the slots: records
that lie side by side in one copy, and then one copy inside the GPU for all layers of one width.
What limits it is the bus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oscar_zoo.runtime.stores import SlotStore, zeros

LEAST_PAGE = 16
"""Tokens. With this many, every part of a record is a multiple of eight bytes."""
STAGE_BYTES = 32 << 20
"""Of the buffer beside the slots, for each direction."""
WORD = torch.int64


def stage_bytes(record: int) -> int:
    """Bytes that both buffers take for records of so many bytes."""
    return 2 * _staged(record) * record


class HostPages:
    def __init__(self, slots: SlotStore, page_size: int, num_pages: int) -> None:
        """`page_size`: tokens, a multiple of `LEAST_PAGE`, which divides the number of slots.
        `num_pages`: records of the host."""
        if page_size % LEAST_PAGE or slots.shape.num_slots % page_size:
            raise ValueError(f"{slots.shape.num_slots} slots have no pages of {page_size} tokens")
        pages = slots.shape.num_slots // page_size
        # `[layers, pages, words]`
        self._parts = [
            stack.view(torch.uint8).view(len(stack), pages, -1).view(WORD) for stack in slots.stacks
        ]
        words, device = sum(part[:, 0].numel() for part in self._parts), self._parts[0].device
        self.record_bytes = words * WORD.itemsize
        self.records = zeros((num_pages, words), WORD, "cpu")
        self._pinned = device.type == "cuda"
        if self._pinned:  # torch would round its own page-locked memory up to a power of two
            place, size = self.records.data_ptr(), self.records.nbytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(place, size, 0))
        shape = _staged(self.record_bytes), words
        self._in, self._out = (torch.empty(shape, dtype=WORD, device=device) for _ in range(2))

    def save(self, pages: Tensor, records: Tensor) -> None:
        """Copy pages into records, in the current stream. Both are numbers on the host."""
        for some, spans, stage in self._pieces(pages, records, self._out):
            for part, staged in self._by_part(stage):
                staged.copy_(part[:, some])
            for record, at, count in spans:
                target = self.records[record : record + count]
                target.copy_(stage[at : at + count], non_blocking=True)

    def load(self, records: Tensor, pages: Tensor) -> None:
        """Copy records into pages, in the current stream. Both are numbers on the host."""
        for some, spans, stage in self._pieces(pages, records, self._in):
            for record, at, count in spans:
                source = self.records[record : record + count]
                stage[at : at + count].copy_(source, non_blocking=True)
            for part, staged in self._by_part(stage):
                part[:, some] = staged

    def close(self) -> None:
        """Give the memory back; nothing may be copied any more."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.records.data_ptr())

    def _by_part(self, stage: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """All pages of some layers, and `[layers, records, words]` of the buffer for them."""
        widths = [part[:, 0].numel() for part in self._parts]
        for part, staged in zip(self._parts, stage.split(widths, 1), strict=True):
            yield part, staged.unflatten(1, (len(part), -1)).transpose(0, 1)

    def _pieces(
        self, pages: Tensor, records: Tensor, stage: Tensor
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]], Tensor]]:
        """As much at a time as fits the buffer: the pages, the spans of records with their place in
        the buffer, and its part."""
        most = len(stage)
        for some, wanted in zip(pages.split(most), records.split(most), strict=True):
            if self._pinned:  # a plain copy would wait for the stream
                some = some.pin_memory().to(stage.device, non_blocking=True)
            yield some, _spans(wanted.tolist()), stage[: len(wanted)]


def _staged(record: int) -> int:
    """Records of one buffer."""
    return max(1, STAGE_BYTES // record)


def _spans(records: Sequence[int]) -> list[tuple[int, int, int]]:
    """Records that follow each other: the first, its place among all, and how many."""
    spans: list[tuple[int, int, int]] = []
    for at, record in enumerate(records):
        if spans and record == spans[-1][0] + spans[-1][2]:
            first, place, count = spans[-1]
            spans[-1] = first, place, count + 1
        else:
            spans.append((record, at, 1))
    return spans
