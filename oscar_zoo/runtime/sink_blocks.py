"""Which block keeps the first tokens of which request: shared by content, counted by request row.
Host data only.

A block holds the first `width` tokens of a prompt uncompressed. Two requests with the same first
tokens (and whatever else decides what their keys and values are) may read one block, so a
prefix-cache hit finds its sinks again. The rules:

* A block can be shared once a step that completes it was launched. All steps run in order on one
  stream, so whoever reads it later reads it complete; before, it has holes, also if its first owner
  is halfway through its prompt.
* A shared block is never written: only a request whose prefix ends inside the first `width` tokens
  writes sinks, and it gets a block of its own, with a copy of what it finds of its prefix in a
  shared one.
* A block without rows is idle and stays shareable until a new one is needed; the least recently
  used goes first. Its next owner writes it in a later step than everybody who still reads it.
* Row 0 is the padding row and block 0 its dummy; neither is ever given away.

Every decision follows from what the scheduler of each rank does in the same order, so all ranks
decide alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Key: TypeAlias = tuple[Hashable, tuple[int, ...]]

MISS = 1 << 30
"""Tokens to prefill again that no prompt has: nothing is taken from the prefix cache."""


@dataclass(frozen=True)
class PromptKey:
    """What the tokens of a request say about its sinks.

    Attributes:
        scope: what besides the tokens decides keys and values; `None` when they cannot be told from
            tokens at all.
        ids: the first tokens, as many as a block holds at most.
        length: number of all tokens known.
    """

    scope: tuple[Hashable, ...] | None
    ids: tuple[int, ...]
    length: int

    def key(self, width: int) -> Key | None:
        """Name of the block with the first `width` tokens; `None` when it is private."""
        return None if self.scope is None or len(self.ids) < width else (self.scope, self.ids)


@dataclass(frozen=True)
class Place:
    """Where the sinks of the new owner of `row` are: positions `[sink_from, width)` of `block`.

    `donor` is the block to copy first. All copies of a step read before any of them writes.
    """

    row: int
    block: int
    sink_from: int
    donor: int | None = None


@dataclass
class _RowState:
    """A row in use. `own`: it writes its block, which nobody else reads before it is published."""

    block: int
    prompt: PromptKey
    own: bool
    whole: bool
    end: int = 0


NOBODY = PromptKey(None, (), 0)
NO_KEY: Key = (None, ())


class SinkBlocks:
    """The blocks of one worker.

    Args:
        width: tokens of a block; 0 turns everything off.
        num_blocks: the dummy included; at least one more than there are rows to use.
        recent: tokens that a prefix hit must prefill again, or `None` when hits take what they
            find.

    Attributes:
        hits: requests that share a block.
        misses: requests with at least `width` tokens that got a block of their own.
        forced_misses: those of them that could have shared a block, had it not been given away:
            their whole prompt was prefilled, whether or not the prefix cache still held it.
        lost: hits without a block, whose first tokens are read as INT2; none with `recent`.
    """

    def __init__(self, width: int, num_blocks: int, recent: int | None) -> None:
        self.width, self.num_blocks, self.recent = width, num_blocks, recent
        self.hits = self.misses = self.forced_misses = self.lost = 0
        self.asking: PromptKey | None = None
        """The request whose prefix SGLang is looking up at the moment."""
        self.clear()

    @property
    def in_use(self) -> int:
        """Blocks of rows in use."""
        return sum(1 for count in self._readers if count)

    @property
    def idle(self) -> int:
        """Blocks that only wait to be shared."""
        return len(self._idle)

    def counts(self) -> dict[str, int]:
        """Everything counted, for reports."""
        names = ("in_use", "idle", "hits", "misses", "forced_misses", "lost")
        return {name: int(getattr(self, name)) for name in names}

    def clear(self) -> None:
        """Forget rows and contents; the prefix cache was emptied."""
        self._readers = [0] * self.num_blocks
        self._free = list(range(self.num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._tenants: dict[int, _RowState] = {}
        self._expected: dict[int, PromptKey] = {}
        self._given_away: OrderedDict[Key, None] = OrderedDict()

    def tail(self, prompt: PromptKey | None, page_size: int = 1) -> int:
        """Tokens at the end of a prompt that must be prefilled again, whatever the prefix cache
        holds.

        A hit must reach past the sinks and find their block, else the prompt starts from the
        beginning: then all its first tokens are uncompressed, for little work when the hit would
        have ended inside them anyway.

        Args:
            prompt: of the request that asks, if that is known.
            page_size: hits end at multiples of it.
        """
        if self.recent is None:
            return 0
        if prompt is None or self.width == 0:
            return self.recent
        reach = max(0, prompt.length - self.recent) // page_size * page_size
        return (
            self.recent
            if reach >= self.width and prompt.key(self.width) in self._block_of
            else MISS
        )

    def expect(self, rows: Iterable[int], prompts: Iterable[PromptKey]) -> None:
        """These rows were given to requests with these prompts; the next step brings their first
        tokens."""
        self._expected.update(zip(rows, prompts, strict=True))

    def begin(self, owners: Sequence[tuple[int, int]]) -> list[Place]:
        """Give blocks to the new owners of a step.

        Args:
            owners: row and cached prefix of each. Only these rows have a new owner.

        Raises:
            RuntimeError: more rows in use than there are blocks.
        """
        for row, _ in owners:
            self._leave(row)
        prompts = {row: self._expected.pop(row, NOBODY) for row, _ in owners}
        if self.width == 0:
            return [Place(row, 0, prefix) for row, prefix in owners]
        # Blocks that this step reads are found before a new one pushes any of them out; their
        # contents stay till then.
        found = {
            row: self._block_of.get(prompts[row].key(self.width) or NO_KEY)
            for row, prefix in owners
            if prefix
        }
        shared = {
            row: self._share(row, prompts[row], found[row])
            for row, prefix in owners
            if prefix >= self.width
        }
        return [
            shared.get(row) or self._own(row, prompts[row], prefix, found.get(row))
            for row, prefix in owners
        ]

    def launched(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """A prefill step is being launched after which `rows` have their first `ends` tokens in the
        cache."""
        for row, end in zip(rows, ends, strict=True):
            self._expected.pop(row, None)
            tenant = self._tenants.get(row)
            if tenant is not None:
                tenant.end = max(tenant.end, end)
                if end >= self.width:
                    self._publish(tenant, tenant.prompt.key(self.width))

    def free(self, row: int, prompt: PromptKey) -> None:
        """The owner of `row` is done, or has to start again later.

        Args:
            row: request row.
            prompt: all its tokens now. The last one was sampled but is not in the cache. A prompt
                shorter than a block has filled it while decoding, and only now are all tokens of
                the block known.
        """
        tenant = self._tenants.get(row)
        if tenant is not None:
            before = tenant.prompt
            same = before.scope == prompt.scope and prompt.ids[: len(before.ids)] == before.ids
            if same and before.length <= tenant.end and before.length < self.width < prompt.length:
                self._publish(tenant, prompt.key(self.width))
        self._leave(row)
        self._expected.pop(row, None)

    def _share(self, row: int, prompt: PromptKey, block: int | None) -> Place | None:
        if block is None:
            return None
        self.hits += 1
        self._idle.pop(block, None)
        self._readers[block] += 1
        self._tenants[row] = _RowState(block, prompt, own=False, whole=True)
        return Place(row, block, 0)

    def _own(self, row: int, prompt: PromptKey, prefix: int, donor: int | None) -> Place:
        key = prompt.key(self.width)
        if key is not None:
            self.misses += 1
            reaches = self.recent is not None and prompt.length - self.recent >= self.width
            self.forced_misses += prefix == 0 and reaches and key in self._given_away
        block, whole = self._take(), prefix == 0 or donor is not None
        self.lost += not whole
        self._readers[block] = 1
        self._tenants[row] = _RowState(block, prompt, own=True, whole=whole)
        return Place(row, block, 0 if whole else prefix, donor)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._idle:
            raise RuntimeError(f"all {self.num_blocks} sink blocks are in use")
        block, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._given_away[key] = None
        while len(self._given_away) > 4 * self.num_blocks:
            self._given_away.popitem(last=False)
        return block

    def _publish(self, tenant: _RowState, key: Key | None) -> None:
        """Let others share a complete block, unless there is one with the same content already."""
        if key is None or not (tenant.own and tenant.whole):
            return
        present = self._block_of.setdefault(key, tenant.block)
        if present == tenant.block:
            self._key_of[present] = key
            self._given_away.pop(key, None)
        elif present in self._idle:
            self._idle.move_to_end(present)

    def _leave(self, row: int) -> None:
        tenant = self._tenants.pop(row, None)
        if tenant is None:
            return
        self._readers[tenant.block] -= 1
        if self._readers[tenant.block]:
            return
        if tenant.block in self._key_of:
            self._idle[tenant.block] = None
        else:
            self._free.append(tenant.block)
