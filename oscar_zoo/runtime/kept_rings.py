"""Rings of requests that have ended, which stay in their rows until the engine hands these out
again. Host data only.

A prefix hit must find the last tokens in 16 bits. Where a prompt goes on from a request that has
ended, as the next turn of a conversation does, the ring of that request has them: it is copied, and
only new tokens are prefilled. This takes no memory, because the rows are there anyway. The engine
should hand out the row that has been idle for longest.

The rules:

* A ring is known by all tokens of its request, and by everything else that decides their keys and
  values. A hit uses it up to the last token that both prompts share.
* A ring is copied in front of the step that brings the first tokens of the new prompt. Rings that
  change owner in that step are read before any of them is written. A ring whose row got a new owner
  in an earlier step is gone.
* Steps that were already on their way when a request ended may write more tokens to its ring, over
  its oldest ones. So these are not used.

Every decision follows from what the scheduler of each rank does in the same order, so all ranks
decide alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Scope: TypeAlias = tuple[Hashable, ...]

LATE = 4
"""Most steps on their way that write to the ring of a request that has ended. Overlapped scheduling
has one such step, and SGLang 0.5.23 may have two."""


@dataclass(frozen=True)
class RingChoice:
    row: int  # whose ring it is
    stamp: int  # of the owner that wrote it
    first: int  # first position that it holds
    end: int  # positions from here on are not in it, or belong to other tokens


@dataclass(frozen=True)
class _Kept:
    """The ring of a request that has ended: its tokens in the cache, and the first in the ring."""

    scope: Scope
    ids: array[int]
    first: int


class KeptRings:
    """The rings of one worker, for windows of `recent` tokens (0 keeps none) and steps that write
    `drafts` tokens for a request.

    Counted are hits that took a ring (`used`), hits whose ring was gone before their first step, so
    that some of their last tokens are read as INT2 (`lost`), and requests that left no ring when
    they ended, because more than their tokens decides keys and values, or because too few of them
    were in the cache (`not_kept`).
    """

    def __init__(self, recent: int, drafts: int = 1) -> None:
        self.recent = recent
        self._sure = recent + drafts - 1 - LATE * drafts
        """Last tokens of a ring that no late step overwrites."""
        self.used = self.lost = self.not_kept = 0
        self.chosen: RingChoice | None = None
        """The ring for the request whose prefix the engine looks up at the moment."""
        self._stamps: dict[int, int] = {}
        self.flush()

    def flush(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._expected: dict[int, RingChoice] = {}
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._lengths: dict[int, int] = {}

    def choose(self, scope: Scope | None, ids: Sequence[int]) -> RingChoice | None:
        """The ring with which a hit reaches furthest into this prompt `ids`, if it reaches further
        than a hit that leaves the last `recent` tokens to prefill. The last token is prefilled in
        any case. Without a `scope`, tokens do not decide keys and values."""
        window = max(0, len(ids) - self.recent)
        best: RingChoice | None = None
        for row, kept in self._kept.items() if scope is not None else ():
            if kept.scope != scope or kept.first > window or len(kept.ids) <= window:
                continue
            if window and kept.ids[window - 1] != ids[window - 1]:  # cheap, and mostly enough
                continue
            end = _common(kept.ids, ids, window)
            if end > max(window, best.end if best else 0):
                best = RingChoice(row, self._stamps.get(row, 0), kept.first, end)
        return best

    def expect(self, row: int, choice: RingChoice | None, length: int) -> None:
        self._lengths[row] = length
        if choice is None:
            self._expected.pop(row, None)
        else:
            self._expected[row] = choice

    def hand_out(self, rows: Iterable[int]) -> None:
        """The engine gave these rows to new requests; nobody may choose their rings any more."""
        for row in rows:
            self._kept.pop(row, None)

    def begin(self, prefixes: Mapping[int, int]) -> dict[int, RingChoice]:
        found: dict[int, RingChoice] = {}
        for row, prefix in prefixes.items():
            choice = self._expected.pop(row, None)
            if choice is None or prefix <= choice.first:
                continue
            if prefix <= choice.end and self._stamps.get(choice.row, 0) == choice.stamp:
                found[row] = choice
            else:
                self.lost += 1
        self.used += len(found)
        for row, prefix in prefixes.items():
            self._stamps[row] = self._stamps.get(row, 0) + 1
            self._starts[row] = found[row].first if row in found else prefix
            self._ends[row] = prefix
        return found

    def launched(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Note that a prefill step is launched, after which the cache holds the first `ends` tokens
        of `rows`."""
        for row, end in zip(rows, ends, strict=True):
            self._ends[row] = max(end, self._ends.get(row, 0))

    def ended(
        self, row: int, scope: Scope | None, asked: Sequence[int], said: Sequence[int]
    ) -> None:
        """Keep the ring of a request that has ended or must start again later. `scope`: everything
        besides the tokens that decides keys and values. `asked` and `said`: the tokens of its
        prompt and of its answer. The last token of an answer was sampled, but need not be in the
        cache. A request that started again has an answer before all that it had is in the cache
        again."""
        self._expected.pop(row, None)
        length = self._lengths.pop(row, 0)
        start = self._starts.pop(row, None)
        if start is None or self.recent == 0:
            return
        prefilled = self._ends.get(row, 0)
        decoded = bool(said) and prefilled >= length
        end = len(asked) + len(said) - 1 if decoded else min(len(asked) + len(said), prefilled)
        first = max(start, end - self._sure)
        if scope is None or first >= end:
            self.not_kept += 1
            return
        ids = array("q", asked)
        ids.extend(said)
        self._kept[row] = _Kept(scope, ids[:end], first)


def _common(kept: array[int], ids: Sequence[int], window: int) -> int:
    """How many leading tokens two prompts share, at most all of `ids` but one; 0 if fewer than
    `window`."""
    if kept[:window] != array("q", ids[:window]):
        return 0
    last = min(len(kept), len(ids) - 1)
    return next((at for at in range(window, last) if kept[at] != ids[at]), last)
