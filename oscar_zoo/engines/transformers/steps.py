"""Where the tokens of a batch lie, which is the same in every layer of a model.

Token `p` of sequence `b` has slot `p * B + b`, so that a longer cache only appends. `p` counts the
padding on the left of a sequence too; its position in windows does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from oscar_kernels.cache import MOST_DRAFTS, TokenTargets
from oscar_zoo.errors import UsageError

FAR = 1 << 30
"""A position that no window has: the first tokens and the last ones are real."""

SPARE = MOST_DRAFTS
"""Rows of a ring beyond its window: as many tokens can be taken back and leave a whole window."""
T = TypeVar("T")


class Steps:
    """Slots and lists of one step at a time: the first layer makes them, the others take them."""

    def __init__(self, pads: Tensor | None) -> None:
        """`pads`, `[B]`, are the tokens of padding of each sequence; `None` where a mask tells."""
        self._given = pads is not None
        self.pads: tuple[int, ...] = () if pads is None else tuple(pads.tolist())
        self._kept: dict[tuple[str, torch.device], tuple[Any, Any]] = {}
        self._pads_on: dict[torch.device, Tensor] = {}
        self._attended: set[torch.device] = set()
        self._at: Tensor | None = None
        self._room = 0

    def begin(self, batch: int, mask: Tensor | None) -> None:
        """A batch begins; `mask`, `[B, 1, T, T]` bool, is true where a token sees another one."""
        self._kept.clear()
        self._pads_on.clear()
        if not self._given:
            self.pads = _pads(batch, mask)
        elif len(self.pads) != batch:
            raise UsageError(
                f"this cache was made for {len(self.pads)} sequences, and {batch} came.",
                hint="make a cache for each batch",
            )

    def select(self, indices: Tensor) -> None:
        """The sequences of the batch are `indices` of those before."""
        self.pads = tuple(self.pads[i] for i in indices.tolist())
        self._kept.clear()
        self._pads_on.clear()

    def lengths(self, length: int) -> list[int]:
        """Tokens of each sequence without padding, of `length` with it."""
        self.need_host()
        return [max(0, length - pad) for pad in self.pads]

    def start(self, position: int, device: torch.device) -> Tensor:
        """What a token of the batch counts as in each sequence, `[B]` int32, 0 for padding."""
        return torch.tensor(self.lengths(position), dtype=torch.int32, device="cpu").to(device)

    @contextmanager
    def follow(self, at: Tensor, room: int) -> Iterator[None]:
        """Steps of one token are made for a length on the device, `at`, and for stores of `room`
        tokens of each sequence, so that a CUDA graph can hold them."""
        self._at, self._room = at, room
        self._kept.clear()
        try:
            yield
        finally:
            self._at = None
            self._kept.clear()

    def need_host(self) -> None:
        """What depends on lengths on the host cannot be in a CUDA graph."""
        if self._at is not None:
            raise RuntimeError("a step that is recorded needs its length on the host")

    def attends_again(self, device: torch.device, *, first: bool) -> bool:
        """Whether a layer in front of this one, and behind the `first` one of the model, has
        attended on this device in the same step."""
        if first:
            self._attended.clear()
        again = device in self._attended
        self._attended.add(device)
        return again

    def targets(self, first: int, new: int, device: torch.device) -> TokenTargets:
        """Where `new` tokens of each sequence go, token by token."""

        def make() -> TokenTargets:
            batch = len(self.pads)
            row = torch.arange(batch, device=device).repeat(new)
            start = first if self._at is None else self._at
            token = torch.arange(new, device=device).repeat_interleave(batch) + start
            pad = self._pads(device).repeat(new)
            # Rows enter a ring as if there were fewer tokens, so that it holds all that it can.
            position, end = token - pad, start + new - pad - SPARE
            real = position >= 0
            return TokenTargets(
                token * batch + row,
                row,
                position.where(real, FAR),
                end.where(real, 2 * FAR - 1),  # so that padding enters no ring
            )

        return self._once("targets", (first, new), device, make)

    def lists(self, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`kv_indptr`, `kv_indices` and `rows` of `length` tokens of each sequence, without
        padding."""

        def make() -> tuple[Tensor, Tensor, Tensor]:
            batch, pads = len(self.pads), self._pads(device)
            count = sum(self.lengths(length)) if self._at is None else batch * self._room
            lengths = (length if self._at is None else self._at + 1) - pads
            ends = lengths.clamp(min=0).cumsum(0)
            at = torch.arange(count, device=device)
            row = torch.searchsorted(ends, at, right=True).clamp(max=batch - 1)
            starts = torch.nn.functional.pad(ends, (1, 0))
            slots = (at - (starts[:-1] - pads)[row]) * batch + row
            rows = torch.arange(batch, dtype=torch.int32, device=device)
            return starts.int(), slots.int(), rows

        return self._once("lists", length, device, make)

    def _pads(self, device: torch.device) -> Tensor:
        if device not in self._pads_on:
            self._pads_on[device] = torch.tensor(self.pads, device=device)
        return self._pads_on[device]

    def _once(self, what: str, key: Any, device: torch.device, make: Callable[[], T]) -> T:
        found = self._kept.get((what, device))
        if found is None or found[0] != key:
            found = self._kept[what, device] = key, make()
        return found[1]  # type: ignore[no-any-return]


def _pads(batch: int, mask: Tensor | None) -> tuple[int, ...]:
    """Tokens of padding on the left of each sequence, by what its last token sees."""
    if mask is None:
        return (0,) * batch
    seen = mask[:, 0, -1] if mask.dtype == torch.bool else mask[:, 0, -1] == 0
    pads = seen.long().argmax(1)
    if not bool((seen.sum(1) == seen.shape[1] - pads).all()):
        raise UsageError(
            "padding must be on the left of a batch, and the whole prompt in one piece.",
            hint="padding_side='left', or give attention_mask= where the cache is made",
        )
    found = pads.expand(batch).tolist()
    return tuple(found)
