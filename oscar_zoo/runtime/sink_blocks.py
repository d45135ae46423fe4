"""Which block keeps the first tokens of which request. Blocks are shared by content and counted by
request row. Host data only.

A block holds the first `width` tokens of a prompt in BF16. Two requests with the same first tokens
(and the same of everything else that decides their keys and values) may read one block, so a
prefix-cache hit finds its sinks again. The rules:

* A block can be shared once a step that completes it was launched. All steps run in order on one
  stream, so every later reader reads it complete. Before that it has holes, for example while its
  first owner is halfway through its prompt.
* A shared block is never written. Only a request whose prefix ends inside the first `width` tokens
  writes sinks. It gets a block of its own, with a copy of the part of its prefix that a shared
  block holds.
* A block without rows is idle. It stays shareable until a new block is needed; the least recently
  used one goes first. Its next owner writes it in a later step than everybody who still reads it.
* What a block held that was given away is kept in the host's memory, where there is room. A hit
  takes it back into another block, in front of its first step. A place on the host may also be
  filled from the disk, when a prompt asks for what is in neither.
* Row 0 is the padding row and block 0 its dummy. Neither is ever given away.

Every decision follows from what the scheduler of each rank does in the same order, so all ranks
decide alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Key: TypeAlias = tuple[Hashable, tuple[int, ...]]

MISS = 1 << 30
"""More tokens to prefill again than any prompt has, so that nothing is taken from the prefix
cache."""
NO_KEY: Key = (None, ())


@dataclass(frozen=True)
class PromptKey:
    """The tokens of a request, as far as its sinks depend on them."""

    # Everything besides the tokens that decides keys and values; `None` if tokens do not decide
    # them at all.
    scope: tuple[Hashable, ...] | None
    ids: tuple[int, ...]  # the first tokens, at most as many as a block holds
    length: int  # number of all known tokens

    def key(self, width: int) -> Key | None:
        """Key of the block with the first `width` tokens; `None` if the block is private."""
        return None if self.scope is None or len(self.ids) < width else (self.scope, self.ids)


@dataclass(frozen=True)
class Place:
    """The sinks of the new owner of `row` are positions `[sink_from, width)` of `block`. In front
    of the step, what it held goes to `saved` on the host, and what `donor` or `host` holds is
    copied into it. All copies of a step read blocks before any of them writes one; none writes to a
    place on the host that another one reads."""

    row: int
    block: int
    sink_from: int
    donor: int | None = None
    saved: int | None = None
    host: int | None = None


@dataclass
class _RowState:
    block: int  # its block
    prompt: PromptKey  # its tokens
    own: bool  # whether the row writes its block, which nobody else reads before it is published
    whole: bool  # whether the block will hold all first tokens
    end: int = 0  # tokens that launched steps bring into the cache


NOBODY = PromptKey(None, (), 0)


class SinkBlocks:
    """The blocks of one worker, of `width` tokens (0 turns everything off), the dummy included; at
    least one more than there are rows to use. `recent`: tokens that a prefix hit must prefill
    again, or `None` if hits use what they find. `host`: blocks that the host keeps beside them.

    Counted are requests: `hits` share a block, `host_hits` of these one that comes back from the
    host; `misses` have at least `width` tokens and got a block of their own; of these
    `forced_misses` had a shared block that was given away, so that their whole prompt was
    prefilled; `lost` are hits without a block, whose first tokens are read as INT2, 0 with
    `recent`.
    """

    def __init__(self, width: int, num_blocks: int, recent: int | None, host: int = 0) -> None:
        self.width, self.num_blocks, self.recent, self.host = width, num_blocks, recent, host
        self.hits = self.misses = self.forced_misses = self.lost = self.host_hits = 0
        self.recall: Callable[[Key, int], bool] | None = None
        """Fills a place on the host with a block from the disk, if it is there."""
        self.asking: PromptKey | None = None
        """The request whose prefix the engine looks up at the moment."""
        self.flush()

    @property
    def in_use(self) -> int:
        return sum(1 for count in self._readers if count)

    @property
    def idle(self) -> int:
        return len(self._idle)

    def counts(self) -> dict[str, int]:
        names = ("in_use", "idle", "hits", "misses", "forced_misses", "lost", "host_hits")
        return {name: int(getattr(self, name)) for name in names}

    def flush(self) -> None:
        self._readers = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._rows: dict[int, _RowState] = {}
        self._expected: dict[int, PromptKey] = {}
        self._given_away: OrderedDict[Key, None] = OrderedDict()
        self._on_host: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._free_on_host = list(range(self.host))
        self._asked: set[Key] = set()  # since the last new owner
        self._unsaved: dict[Key, int] = {}  # blocks that may not be on the disk yet

    def reprefill_tail(
        self, prompt: PromptKey | None, page_size: int = 1, tail: int | None = None
    ) -> int:
        """Tokens at the end of a prompt that must be prefilled again, whatever the prefix cache
        holds.

        A hit must reach past the sinks and find their block. Otherwise the prompt starts from the
        beginning, so that all its first tokens are in BF16. This costs little if the hit would have
        ended inside them anyway. `tail`: tokens to prefill again for the ring; `recent` by default,
        fewer where a kept ring has the others.
        """
        if self.recent is None:
            return 0
        tail = self.recent if tail is None else tail
        if prompt is None or self.width == 0:
            return tail
        reach = max(0, prompt.length - tail) // page_size * page_size
        key = prompt.key(self.width) or NO_KEY
        again = key in self._asked
        self._asked.add(key)
        if key in self._on_host:
            self._on_host.move_to_end(key)  # it is about to be taken back
        if reach < self.width:
            return MISS
        there = key in self._block_of or key in self._on_host
        return tail if there or (not again and self._from_disk(key)) else MISS

    def admit(self, rows: Iterable[int], prompts: Iterable[PromptKey]) -> None:
        """Note that rows were given to requests with these prompts. The next step brings their
        first tokens."""
        self._expected.update(zip(rows, prompts, strict=True))

    def begin(self, owners: Sequence[tuple[int, int]]) -> list[Place]:
        """Give blocks to the new owners of a step. `owners`: row and cached tokens of each. Only
        these rows have a new owner."""
        self._asked.clear()
        for row, _ in owners:
            self._leave(row)
        prompts = {row: self._expected.pop(row, NOBODY) for row, _ in owners}
        if self.width == 0:
            return [Place(row, 0, prefix) for row, prefix in owners]
        # Blocks that this step reads are looked up before a new block displaces any of them.
        found = {
            row: self._block_of.get(prompts[row].key(self.width) or NO_KEY)
            for row, prefix in owners
            if prefix
        }
        hits = [row for row, prefix in owners if prefix >= self.width]
        shared = {row: self._share(row, prompts[row], found[row]) for row in hits}
        keys = [prompts[row].key(self.width) for row, block in found.items() if block is None]
        read = {key: self._on_host.pop(key) for key in keys if key and key in self._on_host}
        for row in hits:
            shared[row] = shared[row] or self._take_back(row, prompts[row], read)
        places = [
            shared.get(row) or self._own(row, prompts[row], prefix, found.get(row), read)
            for row, prefix in owners
        ]
        self._free_on_host += read.values()  # from the next step on
        return places

    def launched(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Note that a prefill step is launched, after which the cache holds the first `ends` tokens
        of `rows`."""
        for row, end in zip(rows, ends, strict=True):
            self._expected.pop(row, None)
            state = self._rows.get(row)
            if state is not None:
                state.end = max(state.end, end)
                if end >= self.width:
                    self._publish(state, state.prompt.key(self.width))

    def release(self, row: int, prompt: PromptKey) -> None:
        """Take back the row of a request that has ended or must start again later. `prompt`: all
        its tokens now; the last one was sampled but is not in the cache. A prompt shorter than a
        block has filled it while decoding, so only now are all tokens of the block known."""
        state = self._rows.get(row)
        if state is not None:
            before = state.prompt
            same = before.scope == prompt.scope and prompt.ids[: len(before.ids)] == before.ids
            if same and before.length <= state.end and before.length < self.width < prompt.length:
                self._publish(state, prompt.key(self.width))
        self._leave(row)
        self._expected.pop(row, None)

    def take_unsaved(self) -> list[tuple[Key, int]]:
        """What was published since this was asked last and is still there: complete once the steps
        launched so far have run."""
        published, self._unsaved = self._unsaved, {}
        return [(key, one) for key, one in published.items() if self._block_of.get(key) == one]

    def _from_disk(self, key: Key) -> bool:
        """Whether the host has the block now, in a free place, or in that of a prompt that nobody
        asks for at the moment."""
        oldest = next(iter(self._on_host), key)
        full = not self._free_on_host
        if self.recall is None or key == NO_KEY or (full and oldest in self._asked):
            return False
        place = self._on_host[oldest] if full else self._free_on_host[-1]
        if not self.recall(key, place):
            return False
        self._on_host.pop(oldest) if full else self._free_on_host.pop()
        self._on_host[key] = place
        return True

    def _share(self, row: int, prompt: PromptKey, block: int | None) -> Place | None:
        if block is None:
            return None
        self.hits += 1
        self._idle.pop(block, None)
        self._readers[block] += 1
        self._rows[row] = _RowState(block, prompt, own=False, whole=True)
        return Place(row, block, 0)

    def _take_back(self, row: int, prompt: PromptKey, read: dict[Key, int]) -> Place | None:
        """Share a block that the host kept, or that another row of the step has taken back."""
        key = prompt.key(self.width) or NO_KEY
        if key not in read or key in self._block_of:
            return self._share(row, prompt, self._block_of.get(key))
        block, saved = self._take()
        self._block_of[key], self._key_of[block] = block, key
        self.host_hits += 1
        place = self._share(row, prompt, block)
        return place and replace(place, saved=saved, host=read[key])

    def _own(
        self, row: int, prompt: PromptKey, prefix: int, donor: int | None, read: dict[Key, int]
    ) -> Place:
        key = prompt.key(self.width)
        host = read.get(key or NO_KEY) if prefix and donor is None else None
        if key is not None:
            self.misses += 1
            reaches = self.recent is not None and prompt.length - self.recent >= self.width
            self.forced_misses += prefix == 0 and reaches and key in self._given_away
        (block, saved), whole = self._take(), prefix == 0 or (donor, host) != (None, None)
        self.lost += not whole
        self._readers[block] = 1
        self._rows[row] = _RowState(block, prompt, own=True, whole=whole)
        return Place(row, block, 0 if whole else prefix, donor, saved, host)

    def _take(self) -> tuple[int, int | None]:
        """A block, and the place on the host for what it holds."""
        if self._free:
            return self._free.pop(), None
        if not self._idle:
            raise RuntimeError(f"all {self.num_blocks} sink blocks are in use")
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        gone: Key | None = key
        saved: int | None = None
        if self._free_on_host:
            gone, saved = None, self._free_on_host.pop()
        elif self._on_host:
            gone, saved = self._on_host.popitem(last=False)
        if saved is not None:
            self._on_host[key] = saved
        if gone is not None:
            self._given_away[gone] = None
        while len(self._given_away) > 4 * self.num_blocks:
            self._given_away.popitem(last=False)
        return block, saved

    def _publish(self, state: _RowState, key: Key | None) -> None:
        """Let others share a complete block, unless another block has the same content."""
        if key is None or not (state.own and state.whole):
            return
        present = self._block_of.setdefault(key, state.block)
        if present == state.block:
            self._key_of[present] = key
            self._given_away.pop(key, None)
            if self.recall is not None:
                self._unsaved[key] = present
            if key in self._on_host:  # an old copy, of a prompt that was prefilled again
                self._free_on_host.append(self._on_host.pop(key))
        elif present in self._idle:
            self._idle.move_to_end(present)

    def _leave(self, row: int) -> None:
        state = self._rows.pop(row, None)
        if state is None:
            return
        self._readers[state.block] -= 1
        if self._readers[state.block]:
            return
        if state.block in self._key_of:
            self._idle[state.block] = None
        else:
            self._free.append(state.block)
