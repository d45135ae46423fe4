"""Pages of token slots in the host's memory, copied there and back whole.

A record is one page of tokens: the codes and the affine parameters of all layers, which may differ
in width. It has a part for every few layers, and parts of the same layers lie side by side, so that
the first layers of a page can be used while the others are on their way. An engine decides which
page of which request lies where. It holds the pages for as long as a copy runs, and lets nobody
read one before its copy is done.

On a GPU parts cross the bus through a small buffer beside the slots: those of records that follow
each other in one copy, and then one copy inside the GPU for all layers of one width. What limits it
is the bus.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oscar_zoo.runtime.stores import SlotStore, zeros

LEAST_PAGE = 16
"""Tokens. With this many, every part of a record is a multiple of eight bytes."""
LAYERS = 6
"""Of a part. A step waits for the first part of what it reads, and hardly for those behind it: for
100,000 tokens of Qwen3-8B that is 7 ms of 42 at 50 GB/s."""
STAGE_BYTES = 32 << 20
"""Of the buffer beside the slots, for each direction."""
WORD = torch.int64


def stage_bytes(record: int) -> int:
    """Bytes that both buffers take for records of so many bytes."""
    return 2 * max(STAGE_BYTES, record)


@dataclass(frozen=True)
class _Part:
    """A few layers. `slots`: `[layers, pages, words]` for each width; `records`: `[records,
    words]` on the host."""

    layers: int
    slots: list[Tensor]
    records: Tensor

    def by_width(self, stage: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """All pages of the layers of one width, and `[layers, records, words]` of the buffer."""
        widths = [one[:, 0].numel() for one in self.slots]
        for one, staged in zip(self.slots, stage.split(widths, 1), strict=True):
            yield one, staged.unflatten(1, (len(one), -1)).transpose(0, 1)

    def pieces(
        self, pages: Tensor, records: Tensor, buffer: Tensor
    ) -> Iterator[tuple[Tensor, list[tuple[int, int, int]], Tensor]]:
        """As much at a time as fits the buffer: the pages, the spans of records with their place in
        the buffer, and its part."""
        words = self.records.shape[1]
        most = len(buffer) // words
        stage = buffer[: most * words].view(most, words)
        for some, wanted in zip(pages.split(most), records.split(most), strict=True):
            yield some, _spans(wanted), stage[: len(wanted)]


class HostPages:
    def __init__(self, slots: SlotStore, page_size: int, num_pages: int) -> None:
        """`page_size`: tokens, a multiple of `LEAST_PAGE`, which divides the number of slots.
        `num_pages`: records of the host."""
        if page_size % LEAST_PAGE or slots.shape.num_slots % page_size:
            raise ValueError(f"{slots.shape.num_slots} slots have no pages of {page_size} tokens")
        pages, number, found = slots.shape.num_slots // page_size, slots.shape.num_layers, []
        for first in range(0, number, LAYERS):
            ends = first, min(first + LAYERS, number)
            cuts = [slice(*(bisect_left(own, end) for end in ends)) for own in slots.layers_of]
            some = [stack[cut] for stack, cut in zip(slots.stacks, cuts, strict=True)]
            whole = [one.view(torch.uint8).view(len(one), pages, -1) for one in some if len(one)]
            found.append((ends[1] - first, [one.view(WORD) for one in whole]))
        words = [sum(view[:, 0].numel() for view in views) for _, views in found]
        self.record_bytes = sum(words) * WORD.itemsize
        self.memory = zeros((num_pages * sum(words),), WORD, "cpu")
        shares = self.memory.split([num_pages * some for some in words])
        self._parts = [
            _Part(layers, views, share.view(num_pages, -1))
            for (layers, views), share in zip(found, shares, strict=True)
        ]
        device = slots.codes[0].device
        self._pinned = device.type == "cuda"
        if self._pinned:  # torch would round its own page-locked memory up to a power of two
            place, size = self.memory.data_ptr(), self.memory.nbytes
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(place, size, 0))
        size = stage_bytes(self.record_bytes) // 2 // WORD.itemsize
        self._in, self._out = (torch.empty(size, dtype=WORD, device=device) for _ in range(2))

    def save(self, pages: Tensor, records: Tensor) -> None:
        """Copy pages into records, in the current stream. Both are numbers on the host."""
        there = self._there(pages)
        for part in self._parts:
            for some, spans, stage in part.pieces(there, records, self._out):
                for slots, staged in part.by_width(stage):
                    staged.copy_(slots[:, some])
                for record, at, count in spans:
                    target = part.records[record : record + count]
                    target.copy_(stage[at : at + count], non_blocking=True)

    def load(self, records: Tensor, pages: Tensor) -> Iterator[None]:
        """Copy records into pages, in the current stream. Both are numbers on the host. It stops
        once for every layer, behind the copy that brings it."""
        there = self._there(pages)
        for part in self._parts:
            for some, spans, stage in part.pieces(there, records, self._in):
                for record, at, count in spans:
                    source = part.records[record : record + count]
                    stage[at : at + count].copy_(source, non_blocking=True)
                for slots, staged in part.by_width(stage):
                    slots[:, some] = staged
            yield from [None] * part.layers

    def record(self, number: int) -> Tensor:
        """A copy of the bytes of a record."""
        return torch.cat([part.records[number] for part in self._parts]).view(torch.uint8)

    def fill(self, number: int, record: Tensor) -> None:
        widths = [part.records.shape[1] for part in self._parts]
        for part, words in zip(self._parts, record.view(WORD).split(widths), strict=True):
            part.records[number] = words

    def close(self) -> None:
        """Give the memory back; nothing may be copied any more."""
        if self._pinned:
            self._pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())

    def _there(self, pages: Tensor) -> Tensor:
        """Numbers of pages beside the slots; a plain copy would wait for the stream."""
        return pages.pin_memory().to(self._in.device, non_blocking=True) if self._pinned else pages


def _spans(records: Tensor) -> list[tuple[int, int, int]]:
    """Records that follow each other: the first, its place among all, and how many."""
    numbers = records.numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 2) != 1)
    counts = np.diff(starts, append=len(numbers))
    return list(zip(*(one.tolist() for one in (numbers[starts], starts, counts)), strict=True))
