"""Pages of token slots in the host's memory, copied there and back whole.

A record is one page of tokens: for each layer its codes, then its affine parameters, so layers may
differ in width. An engine decides which page of which request lies where; it holds the device pages
for as long as a copy runs, and lets nobody read a page before its copy is done.

On a GPU a record crosses the bus in one piece, through a small buffer beside the slots: records
that lie side by side in one copy, and then one copy inside the GPU for each layer. What limits it
is the bus.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

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
    return 2 * max(1, STAGE_BYTES // record) * record


class HostPages:
    def __init__(self, slots: SlotStore, page_size: int, num_pages: int) -> None:
        """`page_size`: tokens, a multiple of `LEAST_PAGE`. `num_pages`: records of the host."""
        if page_size % LEAST_PAGE:
            raise ValueError(f"pages of {page_size} tokens are no multiple of {LEAST_PAGE}")
        layers, pages = slots.shape.num_layers, slots.shape.num_slots // page_size
        buffers = list(slots.buffers())  # of the codes of all layers, then of their parameters
        in_order = itertools.chain.from_iterable(buffers[at::layers] for at in range(layers))
        self._parts = [
            buffer[: pages * page_size].view(torch.uint8).view(pages, -1).view(WORD)
            for buffer in in_order
        ]
        self._widths = [part.shape[1] for part in self._parts]
        words, device = sum(self._widths), self._parts[0].device
        self.record_bytes = words * WORD.itemsize
        self._pinned = device.type == "cuda"
        self.records = zeros((num_pages, words), WORD, "cpu")
        if self._pinned:  # torch would round its own page-locked memory up to a power of two
            place, size = self.records.data_ptr(), self.records.nbytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(place, size, 0))
        staged = stage_bytes(self.record_bytes) // 2 // self.record_bytes
        self._in, self._out = (
            torch.empty((staged, words), dtype=WORD, device=device) for _ in range(2)
        )

    def save(self, pages: Tensor, records: Tensor) -> None:
        """Copy pages into records, in the current stream. Both are numbers on the host."""
        for some, spans, stage in self._pieces(pages, records, self._out):
            for buffer, part in zip(self._parts, stage.split(self._widths, 1), strict=True):
                part.copy_(buffer[some])
            for record, at, count in spans:
                target = self.records[record : record + count]
                target.copy_(stage[at : at + count], non_blocking=True)

    def load(self, records: Tensor, pages: Tensor) -> None:
        """Copy records into pages, in the current stream. Both are numbers on the host."""
        for some, spans, stage in self._pieces(pages, records, self._in):
            for record, at, count in spans:
                source = self.records[record : record + count]
                stage[at : at + count].copy_(source, non_blocking=True)
            for buffer, part in zip(self._parts, stage.split(self._widths, 1), strict=True):
                buffer[some] = part

    def close(self) -> None:
        """Give the memory back; nothing may be copied any more."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.records.data_ptr())

    def _pieces(
        self, pages: Tensor, records: Tensor, stage: Tensor
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]], Tensor]]:
        """As much at a time as fits the buffer: the pages, the spans of records with their place in
        the buffer, and its part."""
        for some, wanted in zip(
            pages.split(len(stage)), records.split(len(stage)), strict=True
        ):
            if self._pinned:  # a plain copy would wait for the stream
                some = some.pin_memory().to(stage.device, non_blocking=True)
            yield some, _spans(wanted.tolist()), stage[: len(wanted)]


def _spans(records: list[int]) -> list[tuple[int, int, int]]:
    """Records that follow each other: the first, its place in the list, and how many."""
    spans: list[tuple[int, int, int]] = []
    for at, record in enumerate(records):
        if spans and record == spans[-1][0] + spans[-1][2]:
            first, place, count = spans[-1]
            spans[-1] = first, place, count + 1
        else:
            spans.append((record, at, 1))
    return spans
